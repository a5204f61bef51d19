"""What every link of a lab really delivers, measured with TCP streams."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ringweave.benchmarks.places.place import Place
from ringweave.benchmarks.places.saturating import Stream, Trial, Trials, plan_trials, routes
from ringweave.benchmarks.systems.system import PROGRAMS
from ringweave.errors import LaunchError, explain

WARM_UP_S, WINDOW_S = 0.4, 1.0
EXPECTED = 0.945
"""TCP delivers 95.6 % of a rate as content; a trial with less is repeated alone, for something else disturbed it."""
LEAST_CREDIBLE = 0.85
"""Below this part of its rate a link was not filled: the machine is too slow for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkRates:
    """Rates of all links, in bytes per second of content."""

    raw: Mapping[str, float]
    """Link -> rate of the cluster file, which counts headers."""
    measured: Mapping[str, float]
    """Link -> what streams got through it; only links that were filled."""
    notes: tuple[str, ...]

    @property
    def believed(self) -> dict[str, float]:
        """Link -> measured rate, or else the raw one, which makes the bound stricter."""
        return {link: self.measured.get(link, raw) for link, raw in self.raw.items()}

    def rows(self) -> list[tuple[str, float, float | None]]:
        """Link, raw rate and measured rate."""
        return [(link, raw, self.measured.get(link)) for link, raw in self.raw.items()]


def measure(place: Place) -> LinkRates:
    """Fill every link with TCP and count what arrives.

    Raises:
        LaunchError: A stream did not come through.

    Cost:
        About 1.6 s for each batch of streams that share no cable, and for each trial that has to be repeated.
    """
    raw = {link.name: link.bandwidth_bytes_per_s for link in place.cluster.links()}
    trials = plan_trials(place.cluster)
    measured: dict[str, float] = {}
    for batch in trials.batches:
        measured.update(_measure_batch(place, batch))
        for trial in batch:
            if any(measured[link] < EXPECTED * raw[link] for link in trial.links):
                again = _measure_batch(place, [trial])
                measured.update({link: max(rate, measured[link]) for link, rate in again.items()})
    return judge(raw, measured, trials)


def judge(raw: Mapping[str, float], measured: Mapping[str, float], trials: Trials) -> LinkRates:
    """Leave out what cannot be true: a link that was not filled tells the machine's rate, not its own."""
    notes = [f"link {link} cannot be filled by any traffic; its raw rate is taken" for link in trials.out_of_reach]
    credible = {}
    for link, rate in measured.items():
        if rate >= LEAST_CREDIBLE * raw[link]:
            credible[link] = min(rate, raw[link])
        else:
            share = rate / raw[link]
            notes.append(f"link {link} got only {share:.0%} of its rate through; its raw rate is taken")
    return LinkRates(raw=raw, measured=credible, notes=tuple(notes))


def _measure_batch(place: Place, batch: Sequence[Trial]) -> dict[str, float]:
    arrived = _run(place, [stream for trial in batch for stream in trial.streams])
    return {link: rate for trial in batch for link, rate in _rates_of(place, trial, arrived).items()}


def _rates_of(place: Place, trial: Trial, arrived: Mapping[Stream, float]) -> dict[str, float]:
    passed = routes(place.cluster, trial)
    return {link: sum(arrived[stream] for stream, route in passed.items() if link in route) for link in trial.links}


def _run(place: Place, streams: Sequence[Stream]) -> dict[Stream, float]:
    """Bytes per second of each, all running at once; nodes with several NICs use them all, each with its like."""
    found = dict.fromkeys(streams, 0.0)
    with contextlib.ExitStack() as stack:
        receivers = []
        for stream in streams:
            num_nics = min(len(place.addresses[stream.src]), len(place.addresses[stream.dst]))
            for address in place.addresses[stream.dst][:num_nics]:
                receiver = stack.enter_context(_started(place, stream.dst, "receive", address, WARM_UP_S, WINDOW_S))
                receivers.append((stream, address, receiver))
        ports = [_line(receiver, stream) for stream, _, receiver in receivers]
        for (stream, address, _), port in zip(receivers, ports, strict=True):
            stack.enter_context(_started(place, stream.src, "send", address, port.strip()))
        for stream, _, receiver in receivers:
            count = json.loads(_line(receiver, stream))
            found[stream] += count["bytes"] / count["seconds"]
    return found


@contextlib.contextmanager
def _started(place: Place, node: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-I", "-S", str(PROGRAMS / "stream.py"), *map(str, arguments)]
    process = subprocess.Popen(
        place.command(node, argv),
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


def _line(process: subprocess.Popen[str], stream: Stream) -> str:
    """What the program prints next. It limits its own waiting, so this cannot last for ever."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise LaunchError(
            explain(
                "measuring a link",
                got=f"no stream from {stream.src} to {stream.dst}",
                expected="bytes to arrive",
                do="See whether the nodes reach each other: ringweave lab exec",
            )
        )
    return line
