"""Max-min fair rates: nobody can get more without taking from somebody who has no more than he."""

import math
from collections.abc import Mapping, Sequence

_AS_SMALL = 1 + 1e-12


def fair_rates(routes: Sequence[Sequence[int]], capacities: Mapping[int, float] | Sequence[float]) -> list[float]:
    """The rate of each flow, when flows share the links that they pass as TCP streams do on the whole.

    Progressive filling: all rates grow together until a link is full; the flows that pass it stay as they are, the
    others grow on.

    Args:
        routes: For each flow the links that it passes; one without links gets an infinite rate.
        capacities: What each link carries, in bytes per second; 0 for one that is cut.

    Returns:
        Bytes per second, in the order of `routes`.

    Source:
        Bertsekas and Gallager, "Data Networks" (1992), section 6.5.2.

    Cost:
        Linear in the lengths of all routes, plus links times different rates.
    """
    users: dict[int, list[int]] = {}
    for flow, route in enumerate(routes):
        for link in route:
            users.setdefault(link, []).append(flow)
    left = {link: capacities[link] for link in users}
    counts = {link: len(flows) for link, flows in users.items()}
    found = [math.inf] * len(routes)
    while counts:
        level = min(left[link] / count for link, count in counts.items())
        full = [link for link, count in counts.items() if left[link] / count <= level * _AS_SMALL]
        for link in full:
            for flow in users[link]:
                if found[flow] == math.inf:
                    found[flow] = level
                    for passed in routes[flow]:
                        left[passed] = max(0.0, left[passed] - level)
                        counts[passed] -= 1
        for link in [link for link, count in counts.items() if not count]:
            del counts[link]
    return found
