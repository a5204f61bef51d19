"""Faults as data: a script is lines of text, one fault each. `parse(str(fault)) == fault`.

```text
at 12.5s kill worker 3                       kill -9
at 15s kill worker 3 during commit           at that moment of its next train step: forward, backward, bucket 0, ...
at 18s kill coordinator                      the one that decides; standby: the other one
at 19s kill server                           the parameter server that leads; server-standby: the other one
at 20s pause worker 2 for 30s                SIGSTOP, then SIGCONT; pause coordinator for 3s
at 40s cut a0 for 30s                        off the network, silently; cut a0 in, cut a0 out: one way
at 60s slow a0->r0 to 50Mbit/s for 20s       one direction of a link
at 70s clock a0 by -3600s for 20s            the wall clock of a node jumps, and back
at 80s fill disk for 10s                     no byte left where the job keeps its checkpoints
```

Seconds count from the first train step of the job.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal

from ringweave import units
from ringweave.errors import UsageError, explain
from ringweave.files.problems import closest

KILL, PAUSE, CUT, SLOW, CLOCK, FILL = "kill", "pause", "cut", "slow", "clock", "fill"
KINDS = (KILL, PAUSE, CUT, SLOW, CLOCK, FILL)
DISK = "disk"
COORDINATOR, STANDBY, SERVER, SERVER_STANDBY = SERVICES = ("coordinator", "standby", "server", "server-standby")
"""Processes of a job that are no workers: of each pair the one that decides or leads, and the other one."""
FORWARD, BACKWARD, BUCKET, COMMIT, COMMITTED, OPTIMIZER = MOMENTS = (
    "forward",
    "backward",
    "bucket",
    "commit",
    "committed",
    "optimizer",
)
"""Of a train step. `bucket N`: while the Nth bucket of gradients is summed; `commit`: before the worker says that it
has all sums; `committed`: when it has heard that all have them."""
_LINE = re.compile(
    r"at (?P<at>\d+(?:\.\d+)?)s (?P<kind>[a-z]+) (?P<worker>worker )?(?P<target>\S+)"
    r"(?: (?P<way>in|out|both))?(?: during (?P<moment>[a-z]+(?: \d+)?))?(?: to (?P<rate>\S+))?"
    r"(?: by (?P<shift>-?\d+(?:\.\d+)?)s)?(?: for (?P<lasts>\d+(?:\.\d+)?)s)?"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One thing that goes wrong, and for how long."""

    at_s: float
    """Seconds after the job's first train step."""
    kind: str
    target: str
    """A worker's rank, one of `SERVICES`, a node, a link, or `disk`."""
    lasts_s: float = 0.0
    """Until it is taken back; 0 for a kill, which cannot be."""
    way: str = "both"
    """Of a cut: `in`, `out` or `both`, from the node's side."""
    rate_bytes_per_s: float = 0.0
    """Of a slow link."""
    moment: str = ""
    """Of a train step at which a worker is killed, such as `bucket 2`; empty: at once."""
    shift_s: float = 0.0
    """By which a clock jumps."""

    @property
    def hits_worker(self) -> bool:
        """Its target is a worker's rank."""
        return self.kind in (KILL, PAUSE) and self.target not in SERVICES

    @property
    def hits_service(self) -> bool:
        """Its target is one of `SERVICES`."""
        return self.kind in (KILL, PAUSE) and self.target in SERVICES

    def __str__(self) -> str:
        worker = "worker " if self.hits_worker else ""
        way = f" {self.way}" if self.kind == CUT and self.way != "both" else ""
        moment = f" during {self.moment}" if self.moment else ""
        rate = f" to {units.format_rate(self.rate_bytes_per_s)}" if self.kind == SLOW else ""
        shift = f" by {_plain(self.shift_s)}s" if self.kind == CLOCK else ""
        lasts = f" for {_plain(self.lasts_s)}s" if self.kind != KILL else ""
        return f"at {_plain(self.at_s)}s {self.kind} {worker}{self.target}{way}{moment}{rate}{shift}{lasts}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Targets:
    """What there is to hit."""

    num_workers: int
    nodes: Sequence[str]
    link_rates: dict[str, float]
    """Link -> bytes per second."""
    moments: Sequence[str] = ()
    """Of a train step, at which workers are killed at random, equally often; none: whenever it is time."""
    num_buckets: int = 4
    """Random moments are in one of the first so many. How many a script has is not known beforehand: a worker whose
    steps have no such bucket dies at a commit, and says so."""
    services: Sequence[str] = ()
    """Of `SERVICES`, those that are killed and paused at random too, each as often as any worker."""


def parse(text: str, targets: Targets | None = None) -> tuple[Fault, ...]:
    """The faults of a script, by time; empty lines and what follows a # are left out.

    Raises:
        UsageError: A line means no fault, or hits what is not there; the text names the line.
    """
    faults = []
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.partition("#")[0].strip()
        if content:
            faults.append(_parse_line(content, f"line {number}"))
            if targets:
                _check_target(faults[-1], targets, f"line {number}")
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def to_text(faults: Iterable[Fault]) -> str:
    """The script."""
    return "".join(f"{fault}\n" for fault in faults)


def refuse_unknown(what: str, names: Iterable[str], known: Sequence[str]) -> None:
    """Refuse a name that there is not.

    Raises:
        UsageError: One of the names is not known.
    """
    for name in names:
        if name not in known:
            do = closest(name, known) or "See docs/chaos.md"
            raise UsageError(explain(what, got=name, expected=", ".join(known), do=do))


def _plain(number: float) -> str:
    """All of its digits and no exponent, so that it reads back as the same number."""
    return format(Decimal(repr(number)), "f").removesuffix(".0")


def _parse_line(content: str, where: str) -> Fault:
    found = _LINE.fullmatch(content)
    kind = found["kind"] if found else ""
    if found is None or kind not in KINDS or not _is_whole(found, kind):
        do = closest(kind, KINDS) if kind and kind not in KINDS else "See docs/chaos.md"
        example = '"at 20s pause worker 2 for 30s"'
        raise UsageError(
            explain("fault", got=content, expected=f"a line like {example}", do=do or "See docs/chaos.md", where=where)
        )
    return Fault(
        at_s=float(found["at"]),
        kind=kind,
        target=found["target"],
        lasts_s=float(found["lasts"] or 0),
        way=found["way"] or "both",
        rate_bytes_per_s=units.parse_rate(found["rate"]) if found["rate"] else 0.0,
        moment=found["moment"] or "",
        shift_s=float(found["shift"] or 0),
    )


def _is_whole(found: re.Match[str], kind: str) -> bool:
    """It has the parts that its kind needs, and no others."""
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
    """One of the moments of a step; that of a bucket has its number."""
    name, has_number, _ = text.partition(" ")
    return name in MOMENTS and bool(has_number) == (name == BUCKET)


def _check_target(fault: Fault, targets: Targets, where: str) -> None:
    workers = [str(rank) for rank in range(targets.num_workers)]
    there: Sequence[str] = {
        KILL: SERVICES if fault.hits_service else workers,
        PAUSE: SERVICES if fault.hits_service else workers,
        CUT: targets.nodes,
        SLOW: sorted(targets.link_rates),
        CLOCK: targets.nodes,
        FILL: [DISK],
    }[fault.kind]
    if fault.target not in there:
        what = "worker" if fault.kind in (KILL, PAUSE) else "link" if fault.kind == SLOW else "node"
        do = closest(fault.target, there) or "Name one of the cluster"
        expected = f"one of {', '.join(there[:8])}{', ...' if len(there) > 8 else ''}"
        raise UsageError(explain(f"{what} of a fault", got=fault.target, expected=expected, do=do, where=where))
