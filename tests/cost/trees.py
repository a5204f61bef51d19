"""Small clusters with unequal rates, as hypothesis strategies; needs the extra `dev`."""

from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

from ringweave.topology import Cluster, Device, Nic, Node, Switch

_rates = st.sampled_from([1.0, 2.0, 3.0, 4.0, 8.0]) | st.floats(0.5, 20.0)


def node(name: str, rate: float, switch: str | None = None, num_devices: int = 1) -> Node:
    """A node with one NIC of that many bytes per second."""
    return Node(
        name=name, switch=switch, nics=(Nic(name="eth0", rate_bytes_per_s=rate),), devices=(Device(),) * num_devices
    )


def flat(rates: Sequence[float], num_devices: int = 1) -> Cluster:
    """Nodes n0, n1, ... of these bytes per second on one switch."""
    nodes = tuple(node(f"n{index}", rate, num_devices=num_devices) for index, rate in enumerate(rates))
    return Cluster(name="flat", nodes=nodes)


@st.composite
def random_trees(
    draw: Callable[[Any], Any], min_nodes: int = 1, max_nodes: int = 6
) -> tuple[Cluster, list[str], dict[str, float]]:
    """A cluster, the nodes of it that take part, and some measured rates, the two directions differing."""
    num_nodes = draw(st.integers(min_nodes, max_nodes))
    names = [f"r{index}" for index in range(draw(st.integers(0, 4)))]
    switches = tuple(
        Switch(name=name, uplink_bytes_per_s=draw(_rates), parent=draw(st.sampled_from([None, *names[:index]])))
        for index, name in enumerate(names)
    )
    places = st.sampled_from([None, *names])
    taking_part = [node(f"n{index}", draw(_rates), draw(places)) for index in range(num_nodes)]
    left_out = [node(f"x{index}", draw(_rates), name) for index, name in enumerate(names)]
    cluster = Cluster(name="random", nodes=(*taking_part, *left_out), switches=switches)
    links = [link.name for link in cluster.links()]
    rates = draw(st.just({}) | st.dictionaries(st.sampled_from(links), _rates))
    return cluster, draw(st.permutations([one.name for one in taking_part])), rates
