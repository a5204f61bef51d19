"""What an elastic job leaves in the event log and the script's own log; the first member with the state writes for all.

If it dies when a reduction counts and it has not written so, the next one does. Since nobody knows how far it had come,
the same may be written twice.
"""

import logging
from collections.abc import Callable

from ringweave.environment import WorkerEnvironment
from ringweave.planning.balancing import Change
from ringweave.telemetry import EventLog
from ringweave.training.elastic.books import ElasticAccount
from ringweave.training.elastic.rows import Commit
from ringweave.training.recording import Recorder, write_account

_LOGGER = logging.getLogger("ringweave")


class ElasticRecorder:
    """Writes events as long as this member is the one that does."""

    def __init__(self, environment: WorkerEnvironment, is_teller: Callable[[], bool]) -> None:
        path = environment.events_path
        self._log = EventLog(path) if path else None
        self._recorder, self._is_teller = Recorder(environment, 0), is_teller
        self._left_to_others: list[Callable[[], None]] = []
        """What another one had to write since the last reduction that counts."""

    def committed(self) -> None:
        """Another reduction counts, for who writes too: it has written what there was before."""
        self._left_to_others.clear()

    def begun(self) -> None:
        """Another epoch begins, maybe with another one that writes."""
        left, self._left_to_others = self._left_to_others, []
        for write in left:
            self._tell(write)

    def prepared(self, *, mode: str, asked: str, reason: str, shares: tuple[int, ...]) -> None:
        """This member begins to train."""
        if self._is_teller():
            self._recorder.prepared(mode=mode, asked=asked, reason=reason, shares=shares)

    def shares_changed(self, batch_number: int, change: Change) -> None:
        """Other shares from a batch on."""
        self._tell(lambda: self._recorder.shares_changed(batch_number, change))

    def samples_lost(self, commit: Commit, num_lost: int) -> None:
        """A reduction counts, without the samples of members who were gone."""
        self._tell(lambda: self._write_lost(commit, num_lost))

    def became_level(self, commit: Commit, batch_number: int) -> None:
        """Members that joined while the others went on are level with them."""
        self._tell(lambda: self._write_level(commit, batch_number))

    def accounted(self, account: ElasticAccount) -> None:
        """An epoch is complete."""
        self._tell(lambda: self._write_account(account))

    def _tell(self, write: Callable[[], None]) -> None:
        if self._is_teller():
            write()
        else:
            self._left_to_others.append(write)

    def _write_lost(self, commit: Commit, num_lost: int) -> None:
        num_samples = commit.account.num_samples
        _LOGGER.info("reduction %d: mean over %d samples, %d lost", commit.number, num_samples, num_lost)
        if self._log:
            self._log.write(
                "samples_lost",
                rank=0,
                reduction=commit.number,
                members=list(commit.members),
                samples=num_samples,
                lost=num_lost,
            )

    def _write_level(self, commit: Commit, batch_number: int) -> None:
        names = ", ".join(commit.level)
        _LOGGER.info("reduction %d: worker %s is level, and has samples from then on", commit.number, names)
        if self._log:
            self._log.write(
                "members_level", rank=0, reduction=commit.number, members=list(commit.level), batch=batch_number
            )

    def _write_account(self, account: ElasticAccount) -> None:
        total, expected, lost = account.total, account.expected, account.lost
        verdict = "each exactly once" if account.is_exact else f"{lost.num_samples} lost with workers that were gone"
        text = "epoch %d: %d of %d samples, %s"
        _LOGGER.info(text, account.epoch, total.num_samples, expected.num_samples, verdict)
        if self._log:
            write_account(self._log, account, [])
