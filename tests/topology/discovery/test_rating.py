"""Which rate every NIC of a discovered node gets from what probing measured."""

from ringweave.topology import Device, Nic, Node, discovery


def node(*nics: Nic) -> Node:
    return Node(name="a", devices=(Device(),), nics=nics)


def nic(name: str, rate: float = 1.25e9, *, rdma: bool = False) -> Nic:
    return Nic(name=name, rate_bytes_per_s=rate, rdma=rdma)


def rates(rated: discovery.NodesWithRates) -> dict[str, float]:
    return {each.name: each.rate_bytes_per_s for each in rated.nodes[0].nics}


def test_every_nic_has_the_rate_that_was_measured_of_it() -> None:
    seen = {"a": {"eth0": 24e6, "eth1": 12e6}}
    rated = discovery.with_measured_rates([node(nic("eth0"), nic("eth1"))], seen, {"a": ("eth0", "eth1")})
    assert (rates(rated), rated.remarks) == (seen["a"], ())


def test_one_that_was_not_measured_is_taken_for_one_of_its_kind() -> None:
    rated = discovery.with_measured_rates([node(nic("eth0"), nic("eth1"))], {"a": {"eth0": 12e6}}, {})
    assert rates(rated) == {"eth0": 12e6, "eth1": 12e6}, "not half of it each"
    assert rated.remarks == ("eth1 on a: not measured, 96Mbit/s as eth0, which is of its kind",)


def test_one_of_another_kind_keeps_its_rate() -> None:
    rated = discovery.with_measured_rates([node(nic("eth0"), nic("ib0", 12.5e9, rdma=True))], {"a": {"eth0": 12e6}}, {})
    assert rates(rated) == {"eth0": 12e6, "ib0": 12.5e9}
    assert rated.remarks == ("ib0 on a: not measured, 100Gbit/s as stated",)


def test_one_that_leads_nowhere_is_left_out() -> None:
    rated = discovery.with_measured_rates(
        [node(nic("eth0"), nic("eth1"))], {"a": {"eth0": 12e6}}, {"a": ("eth0", "eth1")}
    )
    assert rates(rated) == {"eth0": 12e6}
    assert rated.remarks == ("eth1 on a: left out, the other nodes are not reached by it",)


def test_where_tcp_goes_by_another_nic_the_node_has_what_tcp_gets() -> None:
    rdma = [nic(name, 25e9, rdma=True) for name in ("ib0", "ib1")]
    rated = discovery.with_measured_rates([node(*rdma)], {"a": {"eth0": 1e9}}, {"a": ("eth0",)})
    assert rates(rated) == {"ib0": 0.5e9, "ib1": 0.5e9}
    assert rated.remarks == ("ib0, ib1 on a: not measured, the node is taken for what TCP gets of it",)


def test_a_node_that_was_not_measured_stays() -> None:
    assert discovery.with_measured_rates([node(nic("eth0"))], {}, {}).nodes == (node(nic("eth0")),)
