"""Handlers of the parameter server around one ledger, one model and two locks.

One lock guards all mutable state; a thread that holds it waits only for the model. The other one, the *apply lock*,
lets one push at a time be replicated to the standby and then applied, so that versions are the same there.

A ring reads a snapshot and saves it as a checkpoint, or gives one back at the start (`CheckpointHandlers`).
"""

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from ringweave import rpc
from ringweave.errors import ConnectionLostError, DeadlineError, TrainingError
from ringweave.param_server import flat, messages, sessions, snapshots
from ringweave.param_server import job as param_server_job
from ringweave.param_server.barrier import BarrierResult
from ringweave.param_server.data_shards import DataPosition, ResumePoint
from ringweave.param_server.flat import FlatTensors
from ringweave.param_server.job import ServerCounts, ServerJob
from ringweave.param_server.model import AccumulatingModel
from ringweave.param_server.replication import NoStandby, Replicator
from ringweave.param_server.sessions import RingSessions
from ringweave.param_server.snapshots import ServerSnapshot
from ringweave.param_server.versions import PushReceipt
from ringweave.rpc import Ack, Identity, IncomingCall, RpcCall, RpcHandler, RpcReply
from ringweave.rpc.state_transfer import StateServer
from ringweave.topology import cgroups

_OFFER_POLL_S = 0.5
_MAX_STATE_COPIES = 8
"""Maximum size of an optimizer's state in copies of the parameters; anything larger is no snapshot."""
_MAX_BOOKS_BYTES = 64 << 20


class CheckpointHandlers:
    """Handlers for checkpoints of rings."""

    def __init__(
        self,
        service: "ParameterService",
        replicator: Replicator,
        state_server: StateServer,
        clock: Callable[[], float],
    ) -> None:
        """Store the arguments; there is no snapshot yet.

        Args:
            service: Service of the job.
            replicator: Knows whether this server leads, and replicates a restored state to the standby.
            state_server: Publishes the snapshot for rings.
            clock: Returns seconds.
        """
        self._service, self._replicator, self._state_server, self._clock = service, replicator, state_server, clock
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
        self._service.find_job(request.term, request.ring, call.peer)
        with self._service.changed:
            job = self._service.started_job()
            gone = job.gone | set(job.away_s)
            if any(ring not in gone for ring in range(request.ring)):
                return messages.SnapshotReply(is_there=False)
            snapshot = param_server_job.take_job_snapshot(job)
        self._hold_copy(self._service.reserve_copy(snapshot.num_bytes))
        self._state_server.publish(messages.SNAPSHOT_STATE_NAME, snapshots.snapshot_to_buffers(snapshot))
        return messages.SnapshotReply(is_there=True)

    def _release_snapshot(self, call: RpcCall) -> Ack:
        request: messages.ReleaseSnapshot = call.message
        self._service.find_job(request.term, request.ring, call.peer)
        self._state_server.unpublish(messages.SNAPSHOT_STATE_NAME)
        self._hold_copy(None)
        return Ack()

    def _hold_copy(self, held: AbstractContextManager[None] | None) -> None:
        """Count the memory of the published snapshot, in place of the one before it."""
        with self._service.changed:
            before, self._reserved_copy = self._reserved_copy, held
            if held is not None:
                held.__enter__()
            if before is not None:
                before.__exit__(None, None, None)

    def _decide_resume(self, call: RpcCall) -> messages.ResumeDecision:
        offer: messages.OfferCheckpoint = call.message
        self._service.find_job(offer.term, offer.ring, call.peer)
        with self._service.changed:
            job = self._service.started_job()
            if job.has_begun and offer.ring not in job.checkpoint_offers:
                return messages.ResumeDecision(verdict="begun", num_done=job.model.progress.num_done)
            job.checkpoint_offers[offer.ring] = (offer.train_step, offer.check)
            self._service.changed.notify_all()
            while (decision := self._resume_decision(self._service.started_job(), offer.ring)) is None:
                if call.left_s() <= 0 or call.cancelled.is_set():
                    raise DeadlineError(
                        "checkpoint that the rings resume from",
                        got="some have not offered their checkpoint",
                        expected="all that are there",
                        do="Call Checkpoints.load on every rank",
                    )
                self._service.changed.wait(min(_OFFER_POLL_S, max(0.0, call.left_s())))
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
        present_rings = set(range(len(job.setup.rings))) - self._service.ring_sessions.absent_rings(job)
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
        job = self._service.find_job(piece.term, piece.ring, call.peer)
        content = self._receive_piece(job, piece, b"".join(call.buffers))
        if content is None:
            return Ack()
        snapshot = snapshots.snapshot_from_bytes(content)
        with self._service.changed:
            job = self._service.started_job()
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
                self._service.job = param_server_job.restore_job(
                    job, fit_snapshot(snapshot, job.setup), resumed, self._clock
                )
        self._replicator.replicate_start()
        with self._service.changed:
            self._service.changed.notify_all()
        return Ack()

    def _receive_piece(self, job: ServerJob, piece: messages.RestoreSnapshot, content: bytes) -> bytes | None:
        """Add a piece; return the whole snapshot once it is complete."""
        max_bytes = _MAX_BOOKS_BYTES + _MAX_STATE_COPIES * job.model.step_start.num_bytes
        with self._service.changed:
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
            "local steps": one.overlaps,
            "optimizer": one.optimizer,
            "groups of parameters": [list(group.parameters) for group in one.groups],
        }
        for one in (snapshot.setup, setup)
    ]
    if snapshot.setup.fragments != setup.fragments:  # each has the optimizer of its own way
        both = [{name: each[name] for name in ("parameters", "local steps")} for each in both]
    for what, wanted in both[1].items():
        if both[0][what] != wanted:
            got, expected = str(both[0][what])[:200], str(wanted)[:200]
            do = "Train what the checkpoint is of, or begin in another folder"
            raise TrainingError(f"{what} of the checkpoint of rings", got=got, expected=expected, do=do)
    if snapshot.setup.fragments != setup.fragments:
        snapshot = snapshots.with_fragments_of(snapshot, setup)
    return replace(snapshot, setup=setup, pushed={}, live_state=None, ring_bases={})


def regroup_setup(
    setup: messages.ServerSetup, rings: Sequence[Sequence[int]], computing: Sequence[int]
) -> messages.ServerSetup:
    """Return the setup with these rings.

    `computing`: rings that are not idle: their next push would be counted to another ring.

    Raises:
        TrainingError: The rings are not of the job's ranks, or a ring is still computing.
    """
    ranks, ranks_before = (sorted(rank for ring in each for rank in ring) for each in (rings, setup.rings))
    if ranks != ranks_before or not all(rings):
        do = "Regroup all ranks of the job"
        expected = f"every one of the ranks {ranks_before} in one of them"
        raise TrainingError("new rings", got=[list(ring) for ring in rings], expected=expected, do=do)
    if computing:
        do = "Let every ring leave first, as at the end of an epoch"
        raise TrainingError("rings that compute while new ones are formed", got=list(computing), expected="none", do=do)
    return setup.model_copy(update={"rings": [list(ring) for ring in rings]})


class ExchangeBenchmarkHandlers:
    """Handlers for benchmarked exchanges, on a model of zeros that exists until the job starts."""

    def __init__(self, check_term: Callable[[int], None]) -> None:
        """`check_term` refuses a message for a server of another term."""
        self._check_term = check_term
        self._lock = threading.Lock()
        self._model: AccumulatingModel | None = None
        self._peers: set[Identity] = set()
        self._is_over = False

    def handlers(self) -> list[RpcHandler]:
        return [
            RpcHandler(message=messages.ExchangeBenchmark, handle=self._benchmark_exchange),
            RpcHandler(message=messages.EndExchangeBenchmark, handle=self._end_benchmark),
        ]

    def end_benchmarks(self) -> None:
        """End all benchmarks and free their memory, because the job starts."""
        with self._lock:
            self._model, self._is_over = None, True

    def _end_benchmark(self, call: RpcCall) -> Ack:
        message: messages.EndExchangeBenchmark = call.message
        self._check_term(message.term)
        with self._lock:
            self._peers.discard(call.peer)
            if not self._peers:
                self._model = None
        return Ack()

    def _benchmark_exchange(self, call: RpcCall) -> RpcReply:
        """Apply a push and answer the pull after it, in a job whose rings have equal parts of a train step."""
        message: messages.ExchangeBenchmark = call.message
        setup = message.setup
        param_server_job.check_buffers(setup, [len(buffer) for buffer in call.buffers])
        if not setup.rings:
            raise TrainingError("rings of a benchmark", got="none", expected="those of the job", do="Send them")
        self._check_term(message.term)
        parameters = FlatTensors(setup.tensors)
        with self._lock:
            if self._is_over:
                got, do = "a job that has begun", "Run it before the job begins"
                raise TrainingError("exchange benchmark", got=got, expected="none yet", do=do)
            self._peers.add(call.peer)
            model = self._model
            if model is None or model.setup != setup:
                self._model = None  # before there are two
                initial = FlatTensors(setup.tensors)
                for piece in initial.pieces:
                    piece.zero_()
                self._model = model = AccumulatingModel(setup, initial)
            share, options = 1 / len(setup.rings), [group.options for group in setup.groups]
            model.apply_gradient(FlatTensors.over_buffers(setup.tensors, call.buffers), share, options)
            model.read_parameters(parameters)
        result = messages.ExchangeBenchmarkResult(processor_s=time.process_time(), cores=cgroups.cores_per_process(1))
        return RpcReply(result, parameters.buffers())


# One file, to show side by side what happens under which lock.


_PULL_POLL_S = 0.5
_BUFFER_POLL_S = 0.005
"""Interval in which a pull checks whether a copy has been sent; no event wakes it."""


class ParameterService:
    """Parameter server without its connections."""

    def __init__(
        self,
        *,
        replicator: Replicator | None = None,
        max_peers: Callable[[], int] = lambda: 0,
        reset_max_peers: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        state_server: StateServer | None = None,
    ) -> None:
        """Store the arguments and wait for a job to start.

        Args:
            replicator: Knows whether this server leads, and replicates to the standby; None means that there is none.
            max_peers: Returns the maximum number of workers connected at once, for the counters.
            reset_max_peers: Called when the job starts, to ignore workers of earlier benchmarks.
            clock: Returns seconds.
            state_server: Publishes state; None makes one.
        """
        self.counts = ServerCounts()
        self._replicator, self._max_peers, self._clock = replicator or NoStandby(), max_peers, clock
        self._reset_max_peers = reset_max_peers
        self.changed = threading.Condition()
        """Guards all mutable state, and wakes waiting threads."""
        self._apply_lock = threading.Lock()
        self._shard_lock = threading.Lock()
        """Keeps shards in order on the way to the standby, which stores only the last position."""
        self._copying_bytes = 0
        self.job: ServerJob | None = None
        """Job, once it has started."""
        self.ring_sessions = RingSessions(self, self._replicator, clock)
        self._state_server = state_server or StateServer()
        self._benchmark = ExchangeBenchmarkHandlers(self._replicator.check_term)
        self._checkpoints = CheckpointHandlers(self, self._replicator, self._state_server, clock)

    def handlers(self) -> list[RpcHandler]:
        return [
            RpcHandler(message=messages.StartJob, handle=self._start),
            RpcHandler(message=messages.Push, handle=self._push, allocate=self._allocate_push),
            RpcHandler(message=messages.Pull, handle=self._pull),
            RpcHandler(message=messages.TakeShard, handle=self._take_shard),
            RpcHandler(message=messages.LeaveRing, handle=self._leave_ring),
            RpcHandler(message=messages.RegroupRings, handle=self._regroup),
            RpcHandler(message=messages.ServerStatusRequest, handle=lambda _: self.status()),
            *self.ring_sessions.handlers(),
            *self._checkpoints.handlers(),
            *self._benchmark.handlers(),
            *self._state_server.handlers(),
        ]

    @property
    def is_done(self) -> bool:
        """True once every ring has left."""
        job = self.job
        return job is not None and len(job.gone) == len(job.setup.rings)

    @property
    def version(self) -> int:
        """Number of pushes applied."""
        return self.job.ledger.version if self.job else 0

    def resume(self, snapshot: ServerSnapshot) -> None:
        """Resume from a snapshot, before the first call."""
        with self.changed:
            self.job = param_server_job.resume_job(snapshot, self._clock)

    def save_snapshot(self, path: Path) -> int | None:
        """Write the present state to a file while pushes go on; return its version, None before the job starts.

        Raises:
            OSError: The disk does not take it.
        """
        with self.changed:
            job = self.job
            if job is None:
                return None
            snapshot = param_server_job.take_job_snapshot(job)
        with self.reserve_copy(snapshot.num_bytes):
            snapshots.save_snapshot(snapshot, path)
        return snapshot.version

    @contextmanager
    def reserve_copy(self, num_bytes: int) -> Iterator[None]:
        """Count so many bytes as held for the length of the block."""
        with self.changed:
            self._copying_bytes += num_bytes
        try:
            yield
        finally:
            with self.changed:
                self._copying_bytes -= num_bytes

    @contextmanager
    def paused_state(self) -> Iterator[bytes]:
        """Yield the whole state for a standby, empty before the job; no push is applied for the length of the block."""
        with self._apply_lock:
            with self.changed:
                job = self.job
                snapshot = param_server_job.take_job_snapshot(job, is_live=True) if job else None
            state = snapshots.snapshot_to_bytes(snapshot) if snapshot else b""
            del snapshot
            with self.reserve_copy(len(state)):
                yield state

    def pass_over_absent(self, job: ServerJob, number: int) -> BarrierResult | None:
        """Return the result of a barrier without the absent rings; None if another one is missing.

        Rings that may live lose their grants at that moment, so that their samples are lost as the result says.
        """
        with self._apply_lock, self.changed:  # no push is between its replication and its application
            absent, missing = self.ring_sessions.rings_to_pass_over(job), job.barrier.missing_rings(number) - job.gone
            result = job.barrier.result_of(number, job.gone, job.ring_progress, absent)
            if result is not None:
                job.drop_grants(missing)
            self.changed.notify_all()
            return result

    def status(self) -> messages.ServerStatus:
        with self.changed:
            self.counts.most_peers = self._max_peers()
            return param_server_job.server_status(self.job, self.counts, self._copying_bytes)

    def _start(self, call: RpcCall) -> Ack:
        message: messages.StartJob = call.message
        self._replicator.check_term(message.term)
        setup = message.setup
        param_server_job.check_buffers(setup, [len(buffer) for buffer in call.buffers])
        with self.changed:
            if self.job is None:
                # The received memory belongs to this call alone, so the job keeps it.
                first = flat.tensors_of_setup(setup, call.buffers)
                self.job = param_server_job.begin_job(setup, first, self._clock)
                self.counts.received_bytes += sum(len(buffer) for buffer in call.buffers)
                self._reset_max_peers()
            elif self.job.setup != setup:
                raise TrainingError(
                    "job on the parameter server",
                    got="another one",
                    expected="the one that it has",
                    do="Call ringweave.prepare once in a run",
                )
            job = self.job
        self._benchmark.end_benchmarks()
        self._replicator.replicate_start()
        with self.changed:
            job.is_announced = True
        return Ack()

    def _allocate_push(self, incoming: IncomingCall) -> Sequence[memoryview]:
        message: messages.Push = incoming.message
        job = self.find_job_for_leader(message.term, message.ring, incoming.peer)
        return self.push_buffers(job, message, incoming.sizes)

    def push_buffers(self, job: ServerJob, push: messages.Push, sizes: Sequence[int]) -> Sequence[memoryview]:
        """Return memory for a push that is about to come."""
        param_server_job.check_buffers(job.setup, sizes, push.fragments)
        with self.changed:
            pool = job.receiving.pool_for(is_slow=job.link_speed.is_slow(push.ring))
        buffers = pool.acquire()  # without the lock, which the holder of the buffer needs to finish
        with self.changed:
            job.link_speed.push_began(push.ring, self._clock())
        return flat.select_buffers(job.setup, push.fragments, buffers)

    def _push(self, call: RpcCall) -> messages.PushResult:
        push: messages.Push = call.message
        job = self.find_job_for_leader(push.term, push.ring, call.peer)
        with self.changed:
            job.link_speed.push_ended(push.ring, self._clock())
            self.counts.received_bytes += sum(len(buffer) for buffer in call.buffers)
        with self._apply_lock:
            if call.cancelled.is_set():  # while it waited; a live caller repeats it on a new connection
                raise ConnectionLostError(
                    f"push {push.sequence} of ring {push.ring}",
                    got="from a caller that has hung up",
                    expected="one that waits for what becomes of it",
                    do="Push it again",
                )
            receipt = self._known_receipt(job, push, call.peer)
            if receipt is None:
                param_server_job.check_finite(job.setup, push, call.buffers)
                self._replicator.replicate_push(push, call.buffers)
                with self.changed:
                    receipt = self.apply_push(job, push, call.buffers)
                    self.changed.notify_all()
        return messages.PushResult(
            version=receipt.version,
            staleness_versions=receipt.staleness_versions,
            damping=receipt.damping,
            is_repeat=receipt.is_repeat,
        )

    def _known_receipt(self, job: ServerJob, push: messages.Push, peer: rpc.Identity) -> PushReceipt | None:
        """Return the receipt of a push that was applied before; raise if it cannot be applied."""
        with self.changed:
            job.leader_fence.check_leader(push.ring, peer.name)  # the ring may have another representative by now
            receipt = job.ledger.receipt(push.ring, push.sequence)
            if receipt is None:
                job.ledger.check(push.ring, push.sequence, push.base_version)
                job.model.check_push(push)
            else:
                self.counts.repeats += 1
            return receipt

    def apply_push(self, job: ServerJob, push: messages.Push, buffers: Sequence[memoryview]) -> PushReceipt:
        """Apply a push as the next version; with the lock held."""
        age = job.ledger.check(push.ring, push.sequence, push.base_version)
        fragments = flat.fragments_of_setup(job.setup, push.fragments, buffers)
        (_, content), *_ = fragments
        damping = job.ledger.policy.damping(age)
        if push.content == "gradient":
            job.prediction.note_push(push.ring, job.model.progress.total, push.batch_share)
            job.model.compensate(push.ring, content)
            job.model.apply_gradient(content, push.batch_share, push.options, push.absent, damping)
        elif push.content == "change":
            job.model.apply_change(content, push.batch_share, push.num_batches, damping)
        else:
            num_train_steps = push.batch_share * push.num_batches
            job.model.apply_outer_gradient(fragments, push.weight, num_train_steps, damping)
        receipt = job.ledger.push(push.ring, push.sequence, push.base_version)
        if push.ring_progress or push.content != "outer_gradient":  # else it is as before
            job.ring_progress[push.ring] = push.ring_progress
        job.pushed_at_s[push.ring] = self._clock()
        job.record_push(push)
        job.dispatcher.note_push(push.ring, push.num_samples)
        self.counts.staleness[receipt.staleness_versions] += 1
        self.counts.pushes[push.ring] += 1
        self.counts.samples += push.num_samples
        return receipt

    def _pull(self, call: RpcCall) -> RpcReply:
        pull: messages.Pull = call.message
        job = self.find_job_for_leader(pull.term, pull.ring, call.peer)
        param_server_job.check_fragments(job.setup, pull.fragments)
        is_between_pushes = job.setup.compensation > 0
        with self.changed:
            if not call.cancelled.is_set():
                job.last_pull_sequence[pull.ring] = max(pull.after_sequence, job.last_pull_sequence.get(pull.ring, 0))
        while True:
            with self.changed:
                buffers = self._wait_for_buffers(job, call)
            # The standby computes the base of the next push's compensation itself, after the same pushes as here.
            with self._apply_lock if is_between_pushes else nullcontext():
                with self.changed:
                    may_go_on = self._is_wanted(job, call) and param_server_job.may_pull(job, pull)
                    granted = param_server_job.grant_parameters(job, pull, buffers) if may_go_on else None
                if granted is not None:  # else another ring was faster, and this one waits again
                    version, ahead = granted
                    self.counts.sent_bytes += sum(map(len, buffers))
                    self._replicator.replicate_grant(pull.ring, version, ahead, is_between_pushes=is_between_pushes)
                    waited_s = max(0.0, self._clock() - job.pushed_at_s.get(pull.ring, math.inf))
                    steps = max(job.local_steps.values(), default=0) if pull.fragments else 0
                    result = messages.PullResult(version=version, waited_s=waited_s, local_steps=steps)
                    return RpcReply(result, buffers)
            del buffers

    def _wait_for_buffers(self, job: ServerJob, call: RpcCall) -> list[memoryview]:
        """Wait for memory for the answer until the ring may continue; raise if too late, or if it is not wanted."""
        pull: messages.Pull = call.message
        while True:
            is_wanted = self._is_wanted(job, call)
            buffers = self._sending_buffers(job, pull) if is_wanted else None
            if buffers is not None:
                return buffers
            if call.left_s() <= 0 or not is_wanted:
                raise DeadlineError(
                    f"parameters for ring {pull.ring}",
                    got=f"version {job.ledger.version} is all there is" if is_wanted else "no caller that waits",
                    expected=f"its push {pull.after_sequence} applied, and the slowest ring near enough",
                    do="Look which ring does not push any more",
                )
            self.changed.wait(
                min(_BUFFER_POLL_S if param_server_job.may_pull(job, pull) else _PULL_POLL_S, max(0.0, call.left_s()))
            )

    @staticmethod
    def _is_wanted(job: ServerJob, call: RpcCall) -> bool:
        """Return whether the caller still waits for these parameters, and has not asked for later ones."""
        pull: messages.Pull = call.message
        is_heard = job.leader_fence.is_current_leader(pull.ring, call.peer.name)
        return is_heard and not call.cancelled.is_set() and pull.after_sequence == job.last_pull_sequence.get(pull.ring)

    def _sending_buffers(self, job: ServerJob, pull: messages.Pull) -> list[memoryview] | None:
        """Return memory for the answer; None if the ring may not continue, or all of it is being sent."""
        if not param_server_job.may_pull(job, pull):
            return None
        buffers = job.sending.pool_for(is_slow=job.link_speed.is_slow(pull.ring)).acquire_nowait()
        return None if buffers is None else list(flat.select_buffers(job.setup, pull.fragments, buffers))

    def _take_shard(self, call: RpcCall) -> messages.ShardResult:
        request: messages.TakeShard = call.message
        job = self.find_job_for_leader(request.term, request.ring, call.peer)
        with self._shard_lock:
            with self.changed:
                shard = job.dispatcher.next_shard(
                    request.ring,
                    request.number,
                    request.epoch,
                    request.num_samples,
                    request.epoch_samples,
                    request.least,
                    request.ended_epoch,
                )
                job.record_shard(shard)
            self._replicator.replicate_fact(shard)
        return messages.ShardResult(first=shard.first, num_samples=shard.num_samples)

    def _leave_ring(self, call: RpcCall) -> Ack:
        leave: messages.LeaveRing = call.message
        job = self.find_job_for_leader(leave.term, leave.ring, call.peer)
        with self.changed:
            job.leave_ring(leave.ring, is_for_good=leave.is_for_good)
            job.last_pull_sequence.pop(leave.ring, None)  # the push that its last pull was to follow may have expired
            self.changed.notify_all()
        self._replicator.replicate_fact(leave)
        return Ack()

    def _regroup(self, call: RpcCall) -> Ack:
        message: messages.RegroupRings = call.message
        self._replicator.check_term(message.term)
        with self.changed:
            job = self.started_job()
            if message.rings != job.setup.rings:  # else it is a repetition on a new connection, for an earlier ring
                sessions.check_ring_member(job, message.ring, call.peer)
                setup = regroup_setup(job.setup, message.rings, job.ledger.computing)
                self.job = param_server_job.regroup_job(job, setup, self._clock)
        self._replicator.replicate_start()
        return Ack()

    def started_job(self) -> ServerJob:
        """Return the job; raise before it has started."""
        job = self.job
        if job is None:
            raise TrainingError(
                "job", got="none yet", expected="one that rank 0 has begun", do="Call ringweave.prepare"
            )
        return job

    def find_job(self, term: int, ring: int, peer: rpc.Identity) -> ServerJob:
        """Return the job, if that peer belongs to that ring, and this server may answer."""
        self._replicator.check_term(term)
        job = self.started_job()
        sessions.check_ring_member(job, ring, peer)
        with self.changed:
            job.note_heard(ring)
        return job

    def find_job_for_leader(self, term: int, ring: int, peer: rpc.Identity) -> ServerJob:
        """Return the job, if that peer is the ring's current representative."""
        job = self.find_job(term, ring, peer)
        with self.changed:
            job.leader_fence.check_leader(ring, peer.name)
        return job
