import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringweave.errors import ClusterError
from ringweave.lab import cpu_quotas
from ringweave.topology import Cluster, Device, Nic, Node


def cluster(*speeds: float) -> Cluster:
    nic = Nic(name="eth0", rate_bytes_per_s=1e6)
    nodes = tuple(Node(name=f"a{i}", devices=(Device(speed=s),), nics=(nic,)) for i, s in enumerate(speeds))
    return Cluster(name="c", nodes=nodes)


def test_equal_speeds_get_none_unless_asked_for() -> None:
    assert cpu_quotas.choose_quotas(cluster(1, 1), "auto", 2) is None
    assert cpu_quotas.choose_quotas(cluster(1, 0.5), "never", 2) is None
    assert cpu_quotas.choose_quotas(cluster(1, 1), "always", 2) == {"a0": (32_000,), "a1": (32_000,)}
    assert cpu_quotas.quota_in_cpus(32_000) == 0.8


def test_the_fastest_gets_at_most_one_cpu() -> None:
    assert cpu_quotas.choose_quotas(cluster(2, 1), "auto", 64) == {"a0": (40_000,), "a1": (20_000,)}


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=12), st.integers(1, 64))
def test_they_are_in_proportion_and_leave_a_fifth_of_the_machine(speeds: list[float], num_cpus: int) -> None:
    try:
        chosen = cpu_quotas.choose_quotas(cluster(*speeds), "always", num_cpus)
    except ClusterError:
        fair = min(speeds) / max(*speeds, sum(speeds) / (0.8 * num_cpus))
        assert fair * cpu_quotas.QUOTA_PERIOD_US < cpu_quotas.MIN_QUOTA_US + 1
        return
    assert chosen is not None
    us = [of_node[0] for of_node in chosen.values()]
    assert sum(us) <= 0.8 * num_cpus * cpu_quotas.QUOTA_PERIOD_US
    assert min(us) >= cpu_quotas.MIN_QUOTA_US
    for one, speed in zip(us, speeds, strict=True):
        assert one == pytest.approx(us[0] * speed / speeds[0], abs=1 + speed / speeds[0])


def test_too_slow_a_device_is_refused() -> None:
    expected = (
        r"speed of the slowest device of cluster c: 0\.01, expected at least 0\.025, so that it gets 1 ms of every "
        r"40 ms of CPU time \(2 CPUs for 2 devices\)\. Use fewer devices or speeds closer to each other, or bring "
        r"the lab up with --quotas never\."
    )
    with pytest.raises(ClusterError, match=expected):
        cpu_quotas.choose_quotas(cluster(1, 0.01), "auto", 2)
