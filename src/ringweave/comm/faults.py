"""Finding out who is at fault when a collective breaks.

A rank only sees that a neighbour closed its connection or stays silent, and that neighbour may itself be a victim. So
every rank that fails reports it in the store; after a moment, those that did not report are the ones to blame.
Assumption: the store outlives the fault. Where it does not, its host is to blame.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TypeVar

from torch.distributed import Store

from ringweave.comm.asking import in_time
from ringweave.comm.members import Members
from ringweave.comm.transport.seam import TransferFailedError
from ringweave.errors import CommunicationError, DisagreementError, PeerError
from ringweave.files import json_text

GRACE_S = 1.0
"""How long survivors of the same fault get to report: they notice within milliseconds of each other."""

_POLL_S = 0.02
_MAX_BYTES = 1 << 20
"""Of a report: texts of errors."""
_SILENT_S = 5.0
"""A store that has not answered for so long has a host that is stopped or cut off: gone, as far as this goes."""

_Found = TypeVar("_Found")


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a rank says when its collective fails."""

    doing: str
    """The collective in words."""
    suspect: int | None
    """Group rank that it could not reach, if that was it."""
    hung: bool = False
    """The suspect stayed silent rather than closing its connection."""
    failure: str = ""
    """What failed on this rank itself, if that was it."""
    disagreement: str = ""
    """The text of a disagreement, which nobody's death explains."""


def parse(value: bytes) -> Report | None:
    """The report in a value of the store; None if it is none, for then its rank has said nothing."""
    try:
        report = Report(**json_text.loads(value, _MAX_BYTES))
    except (ValueError, TypeError):
        return None
    texts = (report.doing, report.failure, report.disagreement)
    is_suspect = report.suspect is None or type(report.suspect) is int
    is_report = is_suspect and isinstance(report.hung, bool) and all(isinstance(text, str) for text in texts)
    return report if is_report else None


class FaultBoard:
    """Reports of the members of one group, in its store."""

    def __init__(
        self,
        store: Store,
        members: Members,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store = store
        self._members = members
        self._clock = clock
        self._sleep = sleep
        self._is_given_up = False

    def give_up(self) -> None:
        """Wait for nobody's report any more, from any thread: the group was aborted, and it does not matter why."""
        self._is_given_up = True

    def report(self, report: Report) -> None:
        """Tell the others; says nothing if the store is gone, for then nobody can hear."""
        try:
            self._in_time(lambda: self._store.set(self._key(self._members.group_rank), json.dumps(asdict(report))))
        except (RuntimeError, TimeoutError):
            return

    def explain(self, failure: TransferFailedError, doing: str) -> CommunicationError:
        """Wait for what the others report of the same fault, and name who is to blame."""
        try:
            reports = self._in_time(self._gather)
        except (RuntimeError, TimeoutError):
            suspects = [0 if failure.peer is None else failure.peer]
            return self._blame(suspects, failure, doing, "the store of the run is gone as well", hung=failure.hung)
        for group_rank, report in sorted(reports.items()):
            if report.disagreement and group_rank != self._members.group_rank:
                return DisagreementError(f"{report.disagreement} [found by {self._members.name(group_rank)}]")
            if report.failure and group_rank != self._members.group_rank:
                culprit = self._members.name(group_rank)
                return PeerError(f"{doing}: {culprit} failed in {report.doing}: {report.failure}. Look into its log.")
        silent = [r for r in range(self._members.group_size) if r not in reports]
        accused = {report.suspect for report in reports.values()}
        suspects = [] if failure.peer is None else [failure.peer]
        blamed = [r for r in silent if r in accused] or silent or suspects or self._others()
        theirs = reports.get(blamed[0])
        hung = all(r.hung for r in reports.values() if r.suspect in blamed) if accused & set(blamed) else failure.hung
        more = f"it failed in {theirs.doing}" if theirs else ""
        return self._blame(blamed, failure, doing, more, hung=hung)

    def _in_time(self, call: Callable[[], _Found]) -> _Found:
        """What comes of a call that asks the store.

        Raises:
            RuntimeError: The store is gone.
            TimeoutError: It is silent, or nobody waits for it any more.
        """
        return in_time(call, _SILENT_S, lambda: self._is_given_up, "ringweave faults")

    def _others(self) -> list[int]:
        return [r for r in range(self._members.group_size) if r != self._members.group_rank]

    def _gather(self) -> dict[int, Report]:
        """Everybody's report, or those that came within the grace time."""
        reports: dict[int, Report] = {}
        unreadable: set[int] = set()
        deadline = self._clock() + GRACE_S
        while True:
            for group_rank in range(self._members.group_size):
                key = self._key(group_rank)
                if group_rank not in reports and group_rank not in unreadable and self._store.check([key]):
                    report = parse(self._store.get(key))
                    if report is None:
                        unreadable.add(group_rank)
                    else:
                        reports[group_rank] = report
            if len(reports) == self._members.group_size or self._is_given_up or self._clock() >= deadline:
                return reports
            self._sleep(_POLL_S)

    def _blame(
        self, blamed: list[int], failure: TransferFailedError, doing: str, more: str, *, hung: bool
    ) -> PeerError:
        verb = "does not answer" if hung else "is gone"
        plural = {"does not answer": "do not answer", "is gone": "are gone"}[verb] if len(blamed) > 1 else verb
        addition = f" ({more})" if more else ""
        own = self._members.name(self._members.group_rank)
        return PeerError(
            f"{doing}: {self._members.names(blamed)} {plural}{addition}, expected every rank of the group to take "
            f"part. Look into the log of that rank first. [{own}: {failure}]"
        )

    @staticmethod
    def _key(group_rank: int) -> str:
        return f"fault/{group_rank}"
