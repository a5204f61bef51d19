"""What a session works for, and how what goes wrong in it is told."""

import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Protocol

from ringweave.comm.transport.seam import TransferFailedError
from ringweave.errors import MembershipError, RingweaveError, TrainingError, explain
from ringweave.membership.rules.follower import Out
from ringweave.membership.rules.records import Decree
from ringweave.training.elastic.joining.reading import Reading
from ringweave.training.elastic.rows import Commit, Row
from ringweave.wire.pacing import Pace


class Crew(Protocol):
    """What a session works for: the loader with its books, and the model with its state. Called with the lock held."""

    @property
    def state_place(self) -> str:
        """`HOST PORT` where this member's state can be read."""
        ...

    @property
    def is_between_steps(self) -> bool:
        """No batch was drawn whose gradients are still to be reduced."""
        ...

    @property
    def can_be_followed(self) -> bool:
        """A newcomer can do later what the others did with the same sums; else they wait until it has the state."""
        ...

    def row(self) -> Row:
        """What this member's gradients are of."""
        ...

    def note(self) -> dict[str, Any]:
        """What the others have to know when an epoch begins."""
        ...

    def drawn(self) -> tuple[int, str]:
        """How many batches it has drawn, and who computes what of those that do not count yet; see `Standing`."""
        ...

    def commit(self, commit: Commit) -> None:
        """A reduction counts."""
        ...

    def check(self, decree: Decree, notes: Sequence[dict[str, Any]]) -> None:
        """Refuse to join those who have prepared something else."""
        ...

    def begin(
        self, decree: Decree, notes: Sequence[dict[str, Any]], *, is_newcomer: bool, followers: Collection[str]
    ) -> None:
        """An epoch begins, in which these take part with nothing unless they were level already."""
        ...

    def capture(self) -> None:
        """Note what the state is, while the script stands still; called without the lock."""
        ...

    def offer(self, name: str, *, is_lasting: bool) -> None:
        """Let newcomers read what was captured, as it was then if it is to last; called without the lock."""
        ...

    def withdraw(self) -> None:
        """The state is about to change."""
        ...

    def pull(self, place: str, name: str, reading: Reading, pace: Pace | None = None) -> None:
        """Read the state of the member that listens there; called without the lock."""
        ...


def at_work_s(schedstat: Path = Path("/proc/self/schedstat")) -> float:
    """Seconds that this process has computed, or its first thread wanted to and another process had the processor.

    On a machine that is too busy a process that gets nothing done is at work all the same, and not stuck.
    """
    try:
        waited_ns = int(schedstat.read_text().split()[1])
    except (OSError, ValueError, IndexError):  # a kernel that does not count it
        waited_ns = 0
    return time.process_time() + waited_ns / 1e9


def suspects(error: BaseException, decree: Decree) -> list[str]:
    """Whom a failed transfer was with."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, TransferFailedError) and cause.peer is not None:
            return [decree.members[cause.peer]]
        cause = cause.__cause__
    return []


def error_of(out: Out) -> MembershipError:
    """What the script hears of it."""
    what = "job" if out.is_end else "this worker"
    state = "is over" if out.is_end else "is no member any more"
    do = "Start it again: it joins with the state of the others"
    if out.is_end:
        do = "See the coordinator's log"
    if out.heir:
        do = f"Start it again: worker {out.heir} saves the state, if the script gave ringweave.Checkpoints its loader"
    return MembershipError(f"{what} {state}: {out.reason}. {do}.")


def refusal_of(error: Exception) -> RingweaveError:
    """What the script hears of an error in the session's own thread."""
    if isinstance(error, RingweaveError):
        return error
    refusal = TrainingError(
        explain("elastic training", got=repr(error), expected="no failure", do="Report this as a bug of ringweave")
    )
    refusal.__cause__ = error
    return refusal
