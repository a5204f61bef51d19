"""Collective engine: runs the collectives of one group by schedules, several at a time."""

import queue
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ringweave import schedules
from ringweave.comm import bridge
from ringweave.comm.counters import CollectiveCounters, TrafficRecorder
from ringweave.comm.engine import executor
from ringweave.comm.engine.executor import (
    CollectiveIntent,
    ProgramCache,
    ScratchMemory,
    check_agreement,
    run_program,
)
from ringweave.comm.engine.messages import CollectiveMessage, CompiledProgram
from ringweave.comm.failure_registry import GroupEnd
from ringweave.comm.group_info import GroupInfo
from ringweave.comm.native_backend import NativeBackends
from ringweave.comm.transport.connect import NUM_CHANNELS
from ringweave.comm.transport.interface import LinkTraffic, MismatchError, TransferFailedError, Transport
from ringweave.comm.tuning.control_tree import ControlTree
from ringweave.comm.tuning.selector import CollectiveRequest, PendingCollective, ScheduleDecision, ScheduleSelector
from ringweave.comm.work import PendingWork
from ringweave.errors import CommunicationError, DisagreementError
from ringweave.planning import Plan
from ringweave.schedules.program import compile_program
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
        self.scratch, self.messages = ScratchMemory(), ScratchMemory()
        self._callbacks = callbacks
        self._run_job = run_job
        self._jobs: queue.SimpleQueue[CollectiveJob | None] = queue.SimpleQueue()
        self._name = name
        self._thread: threading.Thread | None = None
        """Made with the first job: a thread that never starts keeps its channel, and with it the group."""

    def submit(self, job: CollectiveJob) -> None:
        """Run the job after those submitted before; never called by two threads at a time."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run_jobs, name=self._name, daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def abort(self) -> None:
        """Abort the connections, from any thread."""
        self.transport.abort()

    def close_inherited(self) -> None:
        """Close this process's ends only: for a child after a fork, which must not keep its parent's alive."""
        self.transport.close()

    def stop_accepting(self) -> None:
        self._jobs.put(None)

    def wait_finished(self, timeout_s: float) -> bool:
        """Return True if all submitted jobs finish within `timeout_s`; call `stop_accepting` first."""
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self, timeout_s: float) -> None:
        """Close the connections, after `stop_accepting`; unfinished jobs fail."""
        if not self.wait_finished(0.0):
            self.abort()
            self.wait_finished(timeout_s)
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


def _combine_nothing(_mine: Tensor, _arriving: Tensor) -> None:
    """Stand for the reduction of a collective that has none: its schedules only copy."""
    raise AssertionError("a collective without a reduction has a program that reduces")


_MAX_KEPT_SCHEDULES = 128
"""Schedules whose part of this rank is kept; programs of them are kept beside."""
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
        transports: Sequence[Transport],
        native: NativeBackends,
        end: GroupEnd,
        counters: CollectiveCounters,
        log: EventLog | None = None,
    ) -> None:
        """`selector` decides schedules, `native` is the native backend.

        `transports` has one for each channel, and one more if rows are gathered beside all collectives.
        """
        self._counters = counters
        self._group = group
        self._selector = selector
        self._native = native
        self._end = end
        self._log = log
        self._callbacks = CallbackRunner(f"ringweave-{counters.group}-done")
        self._channels = [
            CollectiveChannel(f"ringweave-{counters.group}-{index}", transport, self._run_job, self._callbacks)
            for index, transport in enumerate(transports)
        ]
        self._rank_parts: dict[tuple[Any, ...], tuple[schedules.Schedule, tuple[schedules.Transfer, ...]]] = {}
        self._plan_version = 1
        self._num_exchanges: Counter[bool] = Counter()
        self._idle_channel = 0
        """Channel that does not have the newest collective."""
        self._newest_works: dict[int, weakref.ref[PendingWork]] = {}
        """Work of each channel's newest job."""
        self._programs: ProgramCache[CompiledProgram] = ProgramCache()
        self._order_lock = threading.Lock()
        if log is not None:
            counters.attach_traffic(_traffic_recorder(log, group, counters.group, self._channels))
        end.attach(self._abort_connections)

    def run(
        self, message: CollectiveMessage, results: list[Tensor], request: CollectiveRequest, timeout_s: float
    ) -> PendingWork:
        """Start a collective by the schedule that the selector decides on.

        `message`: the collective and its tensors; on the CPU, unless the message is staged.
        """
        work = PendingWork(results, message.staged)
        with self._order_lock:  # channels get collectives in the order of their numbers
            pending = self._selector.admit(
                request, lambda decision: self._reserve_program(message, decision), timeout_s
            )
            schedule = pending.decision.choice.schedule if pending.decision else "a schedule to be tried"
            content = f"{message.num_elements} x {message.dtype}, {schedule}"
            detail = f"{message.detail}, " if message.detail else ""
            operation = f"{message.kind} #{pending.number} ({detail}{content})"
            job = CollectiveJob(
                lambda channel: self._run_counted(pending, message, channel, timeout_s),
                operation,
                work,
                message.release,
                timeout_s,
            )
            channel = pending.number % NUM_CHANNELS  # assigned to the channels in turn
            if message.staged is not None and self._end.error is None:
                message.staged.reserve(channel)
            self._idle_channel = (channel + 1) % NUM_CHANNELS
            self._counters.begin_collective()
            return self._submit(job, channel)

    def wait_for_plan(self, *, is_whole: bool = False) -> Plan:
        """Return the group's plan, once it is known; see `ScheduleSelector.wait_for_plan`.

        Raises:
            PeerError: It did not come in time, or before the group was aborted.
        """
        return self._selector.wait_for_plan(is_whole=is_whole)

    def allgather_small(self, row: Tensor, timeout_s: float, *, is_aside: bool = False) -> Tensor:
        """Return a short row of each rank, (group_size, width), from (width,) of each (`ControlTree.allgather`).

        It runs beside the newest collective, which need not be done, or, aside, on a channel that no collective uses.
        Blocks.
        """
        tables: list[Tensor] = []
        with self._order_lock:
            self._num_exchanges[is_aside] += 1
            number = self._num_exchanges[is_aside]
            tag, operation = (
                executor.make_tag(number, executor.ALLGATHER_SIGNATURE),
                f"exchange #{number} ({row.numel()} x {row.dtype})",
            )

            def run(lane: CollectiveChannel) -> None:
                tables.append(ControlTree(self._group, lane.transport, tag=tag, timeout_s=timeout_s).allgather(row))

            job = CollectiveJob(run, operation, PendingWork([row]), lambda: None, timeout_s)
            work = self._submit(job, NUM_CHANNELS if is_aside else self._idle_channel)
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

    def _reserve_program(self, message: CollectiveMessage, decision: ScheduleDecision) -> None:
        """Reserve the program for this kind of message; called in the order of the collectives."""
        choice = decision.choice
        if choice.schedule == schedules.NATIVE:
            return
        if decision.version != self._plan_version:
            # Programs of another plan are not used again.
            self._plan_version, self._programs = (decision.version, ProgramCache())
        kind = (choice, message.operation, message.num_elements, message.dtype, message.block_sizes)
        message.program, message.makes_program = self._programs.get_or_reserve(
            kind, choice.num_segments * self._group.group_size
        )

    def _run_counted(self, pending: PendingCollective, message: CollectiveMessage, *others: Any) -> None:
        """Run one collective, in flight since its call."""
        try:
            self._run_collective(pending, message, *others)
        finally:
            self._counters.end_collective(message.num_bytes)

    def _run_collective(
        self, pending: PendingCollective, message: CollectiveMessage, channel: CollectiveChannel, timeout_s: float
    ) -> None:
        """Run one collective, in the thread of its channel."""
        tag = executor.make_tag(pending.number, executor.NO_SIGNATURE)
        decision = self._selector.wait_for_decision(pending, channel.transport, tag=tag, timeout_s=timeout_s)
        if pending.request.is_on_device and message.program is None:
            self._run_on_device(pending, decision, message, channel, timeout_s)
            return
        index = pending.number % NUM_CHANNELS
        elements = message.begin(index, decision.choice.num_segments, channel.messages)
        compiled = None
        if message.program is None:
            self._native.prepare(index, lambda: self._selector.barrier(channel.transport, tag=tag, timeout_s=timeout_s))
        else:
            if message.makes_program:
                self._fulfil_program(message.program, channel, message, decision, pending.number, timeout_s)
            compiled = message.program.result()
            channel.transport.connect(compiled.program.peers, timeout_s)
        if decision.is_trial:
            self._selector.barrier(channel.transport, tag=tag, timeout_s=timeout_s)
        started_s = time.monotonic()
        if compiled is None:
            message.run_natively(self._native, index, elements, timeout_s)
        else:
            self._run_program(compiled, elements, message, channel, pending.number, timeout_s)
        message.finish(elements, self._group.group_size)
        seconds = time.monotonic() - started_s
        self._counters.count(decision.choice.schedule, message.num_bytes, compiled.program.num_sends if compiled else 0)
        self._selector.record_finished(pending, seconds)

    def _run_on_device(
        self,
        pending: PendingCollective,
        decision: ScheduleDecision,
        message: CollectiveMessage,
        channel: CollectiveChannel,
        timeout_s: float,
    ) -> None:
        """Run one collective by NCCL in the order of the plan's ring, when all earlier ones have finished here."""
        staged, nccl, deadline_s = message.staged, self._native.ordered_nccl, time.monotonic() + timeout_s
        assert staged is not None, "on a device"
        assert nccl is not None, "asked for where there is one"
        self._selector.wait_for_earlier(pending)
        staged.wait_ready()
        if decision.is_trial:
            tag = executor.make_tag(pending.number, executor.NO_SIGNATURE)
            self._selector.barrier(channel.transport, tag=tag, timeout_s=timeout_s)

        def check() -> None:
            if nccl.is_aborted or time.monotonic() > deadline_s:
                text = "the group was aborted" if nccl.is_aborted else f"NCCL was not done within {timeout_s:g} s"
                raise TransferFailedError(None, text, hung=not nccl.is_aborted)

        started_s, order = time.monotonic(), decision.plan.ring_order
        staged.run_on_device(
            pending.number % NUM_CHANNELS,
            message.dtype,
            message.regions()[0],
            lambda elements: message.run_in_order(nccl, order, elements),
            check,
        )
        staged.finish()
        self._counters.count(decision.choice.schedule, message.num_bytes, 0)
        self._selector.record_finished(pending, time.monotonic() - started_s)

    def _run_program(
        self,
        compiled: CompiledProgram,
        elements: Tensor,
        message: CollectiveMessage,
        channel: CollectiveChannel,
        number: int,
        timeout_s: float,
    ) -> None:
        reduction, staged, program = message.reduction, message.staged, compiled.program
        transport, tag = channel.transport, executor.make_tag(number, compiled.signature)
        if staged is not None:  # prepares and finishes the message by segments
            marks, size = compiled.segment_marks, self._group.group_size
            instructions = bridge.paced_instructions(program, marks, staged, elements, reduction, size)
        else:
            instructions = message.instructions(program, elements)
        run_program(
            program,
            elements,
            reduction.combine if reduction else _combine_nothing,
            transport,
            channel.scratch,
            residual=message.residual,
            tag=tag,
            timeout_s=timeout_s,
            instructions=instructions,
        )

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
        error = self._end.repeated_error(job.operation) if self._end.error else self._run_and_handle(job, channel)
        try:
            job.on_finished()
        except Exception as failure:  # of a device: the thread must go on, or all who wait would for ever
            error = error or self._end.fail_alone(failure, job.operation)
        return error

    def _run_and_handle(self, job: CollectiveJob, channel: CollectiveChannel) -> CommunicationError | None:
        try:
            job.run(channel)
        except TransferFailedError as failure:
            return self._end.fail(failure, job.operation, job.timeout_s)
        except MismatchError as mismatch:
            peer = self._group.rank_text(mismatch.peer)
            error = DisagreementError(f"{job.operation}: {peer} runs something else: {mismatch}")
            return self._end.disagree(error, job.operation, may_be_own=True)
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
        message: CollectiveMessage,
        decision: ScheduleDecision,
        number: int,
        timeout_s: float,
    ) -> CompiledProgram:
        """Compile the program for messages like this one, and check that the neighbours have the same intent."""
        choice, num_elements = decision.choice, message.num_elements
        schedule, transfers = self._rank_part(message, decision)
        program = compile_program(schedule, transfers, num_elements, choice.pipelining, self._group.same_node_ranks)
        intent = CollectiveIntent(
            operation=message.operation,
            dtype=str(message.dtype),
            num_elements=num_elements,
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
        self._log_agreement(message, choice.schedule, schedule.digest)
        bounds = message.segment_bounds(choice.num_segments)
        return CompiledProgram(program, executor.make_signature(str(intent)), bounds)

    def _rank_part(
        self, message: CollectiveMessage, decision: ScheduleDecision
    ) -> tuple[schedules.Schedule, tuple[schedules.Transfer, ...]]:
        """Return the proved schedule, and this rank's transfers of it."""
        name, wire = decision.choice.schedule, decision.choice.wire
        key = (decision.version, name, message.kind, message.root, message.block_sizes, wire)
        if key not in self._rank_parts:
            schedule = decision.plan.generate(name, message.kind, message.root, message.block_sizes, wire)
            schedules.verify(schedule)
            part = schedule, schedules.project_rank(schedule, self._group.group_rank)
            # The schedules of earlier plans are dropped, and of many the oldest: each call may have other blocks.
            kept = [item for item in self._rank_parts.items() if item[0][0] == decision.version]
            self._rank_parts = dict([*kept[1 - _MAX_KEPT_SCHEDULES :], (key, part)])
            return part
        return self._rank_parts[key]

    def _log_agreement(self, message: CollectiveMessage, schedule: str, digest: str) -> None:
        if self._log is not None and self._group.group_rank == 0:
            rank = self._group.own_info.global_rank
            fields = {"collective": message.kind, "schedule": schedule, "digest": digest, "bytes": message.num_bytes}
            self._log.write("schedule_agreed", rank=rank, group=self._counters.group, **fields)


def _traffic_recorder(
    log: EventLog, group: GroupInfo, name: str, channels: Sequence[CollectiveChannel]
) -> TrafficRecorder:
    """Return the recorder of this rank; it refers to transports alone, as the group has to be freed."""
    transports, own = [channel.transport for channel in channels], group.own_info

    def read_links() -> dict[int, LinkTraffic]:
        found: dict[int, LinkTraffic] = {}
        for transport in transports:
            for peer, traffic in transport.traffic().items():
                rank = group.ranks[peer].global_rank
                found[rank] = found.get(rank, LinkTraffic()).plus(traffic)
        return found

    return TrafficRecorder(log, {"rank": own.global_rank, "node": own.location.node, "group": name}, read_links)
