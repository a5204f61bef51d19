"""Hypothesis strategy for any legal cluster; needs the extra `dev`."""

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from ringweave.topology import Cluster, Device, Nic, Node, Switch

AWKWARD_NAMES = ("null", "true", "no", "1", "1e3", "0x1f", "2020-01-01", "a0-0", "a0-1", "1-0", "y", "0.5", "a.b-0")
"""Legal names that YAML would read as other types, or that look like names made from `count`."""

_numa_nodes = st.none() | st.integers(0, 7)
_rates = st.floats(0.125, 0.125e18) | st.sampled_from([25e6, 50e6, 1.25e9, 12.5e9])
_speeds = st.floats(1e-6, 1e6) | st.sampled_from([1.0, 0.5]) | st.integers(1, 9)
_devices = st.builds(Device, kind=st.sampled_from(["cpu", "cuda"]), speed=_speeds, numa=_numa_nodes)
_device_tuples = st.integers(1, 4).map(lambda count: (Device(),) * count) | st.lists(
    _devices, min_size=1, max_size=3
).map(tuple)
_nics = st.builds(
    Nic,
    name=st.sampled_from(["eth0", "eth1", "ib0", "bond0.7", "1e3"]),
    rate_bytes_per_s=_rates,
    numa=_numa_nodes,
    rdma=st.booleans(),
)
_nic_tuples = st.lists(_nics, min_size=1, max_size=3, unique_by=lambda nic: nic.name).map(tuple)
_addresses = st.ip_addresses().filter(
    lambda address: not (address.is_multicast or address.is_unspecified or getattr(address, "scope_id", None))
)


@st.composite
def clusters(draw: Callable[[Any], Any]) -> Cluster:
    """Draw a cluster of up to 4 switches in any tree, with any NICs and devices, and runs of equal nodes."""
    names = [f"r{index}" for index in range(draw(st.integers(0, 4)))]
    switches = tuple(
        Switch(name=name, uplink_bytes_per_s=draw(_rates), parent=draw(st.sampled_from([None, "core", *names[:index]])))
        for index, name in enumerate(names)
    )
    return Cluster(
        name=draw(st.sampled_from([*AWKWARD_NAMES, "two-racks"])),
        nodes=(*_distinct_nodes(draw, names), *_like_nodes(draw)),
        switches=switches,
        latency_s=draw(st.floats(0, 3600) | st.just(50e-6)),
    )


def _distinct_nodes(draw: Callable[[Any], Any], switches: list[str]) -> list[Node]:
    """Draw at least one node on every switch."""
    switch_of_node = [*switches, *draw(st.lists(st.sampled_from([None, "core", *switches]), min_size=1, max_size=4))]
    names = draw(st.permutations(AWKWARD_NAMES))
    addresses = draw(st.lists(_addresses, min_size=len(switch_of_node), max_size=len(switch_of_node), unique=True))
    return [
        Node(
            name=name,
            devices=draw(_device_tuples),
            nics=draw(_nic_tuples),
            switch=switch,
            address=draw(st.sampled_from([None, str(address)])),
        )
        for name, switch, address in zip(names, switch_of_node, addresses, strict=False)
    ]


def _like_nodes(draw: Callable[[Any], Any]) -> list[Node]:
    devices, nics = draw(_device_tuples), draw(_nic_tuples)
    first, num_nodes = draw(st.integers(0, 1)), draw(st.integers(0, 4))
    return [Node(name=f"run-{first + index}", devices=devices, nics=nics) for index in range(num_nodes)]
