"""What training leaves in the event log and the script's own log; rank 0 writes for all."""

import logging
from collections.abc import Sequence

from ringweave.environment import WorkerEnvironment
from ringweave.planning.balancing import Change
from ringweave.planning.balancing.shares import Shares
from ringweave.telemetry import EventLog
from ringweave.training.elastic.books import ElasticAccount
from ringweave.training.loading.loader import EpochAccount

_LOGGER = logging.getLogger("ringweave")


class Recorder:
    """Writes events of rank 0, if there is a run directory; the rest of the ranks is silent."""

    def __init__(self, environment: WorkerEnvironment, rank: int) -> None:
        self._is_speaker = rank == 0
        path = environment.events_path
        self._log = EventLog(path) if path and self._is_speaker else None

    def prepared(self, *, mode: str, asked: str, reason: str, shares: Shares) -> None:
        """Training begins."""
        self._say("mode %s, because %s; shares %s", mode, reason, shares)
        if self._log:
            self._log.write(
                "training_prepared",
                rank=0,
                mode=mode,
                asked=asked,
                reason=reason,
                batch_samples=sum(shares),
                shares=list(shares),
            )

    def rings_formed(self, *, rings: Sequence[Sequence[int]], most_versions: int) -> None:
        """Training goes on in rings with a parameter server."""
        self._say("rings %s; no push is older than %d versions", [list(ring) for ring in rings], most_versions)
        if self._log:
            self._log.write(
                "rings_formed", rank=0, rings=[list(ring) for ring in rings], most_staleness_versions=most_versions
            )

    def reconsidered(self, rings: Sequence[Sequence[int]], reason: str) -> None:
        """`auto` has other rings formed next."""
        self._say("other rings %s, because %s", [list(ring) for ring in rings], reason)
        if self._log:
            self._log.write("mode_reconsidered", rank=0, rings=[list(ring) for ring in rings], reason=reason)

    def shares_changed(self, batch_number: int, change: Change) -> None:
        """Other shares from a batch on."""
        text = "shares %s from batch %d on; computing predicted to take %.3g s instead of %.3g s"
        self._say(text, change.shares, batch_number, change.after_s, change.before_s)
        if self._log:
            self._log.write(
                "shares_changed",
                rank=0,
                batch=batch_number,
                shares=list(change.shares),
                predicted_before_s=change.before_s,
                predicted_after_s=change.after_s,
            )

    def accounted(self, account: EpochAccount) -> None:
        """An epoch is complete."""
        total, expected = account.total, account.expected
        text = "epoch %d: %d of %d samples, %s"
        verdict = "each exactly once" if account.is_exact else "not the right ones"
        self._say(text, account.epoch, total.num_samples, expected.num_samples, verdict)
        if self._log:
            write_account(self._log, account, [own.num_samples for own in account.by_rank])

    def _say(self, text: str, *values: object) -> None:
        if self._is_speaker:
            _LOGGER.info(text, *values)


def write_account(log: EventLog, account: EpochAccount | ElasticAccount, by_rank: Sequence[int]) -> None:
    """The event of an epoch that is complete; `by_rank` are the samples of each rank, where ranks stay the same."""
    total, expected = account.total, account.expected
    log.write(
        "samples_accounted",
        rank=0,
        epoch=account.epoch,
        samples=total.num_samples,
        expected=expected.num_samples,
        fingerprint=f"{total.fingerprint:016x}",
        expected_fingerprint=f"{expected.fingerprint:016x}",
        by_rank=list(by_rank),
        exact=account.is_exact,
    )
