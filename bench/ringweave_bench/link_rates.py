"""TCP rates of all links of a lab, measured by streams that fill them."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, product

from ringweave.errors import LaunchError
from ringweave.topology import CORE, Cluster
from ringweave_bench.bench_cluster import BenchCluster
from ringweave_bench.systems import PROGRAMS_FOLDER

_FULL_FRACTION = 1 - 1e-9
_MAX_NODES = 32
_MAX_STREAMS = 16
_MAX_BATCH_BYTES_PER_S = 125e6
"""Largest total rate at once; above, a small machine would be measured instead of its links."""


@dataclass(frozen=True, slots=True)
class TcpStream:
    """One TCP stream."""

    src: str
    dst: str


@dataclass(frozen=True, slots=True)
class LinkTrial:
    """Streams that run at the same time, and the links that they fill."""

    streams: tuple[TcpStream, ...]
    links: tuple[str, ...]
    """Names of the links that are filled."""


@dataclass(frozen=True, slots=True)
class LinkTrialPlan:
    """Batches of trials that measure all links."""

    batches: tuple[tuple[LinkTrial, ...], ...]
    """The trials of a batch share no cable, in neither direction, and run at the same time."""
    unmeasurable: tuple[str, ...]
    """Links that no traffic between nodes can fill, because others are in the way."""


def plan_trials(cluster: Cluster) -> LinkTrialPlan:
    """Plan trials that fill every link that can be filled: by one stream if possible, else by several."""
    rates = {link.name: link.bandwidth_bytes_per_s for link in cluster.links()}
    covered: set[str] = set()
    out_of_reach, trials = [], []
    for link in cluster.links():
        if link.name in covered:
            continue
        trial = _plan_trial(cluster, rates, link.name, _nodes_around(cluster, link.src, link.dst), covered)
        if trial is None:
            out_of_reach.append(link.name)
        else:
            trials.append(trial)
            covered.update(trial.links)
    return LinkTrialPlan(
        tuple(_batch_trials(cluster, trials)), tuple(name for name in out_of_reach if name not in covered)
    )


def trial_routes(cluster: Cluster, trial: LinkTrial) -> dict[TcpStream, tuple[str, ...]]:
    """Return the links that each stream of a trial passes."""
    return {stream: cluster.route(stream.src, stream.dst) for stream in trial.streams}


def _nodes_around(cluster: Cluster, src: str, dst: str) -> tuple[list[str], list[str]]:
    """Return the nodes before and behind a link."""
    is_up = dst in cluster.ancestors(src) if src != CORE else False
    lower = src if is_up else dst
    below = [node.name for node in cluster.nodes if node.name == lower or lower in cluster.ancestors(node.name)]
    above = [node.name for node in cluster.nodes if node.name not in set(below)]
    sides = (below, above) if is_up else (above, below)
    return sides[0][:_MAX_NODES], sides[1][:_MAX_NODES]


def _plan_trial(
    cluster: Cluster,
    rates: Mapping[str, float],
    link: str,
    sides: tuple[list[str], list[str]],
    covered: set[str],
) -> LinkTrial | None:
    pairs = [(TcpStream(*pair), cluster.route(*pair)) for pair in product(*sides)]

    def preference(pair: tuple[TcpStream, tuple[str, ...]]) -> tuple[float, int]:
        others = [name for name in pair[1] if name != link]
        room = min([_max_stream_rate(cluster, pair[0]), *(rates[name] for name in others)])
        return -min(room, rates[link]), sum(name in covered for name in others)

    pairs.sort(key=preference)
    left = dict(rates)
    chosen: list[TcpStream] = []
    for stream, route in islice(_streams_with_room(pairs, left, link), _MAX_STREAMS):
        chosen.append(stream)
        flow = min([_max_stream_rate(cluster, stream), *(left[name] for name in route)])
        for name in route:
            left[name] -= flow
    if left[link] > rates[link] * (1 - _FULL_FRACTION):
        return None
    passed = {name for stream in chosen for name in cluster.route(stream.src, stream.dst)}
    filled = [name for name in rates if name in passed and left[name] <= rates[name] * (1 - _FULL_FRACTION)]
    return LinkTrial(tuple(chosen), tuple(filled))


def _max_stream_rate(cluster: Cluster, stream: TcpStream) -> float:
    """Return the rate that the NICs of its ends allow: the first of one node reaches the first of the other, etc."""
    ends = cluster.node(stream.src).nics, cluster.node(stream.dst).nics
    return sum(min(src.rate_bytes_per_s, dst.rate_bytes_per_s) for src, dst in zip(*ends, strict=False))


def _streams_with_room(
    pairs: Sequence[tuple[TcpStream, tuple[str, ...]]], left: Mapping[str, float], link: str
) -> Iterator[tuple[TcpStream, tuple[str, ...]]]:
    """Yield the streams that still have room, until the link is full; `left` changes as they are taken."""
    for stream, route in pairs:
        if left[link] <= 0:
            return
        if min(left[name] for name in route) > 0:
            yield stream, route


def _batch_trials(cluster: Cluster, trials: Sequence[LinkTrial]) -> list[tuple[LinkTrial, ...]]:
    batches: list[_TrialBatch] = []
    for trial in trials:
        passed = trial_routes(cluster, trial)
        cables = frozenset(frozenset(name.split("->")) for route in passed.values() for name in route)
        rate = sum(_max_stream_rate(cluster, stream) for stream in passed)
        batch = next((each for each in batches if each.has_room(cables, rate)), None)
        if batch is None:
            batch = _TrialBatch()
            batches.append(batch)
        batch.trials.append(trial)
        batch.cables |= cables
        batch.bytes_per_s += rate
    return [tuple(batch.trials) for batch in batches]


@dataclass(slots=True)
class _TrialBatch:
    """Trials that run at the same time, while they are collected."""

    trials: list[LinkTrial] = field(default_factory=list)
    cables: set[frozenset[str]] = field(default_factory=set)
    bytes_per_s: float = 0.0

    def has_room(self, cables: Collection[frozenset[str]], bytes_per_s: float) -> bool:
        return self.cables.isdisjoint(cables) and self.bytes_per_s + bytes_per_s <= _MAX_BATCH_BYTES_PER_S


WARM_UP_S, WINDOW_S = 0.4, 1.0
EXPECTED_FRACTION = 0.945
"""TCP delivers 95.6 % of a rate as content; a trial with less is repeated alone, since other load disturbed it."""
MIN_CREDIBLE_FRACTION = 0.85
"""Below this part of its rate a link was not filled: the machine is too slow for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredLinkRates:
    """Rates of all links, in bytes per second of content."""

    raw: Mapping[str, float]
    """Link -> rate of the cluster file, which counts headers."""
    measured: Mapping[str, float]
    """Link -> rate of the streams through it; only links that were filled."""
    notes: tuple[str, ...]

    @property
    def best_known(self) -> dict[str, float]:
        """Return link -> measured rate, or else the raw one, which makes the bound stricter."""
        return {link: self.measured.get(link, raw) for link, raw in self.raw.items()}

    def rows(self) -> list[tuple[str, float, float | None]]:
        """Return (link, raw rate, measured rate) of every link."""
        return [(link, raw, self.measured.get(link)) for link, raw in self.raw.items()]


def measure_link_rates(bench_cluster: BenchCluster) -> MeasuredLinkRates:
    """Fill every link with TCP and count the arriving bytes.

    Raises:
        LaunchError: A stream failed.

    Cost:
        About 1.6 s for each batch of streams that share no cable, and for each trial that has to be repeated.
    """
    raw = {link.name: link.bandwidth_bytes_per_s for link in bench_cluster.cluster.links()}
    trials = plan_trials(bench_cluster.cluster)
    measured: dict[str, float] = {}
    for batch in trials.batches:
        measured.update(_measure_batch(bench_cluster, batch))
        for trial in batch:
            if any(measured[link] < EXPECTED_FRACTION * raw[link] for link in trial.links):
                again = _measure_batch(bench_cluster, [trial])
                measured.update({link: max(rate, measured[link]) for link, rate in again.items()})
    return discard_unfilled(raw, measured, trials)


def discard_unfilled(
    raw: Mapping[str, float], measured: Mapping[str, float], trials: LinkTrialPlan
) -> MeasuredLinkRates:
    """Drop rates of links that were not filled: they are the machine's rate, not the link's."""
    notes = [f"link {link} cannot be filled by any traffic; its raw rate is taken" for link in trials.unmeasurable]
    credible = {}
    for link, rate in measured.items():
        if rate >= MIN_CREDIBLE_FRACTION * raw[link]:
            credible[link] = min(rate, raw[link])
        else:
            share = rate / raw[link]
            notes.append(f"link {link} got only {share:.0%} of its rate through; its raw rate is taken")
    return MeasuredLinkRates(raw=raw, measured=credible, notes=tuple(notes))


def _measure_batch(bench_cluster: BenchCluster, batch: Sequence[LinkTrial]) -> dict[str, float]:
    arrived = _run_streams(bench_cluster, [stream for trial in batch for stream in trial.streams])
    return {link: rate for trial in batch for link, rate in _trial_rates(bench_cluster, trial, arrived).items()}


def _trial_rates(bench_cluster: BenchCluster, trial: LinkTrial, arrived: Mapping[TcpStream, float]) -> dict[str, float]:
    passed = trial_routes(bench_cluster.cluster, trial)
    return {link: sum(arrived[stream] for stream, route in passed.items() if link in route) for link in trial.links}


def _run_streams(bench_cluster: BenchCluster, streams: Sequence[TcpStream]) -> dict[TcpStream, float]:
    """Run all streams at once; return bytes per second of each. Each NIC of a node pairs with its counterpart."""
    found = dict.fromkeys(streams, 0.0)
    with contextlib.ExitStack() as stack:
        receivers = []
        for stream in streams:
            num_nics = min(len(bench_cluster.addresses[stream.src]), len(bench_cluster.addresses[stream.dst]))
            for address in bench_cluster.addresses[stream.dst][:num_nics]:
                receiver = stack.enter_context(
                    _start_stream(bench_cluster, stream.dst, "receive", address, WARM_UP_S, WINDOW_S)
                )
                receivers.append((stream, address, receiver))
        ports = [_read_line(receiver, stream) for stream, _, receiver in receivers]
        for (stream, address, _), port in zip(receivers, ports, strict=True):
            stack.enter_context(_start_stream(bench_cluster, stream.src, "send", address, port.strip()))
        for stream, _, receiver in receivers:
            count = json.loads(_read_line(receiver, stream))
            found[stream] += count["bytes"] / count["seconds"]
    return found


@contextlib.contextmanager
def _start_stream(bench_cluster: BenchCluster, node: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-I", "-S", str(PROGRAMS_FOLDER / "stream.py"), *map(str, arguments)]
    process = subprocess.Popen(
        bench_cluster.command(node, argv),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _read_line(process: subprocess.Popen[str], stream: TcpStream) -> str:
    """Return the next line that the program prints. It limits its own waiting, so this cannot block for ever."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise LaunchError(
            "measuring a link",
            got=f"no stream from {stream.src} to {stream.dst}",
            expected="bytes to arrive",
            do="See whether the nodes reach each other: ringweave lab exec",
        )
    return line
