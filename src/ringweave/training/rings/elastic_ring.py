"""Elastic ring as the loader and the worker see it: members draw shards and push together, through all generations."""

import atexit
import json
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ringweave import rpc
from ringweave.comm import peer_data
from ringweave.errors import RpcError, TrainingError
from ringweave.membership.membership_records import Membership, parse_member_name
from ringweave.param_server.client import RingClient
from ringweave.param_server.data_shards import Spans
from ringweave.param_server.messages import ResumeDecision
from ringweave.planning.balancing import SampleAccount
from ringweave.planning.balancing.epochs import Indices
from ringweave.training.data.order import Portion
from ringweave.training.data.sources import EpochPass
from ringweave.training.elastic import member_details
from ringweave.training.elastic.accounting import EpochAccount, samples_of_member
from ringweave.training.elastic.elastic_membership import SessionMembership
from ringweave.training.elastic.retained_reductions import FetchedJson
from ringweave.training.elastic.session import ElasticSession
from ringweave.training.elastic.trainer import TrainerState
from ringweave.training.elastic.training_state import IncompleteStep
from ringweave.training.rings import ring_progress
from ringweave.training.rings.ring_progress import (
    OfferedCheckpoint,
    ResumeStart,
    RingCursor,
    RingProgress,
    SlotAssignment,
    spans_of_json,
)
from ringweave.training.rings.ring_worker import RingWorker
from ringweave.training.timing import StepTimer

_MAX_SILENT_PAUSE_S = 1.0
"""Pause of the members after which the other rings no longer wait for this ring."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AssignedMember:
    """Ring of a member, and its connectors to the servers of the job."""

    assignment: SlotAssignment
    num_rings: int
    connectors: Sequence[Callable[[], rpc.RpcClient]]


class SessionExchange:
    """Exchanges of a member with its elastic ring: all members apply what the first one fetches, or none does."""

    starts_pushes_at_once = False

    def __init__(
        self,
        assigned: AssignedMember,
        member: str,
        session: Callable[[], ElasticSession],
        trainer: Callable[[], TrainerState],
    ) -> None:
        """Create it without a connection.

        `session`: returns its session in the ring's membership, once there is one.
        """
        self.assigned, self._member, self._session, self._trainer = assigned, member, session, trainer
        self._lock = threading.Lock()
        self._client: RingClient | None = None
        self._paused_since_s: float | None = None

    def make_progress(self, trainer: TrainerState) -> RingProgress:
        """Return the progress of this member's ring, before it has joined."""
        return RingProgress(RingCursor(ring=self.assigned.assignment.ring), trainer, self.on_pause)

    def _progress(self) -> RingProgress:
        return self._trainer().ring_progress

    @property
    def cursor(self) -> RingCursor:
        return self._progress().cursor

    @property
    def samples(self) -> ring_progress.UnpushedSamples:
        return self._progress().samples

    @property
    def is_representative(self) -> bool:
        return self._session().membership.members[0] == self._member

    @property
    def is_connected(self) -> bool:
        return self._client is not None and self.is_representative

    @property
    def misses_samples(self) -> bool:
        return self._progress().misses_samples

    def last_words(self) -> str:
        return self._progress().last_words()

    def change_atomically(self, change: Callable[[], None]) -> None:
        self._session().change_atomically(change)

    def broadcast_from_first(self, fetch: Callable[[], FetchedJson], tensors: Sequence[Tensor] = ()) -> FetchedJson:
        progress = self._progress()
        if not self.is_representative:  # a member with a lower number has replaced it as representative
            self.close_connection()
        progress.is_broadcasting = True
        try:
            return self._session().broadcast_from_first(fetch, tensors)
        finally:
            progress.is_broadcasting = False

    def client(self) -> RingClient:
        with self._lock:
            if self._client is None:
                self._client = RingClient(
                    self.assigned.connectors,
                    self.cursor.ring,
                    generation_id=lambda: self._session().membership.generation_id,
                    least_incarnations=lambda: self._session().membership.least_incarnations,
                    is_monitored=True,
                )
            return self._client

    def connect_server(self) -> RingClient:
        """Return a connection for this member's ring, beside the representative's."""
        return RingClient(self.assigned.connectors, self.cursor.ring)

    def close_connection(self) -> None:
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def on_pause(self, membership: Membership) -> None:
        """Tell the server that this ring pauses to form a new generation, so that no ring waits for it."""
        if membership.members[0] == self._member:
            threading.Thread(target=self._send_pause, name="ringweave pause", daemon=True).start()

    def check_pause(self, now_s: float, *, is_paused: bool) -> None:
        """Check regularly whether the ring is paused for long; then let no other ring wait for it."""
        if not is_paused:
            self._paused_since_s = None
        elif self._paused_since_s is None:
            self._paused_since_s = now_s
        elif now_s - self._paused_since_s > _MAX_SILENT_PAUSE_S:
            self._paused_since_s = math.inf  # once
            self.on_pause(self._session().membership)

    def _send_pause(self) -> None:
        try:
            self.client().pause_ring()
        except RpcError:
            return  # other rings then wait a little longer


class ElasticRing(SessionMembership):
    """Members of a ring that may lose some of them."""

    def __init__(
        self,
        session: ElasticSession,
        trainer: TrainerState,
        worker: RingWorker,
        exchange: SessionExchange,
        timer: StepTimer,
        incomplete_step: IncompleteStep,
        record_account: Callable[[EpochAccount], object],
    ) -> None:
        super().__init__(session, trainer)
        self.progress, self.worker, self._exchange = trainer.ring_progress, worker, exchange
        self._incomplete_step = incomplete_step
        self._timer, self._record_account = timer, record_account
        self._aborted_epoch: int | None = None
        """Epoch of a pass that was broken off, until the rings have passed the barrier."""
        self._last_aborted_epoch: int | None = None
        """Last epoch that ended in this way."""

    @property
    def has_joined_late(self) -> bool:  # pyrefly: ignore - a constant of the base
        """This member has joined others in its ring, or the ring was training before."""
        return self._trainer.progress.has_joined_late or self.progress.cursor.num_shards > 0

    @property
    def may_save(self) -> bool:
        return self._exchange.is_representative

    def has_training_begun(self) -> bool:
        """Return whether a ring has pushed: the same for all members of this ring, whenever they ask."""
        status = self._exchange.broadcast_from_first(lambda: {"version": self._exchange.client().status().version})
        return bool(status["version"])

    def connect_server(self) -> RingClient:
        return self._exchange.connect_server()

    @property
    def start(self) -> ResumeStart | None:
        return self.progress.cursor.start

    def start_training(self) -> None:
        """Take the state of the server, unless this member has that of the others; leave at the end of the process."""
        atexit.register(self.leave_server)
        if not self._trainer.progress.has_joined_late:
            self.refresh_parameters()
        elif self.worker.changes is not None and not self.worker.num_fragments:  # else the base came along
            self.worker.changes.reset_base()

    @torch.no_grad()
    def refresh_parameters(self) -> None:
        """Take the newest parameters and the server's cursor when the ring starts or resumes."""
        received = self.worker.received.pieces
        self._resume_ring(
            self._exchange.broadcast_from_first(lambda: self._start_ring(self._exchange.client()), received)
        )

    @torch.no_grad()
    def resume(self, offered: OfferedCheckpoint | None, epoch_samples: int) -> tuple[ResumeDecision, int | None]:
        def agree() -> FetchedJson:
            client = self._exchange.client()
            own = (offered.train_step, offered.checksum) if offered else (0, "")
            ruled = client.offer_checkpoint(*own)
            if ruled.verdict == "give" and offered is not None:
                start = ResumeStart.of_state(offered.state, epoch_samples)
                client.restore_snapshot(offered.content(), ruled, start.to_message(start.epoch))
                ruled = client.offer_checkpoint(*own)
            begun = self._start_ring(client) if ruled.verdict == "resumed" else {}
            return {"decision": ruled.model_dump(), **begun}

        outcome = self._exchange.broadcast_from_first(agree, self.worker.received.pieces)
        if "cursor" in outcome:
            self._resume_ring(outcome)
        return ResumeDecision(**outcome["decision"]), self._trainer.progress.epoch

    def _start_ring(self, client: RingClient) -> FetchedJson:
        """Pull the newest parameters; return the ring's cursor, epoch and last report."""
        reply = client.request_assignment(parse_member_name(self._trainer.member)[0], is_starting=True)
        if self.worker.changes is not None:  # pushes in progress of earlier members are void
            client.leave_ring(is_for_good=False)
        version = self.worker.pull(reply.num_pushed, reply.next_fragment)
        start = None
        if reply.resumed_seed is not None:
            done = spans_of_json(reply.resumed)
            start = ResumeStart(epoch=reply.resumed_epoch, done=done, seed=reply.resumed_seed)
        cursor = RingCursor(
            ring=self.progress.cursor.ring,
            num_pushed=reply.num_pushed,
            base_version=version,
            num_shards=reply.num_shards,
            num_barriers=reply.num_barriers,
            next_version=version,
            num_since_level=reply.next_fragment,
            start=start,
        )
        return {"cursor": cursor.to_json(), "epoch": reply.epoch, "ring_progress": reply.ring_progress}

    def _resume_ring(self, start: FetchedJson) -> None:
        text = start["ring_progress"]
        report = _parse_json_object("progress of a ring", text, "its account") if text else {}
        self.session.change_atomically(lambda: self.progress.resume_ring(start["cursor"], start["epoch"], report))
        self.worker.apply_parameters(self.progress.cursor.base_version)

    def leave_server(self) -> None:
        """Tell the server at the process's end that the ring has finished, unless this member failed or stopped."""
        if not (self.session.has_stopped or member_details.script_has_failed()):
            self.worker.leave_server()

    def finish_aborted_pass(self, epoch_samples: int) -> None:
        if self._aborted_epoch is None:
            return
        number, self._aborted_epoch = self._aborted_epoch, None
        self._last_aborted_epoch = number
        self.session.change_atomically(self.progress.discard_open_batches)
        self._pass_barrier(number, {}, use_up=epoch_samples)
        self.session.change_atomically(lambda: self.progress.open_epoch(number + 1))

    def begin_epoch(self, number: int) -> tuple[int, Spans] | None:
        """Begin a pass of an epoch.

        Raises:
            TrainingError: This script has broken off its pass of that epoch.
        """
        if number < self._trainer.progress.epoch:
            if number == self._last_aborted_epoch:
                raise _epoch_over_error(number)
            return None
        if number > self._trainer.progress.epoch:
            self.session.change_atomically(lambda: self.progress.open_epoch(number))
        return number, self.progress.cursor.done_spans_of(number)

    def begin_batch(self) -> None:
        """Do nothing: the boundary is passed when the shard is taken."""

    def pass_shard_boundary(self) -> tuple[Portion, float] | None:
        self._trainer.measure_step()
        self.session.pass_step_boundary(lambda: None)
        if not self.misses_samples:
            self.worker.send_pending()
            return None
        self._incomplete_step.restore()
        self.session.change_atomically(self._trainer.record_missing)
        self._timer.begin_step()
        return self._trainer.accounting.own_part(self._trainer.member), self.progress.batch_part

    def take_shard(self, pass_number: int, wanted: int, total: int, min_samples: int) -> tuple[int, int]:
        cursor = self.progress.cursor

        def ask() -> FetchedJson:
            number, client = cursor.num_shards + 1, self._exchange.client()
            first, count = client.take_shard(pass_number, wanted, total, min_samples=min_samples, number=number)
            return {"first": first, "count": count}

        shard = self._exchange.broadcast_from_first(ask)
        cursor.num_shards += 1
        return shard["first"], shard["count"]

    def record_shard(self, batch: Indices, batch_part: float, first: int) -> Portion:
        self._timer.begin_step()
        self.session.change_atomically(lambda: self.progress.record_batch(batch, batch_part, first))
        own = samples_of_member(batch, self.progress.last_batch_shares, self._trainer.member)
        return Portion(indices=own, batch=batch)

    def record_batch(self, first: int, own: Portion, batch_part: float) -> None:
        del first, own, batch_part
        self.session.record_progress()

    def abort_pass(self, begun: EpochPass, epoch_samples: int) -> None:
        del epoch_samples
        self._aborted_epoch = begun.epoch
        self.worker.discard_unpushed()

    def end_epoch(self, epoch: int, expected: SampleAccount) -> EpochAccount | None:
        by_ring = self._pass_barrier(epoch, self.progress.report())
        self.session.change_atomically(lambda: self.progress.open_epoch(epoch + 1))
        if not by_ring or not all(by_ring.values()):
            return None  # the others finished it long before, or one of them has broken off its pass
        account = ring_progress.sum_accounts(epoch, expected, list(by_ring.values()), self._exchange.assigned.num_rings)
        if ring_progress.reporting_ring(by_ring) == self.progress.cursor.ring:
            self._record_account(account)
        account.check()
        return account

    @torch.no_grad()
    def _pass_barrier(self, epoch: int, report: FetchedJson, *, use_up: int | None = None) -> dict[int, FetchedJson]:
        """Pass a barrier of all rings: return each ring's report, and take the same parameters.

        `use_up`: samples of an epoch that was broken off: they are not handed out any more.
        """
        if self.worker.changes is not None:
            self.worker.changes.push_rest()
        cursor, text = self.progress.cursor, json.dumps(report)

        def gather() -> FetchedJson:
            client = self._exchange.client()
            if use_up is not None:
                client.take_shard(epoch, use_up, use_up, number=cursor.num_shards + 1, ended_epoch=epoch)
            client.leave_ring(is_for_good=False)
            met = client.wait_barrier(cursor.num_barriers + 1, epoch, text)
            version = self.worker.pull(cursor.num_pushed)
            # No ring pushes before all have the same parameters.
            client.wait_barrier(cursor.num_barriers + 2, epoch, "")
            return {"version": version, "reports": {str(ring): each for ring, each in met.items()}}

        result = self._exchange.broadcast_from_first(gather, self.worker.received.pieces)
        self.worker.apply_parameters(result["version"])
        cursor.num_barriers += 2
        cursor.num_shards += use_up is not None
        return {
            int(ring): _parse_json_object(f"report of ring {ring}", each, "its account")
            for ring, each in result["reports"].items()
        }


def _parse_json_object(what: str, text: str, expected: str) -> FetchedJson:
    return peer_data.decode_peer_data(text.encode(), what, peer_data.require_object, expected=expected)


def _epoch_over_error(number: int) -> TrainingError:
    return TrainingError(
        "epoch of an elastic job of rings",
        got=number,
        expected="one whose pass was not broken off, since it is over for all rings",
        do="Name the next one; look at a batch of the DataLoader that prepare was given",
    )
