"""Recorders: write the training events to the event log and to the script's log.

One rank or member writes for all, but for the times of its steps, which every rank writes.
"""

import atexit
import dataclasses
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ringweave.environment import WorkerEnvironment
from ringweave.planning.balancing import ShareChange
from ringweave.planning.balancing.shares import Shares
from ringweave.telemetry import EventLog, event_writer, process_usage
from ringweave.telemetry.process_usage import ProcessUsage
from ringweave.training.elastic.accounting import EpochAccount
from ringweave.training.elastic.retained_reductions import Commit
from ringweave.training.timing import MeasuredStep

if TYPE_CHECKING:
    from ringweave.training.outer_steps import OuterStep

_LOGGER = logging.getLogger("ringweave")
_SUMMED = (
    "wall_s",
    "input_s",
    "input_processor_s",
    "compute_s",
    "forward_s",
    "exchange_s",
    "update_s",
    "processor_s",
)


class Recorder:
    """Recorder of rank 0: writes events if there is a run directory; other ranks write nothing."""

    def __init__(self, environment: WorkerEnvironment, rank: int) -> None:
        self._is_first_rank = rank == 0
        self._write = event_writer(environment.events_path if self._is_first_rank else None)

    def training_prepared(self, *, mode: str, options: str, reason: str, shares: Shares) -> None:
        """Record that training begins."""
        self._log_info("mode %s, because %s; shares %s", mode, reason, shares)
        self.write(
            "training_prepared",
            mode=mode,
            requested_mode=options,
            reason=reason,
            batch_samples=sum(shares),
            shares=list(shares),
        )

    def rings_formed(self, *, rings: Sequence[Sequence[int]], most_versions: int) -> None:
        """Record that training continues in rings with a parameter server."""
        all_ranks = [list(ring) for ring in rings]
        self._log_info("rings %s; no push is older than %d versions", all_ranks, most_versions)
        self.write("rings_formed", rings=all_ranks, most_staleness_versions=most_versions)

    def sites_formed(self, sites: Sequence[Sequence[int]], inner_steps: int, inner_lr_factor: float) -> None:
        """Record that training begins in sites."""
        ranks, factor = [list(site) for site in sites], round(inner_lr_factor, 4)
        text = "sites %s; the first round has %d inner steps, with %g times the script's learning rates"
        self._log_info(text, ranks, inner_steps, factor)
        self.write("sites_formed", sites=ranks, inner_steps=inner_steps, inner_lr_factor=factor)

    def outer_step_done(self, done: "OuterStep") -> None:
        text = "outer step %d after %d train steps: exchange %.3g s, wait for other sites %.3g s, computing %s s"
        computing = [round(each, 3) for each in done.computing_s]
        self._log_info(text, done.number, done.train_steps, done.exchange_s, done.wait_s, computing)
        self.write("outer_step", **dataclasses.asdict(done))

    def mode_reconsidered(self, rings: Sequence[Sequence[int]], reason: str) -> None:
        """Record that `auto` regroups next."""
        all_ranks = [list(ring) for ring in rings]
        self._log_info("other rings %s, because %s", all_ranks, reason)
        self.write("mode_reconsidered", rings=all_ranks, reason=reason)

    def shares_changed(self, batch_number: int, change: ShareChange) -> None:
        """Record other shares from a batch on."""
        text = "shares %s from batch %d on; computing predicted to take %.3g s instead of %.3g s"
        self._log_info(text, change.shares, batch_number, change.after_s, change.before_s)
        self.write(
            "shares_changed",
            batch=batch_number,
            shares=list(change.shares),
            predicted_before_s=change.before_s,
            predicted_after_s=change.after_s,
        )

    def epoch_accounted(self, account: EpochAccount) -> None:
        """Record a complete epoch."""
        total, expected, lost = account.total, account.expected, account.lost
        verdict = "not the right ones"
        if account.is_exact:
            verdict = "each exactly once"
        elif account.is_accounted:
            verdict = f"{lost.num_samples} lost with workers that were gone"
        text = "epoch %d: %d of %d samples, %s"
        self._log_info(text, account.epoch, total.num_samples, expected.num_samples, verdict)
        self.write(
            "samples_accounted",
            epoch=account.epoch,
            samples=total.num_samples,
            expected=expected.num_samples,
            fingerprint=f"{total.fingerprint:016x}",
            expected_fingerprint=f"{expected.fingerprint:016x}",
            by_rank=[own.num_samples for own in account.by_rank],
            exact=account.is_exact,
        )

    def write(self, kind: str, **fields: object) -> None:
        """Write an event, if this rank writes events."""
        self._write(kind, rank=0, **fields)

    def _log_info(self, text: str, *values: object) -> None:
        if self._is_first_rank:
            _LOGGER.info(text, *values)


class ElasticRecorder:
    """Recorder of an elastic job: writes events while this member is the primary."""

    def __init__(self, environment: WorkerEnvironment, is_primary: Callable[[], bool]) -> None:
        self._recorder, self._is_primary = Recorder(environment, 0), is_primary
        self._deferred_writes: list[Callable[[], None]] = []
        """Events since the last committed reduction that another member had to write."""

    def reduction_committed(self) -> None:
        """Drop the deferred events: a primary that commits again has written them."""
        self._deferred_writes.clear()

    def generation_begun(self) -> None:
        """Write the deferred events if this member has become the primary."""
        deferred, self._deferred_writes = self._deferred_writes, []
        for write in deferred:
            self._write_if_primary(write)

    def training_prepared(self, *, mode: str, options: str, reason: str, shares: tuple[int, ...]) -> None:
        if self._is_primary():
            self._recorder.training_prepared(mode=mode, options=options, reason=reason, shares=shares)

    def shares_changed(self, batch_number: int, change: ShareChange) -> None:
        self._write_if_primary(lambda: self._recorder.shares_changed(batch_number, change))

    def residuals_lost(self, members: Sequence[str], wire: str) -> None:
        """Record that members are gone, and with them what encoding had left of their gradients."""
        reason = f"these workers are gone; gradients travel in {wire}"
        self._write_if_primary(lambda: self._recorder.write("residuals_lost", members=list(members), reason=reason))

    def wire_chosen(self, wire: str, reduction: int, members: Sequence[str], reason: str) -> None:
        """Record that the members have chosen another format of gradients."""
        self._write_if_primary(lambda: self._write_wire(wire, reduction, list(members), reason))

    def _write_wire(self, wire: str, reduction: int, members: list[str], reason: str) -> None:
        text = reason.removeprefix("; ")
        _LOGGER.info("gradients travel in %s from reduction %d on: %s", wire, reduction, text)
        self._recorder.write("wire_chosen", wire=wire, reduction=reduction, members=members, reason=text)

    def samples_lost(self, commit: Commit, num_lost: int) -> None:
        self._write_if_primary(lambda: self._write_lost(commit, num_lost))

    def samples_recomputed(self, commit: Commit, num_missing: int) -> None:
        self._write_if_primary(lambda: self._write_missing(commit, num_missing))

    def members_caught_up(self, commit: Commit, batch_number: int) -> None:
        self._write_if_primary(lambda: self._write_caught_up(commit, batch_number))

    def epoch_accounted(self, account: EpochAccount) -> None:
        self._write_if_primary(lambda: self._recorder.epoch_accounted(account))

    def _write_if_primary(self, write: Callable[[], None]) -> None:
        if self._is_primary():
            write()
        else:
            self._deferred_writes.append(write)

    def _write_partial(self, kind: str, commit: Commit, **num_absent: int) -> None:
        """Write the event of a reduction that lacks samples of lost members; `num_absent` is its field for them."""
        members, num_samples = list(commit.members), commit.account.num_samples
        self._recorder.write(kind, reduction=commit.number, members=members, samples=num_samples, **num_absent)

    def _write_lost(self, commit: Commit, num_lost: int) -> None:
        num_samples = commit.account.num_samples
        _LOGGER.info("reduction %d: mean over %d samples, %d lost", commit.number, num_samples, num_lost)
        self._write_partial("samples_lost", commit, lost=num_lost)

    def _write_missing(self, commit: Commit, num_missing: int) -> None:
        text = "reduction %d: %d samples of lost workers are computed by the others in the same train step"
        _LOGGER.info(text, commit.number, num_missing)
        self._write_partial("samples_recomputed", commit, missing=num_missing)

    def _write_caught_up(self, commit: Commit, batch_number: int) -> None:
        names = ", ".join(commit.caught_up)
        _LOGGER.info("reduction %d: worker %s has caught up, and has samples from then on", commit.number, names)
        members = list(commit.caught_up)
        self._recorder.write("members_caught_up", reduction=commit.number, members=members, batch=batch_number)


class StepRecorder:
    """Writes the measured steps of this rank, as sums over windows."""

    def __init__(
        self, log: EventLog, rank: int, node: str, usage: ProcessUsage, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin a window."""
        self._log, self._rank, self._node, self._usage, self._clock = log, rank, node, usage, clock
        self._steps: list[MeasuredStep] = []
        self._first_s = self._begun_s = clock()
        self._before = usage.read()

    @classmethod
    def of_this_process(cls, environment: WorkerEnvironment) -> Callable[[MeasuredStep], object]:
        """Return the function that records a step; without an event log, one that does nothing."""
        path = environment.events_path
        if path is None:
            return lambda step: None
        node = environment.node or socket.gethostname()
        recorder = cls(EventLog(path), int(os.environ.get("RANK", "0")), node, process_usage.of_this_process())
        atexit.register(recorder.flush)
        return recorder.record

    def record(self, step: MeasuredStep) -> None:
        """Add a step, and write the window if it is over."""
        self._steps.append(step)
        if self._clock() - self._begun_s >= process_usage.window_length_s(self._begun_s - self._first_s):
            self.flush()

    def flush(self) -> None:
        """Write the window, unless it has no step, and begin another one."""
        steps, self._steps = self._steps, []
        before, self._before, self._begun_s = self._before, self._usage.read(), self._clock()
        if not steps:
            return
        sums = {name: round(sum(getattr(each, name) for each in steps), 6) for name in _SUMMED}
        usage = {name: round(value - before[name], 6) for name, value in self._before.items()}
        self._log.write(
            "steps_measured",
            rank=self._rank,
            node=self._node,
            steps=len(steps),
            samples=sum(each.num_samples for each in steps),
            longest_s=round(max(each.wall_s for each in steps), 6),
            memory_bytes=self._usage.memory_bytes(),
            **sums,
            **usage,
        )
