"""Ratio of the multi-level shares to the bound on random clusters; the table of docs/explanation/planning.md.

Run: python bench/shares_gap.py [NUMBER OF CLUSTERS OF EACH KIND]
"""

import sys
from collections.abc import Callable
from random import Random

from ringweave import cost, planning
from ringweave.planning import chunk_shares
from ringweave.topology import Cluster, Device, Nic, Node, Switch

Rates = Callable[[Random], float]
MEMORY_BYTES_PER_S = 1e12


def any_tree(random: Random, rates: Rates) -> Cluster:
    """3 to 10 nodes, up to 4 switches anywhere."""
    num_nodes, num_switches = random.randint(3, 10), random.randint(0, 4)
    names = [f"s{index}" for index in range(num_switches)]
    switches = [
        Switch(name=name, uplink_bytes_per_s=rates(random), parent=random.choice([None, *names[:index]]))
        for index, name in enumerate(names)
    ]
    places = [*names, *(random.choice([None, *names]) for _ in range(num_nodes - num_switches))]
    nodes = [_node(f"n{index}", rates(random), place) for index, place in enumerate(places)]
    return Cluster(name="any-tree", nodes=tuple(nodes), switches=tuple(switches))


def racks(random: Random, *, alike: bool) -> Cluster:
    """2 to 4 racks of 2 to 6 nodes."""
    switches, nodes = [], []
    for index in range(random.randint(2, 4)):
        num_nodes, rate = random.randint(2, 6), _classes(random)
        uplink = rate * num_nodes * random.choice([1 / 8, 1 / 4, 1 / 2, 1])
        switches.append(Switch(name=f"r{index}", uplink_bytes_per_s=uplink))
        for place in range(num_nodes):
            nodes.append(_node(f"n{index}-{place}", rate if alike else _classes(random), f"r{index}"))
    return Cluster(name="racks", nodes=tuple(nodes), switches=tuple(switches))


def busiest_over_bound(cluster: Cluster) -> tuple[float, float]:
    """Return the ratio for exact fractions, and for whole shares."""
    net = cost.group_network(cluster)
    bound_s = cost.network_bound(net, 1).seconds
    tree = chunk_shares.build_share_tree(
        net, cost.vertices_of_ranks(net, [node.name for node in cluster.nodes]).tolist(), MEMORY_BYTES_PER_S
    )
    found = chunk_shares.solve_fractions(tree, bound_s)
    return found.busiest_s_per_byte / bound_s, chunk_shares.lay_out_message(found).busiest_s_per_byte / bound_s


def gathering_over_bound(cluster: Cluster) -> tuple[float, float]:
    """Return the ratio of the multi-level allgather, and the smaller one of it and the ring's."""
    nodes = [node.name for node in cluster.nodes]
    plan = planning.plan_group(cluster, nodes, kinds=["allgather"])
    found = {name: asked.busiest_s_per_byte for name, asked in plan.collective("allgather").demands}
    bound_s = plan.bound_s(1, "allgather")
    return found["multi-level"] / bound_s, min(found["multi-level"], found["ring"]) / bound_s


def study_gathering(name: str, make: Callable[[Random], Cluster], count: int) -> None:
    """Print one row of the table of allgathers."""
    pairs = [gathering_over_bound(make(Random(seed))) for seed in range(count)]
    for what, ratios in zip(
        ("multi-level", "the better of it and ring"), map(sorted, zip(*pairs, strict=True)), strict=True
    ):
        near = sum(ratio < 1.01 for ratio in ratios) / count
        print(
            f"{name}, allgather, {what}: {near:.1%} within 1 %; 90 %: {ratios[count * 9 // 10]:.3f}, "
            f"99 %: {ratios[count * 99 // 100]:.3f}, worst {ratios[-1]:.3f}"
        )


def study(name: str, make: Callable[[Random], Cluster], count: int) -> None:
    """Print one row of the table."""
    pairs = [busiest_over_bound(make(Random(seed))) for seed in range(count)]
    ratios = sorted(exact for exact, _ in pairs)
    reached, near = (sum(ratio < limit for ratio in ratios) / count for limit in (1 + 1e-5, 1.05))
    rounding = max(whole / exact for exact, whole in pairs)
    print(
        f"{name}: {reached:.1%} reach it, {near:.1%} within 5 %; 90 %: {ratios[count * 9 // 10]:.3f}, "
        f"99 %: {ratios[count * 99 // 100]:.3f}, worst {ratios[-1]:.3f}; whole shares at most {rounding:.4f} times that"
    )


def main() -> None:
    """Print all rows."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    for each in (study, study_gathering):
        each("any tree, rates uniform", lambda random: any_tree(random, lambda r: r.uniform(1e7, 1e8)), count)
        each("any tree, rates 1, 2, 4, 10", lambda random: any_tree(random, _classes), count)
        each("any tree, rates log-uniform", lambda random: any_tree(random, lambda r: 10 ** r.uniform(7, 9)), count)
        each("racks, nodes alike", lambda random: racks(random, alike=True), count)
        each("racks, nodes mixed", lambda random: racks(random, alike=False), count)


def _node(name: str, rate: float, switch: str | None) -> Node:
    nics = (Nic(name="eth0", rate_bytes_per_s=rate),)
    return Node(name=name, devices=(Device(),), nics=nics, switch=switch)


def _classes(random: Random) -> float:
    return random.choice([1e7, 2e7, 4e7, 1e8])


if __name__ == "__main__":
    main()
