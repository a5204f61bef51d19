"""Checkpoint handlers of the server: a ring reads a snapshot and saves it, or gives one back at the start."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Protocol

from ringweave.errors import DeadlineError, TrainingError
from ringweave.param_server import job as param_server_job
from ringweave.param_server import messages, snapshots
from ringweave.param_server.data_shards import DataPosition, ResumePoint
from ringweave.param_server.job import ServerJob
from ringweave.param_server.replication import Replicator
from ringweave.param_server.snapshots import ServerSnapshot
from ringweave.rpc import Ack, Identity, RpcCall, RpcHandler
from ringweave.rpc.state_transfer import StateServer

_OFFER_POLL_S = 0.5
_MAX_STATE_COPIES = 8
"""Maximum size of an optimizer's state in copies of the parameters; anything larger is no snapshot."""
_MAX_BOOKS_BYTES = 64 << 20


class CheckpointJobAccess(Protocol):
    """Access to the service's job."""

    changed: threading.Condition
    job: ServerJob | None

    def find_job(self, term: int, ring: int, peer: Identity) -> ServerJob: ...

    def started_job(self) -> ServerJob: ...

    def reserve_copy(self, num_bytes: int) -> AbstractContextManager[None]:
        """Count so many bytes as held for the length of a block."""
        ...


class CheckpointHandlers:
    """Handlers for checkpoints of rings."""

    def __init__(
        self,
        job_access: CheckpointJobAccess,
        replicator: Replicator,
        state_server: StateServer,
        absent_rings: Callable[[ServerJob], set[int]],
        clock: Callable[[], float],
    ) -> None:
        """Store the arguments; there is no snapshot yet.

        Args:
            job_access: Access to the job.
            replicator: Knows whether this server leads, and replicates a restored state to the standby.
            state_server: Publishes the snapshot for rings.
            absent_rings: Returns the rings that barriers do not wait for.
            clock: Returns seconds.
        """
        self._job_access, self._replicator, self._state_server, self._absent_rings, self._clock = (
            job_access,
            replicator,
            state_server,
            absent_rings,
            clock,
        )
        self._reserved_copy: AbstractContextManager[None] | None = None
        self._uploads: dict[int, bytearray] = {}

    def handlers(self) -> list[RpcHandler]:
        return [
            RpcHandler(message=messages.SnapshotRequest, handle=self._take_snapshot),
            RpcHandler(message=messages.ReleaseSnapshot, handle=self._release_snapshot),
            RpcHandler(message=messages.OfferCheckpoint, handle=self._decide_resume),
            RpcHandler(message=messages.RestoreSnapshot, handle=self._restore_snapshot),
        ]

    def _take_snapshot(self, call: RpcCall) -> messages.SnapshotReply:
        request: messages.SnapshotRequest = call.message
        self._job_access.find_job(request.term, request.ring, call.peer)
        with self._job_access.changed:
            job = self._job_access.started_job()
            gone = job.gone | set(job.away_s)
            if any(ring not in gone for ring in range(request.ring)):
                return messages.SnapshotReply(is_there=False)
            snapshot = param_server_job.take_job_snapshot(job)
        self._hold_copy(self._job_access.reserve_copy(snapshot.num_bytes))
        self._state_server.publish(messages.SNAPSHOT_STATE_NAME, snapshots.snapshot_to_buffers(snapshot))
        return messages.SnapshotReply(is_there=True)

    def _release_snapshot(self, call: RpcCall) -> Ack:
        request: messages.ReleaseSnapshot = call.message
        self._job_access.find_job(request.term, request.ring, call.peer)
        self._state_server.unpublish(messages.SNAPSHOT_STATE_NAME)
        self._hold_copy(None)
        return Ack()

    def _hold_copy(self, held: AbstractContextManager[None] | None) -> None:
        """Count the memory of the published snapshot, in place of the one before it."""
        with self._job_access.changed:
            before, self._reserved_copy = self._reserved_copy, held
            if held is not None:
                held.__enter__()
            if before is not None:
                before.__exit__(None, None, None)

    def _decide_resume(self, call: RpcCall) -> messages.ResumeDecision:
        offer: messages.OfferCheckpoint = call.message
        self._job_access.find_job(offer.term, offer.ring, call.peer)
        with self._job_access.changed:
            job = self._job_access.started_job()
            if job.has_begun and offer.ring not in job.checkpoint_offers:
                return messages.ResumeDecision(verdict="begun", num_done=job.model.progress.num_done)
            job.checkpoint_offers[offer.ring] = (offer.train_step, offer.check)
            self._job_access.changed.notify_all()
            while (decision := self._resume_decision(self._job_access.started_job(), offer.ring)) is None:
                if call.left_s() <= 0 or call.cancelled.is_set():
                    raise DeadlineError(
                        "checkpoint that the rings resume from",
                        got="some have not offered their checkpoint",
                        expected="all that are there",
                        do="Call Checkpoints.load on every rank",
                    )
                self._job_access.changed.wait(min(_OFFER_POLL_S, max(0.0, call.left_s())))
        return decision

    def _resume_decision(self, job: ServerJob, ring: int) -> messages.ResumeDecision | None:
        """Return the decision for that ring; None as long as it has to wait."""
        if job.resumed is not None:
            resumed, num_done = job.resumed, job.model.progress.num_done
            return messages.ResumeDecision(
                verdict="resumed", train_step=resumed.train_step, check=resumed.check, num_done=num_done
            )
        if job.has_nothing_to_resume:
            return messages.ResumeDecision(verdict="nothing", num_done=job.model.progress.num_done)
        present_rings = set(range(len(job.setup.rings))) - self._absent_rings(job)
        if not present_rings <= job.checkpoint_offers.keys():
            return None
        best = max(
            (job.checkpoint_offers[each] for each in present_rings if job.checkpoint_offers[each][1]), default=None
        )
        if best is None:
            job.has_nothing_to_resume = True
            return messages.ResumeDecision(verdict="nothing")
        source_ring = min(each for each in present_rings if job.checkpoint_offers[each] == best)
        return (
            messages.ResumeDecision(verdict="give", train_step=best[0], check=best[1]) if ring == source_ring else None
        )

    def _restore_snapshot(self, call: RpcCall) -> Ack:
        piece: messages.RestoreSnapshot = call.message
        job = self._job_access.find_job(piece.term, piece.ring, call.peer)
        content = self._receive_piece(job, piece, b"".join(call.buffers))
        if content is None:
            return Ack()
        snapshot = snapshots.snapshot_from_bytes(content)
        with self._job_access.changed:
            job = self._job_access.started_job()
            if job.resumed is None:  # else it is a repetition, or another ring was faster
                if job.has_begun:
                    raise TrainingError(
                        "checkpoint to go on from",
                        got="one after the first samples were drawn",
                        expected="it before",
                        do="Call Checkpoints.load right after prepare",
                    )
                start = piece.start
                position = DataPosition(pass_number=start.pass_number, epoch=start.epoch, done=tuple(start.done))
                resumed = ResumePoint(
                    train_step=piece.train_step, check=piece.check, seed=start.seed, position=position
                )
                self._job_access.job = param_server_job.restore_job(
                    job, fit_snapshot(snapshot, job.setup), resumed, self._clock
                )
        self._replicator.replicate_start()
        with self._job_access.changed:
            self._job_access.changed.notify_all()
        return Ack()

    def _receive_piece(self, job: ServerJob, piece: messages.RestoreSnapshot, content: bytes) -> bytes | None:
        """Add a piece; return the whole snapshot once it is complete."""
        max_bytes = _MAX_BOOKS_BYTES + _MAX_STATE_COPIES * job.model.step_start.num_bytes
        with self._job_access.changed:
            held = bytearray() if piece.first_byte == 0 else self._uploads.get(piece.ring, bytearray())
            is_too_long = max(piece.num_bytes, len(held) + len(content)) > min(max_bytes, piece.num_bytes)
            if is_too_long or len(held) != piece.first_byte:
                raise TrainingError(
                    "piece of a snapshot",
                    got=f"byte {piece.first_byte} of {piece.num_bytes}",
                    expected=f"byte {len(held)}, of at most {max_bytes}",
                    do="Give back what this server, or one of the same model, has written",
                )
            held += content
            self._uploads[piece.ring] = held
            if len(held) < piece.num_bytes:
                return None
            return bytes(self._uploads.pop(piece.ring))


def fit_snapshot(snapshot: ServerSnapshot, setup: messages.ServerSetup) -> ServerSnapshot:
    """Return the snapshot for this job's rings.

    Raises:
        TrainingError: It is of another model, optimizer or way to push.
    """
    both = [
        {
            "parameters": [(each.name, tuple(each.shape), each.dtype) for each in one.tensors],
            "optimizer": one.optimizer,
            "groups of parameters": [list(group.parameters) for group in one.groups],
            "local steps": one.overlaps,
        }
        for one in (snapshot.setup, setup)
    ]
    for what, wanted in both[1].items():
        if both[0][what] != wanted:
            got, expected = str(both[0][what])[:200], str(wanted)[:200]
            do = "Train what the checkpoint is of, or begin in another folder"
            raise TrainingError(f"{what} of the checkpoint of rings", got=got, expected=expected, do=do)
    return replace(snapshot, setup=setup, pushed={}, live_state=None, ring_bases={})
