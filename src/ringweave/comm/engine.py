"""Runs the collectives of one group by schedules, in threads of its own, several at a time."""

import itertools
import queue
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from ringweave import schedules
from ringweave.comm.agreement import Intent, agree
from ringweave.comm.choosing import Choice
from ringweave.comm.counters import Counters
from ringweave.comm.executor import run_program
from ringweave.comm.faults import FaultBoard, Report
from ringweave.comm.members import Members
from ringweave.comm.programs import Pipelining, Program, compile_program
from ringweave.comm.reductions import Reduction
from ringweave.comm.transport import TransferFailedError, Transport
from ringweave.comm.works import PendingWork
from ringweave.errors import CommunicationError, DisagreementError
from ringweave.telemetry.events import EventLog

NUM_THREADS = 2
"""Collectives of one group that may be on the wire at once."""

_TAG_BITS = 31
_SIGNATURE_BITS = 12
_CLOSING_S = 2.0


@dataclass(frozen=True, slots=True)
class _Plan:
    """What this rank runs for one kind of message."""

    program: Program
    signature: int
    """Goes into the tag, so that messages of ranks that run different things never meet."""


@dataclass(frozen=True, slots=True)
class _Job:
    """A collective that waits for a thread."""

    run: Callable[[], None]
    doing: str
    work: PendingWork


class Engine:
    """The scheduled collectives of one group on one rank.

    Jobs start in the order of submission, which is the same on all ranks as for every torch.distributed collective;
    the oldest one that is not finished is therefore being run by everybody.
    """

    def __init__(
        self,
        members: Members,
        connect: Callable[[], Transport],
        cut_host: Callable[[], None],
        board: FaultBoard,
        counters: Counters,
        group: str,
        log: EventLog | None = None,
    ) -> None:
        self.counters = counters
        self._members = members
        self._connect = connect
        self._cut_host = cut_host
        self._board = board
        self._group = group
        self._log = log
        self._lock = threading.Lock()
        self._transport: Transport | None = None
        self._parts: dict[str, tuple[schedules.Schedule, tuple[schedules.Transfer, ...]]] = {}
        self._plans: dict[tuple[Choice, int, torch.dtype, str], Future[_Plan]] = {}
        self._sequences = itertools.count(1)
        self._broken: CommunicationError | None = None
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def allreduce(self, tensor: Tensor, reduction: Reduction, choice: Choice, timeout_s: float) -> PendingWork:
        """Reduce `tensor` over the group, in place, by the chosen schedule.

        Args:
            tensor: On the CPU; any shape and strides.
            reduction: How contributions are combined.
            choice: Schedule and segments, the same on all ranks.
            timeout_s: Bound on the whole collective, from when it starts to run.
        """
        sequence = next(self._sequences)
        doing = f"allreduce #{sequence} ({reduction.name}, {tensor.numel()} x {tensor.dtype}, {choice.schedule})"
        key = (choice, tensor.numel(), tensor.dtype, reduction.name)
        first_use = key not in self._plans
        promised = self._plans.setdefault(key, Future())

        def run() -> None:
            message = tensor.detach().contiguous().view(-1)
            if first_use:
                promised.set_result(self._make_plan(message, reduction, choice, sequence, timeout_s))
            plan = promised.result(timeout_s)
            tag = _tag(sequence, plan.signature)
            reduction.prepare(message)
            run_program(plan.program, message, reduction.combine, self._connected(), tag=tag, timeout_s=timeout_s)
            reduction.finish(message, self._members.group_size)
            self.counters.count(choice.schedule, message.nbytes, plan.program.num_sends)
            if message.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(message.view(tensor.shape))

        return self._submit(run, doing, PendingWork([tensor]))

    def close(self) -> None:
        """Finish what was submitted as far as it can, then drop the connections; safe to call twice."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(_CLOSING_S)
        self._threads.clear()
        if self._transport is not None:
            self._transport.close()
        self.counters.flush()

    def abort(self) -> None:
        """Drop the connections at once; what is in flight fails."""
        self._broken = self._broken or CommunicationError(f"process group {self._group}: aborted.")
        self._cut()

    def _submit(self, run: Callable[[], None], doing: str, work: PendingWork) -> PendingWork:
        if self._broken is not None:
            work.finish(self._again(doing))
            return work
        if len(self._threads) < NUM_THREADS:
            name = f"ringweave-{self._group}-{len(self._threads)}"
            self._threads.append(threading.Thread(target=self._serve, name=name, daemon=True))
            self._threads[-1].start()
        self._jobs.put(_Job(run, doing, work))
        return work

    def _serve(self) -> None:
        with torch.inference_mode():
            while (job := self._jobs.get()) is not None:
                job.work.finish(self._error_of(job))

    def _error_of(self, job: _Job) -> BaseException | None:
        if self._broken is not None:
            return self._again(job.doing)
        try:
            job.run()
        except TransferFailedError as failure:
            return self.fail(failure, job.doing)
        except DisagreementError as disagreement:
            self._board.report(Report(doing=job.doing, suspect=None, disagreement=str(disagreement)))
            return self._break(disagreement)
        except CommunicationError as failure:
            return self._break(failure)
        except Exception as bug:
            return bug
        return None

    def fail(self, failure: TransferFailedError, doing: str) -> CommunicationError:
        """End this group: tell the others, cut every connection so that nobody waits for us, and name who is to blame.

        Args:
            failure: The message that did not get through.
            doing: The collective in words.
        """
        self._board.report(Report(doing=doing, suspect=failure.peer, hung=failure.hung))
        self._cut()
        error = self._board.explain(failure, doing)
        error.__cause__ = failure
        return self._break(error)

    def _cut(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        self._cut_host()

    def _break(self, error: CommunicationError) -> CommunicationError:
        self._broken = self._broken or error
        self._cut()
        if self._log is not None:
            own = self._members.group_rank
            where = {"rank": self._members.global_ranks[own], "node": self._members.nodes[own]}
            self._log.write("communication_failed", **where, group=self._group, text=str(error))
        return error

    def _again(self, doing: str) -> CommunicationError:
        assert self._broken is not None
        return type(self._broken)(f"{doing}: this process group has failed before: {self._broken}")

    def _connected(self) -> Transport:
        with self._lock:
            if self._transport is None:
                self._transport = self._connect()
            return self._transport

    def _make_plan(
        self, message: Tensor, reduction: Reduction, choice: Choice, sequence: int, timeout_s: float
    ) -> _Plan:
        """Compile the program for messages like this one, and make sure that the neighbours intend the same."""
        schedule, transfers = self._part_of(choice.schedule)
        pipelining = Pipelining(num_segments=choice.num_segments)
        program = compile_program(schedule, transfers, message.numel(), pipelining)
        intent = Intent(
            operation=reduction.name,
            dtype=str(message.dtype),
            num_elements=message.numel(),
            schedule=choice.schedule,
            digest=schedule.digest,
            pipelining=", ".join(f"{name} {value}" for name, value in asdict(pipelining).items()),
        )
        if self._members.group_size > 1:
            agree(intent, self._members, self._connected(), tag=_tag(sequence, 0), timeout_s=timeout_s)
        self._note_agreement(schedule, message.nbytes)
        return _Plan(program, 1 + zlib.crc32(str(intent).encode()) % (2**_SIGNATURE_BITS - 1))

    def _part_of(self, name: str) -> tuple[schedules.Schedule, tuple[schedules.Transfer, ...]]:
        if name not in self._parts:
            schedule = schedules.generate(name, self._members.group_size)
            schedules.verify(schedule)
            self._parts[name] = schedule, schedules.project(schedule, self._members.group_rank)
        return self._parts[name]

    def _note_agreement(self, schedule: schedules.Schedule, num_bytes: int) -> None:
        if self._log is not None and self._members.group_rank == 0:
            rank = self._members.global_ranks[0]
            fields = {"schedule": schedule.name, "digest": schedule.digest, "bytes": num_bytes}
            self._log.write("schedule_agreed", rank=rank, group=self._group, **fields)


def _tag(sequence: int, signature: int) -> int:
    """Of 31 bits: which collective, and what is run in it."""
    return (sequence << _SIGNATURE_BITS | signature) & (2**_TAG_BITS - 1)
