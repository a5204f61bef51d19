"""Faults as data: a script has one fault per line, written by hand or drawn at random. `parse(str(x)) == x`.

```text
at 12.5s kill worker 3                       kill -9
at 15s kill worker 3 during commit           at that moment of its next train step: forward, backward, bucket 0, ...
at 18s kill coordinator                      the active one; standby: the other one
at 19s kill server                           the leading parameter server; server-standby: the other one
at 20s pause worker 2 for 30s                SIGSTOP, then SIGCONT; pause coordinator for 3s
at 40s cut a0 for 30s                        off the network, silently; cut a0 in, cut a0 out: one way
at 60s slow a0->r0 to 50Mbit/s for 20s       one direction of a link
at 70s clock a0 by -3600s for 20s            the wall clock of a node jumps, and back
at 80s fill disk for 10s                     no byte left on the disk of the job's checkpoints
```

Seconds count from the first train step of the job.
"""

import math
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from ringweave import units
from ringweave.errors import UsageError
from ringweave.files.problems import suggest_closest

KILL, PAUSE, CUT, SLOW, CLOCK, FILL = "kill", "pause", "cut", "slow", "clock", "fill"
KINDS = (KILL, PAUSE, CUT, SLOW, CLOCK, FILL)
DISK = "disk"
COORDINATOR, STANDBY, SERVER, SERVER_STANDBY = SERVICES = ("coordinator", "standby", "server", "server-standby")
"""Processes of a job that are not workers: of each pair the active one and the other one."""
FORWARD, BACKWARD, BUCKET, COMMIT, COMMITTED, OPTIMIZER = MOMENTS = (
    "forward",
    "backward",
    "bucket",
    "commit",
    "committed",
    "optimizer",
)
"""Moments of a train step. `bucket N`: during the allreduce of the Nth bucket of gradients. `commit`: before the worker
votes that it has all sums. `committed`: after it has learned that all ranks have them."""
_FAULT_LINE = re.compile(
    r"at (?P<at>\d+(?:\.\d+)?)s (?P<kind>[a-z]+) (?P<worker>worker )?(?P<target>\S+)"
    r"(?: (?P<way>in|out|both))?(?: during (?P<moment>[a-z]+(?: \d+)?))?(?: to (?P<rate>\S+))?"
    r"(?: by (?P<shift>-?\d+(?:\.\d+)?)s)?(?: for (?P<lasts>\d+(?:\.\d+)?)s)?"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A fault with its target and duration."""

    at_s: float
    """Seconds after the job's first train step."""
    kind: str
    target: str
    """A worker's rank, one of `SERVICES`, a node, a link, or `disk`."""
    lasts_s: float = 0.0
    """Duration; 0 for a kill, which cannot be lifted."""
    direction: str = "both"
    """Direction of a cut: `in`, `out` or `both`, from the node's side."""
    rate_bytes_per_s: float = 0.0
    """Rate of a slow link."""
    moment: str = ""
    """Moment of a train step at which a worker is killed, such as `bucket 2`; empty: at once."""
    shift_s: float = 0.0
    """Shift of a clock."""

    @property
    def hits_worker(self) -> bool:
        """True if its target is a worker's rank."""
        return self.kind in (KILL, PAUSE) and self.target not in SERVICES

    @property
    def hits_service(self) -> bool:
        """True if its target is one of `SERVICES`."""
        return self.kind in (KILL, PAUSE) and self.target in SERVICES

    def __str__(self) -> str:
        worker = "worker " if self.hits_worker else ""
        way = f" {self.direction}" if self.kind == CUT and self.direction != "both" else ""
        moment = f" during {self.moment}" if self.moment else ""
        rate = f" to {units.format_rate(self.rate_bytes_per_s)}" if self.kind == SLOW else ""
        shift = f" by {_plain_number(self.shift_s)}s" if self.kind == CLOCK else ""
        lasts = f" for {_plain_number(self.lasts_s)}s" if self.kind != KILL else ""
        return f"at {_plain_number(self.at_s)}s {self.kind} {worker}{self.target}{way}{moment}{rate}{shift}{lasts}"


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultTargets:
    """Possible targets."""

    num_workers: int
    nodes: Sequence[str]
    link_rates: dict[str, float]
    """Link -> bytes per second."""
    moments: Sequence[str] = ()
    """Moments of a train step for random kills, equally often; none: kills happen at once."""
    num_buckets: int = 4
    """Random buckets are among the first so many. A script's number of buckets is not known beforehand: a worker
    without such a bucket dies at a commit, and reports it."""
    services: Sequence[str] = ()
    """Services that are killed and paused at random too, each as often as any worker."""


def parse_faults(text: str, targets: FaultTargets | None = None) -> tuple[Fault, ...]:
    """Parse the faults of a script, sorted by time; empty lines and comments after # are ignored.

    Raises:
        UsageError: A line is no fault, or its target does not exist; the text names the line.
    """
    faults = []
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.partition("#")[0].strip()
        if content:
            faults.append(_parse_line(content, f"line {number}"))
            if targets:
                _check_target(faults[-1], targets, f"line {number}")
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def faults_text(faults: Iterable[Fault]) -> str:
    """Return the script of faults, one per line."""
    return "".join(f"{fault}\n" for fault in faults)


def check_known_names(what: str, names: Iterable[str], known: Sequence[str]) -> None:
    """Refuse unknown names.

    Raises:
        UsageError: One of the names is not known.
    """
    for name in names:
        if name not in known:
            do = suggest_closest(name, known) or "See docs/how-to/inject-faults.md"
            raise UsageError(what, got=name, expected=", ".join(known), do=do)


def _plain_number(number: float) -> str:
    """Return all digits of a number without an exponent, so that it parses back to the same number."""
    return format(Decimal(repr(number)), "f").removesuffix(".0")


def _parse_line(content: str, where: str) -> Fault:
    found = _FAULT_LINE.fullmatch(content)
    kind = found["kind"] if found else ""
    if found is None or kind not in KINDS or not _has_needed_parts(found, kind):
        do = suggest_closest(kind, KINDS) if kind and kind not in KINDS else "See docs/how-to/inject-faults.md"
        example = '"at 20s pause worker 2 for 30s"'
        raise UsageError(
            "fault",
            got=content,
            expected=f"a line like {example}",
            do=do or "See docs/how-to/inject-faults.md",
            where=where,
        )
    return Fault(
        at_s=float(found["at"]),
        kind=kind,
        target=found["target"],
        lasts_s=float(found["lasts"] or 0),
        direction=found["way"] or "both",
        rate_bytes_per_s=units.parse_rate(found["rate"]) if found["rate"] else 0.0,
        moment=found["moment"] or "",
        shift_s=float(found["shift"] or 0),
    )


def _has_needed_parts(found: re.Match[str], kind: str) -> bool:
    """True if a line has exactly the parts that its kind of fault needs."""
    hits_service = kind in (KILL, PAUSE) and found["target"] in SERVICES
    return (
        bool(found["worker"]) == (kind in (KILL, PAUSE) and not hits_service)
        and bool(found["lasts"]) == (kind != KILL)
        and bool(found["rate"]) == (kind == SLOW)
        and bool(found["shift"]) == (kind == CLOCK)
        and (not found["way"] or kind == CUT)
        and (not found["moment"] or (kind == KILL and not hits_service and _is_moment(found["moment"])))
        and (kind != FILL or found["target"] == DISK)
    )


def _is_moment(text: str) -> bool:
    """True for a moment of a step; a bucket has its number."""
    name, has_number, _ = text.partition(" ")
    return name in MOMENTS and bool(has_number) == (name == BUCKET)


def _check_target(fault: Fault, targets: FaultTargets, where: str) -> None:
    workers = [str(rank) for rank in range(targets.num_workers)]
    known_targets: Sequence[str] = {
        KILL: SERVICES if fault.hits_service else workers,
        PAUSE: SERVICES if fault.hits_service else workers,
        CUT: targets.nodes,
        SLOW: sorted(targets.link_rates),
        CLOCK: targets.nodes,
        FILL: [DISK],
    }[fault.kind]
    if fault.target not in known_targets:
        what = "worker" if fault.kind in (KILL, PAUSE) else "link" if fault.kind == SLOW else "node"
        do = suggest_closest(fault.target, known_targets) or "Name one of the cluster"
        expected = f"one of {', '.join(known_targets[:8])}{', ...' if len(known_targets) > 8 else ''}"
        raise UsageError(f"{what} of a fault", got=fault.target, expected=expected, do=do, where=where)


MIN_EVERY_S = 0.01
"""Resolution of random times."""
_CLOCK_SHIFT_S = 3600.0
"""Shift of random clock jumps, forwards or back."""
_MIN_SECONDS: Mapping[str, float] = {"every": MIN_EVERY_S, "for": 0.0, "lasts": 0.0, "calm": 0.0}


def draw_faults(
    kinds: Sequence[str],
    targets: FaultTargets,
    *,
    seed: int,
    every_s: float,
    until_s: float,
    lasts_s: float,
    calm_s: float,
) -> tuple[Fault, ...]:
    """Draw a script at random; the same for the same arguments.

    Args:
        kinds: Kinds of faults, equally often.
        targets: Possible targets, each equally often.
        seed: Seed of all choices.
        every_s: Mean seconds from one fault to the next (Poisson arrivals); at least a tenth of it passes.
        until_s: No fault begins later.
        lasts_s: Duration of each fault.
        calm_s: No fault begins earlier; the fault-free rate is measured in this time.

    Raises:
        UsageError: There is no such kind, moment or service, no kind at all, or a time is out of range.
    """
    check_known_names("kind of fault", kinds, KINDS)
    check_known_names("moment of fault", targets.moments, MOMENTS)
    check_known_names("service to hit", targets.services, SERVICES)
    if not kinds:
        do = "Name some: --random kill,pause"
        raise UsageError("kinds of faults", got="none", expected=f"some of {', '.join(KINDS)}", do=do)
    for name, seconds in {"every": every_s, "for": until_s, "lasts": lasts_s, "calm": calm_s}.items():
        check_seconds(name, seconds, minimum=_MIN_SECONDS[name])
    rng, found, at_s = random.Random(seed), [], calm_s
    while at_s <= until_s:
        found.append(_draw_fault(rng, rng.choice(list(kinds)), round(at_s, 2), lasts_s, targets))
        at_s += max(every_s / 10, rng.expovariate(1 / every_s))
    return tuple(found)


def check_seconds(name: str, seconds: float, *, minimum: float = 0.0) -> None:
    """Refuse a time out of range.

    Raises:
        UsageError: It is less than the minimum, or not a number of seconds at all.
    """
    if not minimum <= seconds < math.inf:
        do = "Give a number of seconds"
        raise UsageError(f"--{name}", got=seconds, expected=f"{minimum:g} or more seconds", do=do)


def draw_moment(rng: random.Random, moments: Sequence[str], num_buckets: int) -> str:
    """Draw a moment, with the number of a bucket if it needs one; empty if there are no moments."""
    moment = rng.choice(list(moments)) if moments else ""
    return f"{moment} {rng.randrange(num_buckets)}" if moment == BUCKET else moment


def _draw_fault(rng: random.Random, kind: str, at_s: float, lasts_s: float, targets: FaultTargets) -> Fault:
    if kind == KILL:
        target = _draw_process(rng, targets)
        moment = "" if target in SERVICES else draw_moment(rng, targets.moments, targets.num_buckets)
        return Fault(at_s=at_s, kind=kind, target=target, moment=moment)
    if kind == PAUSE:
        return Fault(at_s=at_s, kind=kind, target=_draw_process(rng, targets), lasts_s=lasts_s)
    if kind == CUT:
        direction = rng.choice(("in", "out", "both"))
        return Fault(at_s=at_s, kind=kind, target=rng.choice(list(targets.nodes)), lasts_s=lasts_s, direction=direction)
    if kind == SLOW:
        link = rng.choice(sorted(targets.link_rates))
        rate = round(targets.link_rates[link] / 4)
        return Fault(at_s=at_s, kind=kind, target=link, lasts_s=lasts_s, rate_bytes_per_s=rate)
    if kind == CLOCK:
        shift_s = rng.choice((-_CLOCK_SHIFT_S, _CLOCK_SHIFT_S))
        return Fault(at_s=at_s, kind=kind, target=rng.choice(list(targets.nodes)), lasts_s=lasts_s, shift_s=shift_s)
    return Fault(at_s=at_s, kind=kind, target=DISK, lasts_s=lasts_s)


def _draw_process(rng: random.Random, targets: FaultTargets) -> str:
    """Draw a worker's rank or a service, each process equally often."""
    index = rng.randrange(targets.num_workers + len(targets.services))
    return str(index) if index < targets.num_workers else targets.services[index - targets.num_workers]
