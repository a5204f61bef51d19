"""How long each way of training together takes for the samples of a train step: why `auto` chooses what it chooses.

The time to a given loss is the number of samples that this takes, times seconds a sample. Exact modes need the samples
of synchronous training. The parameter server needs a little more (`WORTH`), and wins only where the wait for others is
more than that. Times are predicted: computing by measured speeds, plus transfers at the rates of NICs and switches, and
what a rehearsal has shown that a collective takes beyond those, and an exchange at the server.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ringweave.planning import balancing, modes
from ringweave.planning.balancing import Speed

WORTH = 0.98
"""What a sample is worth that several rings train on, beside one of synchronous training: rehearsals in virtual time
found losses 0 to 2 % behind after the same samples (docs/decisions/0021)."""
MIN_GAIN = 0.05
"""Rings must be this much faster than one exact step of all to be taken, where rounds of rings were rehearsed."""
MIN_GAIN_UNREHEARSED = 0.1
"""Likewise, where rings are known by the sum of their parts alone: in labs of parts of processors that was up to a
tenth short of what was measured, and more (docs/decisions/0062, 0063)."""
_MIN_GAIN_OF_RINGS = 0.03
"""Likewise, rings than simpler rings, whose forecasts have the same errors."""
_DIFFERENT = 1.25
"""Rates that differ by less are of one kind."""

Ring = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Worker:
    """What is known of a rank."""

    sample_s: Sequence[float]
    """Seconds that a sample has taken it, in several trials: where they differ at random, so will steps."""
    rate_bytes_per_s: float = math.inf
    """Of its NICs."""
    uplinks: Mapping[str, float] = field(default_factory=dict)
    """Name of each switch above it, the nearest first -> bytes per second of that one's uplink, each direction."""

    passing_s: float = 0.0
    """Seconds by which every collective that it takes part in lasts longer than links do, for all the bytes of the
    gradients passing through it twice: what it needs a processor for, and pauses of one that it has a part of."""

    pushing_s: float | None = None
    """Likewise, of an exchange with the parameter server; None takes it for as long as passing them."""

    @property
    def mean_s(self) -> float:
        """Seconds of a sample in the long run."""
        return math.fsum(self.sample_s) / len(self.sample_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What a train step is."""

    batch_samples: int
    """Over all workers."""
    caps: Sequence[int] | None = None
    """The most samples of a batch that each worker's memory takes; None where there is no limit."""
    num_bytes: float
    """Of the gradients, and of the parameters."""
    server_bytes_per_s: float = math.inf
    """Rate of the node that the parameter server is on, each direction."""
    server_uplinks: Mapping[str, float] = field(default_factory=dict)
    """As a worker's, of that node."""
    serving_s: float = 0.0
    """Seconds that the server's processor needs for a push and what is sent back, one after the other for all rings."""
    local_steps: int = 0
    """Steps of a ring from one push to the next, which is under way meanwhile; 0 pushes each step, and waits."""
    epoch_samples: float = math.inf
    """Samples of an epoch, at whose end all rings meet."""
    most_ahead: Callable[[int], float] = lambda _num_rings: math.inf
    """Number of rings -> pushes of all others while a ring computes a round on parameters that it has taken: the
    bound on staleness, beyond which they wait for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """One way of training."""

    mode: str
    step_s: float
    """Predicted: seconds for what a step of synchronous training gains."""
    computing_s: float
    """Predicted: of these, computing of the slowest ring's round, and waiting in it for the slowest member."""
    rings: tuple[Ring, ...] = ()
    """Of the modes with a server."""

    def __str__(self) -> str:
        """One line."""
        rings = f", rings {[list(ring) for ring in self.rings]}" if self.rings else ""
        return f"{self.mode} {self.step_s:.3g} s, {self.computing_s:.3g} s of it computing{rings}"


def forecast(workers: Sequence[Worker], work: Work, rings: Sequence[Sequence[Ring]] = ()) -> tuple[Forecast, ...]:
    """What each mode is predicted to take, simpler modes first.

    Args:
        workers: Every rank.
        work: The train step.
        rings: Ways to form rings that are looked at; none means that there is no parameter server.
    """
    everyone = tuple(range(len(workers)))
    speeds = [Speed(s_per_sample=each.mean_s) for each in workers]
    equal = balancing.apportion(work.batch_samples, [Speed(s_per_sample=1.0)] * len(workers), work.caps)
    shares = balancing.apportion(work.batch_samples, speeds, work.caps)
    reducing_s = allreduce_s(workers, work.num_bytes)  # in both modes: among the same ranks
    found = [
        Forecast(mode=mode, step_s=computing_s + reducing_s, computing_s=computing_s)
        for mode, computing_s in (
            (modes.SYNC, _computing_s(everyone, equal, workers)),
            (modes.BALANCED, _computing_s(everyone, shares, workers)),
        )
    ]
    return (*found, *(_of_rings(tuple(each), shares, workers, work) for each in rings))


def stepped(forecasts: Sequence[Forecast], balanced_s: float) -> tuple[Forecast, ...]:
    """The same, with balanced as long as its steps were in a rehearsal.

    That has in it what no sum of parts has: the optimizer's step, a kernel's pauses in the midst of anything, and that
    who waits for others uses up less of its part of a processor meanwhile.
    """
    return tuple(replace(each, step_s=balanced_s) if each.mode == modes.BALANCED else each for each in forecasts)


def turned(forecasts: Sequence[Forecast], work: Work, round_sample_s: Sequence[float]) -> tuple[Forecast, ...]:
    """The same, with each rank alone as fast as its rounds were in a rehearsal.

    Forecasts of other rings are sums of the same parts: what those missed of each rank alone, they miss of them too.

    Args:
        forecasts: As `forecast` has them.
        work: As there.
        round_sample_s: Of each rank, mean seconds of a round divided by the round's samples.
    """
    alone = next((each for each in forecasts if each.mode == modes.PS), None)
    if alone is None:
        return tuple(forecasts)
    step_s = work.batch_samples / math.fsum(1 / each_s for each_s in round_sample_s) / _worth(work)
    return tuple(
        replace(each, step_s=each.step_s * step_s / alone.step_s) if each.rings else each for each in forecasts
    )


def choose(forecasts: Sequence[Forecast], least_gain: float = MIN_GAIN) -> Forecast:
    """The fastest; one that is simpler, and so comes earlier, unless that is slower by more than the least gain.

    Args:
        forecasts: Simpler ones first.
        least_gain: Of rings over one step of all.
    """
    best_s = min(each.step_s for each in forecasts)
    return next(
        each for each in forecasts if each.step_s <= best_s * (1 + (_MIN_GAIN_OF_RINGS if each.rings else least_gain))
    )


def expected_slowest_s(values: Sequence[Sequence[float]]) -> float:
    """The mean of the largest of several times, each of which is one of its values, all equally likely."""
    steps = sorted((value, index) for index, own in enumerate(values) for value in own)
    counts, num_without, total, before = [0] * len(values), len(values), 0.0, 0.0
    log_chance = -math.fsum(math.log(len(own)) for own in values)  # that none is larger: tiny for thousands at first
    for value, index in steps:
        counts[index] += 1
        if counts[index] == 1:
            num_without -= 1
        else:
            log_chance += math.log(counts[index] / (counts[index] - 1))
        chance = 0.0 if num_without else math.exp(log_chance)
        total += value * (chance - before)
        before = chance
    return total


def allreduce_s(workers: Sequence[Worker], num_bytes: float) -> float:
    """Predicted seconds of an allreduce of the gradients among these: the bound by links, and what passing adds."""
    count = len(workers)
    if count < 2:
        return 0.0
    return bound_s(workers, num_bytes) + (count - 1) / count * math.fsum(each.passing_s for each in workers)


def bound_s(workers: Sequence[Worker], num_bytes: float) -> float:
    """The least seconds of an allreduce among two or more, by their NICs and by uplinks between them."""
    rates = [each.rate_bytes_per_s for each in workers]
    between = dividing([each.uplinks for each in workers])
    return num_bytes * max(2 * (len(rates) - 1) / math.fsum(rates), *(1 / rate for rate in (*rates, *between.values())))


def rehearsed(workers: Sequence[Worker], num_bytes: float, reducing_s: float) -> list[Worker]:
    """The same with what an allreduce among all of them has shown.

    What it took more than links explain is put down to processors: to each in proportion to how slowly it computes, for
    whoever waits for a turn of its processor keeps the whole ring waiting. Where no rate is known at all, links are
    taken to have set the pace, the same one for all.

    Args:
        workers: Two or more, which have not been through this.
        num_bytes: Of the message.
        reducing_s: Measured.
    """
    count = len(workers)
    if all(math.isinf(each.rate_bytes_per_s) for each in workers):
        rate = 2 * (count - 1) / count * num_bytes / reducing_s
        return [replace(each, rate_bytes_per_s=rate) for each in workers]
    more_s = max(0.0, reducing_s - bound_s(workers, num_bytes)) * count / (count - 1)
    all_s = math.fsum(each.mean_s for each in workers)
    return [replace(each, passing_s=more_s * each.mean_s / all_s) for each in workers]


def exchanged(
    workers: Sequence[Worker], num_bytes: float, exchanging_s: float, server_bytes_per_s: float
) -> list[Worker]:
    """The same with what an exchange with the parameter server has taken the first of them.

    What it took more than links explain is what its processor needs; others need more, the more slowly they compute.
    """
    first = workers[0]
    links_s = 2 * num_bytes / min(first.rate_bytes_per_s, server_bytes_per_s)
    more_s = max(0.0, exchanging_s - links_s)
    return [replace(each, pushing_s=more_s * each.mean_s / first.mean_s) for each in workers]


def dividing(paths: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Uplinks of switches that have some of these nodes below them and not all: traffic among the nodes passes them.

    Args:
        paths: `Worker.uplinks` of each node.
    """
    found = {name: rate for path in paths for name, rate in path.items()}
    return {name: rate for name, rate in found.items() if not all(name in path for path in paths)}


def by_switch(paths: Sequence[Mapping[str, float]]) -> tuple[tuple[Ring, ...], ...]:
    """Rings of workers below one switch: once the nearest ones, once the topmost.

    Args:
        paths: `Worker.uplinks` of each.
    """
    ways = []
    for place in (0, -1):
        rings: dict[str, list[int]] = {}
        for rank, path in enumerate(paths):
            rings.setdefault([*path][place] if path else "", []).append(rank)
        ways.append(tuple(map(tuple, rings.values())))
    return tuple(ways)


def by_rate(rates_bytes_per_s: Sequence[float]) -> tuple[Ring, ...]:
    """Rings of workers whose links are about equally fast, the fastest ring first; one ring if all are."""
    line = sorted(range(len(rates_bytes_per_s)), key=lambda rank: (-rates_bytes_per_s[rank], rank))
    rings = [[line[0]]]
    for before, rank in itertools.pairwise(line):
        if rates_bytes_per_s[before] > rates_bytes_per_s[rank] * _DIFFERENT:  # links that are not known are equal
            rings.append([])
        rings[-1].append(rank)
    return tuple(map(tuple, rings))


def _computing_s(ranks: Sequence[int], shares: Sequence[int], workers: Sequence[Worker]) -> float:
    return expected_slowest_s([[shares[rank] * each_s for each_s in workers[rank].sample_s] for rank in ranks])


def _of_rings(rings: tuple[Ring, ...], shares: Sequence[int], workers: Sequence[Worker], work: Work) -> Forecast:
    """Rings go on beside each other, share links on their ways to the server, and none is too far ahead of another."""
    rounds_s, slowest_s = [], 0.0
    ways = [dividing([workers[ring[0]].uplinks, work.server_uplinks]) for ring in rings]
    for ring, way in zip(rings, ways, strict=True):
        members = [workers[rank] for rank in ring]
        rates = [each.rate_bytes_per_s for each in members]
        computing_s = _computing_s(ring, shares, workers)
        between = dividing([each.uplinks for each in members])
        broadcasting_s = 0.0
        if len(ring) > 1:  # all bytes pass once
            passing_s = math.fsum(each.passing_s for each in members) / 2
            broadcasting_s = work.num_bytes / min(*rates, *between.values()) + passing_s
        exchanging_s = 2 * work.num_bytes / min(rates[0], work.server_bytes_per_s, *way.values())
        exchanging_s += work.serving_s
        exchanging_s += members[0].passing_s if members[0].pushing_s is None else members[0].pushing_s
        stepping_s = computing_s + allreduce_s(members, work.num_bytes)
        overlapped_s = max(work.local_steps * stepping_s, exchanging_s)
        rounds_s.append((overlapped_s if work.local_steps else stepping_s + exchanging_s) + broadcasting_s)
        slowest_s = max(slowest_s, computing_s)
    steps = max(1, work.local_steps)
    samples_per_s = math.fsum(
        steps * sum(shares[rank] for rank in ring) / (each_s * wait * crowding)
        for ring, each_s, wait, crowding in zip(
            rings, rounds_s, _waits(rounds_s, work), _crowding(rounds_s, ways, work), strict=True
        )
    )
    worth = _worth(work) if len(rings) > 1 else 1.0
    mode = modes.PS if all(len(ring) == 1 for ring in rings) else modes.PS_HRA
    step_s = work.batch_samples / samples_per_s / worth
    return Forecast(mode=mode, step_s=step_s, computing_s=slowest_s, rings=rings)


def _worth(work: Work) -> float:
    """Of a sample in several rings, which meet at the end of an epoch: that takes as long as a step.

    Who has just begun its part of the last batch keeps the others waiting, for half of one; parts become small towards
    the end, but a round of few samples takes longer for each; and then all hear what all have done. Measured: 0.8 to
    1.2 steps (docs/decisions/0063).
    """
    return WORTH / (1 + work.batch_samples / work.epoch_samples)


def _crowding(rounds_s: Sequence[float], ways: Sequence[Mapping[str, float]], work: Work) -> list[float]:
    """How many times as long rounds of each ring take: its links to the server, and that one, have the others' too."""

    def load(rate: float, users: Sequence[float]) -> float:
        return math.fsum(1 / each_s for each_s in users) * work.num_bytes / rate

    passed = {name: rate for way in ways for name, rate in way.items()}
    loads = {
        name: load(rate, [each_s for each_s, way in zip(rounds_s, ways, strict=True) if name in way])
        for name, rate in passed.items()
    }
    server = load(work.server_bytes_per_s, rounds_s)
    serving = math.fsum(work.serving_s / each_s for each_s in rounds_s)
    return [max(1.0, server, serving, *(loads[name] for name in way)) for way in ways]


def _waits(rounds_s: Sequence[float], work: Work) -> list[float]:
    """How many times as long a round of each ring takes, since it waits for a ring that would be too far behind."""
    depth = 2 if work.local_steps else 1  # a round that is pushed meanwhile was computed on earlier parameters
    most = work.most_ahead(len(rounds_s))
    behind = [
        math.fsum(depth * own_s / each_s for ring, each_s in enumerate(rounds_s) if ring != own) / most
        for own, own_s in enumerate(rounds_s)
    ]
    return [max([1.0, *behind[:ring], *behind[ring + 1 :]]) for ring in range(len(rounds_s))]
