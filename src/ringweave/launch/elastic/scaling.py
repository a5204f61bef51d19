"""How many workers an elastic run shall have: asked in its run directory by a command, answered by who leads the run.

```text
RUN_DIR/scale.json      {"asked": "3f0c...", "workers": 4}; gone once it is taken
RUN_DIR/events.jsonl    the answer: event `workers_asked` with the same word
```
"""

import json
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ringweave import telemetry
from ringweave.errors import LaunchError, UsageError, explain
from ringweave.files import json_text
from ringweave.launch import records, run_dirs
from ringweave.launch.run_dirs import RunDir
from ringweave.membership.rules.settings import Bounds

_POLL_S = 0.05
_MOST_BYTES = 4096
"""Of a request; what is longer is none."""
_ANSWERED_S = 30.0
"""Who leads a run looks fifty times a second: one that does not answer for so long is stopped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """What a run made of a request."""

    workers: int
    """How many there shall be."""
    before: int
    """How many there were to be until then."""
    starting: Sequence[int] = ()
    """Ranks whose processes were started."""
    leaving: Sequence[int] = ()
    """Ranks that were asked to leave after their train step."""
    refused: str = ""
    """Why nothing was done, in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What may be asked of a run."""

    bounds: Bounds
    num_places: int
    """Places for workers that it has."""
    why: str
    """Why it has no more, for people."""

    def refusal(self, workers: int) -> str:
        """Why it cannot have so many; empty where it can."""
        most = min(self.bounds.most, self.num_places)
        if self.bounds.least <= workers <= most:
            return ""
        why = f"--elastic {self.bounds}" if most == self.bounds.most or workers < self.bounds.least else self.why
        expected = f"{self.bounds.least} to {most} ({why})"
        return explain("--workers", got=workers, expected=expected, do="Ask for as many as the run was given room for")


class Desk:
    """Where a run finds what it is asked for."""

    def __init__(
        self, run_dir: RunDir, limits: Limits, workers: int, say: Callable[[str], object] = lambda text: None
    ) -> None:
        """What was asked of an earlier run in this directory is forgotten.

        Args:
            run_dir: Of the run.
            limits: What it can do.
            workers: How many it begins with.
            say: Told of each answer, in words.
        """
        self._path, self._limits, self._say = run_dir.scale, limits, say
        self._log = telemetry.EventLog(run_dir.events)
        self._asked = ""
        self.workers = workers
        """How many it shall have."""
        self._path.unlink(missing_ok=True)

    def take(self) -> int | None:
        """Workers that are asked for now, once for each request; None where there is none, or none that can be read."""
        try:
            with self._path.open("rb") as file:
                text = file.read(_MOST_BYTES + 1)
            self._path.unlink()
        except OSError:
            return None
        request = _parse(text)
        if request is None:
            return None
        self._asked, workers = request
        return workers

    def refuse(self, workers: int, why_not_now: str) -> bool:
        """Answer what was taken last with a refusal, where it is too much, or not the time for it; whether it was."""
        refused = self._limits.refusal(workers) or why_not_now
        if refused:
            self._write(Scale(workers=self.workers, before=self.workers, refused=refused))
        return bool(refused)

    def grant(self, workers: int, *, starting: Sequence[int], leaving: Sequence[int]) -> None:
        """Answer what was taken last: it is done."""
        before, self.workers = self.workers, workers
        self._write(Scale(workers=workers, before=before, starting=starting, leaving=leaving))
        self._say(describe(Scale(workers=workers, before=before, starting=starting, leaving=leaving)))

    def _write(self, scale: Scale) -> None:
        self._log.write(
            "workers_asked",
            asked=self._asked,
            workers=scale.workers,
            before=scale.before,
            starting=list(scale.starting),
            leaving=list(scale.leaving),
            refused=scale.refused,
        )


def describe(scale: Scale) -> str:
    """`4 workers are asked for, 2 before; started: ranks 2, 3`."""
    doing = [("started", scale.starting), ("asked to leave after its train step", scale.leaving)]
    parts = [f"{what}: rank {', '.join(map(str, ranks))}" for what, ranks in doing if ranks]
    return "; ".join([f"{scale.workers} workers are asked for, {scale.before} before", *parts])


def ask(
    run_dir: RunDir,
    workers: int,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Scale:
    """Have a run go on with so many workers.

    Args:
        run_dir: Of an elastic run that is under way.
        workers: How many it shall have.
        clock: Seconds that never go back.
        sleep: Waits between two looks.

    Raises:
        UsageError: There is no such run, or it cannot have so many workers.
        LaunchError: It does not answer.
    """
    _check(run_dir)
    asked = secrets.token_hex(8)
    beside = run_dir.scale.with_name(f".{run_dir.scale.name}.{os.getpid()}")
    beside.write_text(json.dumps({"asked": asked, "workers": workers}) + "\n", encoding="utf-8")
    beside.replace(run_dir.scale)
    until_s = clock() + _ANSWERED_S
    while (answer := _answer(run_dir, asked)) is None:
        _check_alive(run_dir)
        if clock() > until_s:
            run_dir.scale.unlink(missing_ok=True)
            do = "See whether its ringweave run is stopped"
            got = f"no answer within {_ANSWERED_S:g} s"
            raise LaunchError(explain("run", got=got, expected="one", do=do, where=str(run_dir.root)))
        sleep(_POLL_S)
    if answer.refused:
        raise UsageError(answer.refused)
    return answer


def _check(run_dir: RunDir) -> None:
    try:
        record = json_text.load(run_dir.record, records.MAX_BYTES)
    except (OSError, ValueError) as error:
        do = "Give the directory that `ringweave run` has named"
        text = explain("run directory", got=str(run_dir.root), expected="one with a run.json", do=do)
        raise UsageError(text) from error
    _check_alive(run_dir)
    if not isinstance(record, dict) or not record.get("elastic"):
        expected = "one that was started with --elastic MIN:MAX"
        raise UsageError(explain("run", got=str(run_dir.root), expected=expected, do="Start it again with --elastic"))


def _check_alive(run_dir: RunDir) -> None:
    if not run_dirs.is_taken(run_dir):
        do = "Start it again with as many workers as it shall have"
        raise UsageError(explain("run", got=f"{run_dir.root}, which is over", expected="one that is under way", do=do))


def _answer(run_dir: RunDir, asked: str) -> Scale | None:
    for event in telemetry.read(run_dir.events):
        if event["kind"] == "workers_asked" and event["asked"] == asked:
            fields: dict[str, Any] = {key: event[key] for key in Scale.__slots__}
            return Scale(**fields)
    return None


def _parse(text: bytes) -> tuple[str, int] | None:
    try:
        request = json_text.loads(text, _MOST_BYTES)
    except ValueError:
        return None
    if not isinstance(request, dict):
        return None
    asked, workers = request.get("asked"), request.get("workers")
    is_one = isinstance(asked, str) and isinstance(workers, int) and not isinstance(workers, bool)
    return (asked, workers) if is_one and len(asked) <= 64 else None
