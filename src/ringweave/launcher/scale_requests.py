"""Requests for another number of workers of a running elastic run.

They go through its run directory:

```text
RUN_DIR/scale.json      {"request_id": "3f0c...", "workers": 4}; removed when the run has read it
RUN_DIR/events.jsonl    the answer: event `workers_scaled` with the same id
```
"""

import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from ringweave import telemetry
from ringweave.errors import LaunchError, UsageError, explain
from ringweave.files import file_io
from ringweave.launcher import run_dir as launcher_run_dir
from ringweave.launcher.run_dir import RunDir
from ringweave.membership.settings import MemberBounds

_ANSWER_POLL_S = 0.05
_RETRY_S = 1.0
"""Pause before a request that came at the wrong time is taken again."""
_MAX_REQUEST_BYTES = 4096
"""Upper limit of a request; a longer one is ignored."""
_ANSWER_TIMEOUT_S = 30.0
"""A run polls for requests fifty times a second; one that does not answer for this long is stopped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleAnswer:
    """Answer of a run to a request for another number of workers."""

    workers: int
    before: int
    """Previously requested number of workers."""
    starting: Sequence[int] = ()
    """Ranks whose processes were started."""
    leaving: Sequence[int] = ()
    """Ranks that were asked to leave after their train step."""
    refused: str = ""
    """Reason of a refusal, in words; empty if the request was granted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleLimits:
    """Limits of the number of workers of a run."""

    bounds: MemberBounds
    num_slots: int
    """Number of worker slots of the run."""
    reason: str
    """Reason why the run has no more slots, for people."""

    def refusal(self, workers: int) -> str:
        """Return the reason why the run cannot have this many workers; empty if it can."""
        max_workers = min(self.bounds.max_members, self.num_slots)
        if self.bounds.min_members <= workers <= max_workers:
            return ""
        reason = (
            f"--elastic {self.bounds}"
            if max_workers == self.bounds.max_members or workers < self.bounds.min_members
            else self.reason
        )
        expected = f"{self.bounds.min_members} to {max_workers} ({reason})"
        return explain("--workers", got=workers, expected=expected, do="Ask for a number within the limits of the run")


@dataclass(frozen=True, kw_only=True, slots=True)
class WantedWorkers:
    """Number of workers that an elastic job on several nodes was asked to have; its ranks are 0 to `workers` - 1."""

    workers: int
    number: int
    """Number of the request, from 1: each starts again the workers that were given up or had left."""


class WorkerRequests(Protocol):
    """Requests for another number of workers, as the supervision of elastic workers reads them."""

    workers: int
    """Number of slots that shall have workers, the first ones."""

    def take_request(self) -> int | None:
        """Return the number of a new request; None if there is none."""
        ...

    def refuse_request(self, workers: int, refusal: str) -> bool:
        """Return whether the taken request is refused, as `refusal` says or by its number."""
        ...

    def grant_request(self, workers: int, *, starting: Sequence[int], leaving: Sequence[int]) -> None:
        """Note that the taken request is done."""
        ...


class NodeRequests:
    """Requests for another number of workers of a job, as one of its nodes takes them; decided by the whole job."""

    def __init__(
        self, ranks: Sequence[int], wanted: WantedWorkers, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`ranks`: those of the node's slots, ascending; `wanted`: request with which the node starts."""
        self._ranks, self._wanted, self._clock = ranks, wanted, clock
        self._is_pending, self._retry_s = False, 0.0
        self.workers = self._num_slots()
        """Number of slots that shall have workers."""

    def request(self, wanted: WantedWorkers) -> None:
        """Note the newest request of the job."""
        if wanted.number > self._wanted.number:
            self._wanted, self._is_pending, self._retry_s = wanted, True, 0.0

    def take_request(self) -> int | None:
        """Return the number of slots that shall have workers; None without a new request."""
        return self._num_slots() if self._is_pending and self._clock() >= self._retry_s else None

    def refuse_request(self, workers: int, refusal: str) -> bool:
        """Put a request off that comes at the wrong time; the job has decided about its number."""
        if refusal:
            self._retry_s = self._clock() + _RETRY_S
        return bool(refusal)

    def grant_request(self, workers: int, *, starting: Sequence[int], leaving: Sequence[int]) -> None:
        """Note that the request is done."""
        self.workers, self._is_pending = workers, False

    def _num_slots(self) -> int:
        return sum(rank < self._wanted.workers for rank in self._ranks)


class ScaleRequests:
    """Requests of users for another number of workers, read from the run directory."""

    def __init__(
        self,
        run_dir: RunDir,
        limits: ScaleLimits,
        workers: int,
        notify_user: Callable[[str], object] = lambda text: None,
    ) -> None:
        """Remove a request that was left for an earlier run in this directory."""
        self._path, self._limits, self._notify_user = run_dir.scale_request, limits, notify_user
        self._events = telemetry.EventLog(run_dir.events)
        self._request_id = ""
        self.workers = workers
        """Requested number of workers."""
        self._path.unlink(missing_ok=True)

    def take_request(self) -> int | None:
        """Return the requested number of workers, once for each request; None if there is no valid request."""
        try:
            with self._path.open("rb") as file:
                text = file.read(_MAX_REQUEST_BYTES + 1)
            self._path.unlink()
        except OSError:
            return None
        request = _parse_request(text)
        if request is None:
            return None
        self._request_id, workers = request
        return workers

    def refuse_request(self, workers: int, refusal: str) -> bool:
        """Refuse the last request if it is out of limits or comes at the wrong time; return whether it was refused."""
        refused = self._limits.refusal(workers) or refusal
        if refused:
            self._write_answer(ScaleAnswer(workers=self.workers, before=self.workers, refused=refused))
        return bool(refused)

    def grant_request(self, workers: int, *, starting: Sequence[int], leaving: Sequence[int]) -> None:
        """Answer the last request: it is done."""
        answer = ScaleAnswer(workers=workers, before=self.workers, starting=starting, leaving=leaving)
        self.workers = workers
        self._write_answer(answer)
        self._notify_user(describe_answer(answer))

    def _write_answer(self, scale: ScaleAnswer) -> None:
        self._events.write("workers_scaled", request_id=self._request_id, **asdict(scale))


def describe_answer(scale: ScaleAnswer) -> str:
    """Return an answer as text: `4 workers requested, 2 before; started: ranks 2, 3`."""
    changes = [("started", scale.starting), ("leaving after the train step", scale.leaving)]
    parts = [f"{what}: rank {', '.join(map(str, ranks))}" for what, ranks in changes if ranks]
    return "; ".join([f"{scale.workers} workers requested, {scale.before} before", *parts])


def request_workers(
    run_dir: RunDir,
    workers: int,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> ScaleAnswer:
    """Ask a run for another number of workers, and return its answer.

    `run_dir`: directory of an elastic run that is in progress.

    Raises:
        UsageError: There is no such run, or it cannot have so many workers.
        LaunchError: The run does not answer.
    """
    _check_elastic(run_dir)
    request_id = secrets.token_hex(8)
    text = json.dumps({"request_id": request_id, "workers": workers}) + "\n"
    file_io.replace_text(run_dir.scale_request, text)
    until_s = clock() + _ANSWER_TIMEOUT_S
    while (answer := _find_answer(run_dir, request_id)) is None:
        _check_alive(run_dir)
        if clock() > until_s:
            run_dir.scale_request.unlink(missing_ok=True)
            do = "Check whether its ringweave run is stopped"
            got = f"no answer within {_ANSWER_TIMEOUT_S:g} s"
            raise LaunchError("run", got=got, expected="one", do=do, where=str(run_dir.root))
        sleep(_ANSWER_POLL_S)
    if answer.refused:
        raise UsageError(answer.refused)
    return answer


def _check_elastic(run_dir: RunDir) -> None:
    try:
        record = file_io.load_json(run_dir.run_json, launcher_run_dir.MAX_RUN_JSON_BYTES)
    except (OSError, ValueError) as error:
        do = "Give the directory that `ringweave run` printed"
        text = explain("run directory", got=str(run_dir.root), expected="one with a run.json", do=do)
        raise UsageError(text) from error
    _check_alive(run_dir)
    if isinstance(record, dict) and record.get("format") != launcher_run_dir.RUN_JSON_FORMAT:
        got, expected = record.get("format", "none"), str(launcher_run_dir.RUN_JSON_FORMAT)
        do = "Scale it with the ringweave that started it"
        raise UsageError("format of run.json", got=got, expected=expected, do=do, where=str(run_dir.run_json))
    if not isinstance(record, dict) or not record.get("elastic"):
        expected = "a run with --elastic MIN:MAX"
        raise UsageError(
            "run", got=str(run_dir.root), expected=expected, do="Start it again with ringweave run --elastic"
        )


def _check_alive(run_dir: RunDir) -> None:
    if not launcher_run_dir.is_run_dir_held(run_dir):
        do = "Start it again with the new number of workers"
        raise UsageError("run", got=f"{run_dir.root}, which is over", expected="a current run", do=do)


def _find_answer(run_dir: RunDir, request_id: str) -> ScaleAnswer | None:
    for event in telemetry.read_events(run_dir.events):
        if event["kind"] == "workers_scaled" and event["request_id"] == request_id:
            fields: dict[str, Any] = {key: event[key] for key in ScaleAnswer.__slots__}
            return ScaleAnswer(**fields)
    return None


def _parse_request(text: bytes) -> tuple[str, int] | None:
    try:
        request = file_io.parse_json(text, _MAX_REQUEST_BYTES)
    except ValueError:
        return None
    if not isinstance(request, dict):
        return None
    request_id, workers = request.get("request_id"), request.get("workers")
    is_valid = isinstance(request_id, str) and isinstance(workers, int) and not isinstance(workers, bool)
    return (request_id, workers) if is_valid and len(request_id) <= 64 else None
