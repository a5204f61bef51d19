"""Failure registry: finds the rank at fault when a collective breaks, and ends the group.

A rank only sees that a neighbour closed its connection or is silent; the neighbour may itself be a victim. Every
failing rank therefore publishes a report in the store. After a grace time, the ranks without a report are the culprits.
Assumption: the store outlives the failure. Where it does not, the machine that holds it is the culprit.
"""

import json
import re
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, TypeVar

from torch.distributed import Store

from ringweave.comm.counters import CollectiveCounters
from ringweave.comm.group_info import GroupInfo
from ringweave.comm.native_backend import NativeBackends
from ringweave.comm.peer_data import BackgroundCall
from ringweave.comm.transport.interface import TransferFailedError
from ringweave.errors import CommunicationError, DisagreementError, PeerError
from ringweave.files import file_io

if TYPE_CHECKING:
    from ringweave.telemetry.events import EventLog

REPORT_GRACE_S = 1.0
"""Time for survivors of the same failure to report: they notice within milliseconds of each other."""

_POLL_S = 0.02
_MAX_REPORT_BYTES = 1 << 20
"""Limit on a report, which holds error texts."""
_STORE_TIMEOUT_S = 5.0
"""A store that is silent for so long is on a machine that is stopped or cut off; it counts as dead."""

_EXCHANGE = re.compile(r"(exchange #\d+) \((.*)\)")
"""Operation of an exchange of rows: its name, and the size of this rank's row."""
_LATE_FIX = "if it is only late, give the collective or its group a longer timeout"

_CallT = TypeVar("_CallT")


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveFailureReport:
    """Report of a rank whose collective failed."""

    operation: str
    """The collective in words."""
    suspect: int | None
    """Group rank that it could not reach, if that was the cause."""
    is_hung: bool = False
    """The suspect stayed silent instead of closing its connection."""
    failure: str = ""
    """Failure of this rank itself, if that was the cause."""
    disagreement: str = ""
    """Text of a disagreement, which no rank's death explains."""
    overrun: str = ""
    """Time limit that ran out, in words, if that was the cause."""


def parse_failure_report(value: bytes) -> CollectiveFailureReport | None:
    """Parse a report of the store; None if it is none, as if its rank had not reported."""
    try:
        report = CollectiveFailureReport(**file_io.parse_json(value, _MAX_REPORT_BYTES))
    except (ValueError, TypeError):
        return None
    texts = (report.operation, report.failure, report.disagreement, report.overrun)
    is_suspect = report.suspect is None or type(report.suspect) is int
    is_report = is_suspect and isinstance(report.is_hung, bool) and all(isinstance(text, str) for text in texts)
    return report if is_report else None


class FailureRegistry:
    """Failure reports of the members of one group, in its store."""

    def __init__(
        self,
        store: Store,
        group: GroupInfo,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store = store
        self._group = group
        self._clock = clock
        self._sleep = sleep
        self._is_stopped = False

    def stop_waiting(self) -> None:
        """Stop waiting for reports, from any thread: the group was aborted, and the cause does not matter."""
        self._is_stopped = True

    def publish(self, report: CollectiveFailureReport) -> None:
        """Publish a report; ignore a dead store, which no rank could read."""
        try:
            self._call_store(lambda: self._store.set(self._key(self._group.group_rank), json.dumps(asdict(report))))
        except (RuntimeError, TimeoutError):
            return

    def diagnose(self, failure: TransferFailedError, operation: str) -> CommunicationError:
        """Collect the other ranks' reports of the same failure, and return the error that names the culprit."""
        if self._group.group_size == 1:
            own = self._group.rank_text(0)
            return CommunicationError(f"{operation}: {own}, alone in its group, failed: {failure}. Fix what failed.")
        try:
            reports = self._call_store(self._collect_reports)
        except (RuntimeError, TimeoutError):
            suspects = [0 if failure.peer is None else failure.peer]
            return self._make_peer_error(
                suspects, failure, operation, "the store of the run is gone as well", hung=failure.hung
            )
        for group_rank, report in sorted(reports.items()):
            if report.disagreement and (odd := self._odd_rows_error(reports, operation)):
                return odd
            if report.disagreement and group_rank != self._group.group_rank:
                return DisagreementError(f"{report.disagreement} [found by {self._group.rank_text(group_rank)}]")
            if report.failure and group_rank != self._group.group_rank:
                culprit = self._group.rank_text(group_rank)
                return PeerError(
                    f"{operation}: {culprit} failed in {report.operation}: {report.failure}. Look into its log."
                )
        unreported = [r for r in range(self._group.group_size) if r not in reports]
        timed_out = [r for r, report in sorted(reports.items()) if report.is_hung]
        if timed_out and not unreported:
            return self._make_timeout_error(timed_out, reports, failure, operation)
        suspected = {report.suspect for report in reports.values()}
        suspects = [] if failure.peer is None else [failure.peer]
        culprits = [r for r in unreported if r in suspected] or unreported or suspects or self._others()
        culprit_report = reports.get(culprits[0])
        hung = (
            all(r.is_hung for r in reports.values() if r.suspect in culprits)
            if suspected & set(culprits)
            else failure.hung or bool(timed_out)
        )
        more = f"it failed in {culprit_report.operation}" if culprit_report else ""
        overrun = reports[timed_out[0]].overrun if timed_out else ""
        return self._make_peer_error(culprits, failure, operation, more, hung=hung, overrun=overrun)

    def find_odd_rows(self, operation: str) -> DisagreementError | None:
        """Return the error that names those whose rows in an exchange are of other sizes than those of the majority.

        A rank that finds a wrong row cannot know whose is wrong: its own may be, or that of its neighbour. The reports
        of the group tell. None: it is no exchange, no majority has reported the same size, or the store is dead.
        """
        if _EXCHANGE.fullmatch(operation) is None:
            return None
        try:
            return self._odd_rows_error(self._call_store(self._collect_reports), operation)
        except (RuntimeError, TimeoutError):
            return None

    def _odd_rows_error(
        self, reports: Mapping[int, CollectiveFailureReport], operation: str
    ) -> DisagreementError | None:
        """Return the error that `find_odd_rows` describes, from the reports of that exchange."""
        own, sizes = _EXCHANGE.fullmatch(operation), dict[int, str]()
        for group_rank, report in sorted(reports.items()):
            match = _EXCHANGE.fullmatch(report.operation)
            if own is not None and match is not None and match[1] == own[1]:
                sizes[group_rank] = match[2]
        usual, count = Counter(sizes.values()).most_common(1)[0] if sizes else ("", 0)
        odd = [group_rank for group_rank, size in sizes.items() if size != usual]
        if own is None or not odd or 2 * count <= self._group.group_size:
            return None
        error = DisagreementError(
            f"{own[1]}: {self._group.ranks_text(odd)} sent a row of {sizes[odd[0]]}, expected {usual}, as of {count} "
            f"ranks. Look into the log of that rank: it runs another program, or its memory is damaged."
        )
        error.culprits = tuple(odd)
        return error

    def _call_store(self, call: Callable[[], _CallT]) -> _CallT:
        """Call the store with a timeout."""
        return BackgroundCall(call, "ringweave failures").wait_result(_STORE_TIMEOUT_S, lambda: self._is_stopped)

    def _others(self) -> list[int]:
        return [r for r in range(self._group.group_size) if r != self._group.group_rank]

    def _collect_reports(self) -> dict[int, CollectiveFailureReport]:
        """Return the reports of all ranks, or those that came within the grace time."""
        reports: dict[int, CollectiveFailureReport] = {}
        unreadable: set[int] = set()
        deadline = self._clock() + REPORT_GRACE_S
        while True:
            for group_rank in range(self._group.group_size):
                key = self._key(group_rank)
                if group_rank not in reports and group_rank not in unreadable and self._store.check([key]):
                    report = parse_failure_report(self._store.get(key))
                    if report is None:
                        unreadable.add(group_rank)
                    else:
                        reports[group_rank] = report
            if len(reports) == self._group.group_size or self._is_stopped or self._clock() >= deadline:
                return reports
            self._sleep(_POLL_S)

    def _make_peer_error(
        self,
        culprits: list[int],
        failure: TransferFailedError,
        operation: str,
        detail: str,
        *,
        hung: bool,
        overrun: str = "",
    ) -> PeerError:
        verb = "does not answer" if hung else "is gone"
        plural = {"does not answer": "do not answer", "is gone": "are gone"}[verb] if len(culprits) > 1 else verb
        addition = f" ({detail})" if detail else ""
        limit = f" ({overrun})" if overrun else ""
        cause, fix = (f"time ran out{limit}: ", f"; {_LATE_FIX}") if hung else ("", "")
        own = self._group.rank_text(self._group.group_rank)
        return PeerError(
            f"{operation}: {cause}{self._group.ranks_text(culprits)} {plural}{addition}, expected every rank of the "
            f"group to take part. Look into the log of that rank first{fix}. [{own}: {failure}]"
        )

    def _make_timeout_error(
        self,
        timed_out: list[int],
        reports: dict[int, CollectiveFailureReport],
        failure: TransferFailedError,
        operation: str,
    ) -> PeerError:
        """Return the error of a group whose ranks are all alive: the time of some was too short."""
        own = self._group.group_rank
        report = reports[own if own in timed_out else timed_out[0]]
        addition = "" if report.operation == operation else f" in {report.operation}"
        return PeerError(
            f"{operation}: time ran out on {self._group.ranks_text(timed_out)}{addition} ({report.overrun}), expected "
            "every rank of the group to take part in time. All ranks are alive: look into the log of the one that "
            f"comes late, and {_LATE_FIX}. [{self._group.rank_text(own)}: {failure}]"
        )

    @staticmethod
    def _key(group_rank: int) -> str:
        return f"failure/{group_rank}"


class GroupEnd:
    """End of one group: its first failure is reported and explained once, and every later collective repeats it.

    The engine of scheduled collectives, which a group may not have yet, takes part through `attach`.
    """

    def __init__(
        self,
        group: GroupInfo,
        failures: FailureRegistry,
        native: NativeBackends,
        counters: CollectiveCounters,
        log: "EventLog | None" = None,
    ) -> None:
        self.error: CommunicationError | None = None
        """Reason of the end; None while the group lives, and while the reason is searched for."""
        self._group = group
        self._failures = failures
        self._native = native
        self._counters = counters
        self._log = log
        self._ending_lock = threading.Lock()
        self._attach_lock = threading.Lock()
        self._is_aborted = False
        self._aborts: list[weakref.WeakMethod[Callable[[], None]]] = []

    def attach(self, abort: Callable[[], None]) -> None:
        """Call this method when the group ends, or now if it has; any number of times, from any thread."""
        with self._attach_lock:
            self._aborts.append(weakref.WeakMethod(abort))
            is_late = self._is_aborted
        if is_late:
            abort()

    def fail(self, failure: TransferFailedError, operation: str, timeout_s: float | None = None) -> CommunicationError:
        """End the group: report the failure, abort every connection so that no rank waits, and name the culprit.

        Args:
            failure: The message that did not get through.
            operation: The collective in words.
            timeout_s: Limit on the collective; None where the failure's own text names it.
        """
        overrun = "" if not failure.hung else str(failure) if timeout_s is None else f"timeout of {timeout_s:g} s"
        report = CollectiveFailureReport(
            operation=operation, suspect=failure.peer, is_hung=failure.hung, overrun=overrun
        )
        return self._end_group(report, lambda: self._failures.diagnose(failure, operation), failure)

    def fail_alone(self, cause: Exception, operation: str) -> CommunicationError:
        """End the group after a failure of this rank itself, such as out of memory: the others must not wait for it."""
        own, text = self._group.rank_text(self._group.group_rank), f"{type(cause).__name__}: {cause}"
        error = CommunicationError(f"{operation}: {own} failed: {text}. Fix what failed there.")
        return self._end_group(
            CollectiveFailureReport(operation=operation, suspect=None, failure=text), lambda: error, cause
        )

    def disagree(self, error: DisagreementError, operation: str, *, may_be_own: bool = False) -> CommunicationError:
        """End the group because its ranks run different collectives; `may_be_own`: this rank's may be the wrong one."""
        report = CollectiveFailureReport(operation=operation, suspect=None, disagreement=str(error))

        def diagnose() -> DisagreementError:
            return (self._failures.find_odd_rows(operation) if may_be_own else None) or error

        return self._end_group(report, diagnose, error.__cause__)

    def abort(self) -> None:
        """Abort the connections at once; collectives in flight and later ones fail."""
        self.error = self.error or CommunicationError("process group: aborted. Make a new one.")
        self._failures.stop_waiting()
        self._abort_connections()

    def destroy(self) -> None:
        """Note that the group was destroyed, so that no rank searches for a culprit."""
        self.error = self.error or CommunicationError("process group: it was destroyed. Make a new one.")
        self._failures.stop_waiting()

    def close(self) -> None:
        """Release the native backend and write the counts, after the engine's end."""
        self._native.close()
        self.destroy()
        self._counters.close()

    def repeated_error(self, operation: str) -> CommunicationError:
        """Return the error of a collective that comes after the end."""
        assert self.error is not None
        error = type(self.error)(f"{operation}: this process group has failed before: {self.error}")
        error.__cause__ = self.error
        return error

    def _end_group(
        self, report: CollectiveFailureReport, diagnose: Callable[[], CommunicationError], cause: BaseException | None
    ) -> CommunicationError:
        """End the group for the first failure of this rank, and report only that one.

        Ending the group makes everything else in flight fail, with the wrong peers and reasons. Those failures wait
        here for the actual reason and repeat it.
        """
        with self._ending_lock:
            if self.error is not None:
                return self.repeated_error(report.operation)
            self._failures.publish(report)
            self._abort_connections()
            error = diagnose()
            error.__cause__ = cause
            return self._record_end(error)

    def _abort_connections(self) -> None:
        with self._attach_lock:
            self._is_aborted = True
            aborts = [method() for method in self._aborts]
        for abort in aborts:
            if abort is not None:
                abort()
        self._native.abort()

    def _record_end(self, error: CommunicationError) -> CommunicationError:
        self.error = self.error or error
        self._counters.close()
        if self._log is not None:
            own = self._group.own_info
            where = {"rank": own.global_rank, "node": own.location.node}
            self._log.write("communication_failed", **where, group=self._counters.group, text=str(error))
        return error
