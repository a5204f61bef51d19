"""Runs the collectives of one group by schedules, several at a time."""

import itertools
import time
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup, Work

from ringweave import schedules
from ringweave.comm.choosing import GroupPlan
from ringweave.comm.counters import Counters
from ringweave.comm.faults import FaultBoard, Report
from ringweave.comm.members import Members
from ringweave.comm.running.agreement import Intent, agree
from ringweave.comm.running.completing import Completer
from ringweave.comm.running.device import finished_work, run_rounds
from ringweave.comm.running.executor import run_program
from ringweave.comm.running.keeping import Promises
from ringweave.comm.running.lanes import Job, Lane
from ringweave.comm.running.memory import flatten, write_back
from ringweave.comm.running.reductions import Reduction
from ringweave.comm.transport.seam import MismatchError, TransferFailedError, Transport
from ringweave.comm.works import PendingWork
from ringweave.errors import CommunicationError, DisagreementError
from ringweave.planning import Choice
from ringweave.schedules.programs import Pipelining, Program, compile_program
from ringweave.telemetry.events import EventLog

NUM_LANES = 2
"""Collectives of one group that may be on the wire at once."""

_SIGNATURE_BITS = 32


@dataclass(frozen=True, slots=True)
class _Plan:
    """What this rank runs for one kind of message."""

    program: Program
    signature: int
    """Goes into the tag, so that ranks that run different things find out at the first message."""


class Engine:
    """The scheduled collectives of one group on one rank.

    Collectives are numbered in the order of the calls, which is the same on all ranks, as torch.distributed asks for.
    The oldest one that is not finished is being run by everybody, so there is always progress.
    """

    def __init__(
        self,
        members: Members,
        plan: GroupPlan,
        connect: Callable[[int], Transport],
        cut_host: Callable[[], None],
        board: FaultBoard,
        counters: Counters,
        log: EventLog | None = None,
    ) -> None:
        """`plan` makes the schedules; `connect` a lane's transport; `cut_host` breaks what the host library does."""
        self.counters = counters
        self._members = members
        self._plan = plan
        self._connect = connect
        self._cut_host = cut_host
        self._board = board
        self._log = log
        self._lanes: list[Lane] = []
        self._completer = Completer(f"ringweave-{counters.group}-done")
        self._parts: dict[str, tuple[schedules.Schedule, tuple[schedules.Transfer, ...]]] = {}
        self._plans: Promises[_Plan] = Promises()
        self._numbers = itertools.count(1)
        self._broken: CommunicationError | None = None

    def allreduce(self, tensor: Tensor, reduction: Reduction, choice: Choice, timeout_s: float) -> PendingWork:
        """Reduce `tensor` over the group, in place, by the chosen schedule.

        Args:
            tensor: On the CPU; any shape and strides.
            reduction: How contributions are combined.
            choice: Schedule and segments, the same on all ranks.
            timeout_s: Bound on the whole collective, from when it starts to run.
        """
        number = next(self._numbers)
        doing = f"allreduce #{number} ({reduction.name}, {tensor.numel()} x {tensor.dtype}, {choice.schedule})"
        kind = (choice, tensor.numel(), tensor.dtype, reduction.name)
        promised, is_first_use = self._plans.look_up(kind, choice.num_segments * self._members.group_size)

        def run(lane: Lane) -> None:
            message = flatten(tensor)
            if is_first_use:
                self._keep_promise(promised, lane, message, reduction, choice, number, timeout_s)
            plan = promised.result()
            transport = lane.transport()
            transport.connect(plan.program.peers)
            reduction.prepare(message)
            tag = _tag(number, plan.signature)
            run_program(plan.program, message, reduction.combine, transport, lane.scratch, tag=tag, timeout_s=timeout_s)
            reduction.finish(message, self._members.group_size)
            self.counters.count(choice.schedule, message.nbytes, plan.program.num_sends)
            write_back(message, tensor)

        job = Job(run, doing, PendingWork([tensor]), promised.cancel)
        if self._broken is not None:
            job.work.settle(self._again(doing))
            job.work.resolve()
        else:
            self._lane(number).submit(job)
        return job.work

    def allreduce_on_device(self, tensor: Tensor, reduction: Reduction, name: str, library: ProcessGroup) -> Work:
        """Reduce a tensor of an accelerator by a schedule whose messages go by its library, round by round.

        Args:
            tensor: On the accelerator; any shape and strides.
            reduction: How contributions are combined.
            name: Of the schedule.
            library: Sends and receives there.
        """
        schedule, transfers = self._part_of(name)
        message = flatten(tensor)
        reduction.prepare(message)
        run_rounds(schedule, transfers, message, reduction.combine, library)
        reduction.finish(message, self._members.group_size)
        self.counters.count(name, message.nbytes, sum(transfer.sends for transfer in transfers))
        write_back(message, tensor)
        return finished_work(tensor)

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

    def close(self, timeout_s: float) -> None:
        """Finish what was submitted if that takes no longer, then cut what is left; safe to call twice."""
        destroyed = CommunicationError("process group: it was destroyed. Make a new one.")
        for lane in self._lanes:
            lane.end()
        deadline = time.monotonic() + timeout_s
        if not all(lane.wait_ended(max(0.0, deadline - time.monotonic())) for lane in self._lanes):
            self._broken = self._broken or destroyed  # so that nobody looks for who is to blame
            self._board.give_up()
        for lane in self._lanes:
            lane.close(timeout_s)
        self._completer.close(timeout_s)
        self._lanes = []
        self._broken = self._broken or destroyed
        self.counters.flush()

    def forget(self) -> None:
        """Close this process's ends of the connections only: for a child after a fork."""
        for lane in self._lanes:
            lane.forget()

    def abort(self) -> None:
        """Cut the connections at once; what is in flight fails, and so does what comes after."""
        self._broken = self._broken or CommunicationError("process group: aborted. Make a new one.")
        self._board.give_up()
        self._cut()

    def _lane(self, number: int) -> Lane:
        """Collectives are dealt to the lanes in turn."""
        if not self._lanes:
            self._lanes = [self._new_lane(index) for index in range(NUM_LANES)]
        return self._lanes[number % NUM_LANES]

    def _new_lane(self, index: int) -> Lane:
        name = f"ringweave-{self.counters.group}-{index}"
        return Lane(name, lambda: self._connect(index), self._outcome_of, self._completer)

    def _outcome_of(self, job: Job, lane: Lane) -> BaseException | None:
        """Run a job; None if it went well."""
        if self._broken is not None:
            job.abandon()
            return self._again(job.doing)
        try:
            job.run(lane)
        except TransferFailedError as failure:
            return self._again(job.doing) if self._broken else self.fail(failure, job.doing)
        except MismatchError as mismatch:
            peer = self._members.name(mismatch.peer)
            return self._disagree(DisagreementError(f"{job.doing}: {peer} runs something else: {mismatch}"), job)
        except DisagreementError as disagreement:
            return self._disagree(disagreement, job)
        except Exception as failure:
            return self._again(job.doing) if self._broken else self._give_up(failure, job)
        return None

    def _give_up(self, cause: Exception, job: Job) -> CommunicationError:
        """Something of this rank's own failed, such as its memory: the others must not wait for it."""
        own, text = self._members.name(self._members.group_rank), f"{type(cause).__name__}: {cause}"
        self._board.report(Report(doing=job.doing, suspect=None, failure=text))
        error = CommunicationError(f"{job.doing}: {own} failed: {text}. Mend what failed there.")
        error.__cause__ = cause
        return self._break(error)

    def _disagree(self, error: DisagreementError, job: Job) -> CommunicationError:
        self._board.report(Report(doing=job.doing, suspect=None, disagreement=str(error)))
        return self._break(error)

    def _cut(self) -> None:
        for lane in self._lanes:
            lane.abort()
        self._cut_host()

    def _break(self, error: CommunicationError) -> CommunicationError:
        self._broken = self._broken or error
        self._cut()
        self.counters.flush()
        if self._log is not None:
            own = self._members.own
            where = {"rank": own.global_rank, "node": own.place.node}
            self._log.write("communication_failed", **where, group=self.counters.group, text=str(error))
        return error

    def _again(self, doing: str) -> CommunicationError:
        assert self._broken is not None
        return type(self._broken)(f"{doing}: this process group has failed before: {self._broken}")

    def _keep_promise(self, promised: "Future[_Plan]", *what: Any) -> None:
        """Make the plan that other collectives may be waiting for already; they fail with us if we fail."""
        try:
            promised.set_result(self._make_plan(*what))
        except BaseException as error:
            promised.set_exception(error)
            raise

    def _make_plan(
        self, lane: Lane, message: Tensor, reduction: Reduction, choice: Choice, number: int, timeout_s: float
    ) -> _Plan:
        """Compile the program for messages like this one, and make sure that the neighbours intend the same."""
        schedule, transfers = self._part_of(choice.schedule)
        pipelining = Pipelining(num_segments=choice.num_segments, lag=choice.lag, window=choice.window)
        program = compile_program(schedule, transfers, message.numel(), pipelining, self._members.neighbours)
        intent = Intent(
            operation=reduction.name,
            dtype=str(message.dtype),
            num_elements=message.numel(),
            schedule=choice.schedule,
            digest=schedule.digest,
            pipelining=", ".join(f"{name} {value}" for name, value in asdict(pipelining).items()),
        )
        if self._members.group_size > 1:
            agree(intent, self._members, lane.transport(), tag=_tag(number, 0), timeout_s=timeout_s)
        self._note_agreement(schedule, message.nbytes)
        return _Plan(program, 1 + zlib.crc32(str(intent).encode()) % (2**_SIGNATURE_BITS - 1))

    def _part_of(self, name: str) -> tuple[schedules.Schedule, tuple[schedules.Transfer, ...]]:
        if name not in self._parts:
            schedule = self._plan.get().generate(name)
            schedules.verify(schedule)
            self._parts[name] = schedule, schedules.project(schedule, self._members.group_rank)
        return self._parts[name]

    def _note_agreement(self, schedule: schedules.Schedule, num_bytes: int) -> None:
        if self._log is not None and self._members.group_rank == 0:
            rank = self._members.own.global_rank
            fields = {"schedule": schedule.name, "digest": schedule.digest, "bytes": num_bytes}
            self._log.write("schedule_agreed", rank=rank, group=self.counters.group, **fields)


def _tag(number: int, signature: int) -> int:
    """Which collective, and what is run in it."""
    return number << _SIGNATURE_BITS | signature
