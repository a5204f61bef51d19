"""Collective engine: runs the collectives of one group by schedules, several at a time."""

import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ringweave import planning, schedules
from ringweave.comm import bridge
from ringweave.comm.counters import CollectiveCounters
from ringweave.comm.engine import executor
from ringweave.comm.engine.executor import (
    CollectiveIntent,
    ProgramCache,
    ScratchMemory,
    check_agreement,
    flatten_tensor,
    run_program,
    write_back,
)
from ringweave.comm.engine.reductions import ReduceOperation
from ringweave.comm.failure_registry import GroupEnd
from ringweave.comm.group_info import GroupInfo
from ringweave.comm.native_backend import NativeBackends
from ringweave.comm.transport.connect import NUM_CHANNELS
from ringweave.comm.transport.interface import MismatchError, TransferFailedError, Transport
from ringweave.comm.tuning.control_tree import ControlTree
from ringweave.comm.tuning.selector import CollectiveRequest, PendingCollective, ScheduleDecision, ScheduleSelector
from ringweave.comm.work import PendingWork
from ringweave.errors import CommunicationError, DisagreementError
from ringweave.schedules.program import RankProgram, compile_program
from ringweave.telemetry.events import EventLog


class CallbackRunner:
    """Runs each callback in a thread that nothing else needs, a new one whenever all others are busy.

    Callbacks chained on one collective may therefore wait for another.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._num_idle = 0
        self._threads: list[threading.Thread] = []
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def submit(self, call: Callable[[], None]) -> None:
        """Run `call` soon."""
        with self._lock:
            if self._num_idle:
                self._num_idle -= 1
            else:
                name = f"{self._name}-{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._run_calls, name=name, daemon=True))
                self._threads[-1].start()
        self._calls.put(call)

    def close(self, timeout_s: float) -> None:
        """Stop the threads, waiting at most so long for each."""
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join(timeout_s)

    def _run_calls(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call
            with self._lock:
                self._num_idle += 1


@dataclass(frozen=True, slots=True)
class CollectiveJob:
    """A collective that waits for its channel."""

    run: Callable[["CollectiveChannel"], None]
    operation: str
    """The collective in words."""
    work: PendingWork
    on_finished: Callable[[], object]
    """Called when the job is over, run or not: other jobs must not wait for ever for its program."""
    timeout_s: float
    """Limit on the collective."""


class CollectiveChannel:
    """One thread that runs jobs in order, over a transport that no other thread drives.

    Collectives are dealt to channels by their number, the same on all ranks, so both ends of every connection see the
    same collectives in the same order.
    """

    def __init__(
        self,
        name: str,
        transport: Transport,
        run_job: Callable[[CollectiveJob, "CollectiveChannel"], BaseException | None],
        callbacks: CallbackRunner,
    ) -> None:
        """`transport` exists from the start, used or not, so that an abort ends a wait for connections."""
        self.transport = transport
        self.scratch = ScratchMemory()
        self._callbacks = callbacks
        self._run_job = run_job
        self._jobs: queue.SimpleQueue[CollectiveJob | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run_jobs, name=name, daemon=True)

    def submit(self, job: CollectiveJob) -> None:
        """Run the job after those submitted before; never called by two threads at a time."""
        if self._thread.ident is None:
            self._thread.start()
        self._jobs.put(job)

    def abort(self) -> None:
        """Abort the connections, from any thread."""
        self.transport.abort()

    def close_inherited(self) -> None:
        """Close this process's ends only: for a child after a fork, which must not keep its parent's alive."""
        self.transport.close()

    def stop_accepting(self) -> None:
        """Accept no more jobs."""
        self._jobs.put(None)

    def wait_finished(self, timeout_s: float) -> bool:
        """Return True if all submitted jobs finish within `timeout_s`; call `stop_accepting` first."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self, timeout_s: float) -> None:
        """Close the connections, after `stop_accepting`; unfinished jobs fail."""
        if self._thread.is_alive():
            self.abort()
            self._thread.join(timeout_s)
        self.transport.close()

    def _run_jobs(self) -> None:
        while (job := self._jobs.get()) is not None:
            with torch.inference_mode():
                error = self._run_job(job, self)
            if error is not None:
                self.transport.abort()  # before the caller can reuse the message, which other ranks may still read
            job.work.set_finished(error)
            if not job.work.finish_without_future():
                # Callbacks of its future must not run in inference mode.
                self._callbacks.submit(job.work.resolve_future)
            del job, error  # release the tensors while this thread waits


@dataclass(slots=True)
class CompiledProgram:
    """Program for one kind of message."""

    program: RankProgram
    signature: int
    """Part of the tag, so that ranks with different programs find out at the first message."""
    bounds: tuple[int, ...]
    """Bounds of its segments."""
    _segment_marks: bridge.SegmentMarks | None = None

    @property
    def segment_marks(self) -> bridge.SegmentMarks:
        """Marks for messages of devices, made when first needed."""
        if self._segment_marks is None:
            self._segment_marks = bridge.marks(self.program, self.bounds)
        return self._segment_marks


@dataclass(slots=True)
class ScheduledMessage:
    """Message of one collective, and its program."""

    tensor: Tensor
    op: Any
    reduction: ReduceOperation
    staged: bridge.StagedMessage | None
    """None on the CPU."""
    program: Future[CompiledProgram] | None = None
    """None for the native backend."""
    makes_program: bool = False
    """This collective makes the program."""

    def begin(self, channel: int, num_segments: int) -> Tensor:
        """Return the elements on the host, one-dimensional; of a device, when the first segment is there."""
        if self.staged is None:
            return flatten_tensor(self.tensor)
        return bridge.fetch_segments(self.staged, channel, bridge.segment_bounds(self.tensor.numel(), num_segments))

    def finish(self, message: Tensor) -> None:
        """Give the tensor the result, of which the bridge has sent what a program made."""
        if self.staged is None:
            write_back(message, self.tensor)
            return
        if self.program is None:
            self.staged.put(0, message.numel())
        self.staged.finish()

    def release(self) -> None:
        """Cancel the program if this collective was to make it and did not, so that no other collective waits for it.

        Collectives that only use the program leave it alone: it may be in the making.
        """
        if self.makes_program and self.program is not None:
            self.program.cancel()  # no effect on a finished one
        if self.staged is not None:
            self.staged.discard()


_ABORT_TIMEOUT_S = 5.0
"""Limit on waiting for aborted channels in `close`: they end at once, except in operations that cannot be aborted."""


class CollectiveEngine:
    """The scheduled collectives of one group on one rank.

    Collectives are numbered in the order of the calls, which is the same on all ranks, as torch.distributed asks for.
    All ranks run the oldest unfinished one, so there is always progress.
    """

    def __init__(
        self,
        group: GroupInfo,
        selector: ScheduleSelector,
        connect: Callable[[int], Transport],
        native: NativeBackends,
        end: GroupEnd,
        counters: CollectiveCounters,
        log: EventLog | None = None,
    ) -> None:
        """`selector` decides schedules; `connect` makes a channel's transport; `native` is the native backend."""
        self._counters = counters
        self._group = group
        self._selector = selector
        self._native = native
        self._end = end
        self._log = log
        self._callbacks = CallbackRunner(f"ringweave-{counters.group}-done")
        self._channels = [
            CollectiveChannel(f"ringweave-{counters.group}-{index}", connect(index), self._run_job, self._callbacks)
            for index in range(NUM_CHANNELS)
        ]
        self._rank_parts: dict[tuple[int, str], tuple[schedules.Schedule, tuple[schedules.Transfer, ...]]] = {}
        self._plan_version, self._num_exchanges = 1, 0
        self._idle_channel = 0
        """Channel that does not have the newest collective."""
        self._newest_works: dict[int, weakref.ref[PendingWork]] = {}
        """Work of each channel's newest job."""
        self._programs: ProgramCache[CompiledProgram] = ProgramCache()
        self._order_lock = threading.Lock()
        end.attach(self._abort_connections)

    def allreduce(
        self,
        tensor: Tensor,
        op: Any,
        reduction: ReduceOperation,
        request: CollectiveRequest,
        timeout_s: float,
        staged: bridge.StagedMessage | None = None,
    ) -> PendingWork:
        """Reduce `tensor` over the group, in place, by the schedule that the selector decides on.

        Args:
            tensor: Any shape and strides; on the CPU, unless `staged` is given.
            op: Reduce operation of torch.
            reduction: Combines contributions.
            request: Input of the selector.
            timeout_s: Limit on the whole collective, from its start.
            staged: The tensor on its way through the bridge.
        """
        scheduled = ScheduledMessage(tensor, op, reduction, staged)
        work = PendingWork([tensor], staged)
        with self._order_lock:  # channels get collectives in the order of their numbers
            pending = self._selector.admit(
                request, lambda decision: self._reserve_program(scheduled, decision), timeout_s
            )
            schedule = pending.decision.choice.schedule if pending.decision else "a schedule to be tried"
            operation = f"allreduce #{pending.number} ({reduction.name}, {tensor.numel()} x {tensor.dtype}, {schedule})"
            job = CollectiveJob(
                lambda channel: self._run_allreduce(pending, scheduled, channel, timeout_s),
                operation,
                work,
                scheduled.release,
                timeout_s,
            )
            channel = pending.number % NUM_CHANNELS  # assigned to the channels in turn
            self._idle_channel = (channel + 1) % NUM_CHANNELS
            return self._submit(job, channel)

    def wait_for_plan(self) -> None:
        """Wait for the group's plan.

        Raises:
            PeerError: It did not come in time, or before the group was aborted.
        """
        _ = self._selector.plan

    def allgather_small(self, row: Tensor, timeout_s: float) -> Tensor:
        """Return a short row of each rank, (group_size, width), from (width,) of each (`ControlTree.allgather`).

        It runs beside the newest collective, which need not be done. Blocks.
        """
        tables: list[Tensor] = []
        with self._order_lock:
            self._num_exchanges += 1
            number = self._num_exchanges
            tag, operation = (
                executor.make_tag(number, executor.ALLGATHER_SIGNATURE),
                f"exchange #{number} ({row.numel()} x {row.dtype})",
            )

            def run(lane: CollectiveChannel) -> None:
                tables.append(ControlTree(self._group, lane.transport, tag=tag, timeout_s=timeout_s).allgather(row))

            job = CollectiveJob(run, operation, PendingWork([row]), lambda: None, timeout_s)
            work = self._submit(job, self._idle_channel)
        work.wait()
        return tables[0]

    def unfinished_works(self) -> list[PendingWork]:
        """Return the newest work of each channel that is not finished; a channel finishes its works in order."""
        works = [reference() for reference in list(self._newest_works.values())]
        return [work for work in works if work is not None and not work.is_completed()]

    def _submit(self, job: CollectiveJob, channel: int) -> PendingWork:
        """Submit a job to a channel, or fail it if the group has ended; in the order of the calls."""
        if self._end.error is None:
            self._newest_works[channel] = weakref.ref(job.work)
            self._channels[channel].submit(job)
        else:
            job.work.set_finished(self._end.repeated_error(job.operation))
            job.work.resolve_future()
        return job.work

    def _reserve_program(self, scheduled: ScheduledMessage, decision: ScheduleDecision) -> None:
        """Reserve the program for this kind of message; called in the order of the collectives."""
        if decision.choice.schedule == schedules.NATIVE:
            return
        choice, tensor = decision.choice, scheduled.tensor
        if decision.version != self._plan_version:
            # Programs of another plan are not used again.
            self._plan_version, self._programs = (decision.version, ProgramCache())
        kind = (choice, tensor.numel(), tensor.dtype, scheduled.reduction.name)
        scheduled.program, scheduled.makes_program = self._programs.get_or_reserve(
            kind, choice.num_segments * self._group.group_size
        )

    def _run_allreduce(
        self, pending: PendingCollective, scheduled: ScheduledMessage, channel: CollectiveChannel, timeout_s: float
    ) -> None:
        """Run one collective, in the thread of its channel."""
        tag = executor.make_tag(pending.number, executor.NO_SIGNATURE)
        decision = self._selector.wait_for_decision(pending, channel.transport, tag=tag, timeout_s=timeout_s)
        index = pending.number % NUM_CHANNELS
        message = scheduled.begin(index, decision.choice.num_segments)
        compiled = None
        if scheduled.program is None:
            self._native.prepare(index, lambda: self._selector.barrier(channel.transport, tag=tag, timeout_s=timeout_s))
        else:
            if scheduled.makes_program:
                self._fulfil_program(
                    scheduled.program, channel, message, scheduled.reduction, decision, pending.number, timeout_s
                )
            compiled = scheduled.program.result()
            channel.transport.connect(compiled.program.peers, timeout_s)
        if decision.is_trial:
            self._selector.barrier(channel.transport, tag=tag, timeout_s=timeout_s)
        started_s = time.monotonic()
        if compiled is None:
            self._native.allreduce(index, message, scheduled.op, timeout_s)
        else:
            self._run_program(compiled, message, scheduled, channel, pending.number, timeout_s)
        seconds = time.monotonic() - started_s
        scheduled.finish(message)
        self._counters.count(decision.choice.schedule, message.nbytes, compiled.program.num_sends if compiled else 0)
        self._selector.record_finished(pending, seconds)

    def _run_program(
        self,
        compiled: CompiledProgram,
        message: Tensor,
        scheduled: ScheduledMessage,
        channel: CollectiveChannel,
        number: int,
        timeout_s: float,
    ) -> None:
        reduction, staged, program = scheduled.reduction, scheduled.staged, compiled.program
        transport, tag = channel.transport, executor.make_tag(number, compiled.signature)
        instructions, size = None, self._group.group_size
        if staged is None:
            reduction.prepare(message)
        else:  # prepares and finishes the message by segments
            marks = compiled.segment_marks
            instructions = bridge.paced_instructions(program, marks, staged, message, reduction, size)
        run_program(
            program,
            message,
            reduction.combine,
            transport,
            channel.scratch,
            tag=tag,
            timeout_s=timeout_s,
            instructions=instructions,
        )
        if staged is None:
            reduction.finish(message, size)

    def close(self, timeout_s: float) -> None:
        """Finish submitted collectives within the limit, then abort the rest; safe to call twice.

        A group that was aborted or has failed has nothing to finish, and is not waited for.
        """
        if self._end.error is not None:
            timeout_s = min(timeout_s, _ABORT_TIMEOUT_S)
        for channel in self._channels:
            channel.stop_accepting()
        deadline = time.monotonic() + timeout_s
        if not all(channel.wait_finished(max(0.0, deadline - time.monotonic())) for channel in self._channels):
            self._end.destroy()
            self._selector.abort()
            for channel in self._channels:  # before any wait: it may depend on the result of another one
                if not channel.wait_finished(0.0):
                    channel.abort()
            self._native.abort()
        for channel in self._channels:
            channel.close(timeout_s)
        self._callbacks.close(timeout_s)
        self._channels = []
        self._selector.flush_timings()

    def close_inherited(self) -> None:
        """Close this process's ends of the connections only: for a child after a fork."""
        for channel in self._channels:
            channel.close_inherited()

    def _run_job(self, job: CollectiveJob, channel: CollectiveChannel) -> BaseException | None:
        """Run a job unless the group has ended; return None if it succeeded."""
        try:
            return self._end.repeated_error(job.operation) if self._end.error else self._run_and_handle(job, channel)
        finally:
            job.on_finished()

    def _run_and_handle(self, job: CollectiveJob, channel: CollectiveChannel) -> CommunicationError | None:
        try:
            job.run(channel)
        except TransferFailedError as failure:
            return self._end.fail(failure, job.operation, job.timeout_s)
        except MismatchError as mismatch:
            peer = self._group.rank_text(mismatch.peer)
            error = DisagreementError(f"{job.operation}: {peer} runs something else: {mismatch}")
            return self._end.disagree(error, job.operation)
        except DisagreementError as disagreement:
            return self._end.disagree(disagreement, job.operation)
        except Exception as failure:
            return self._end.fail_alone(failure, job.operation)
        return None

    def _abort_connections(self) -> None:
        for channel in self._channels:
            channel.abort()
        self._selector.abort()
        self._selector.flush_timings()

    def _fulfil_program(self, program: Future[CompiledProgram], *arguments: Any) -> None:
        """Compile the program that other collectives may already wait for; they fail with this one."""
        try:
            program.set_result(self._compile(*arguments))
        except BaseException as error:
            program.set_exception(error)
            raise

    def _compile(
        self,
        channel: CollectiveChannel,
        message: Tensor,
        reduction: ReduceOperation,
        decision: ScheduleDecision,
        number: int,
        timeout_s: float,
    ) -> CompiledProgram:
        """Compile the program for messages like this one, and check that the neighbours have the same intent."""
        choice = decision.choice
        schedule, transfers = self._rank_part(choice.schedule, decision.plan, decision.version)
        program = compile_program(schedule, transfers, message.numel(), choice.pipelining, self._group.same_node_ranks)
        intent = CollectiveIntent(
            operation=reduction.name,
            dtype=str(message.dtype),
            num_elements=message.numel(),
            schedule=choice.schedule,
            digest=schedule.digest,
            pipelining=", ".join(f"{name} {value}" for name, value in asdict(choice.pipelining).items()),
        )
        if self._group.group_size > 1:
            check_agreement(
                intent,
                self._group,
                channel.transport,
                tag=executor.make_tag(number, executor.NO_SIGNATURE),
                timeout_s=timeout_s,
            )
        self._log_agreement(schedule, message.nbytes)
        bounds = bridge.segment_bounds(message.numel(), choice.num_segments)
        return CompiledProgram(program, executor.make_signature(str(intent)), bounds)

    def _rank_part(
        self, schedule_name: str, plan: planning.Plan, version: int
    ) -> tuple[schedules.Schedule, tuple[schedules.Transfer, ...]]:
        if (version, schedule_name) not in self._rank_parts:
            schedule = plan.generate(schedule_name)
            schedules.verify(schedule)
            part = schedule, schedules.project_rank(schedule, self._group.group_rank)
            # The schedules of earlier plans are dropped.
            kept = {key: old for key, old in self._rank_parts.items() if key[0] == version}
            self._rank_parts = {**kept, (version, schedule_name): part}
            return part
        return self._rank_parts[version, schedule_name]

    def _log_agreement(self, schedule: schedules.Schedule, num_bytes: int) -> None:
        if self._log is not None and self._group.group_rank == 0:
            rank = self._group.own_info.global_rank
            fields = {"schedule": schedule.name, "digest": schedule.digest, "bytes": num_bytes}
            self._log.write("schedule_agreed", rank=rank, group=self._counters.group, **fields)
