"""Which streams between nodes fill which links, so that the rate of every link can be measured. Pure."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, product

from ringweave.topology import CORE, Cluster

_FULL = 1 - 1e-9
_MOST_NODES = 32
_MOST_STREAMS = 16
_MOST_AT_ONCE_BYTES_PER_S = 125e6
"""More than that at once, and a small machine would be measured instead of its links."""


@dataclass(frozen=True, slots=True)
class Stream:
    """One TCP stream."""

    src: str
    dst: str


@dataclass(frozen=True, slots=True)
class Trial:
    """Streams that run at the same time, and the links that they fill."""

    streams: tuple[Stream, ...]
    links: tuple[str, ...]
    """Names of the links that carry as much as they can."""


@dataclass(frozen=True, slots=True)
class Trials:
    """How all links are measured."""

    batches: tuple[tuple[Trial, ...], ...]
    """The trials of a batch share no cable, in neither direction, and run at the same time."""
    out_of_reach: tuple[str, ...]
    """Links that no traffic between nodes can fill, because others are in the way."""


def plan_trials(cluster: Cluster) -> Trials:
    """Trials that fill every link that can be filled: by one stream where possible, else by several."""
    rates = {link.name: link.bandwidth_bytes_per_s for link in cluster.links()}
    covered: set[str] = set()
    out_of_reach, trials = [], []
    for link in cluster.links():
        if link.name in covered:
            continue
        trial = _trial(cluster, rates, link.name, _sides(cluster, link.src, link.dst), covered)
        if trial is None:
            out_of_reach.append(link.name)
        else:
            trials.append(trial)
            covered.update(trial.links)
    return Trials(tuple(_batched(cluster, trials)), tuple(name for name in out_of_reach if name not in covered))


def routes(cluster: Cluster, trial: Trial) -> dict[Stream, tuple[str, ...]]:
    """The links that each stream of a trial passes."""
    return {stream: cluster.route(stream.src, stream.dst) for stream in trial.streams}


def _sides(cluster: Cluster, src: str, dst: str) -> tuple[list[str], list[str]]:
    """Nodes before and behind a link."""
    is_up = dst in cluster.ancestors(src) if src != CORE else False
    lower = src if is_up else dst
    below = [node.name for node in cluster.nodes if node.name == lower or lower in cluster.ancestors(node.name)]
    above = [node.name for node in cluster.nodes if node.name not in set(below)]
    sides = (below, above) if is_up else (above, below)
    return sides[0][:_MOST_NODES], sides[1][:_MOST_NODES]


def _trial(
    cluster: Cluster,
    rates: Mapping[str, float],
    link: str,
    sides: tuple[list[str], list[str]],
    covered: set[str],
) -> Trial | None:
    pairs = [(Stream(*pair), cluster.route(*pair)) for pair in product(*sides)]

    def preference(pair: tuple[Stream, tuple[str, ...]]) -> tuple[float, int]:
        others = [name for name in pair[1] if name != link]
        room = min([_most(cluster, pair[0]), *(rates[name] for name in others)])
        return -min(room, rates[link]), sum(name in covered for name in others)

    pairs.sort(key=preference)
    left = dict(rates)
    chosen: list[Stream] = []
    for stream, route in islice(_useful(pairs, left, link), _MOST_STREAMS):
        chosen.append(stream)
        flow = min([_most(cluster, stream), *(left[name] for name in route)])
        for name in route:
            left[name] -= flow
    if left[link] > rates[link] * (1 - _FULL):
        return None
    passed = {name for stream in chosen for name in cluster.route(stream.src, stream.dst)}
    filled = [name for name in rates if name in passed and left[name] <= rates[name] * (1 - _FULL)]
    return Trial(tuple(chosen), tuple(filled))


def _most(cluster: Cluster, stream: Stream) -> float:
    """What the NICs of its ends let through: the first of one node reaches the first of the other, and so on."""
    ends = cluster.node(stream.src).nics, cluster.node(stream.dst).nics
    return sum(min(src.rate_bytes_per_s, dst.rate_bytes_per_s) for src, dst in zip(*ends, strict=False))


def _useful(
    pairs: Sequence[tuple[Stream, tuple[str, ...]]], left: Mapping[str, float], link: str
) -> Iterator[tuple[Stream, tuple[str, ...]]]:
    """The streams that still find room, until the link is full; `left` changes while they are taken."""
    for stream, route in pairs:
        if left[link] <= 0:
            return
        if min(left[name] for name in route) > 0:
            yield stream, route


def _batched(cluster: Cluster, trials: Sequence[Trial]) -> list[tuple[Trial, ...]]:
    batches: list[_Batch] = []
    for trial in trials:
        passed = routes(cluster, trial)
        cables = frozenset(frozenset(name.split("->")) for route in passed.values() for name in route)
        rate = sum(_most(cluster, stream) for stream in passed)
        batch = next((each for each in batches if each.has_room(cables, rate)), None)
        if batch is None:
            batch = _Batch()
            batches.append(batch)
        batch.trials.append(trial)
        batch.cables |= cables
        batch.bytes_per_s += rate
    return [tuple(batch.trials) for batch in batches]


@dataclass(slots=True)
class _Batch:
    """Trials that run at the same time, while they are collected."""

    trials: list[Trial] = field(default_factory=list)
    cables: set[frozenset[str]] = field(default_factory=set)
    bytes_per_s: float = 0.0

    def has_room(self, cables: Collection[frozenset[str]], bytes_per_s: float) -> bool:
        return self.cables.isdisjoint(cables) and self.bytes_per_s + bytes_per_s <= _MOST_AT_ONCE_BYTES_PER_S
