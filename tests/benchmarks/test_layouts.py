import pytest

from ringweave import topology
from ringweave.errors import UsageError
from ringweave_bench import benchmark_request

CLUSTER = topology.loads("""
name: c
nodes:
  - {name: a, nic: 1Mbit/s, devices: 3}
  - {name: b, nic: 1Mbit/s, devices: 1}
  - {name: c, nic: 1Mbit/s, devices: 2}
""")
ONE_EACH = topology.loads("name: c\nnodes: [{name: a, nic: 1Mbit/s, devices: 1, count: 4}]")


@pytest.mark.parametrize(
    ("order", "nodes"), [("block", "a a a b c c"), ("round-robin", "a b c a c a"), ("shuffled", "a a a b c c")]
)
def test_every_device_has_a_rank(order: str, nodes: str) -> None:
    layout = benchmark_request.place_ranks(CLUSTER, order)
    if order == "shuffled":
        assert list(layout) != nodes.split()
        layout = tuple(sorted(layout))
    assert list(layout) == nodes.split()


def test_shuffled_is_the_same_every_time() -> None:
    assert benchmark_request.place_ranks(CLUSTER, "shuffled") == benchmark_request.place_ranks(CLUSTER, "shuffled")


def test_orders_that_are_the_same_here_are_left_out_with_a_note() -> None:
    found, notes = benchmark_request.distinct_layouts(ONE_EACH, ("block", "round-robin", "shuffled"))
    assert list(found) == ["block", "shuffled"]
    assert notes == ["order round-robin is left out: on this cluster it is the same as block"]
    found, notes = benchmark_request.distinct_layouts(CLUSTER, ("block", "round-robin"))
    assert (list(found), notes) == (["block", "round-robin"], [])


@pytest.mark.parametrize(("name", "do"), [("blok", "Did you mean block?"), ("zzz", "Name one of them.")])
def test_an_unknown_order(name: str, do: str) -> None:
    with pytest.raises(
        UsageError, match=r"--orders: '\w+', expected block, round-robin, shuffled, separated"
    ) as caught:
        benchmark_request.check_order(name)
    assert str(caught.value).endswith(do)
