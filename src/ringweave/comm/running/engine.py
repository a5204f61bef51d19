"""Runs the collectives of one group by schedules, several at a time."""

# Longer than a file should be: what begins a collective and what ends a group are read beside each other.

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup, Work

from ringweave import planning, schedules
from ringweave.comm.adapting.consulting import Council
from ringweave.comm.adapting.directing import Asked, Decision, Director, Ticket
from ringweave.comm.adapting.hosting import Hosts
from ringweave.comm.counters import Counters
from ringweave.comm.faults import FaultBoard, Report
from ringweave.comm.members import Members
from ringweave.comm.running import tags
from ringweave.comm.running.agreement import Intent, agree
from ringweave.comm.running.completing import Completer
from ringweave.comm.running.device import check_dtype, finished_work, run_rounds
from ringweave.comm.running.executor import run_program
from ringweave.comm.running.keeping import Promises
from ringweave.comm.running.lanes import Job, Lane
from ringweave.comm.running.memory import flatten, write_back
from ringweave.comm.running.reductions import Reduction
from ringweave.comm.running.uses import Compiled, Use
from ringweave.comm.transport.seam import MismatchError, TransferFailedError, Transport
from ringweave.comm.works import PendingWork
from ringweave.errors import CommunicationError, DisagreementError
from ringweave.schedules.programs import compile_program
from ringweave.telemetry.events import EventLog

NUM_LANES = 2
"""Collectives of one group that may be on the wire at once."""

_CUT_S = 5.0
"""How long `close` waits for lanes that were cut: they end at once, unless they are in what cannot be cut."""


class Engine:
    """The scheduled collectives of one group on one rank.

    Collectives are numbered in the order of the calls, which is the same on all ranks, as torch.distributed asks for.
    The oldest one that is not finished is being run by everybody, so there is always progress.
    """

    def __init__(
        self,
        members: Members,
        director: Director,
        connect: Callable[[int], Transport],
        hosts: Hosts,
        board: FaultBoard,
        counters: Counters,
        log: EventLog | None = None,
    ) -> None:
        """`director` decides what runs; `connect` a lane's transport; `hosts` is the library underneath."""
        self.counters = counters
        self._members = members
        self._director = director
        self._hosts = hosts
        self._board = board
        self._log = log
        self._completer = Completer(f"ringweave-{counters.group}-done")
        self._lanes = [
            Lane(f"ringweave-{counters.group}-{index}", connect(index), self._outcome_of, self._completer)
            for index in range(NUM_LANES)
        ]
        self._parts: dict[tuple[int, str], tuple[schedules.Schedule, tuple[schedules.Transfer, ...]]] = {}
        self._version, self._num_exchanges = 1, 0
        self._idle = 0
        """The lane that the newest collective is not in."""
        self._plans: Promises[Compiled] = Promises()
        self._order = threading.Lock()
        self._ending = threading.Lock()
        self._broken: CommunicationError | None = None

    def allreduce(self, tensor: Tensor, op: Any, reduction: Reduction, asked: Asked, timeout_s: float) -> PendingWork:
        """Reduce `tensor` over the group, in place, by the schedule that the director decides on.

        Args:
            tensor: On the CPU; any shape and strides.
            op: The reduction as torch names it.
            reduction: How contributions are combined.
            asked: What the director is to know.
            timeout_s: Bound on the whole collective, from when it starts to run.
        """
        use = Use(tensor, op, reduction)
        work = PendingWork([tensor])
        with self._order:  # the lanes get collectives in the order of their numbers
            ticket = self._director.admit(asked, lambda decision: self._promise(use, decision), timeout_s)
            how = ticket.decision.choice.schedule if ticket.decision else "a schedule to be tried"
            doing = f"allreduce #{ticket.number} ({reduction.name}, {tensor.numel()} x {tensor.dtype}, {how})"
            job = Job(lambda lane: self._run(ticket, use, lane, timeout_s), doing, work, use.end)
            lane = ticket.number % NUM_LANES  # dealt to the lanes in turn
            self._idle = (lane + 1) % NUM_LANES
            return self._submit(job, lane)

    def settle(self) -> None:
        """Wait for the plan of the group.

        Raises:
            PeerError: It did not come in time, or before the group was aborted.
        """
        _ = self._director.plan

    def exchange(self, own: Tensor, timeout_s: float) -> Tensor:
        """(group_size, width): what each rank says, (width,), a few words; see `Council.gather`.

        Beside the newest collective, which need not be done. Blocks.
        """
        said: list[Tensor] = []
        with self._order:
            self._num_exchanges += 1
            number = self._num_exchanges
            tag, doing = tags.tag(number, tags.EXCHANGE), f"exchange #{number} ({own.numel()} x {own.dtype})"

            def run(lane: Lane) -> None:
                said.append(Council(self._members, lane.transport, tag=tag, timeout_s=timeout_s).gather(own))

            work = self._submit(Job(run, doing, PendingWork([own]), lambda: None), self._idle)
        work.wait()
        return said[0]

    def _submit(self, job: Job, lane: int) -> PendingWork:
        """Let a lane run it, unless the group has ended; in the order of the calls."""
        if self._broken is None:
            self._lanes[lane].submit(job)
        else:
            job.work.settle(self._again(job.doing))
            job.work.resolve()
        return job.work

    def _promise(self, use: Use, decision: Decision) -> None:
        """Note who makes the program for this kind of message; called in the order of the collectives."""
        if decision.choice.schedule == schedules.HOST:
            return
        choice, tensor = decision.choice, use.tensor
        if decision.version != self._version:
            self._version, self._plans = decision.version, Promises()  # those of another plan are not used again
        kind = (choice, tensor.numel(), tensor.dtype, use.reduction.name)
        use.promised, use.is_first = self._plans.look_up(kind, choice.num_segments * self._members.group_size)

    def _run(self, ticket: Ticket, use: Use, lane: Lane, timeout_s: float) -> None:
        """One collective, in the thread of its lane."""
        tag = tags.tag(ticket.number, tags.UNSIGNED)
        decision = self._director.decide(ticket, lane.transport, tag=tag, timeout_s=timeout_s)
        message = flatten(use.tensor)
        index = ticket.number % NUM_LANES
        plan = None
        if use.promised is None:
            self._hosts.prepare(index, lambda: self._director.meet(lane.transport, tag=tag, timeout_s=timeout_s))
        else:
            if use.is_first:
                self._keep_promise(use.promised, lane, message, use.reduction, decision, ticket.number, timeout_s)
            plan = use.promised.result()
            lane.transport.connect(plan.program.peers, timeout_s)
        if decision.is_trial:
            self._director.meet(lane.transport, tag=tag, timeout_s=timeout_s)
        started_s = time.monotonic()
        if plan is None:
            self._hosts.allreduce(index, message, use.op, timeout_s)
        else:
            self._run_program(plan, message, use.reduction, lane, ticket.number, timeout_s)
        seconds = time.monotonic() - started_s
        write_back(message, use.tensor)
        self.counters.count(decision.choice.schedule, message.nbytes, plan.program.num_sends if plan else 0)
        self._director.finish(ticket, seconds)

    def _run_program(
        self, plan: Compiled, message: Tensor, reduction: Reduction, lane: Lane, number: int, timeout_s: float
    ) -> None:
        reduction.prepare(message)
        transport, tag = lane.transport, tags.tag(number, plan.signature)
        run_program(plan.program, message, reduction.combine, transport, lane.scratch, tag=tag, timeout_s=timeout_s)
        reduction.finish(message, self._members.group_size)

    def allreduce_on_device(self, tensor: Tensor, reduction: Reduction, name: str, library: ProcessGroup) -> Work:
        """Reduce a tensor of an accelerator by a schedule whose messages go by its library, round by round.

        Args:
            tensor: On the accelerator; any shape and strides.
            reduction: How contributions are combined.
            name: Of the schedule.
            library: Sends and receives there.

        Raises:
            CommunicationError: The library sends no messages of this dtype.
        """
        check_dtype(reduction, tensor.dtype)
        schedule, transfers = self._part_of(name, self._director.plan, version=1)
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
        report = Report(doing=doing, suspect=failure.peer, hung=failure.hung)
        return self._end(report, lambda: self._board.explain(failure, doing), failure)

    def close(self, timeout_s: float) -> None:
        """Finish what was submitted if that takes no longer, then cut what is left; safe to call twice.

        A group that was aborted or has failed has nothing to finish, and is not waited for.
        """
        if self._broken is not None:
            timeout_s = min(timeout_s, _CUT_S)
        destroyed = CommunicationError("process group: it was destroyed. Make a new one.")
        for lane in self._lanes:
            lane.end()
        deadline = time.monotonic() + timeout_s
        if not all(lane.wait_ended(max(0.0, deadline - time.monotonic())) for lane in self._lanes):
            self._broken = self._broken or destroyed  # so that nobody looks for who is to blame
            self._board.give_up()
            self._director.cut()
            for lane in self._lanes:  # before any is waited for: it may wait for what another one makes
                if not lane.wait_ended(0.0):
                    lane.abort()
            self._hosts.cut()
        for lane in self._lanes:
            lane.close(timeout_s)
        self._hosts.close()
        self._completer.close(timeout_s)
        self._lanes = []
        self._broken = self._broken or destroyed
        self.counters.flush()
        self._director.flush()

    def forget(self) -> None:
        """Close this process's ends of the connections only: for a child after a fork."""
        for lane in self._lanes:
            lane.forget()

    def abort(self) -> None:
        """Cut the connections at once; what is in flight fails, and so does what comes after."""
        self._broken = self._broken or CommunicationError("process group: aborted. Make a new one.")
        self._board.give_up()
        self._cut()

    def _outcome_of(self, job: Job, lane: Lane) -> BaseException | None:
        """Run a job unless the group has ended; None if it went well."""
        try:
            return self._again(job.doing) if self._broken else self._attempt(job, lane)
        finally:
            job.end()

    def _attempt(self, job: Job, lane: Lane) -> CommunicationError | None:
        try:
            job.run(lane)
        except TransferFailedError as failure:
            return self.fail(failure, job.doing)
        except MismatchError as mismatch:
            peer = self._members.name(mismatch.peer)
            return self._disagree(DisagreementError(f"{job.doing}: {peer} runs something else: {mismatch}"), job)
        except DisagreementError as disagreement:
            return self._disagree(disagreement, job)
        except Exception as failure:
            return self._give_up(failure, job)
        return None

    def _give_up(self, cause: Exception, job: Job) -> CommunicationError:
        """Something of this rank's own failed, such as its memory: the others must not wait for it."""
        own, text = self._members.name(self._members.group_rank), f"{type(cause).__name__}: {cause}"
        error = CommunicationError(f"{job.doing}: {own} failed: {text}. Mend what failed there.")
        return self._end(Report(doing=job.doing, suspect=None, failure=text), lambda: error, cause)

    def _disagree(self, error: DisagreementError, job: Job) -> CommunicationError:
        report = Report(doing=job.doing, suspect=None, disagreement=str(error))
        return self._end(report, lambda: error, error.__cause__)

    def _end(
        self, report: Report, explain: Callable[[], CommunicationError], cause: BaseException | None
    ) -> CommunicationError:
        """End the group for the first failure of this rank, and tell the others of that one alone.

        To end it makes what else is in flight fail, with the wrong peers and reasons. That waits here until it is known
        why the group ended, and says so.
        """
        with self._ending:
            if self._broken is not None:
                return self._again(report.doing)
            self._board.report(report)
            self._cut()
            error = explain()
            error.__cause__ = cause
            return self._break(error)

    def _cut(self) -> None:
        for lane in self._lanes:
            lane.abort()
        self._director.cut()
        self._hosts.cut()

    def _break(self, error: CommunicationError) -> CommunicationError:
        self._broken = self._broken or error
        self.counters.flush()
        self._director.flush()
        if self._log is not None:
            own = self._members.own
            where = {"rank": own.global_rank, "node": own.place.node}
            self._log.write("communication_failed", **where, group=self.counters.group, text=str(error))
        return error

    def _again(self, doing: str) -> CommunicationError:
        assert self._broken is not None
        error = type(self._broken)(f"{doing}: this process group has failed before: {self._broken}")
        error.__cause__ = self._broken
        return error

    def _keep_promise(self, promised: Future[Compiled], *what: Any) -> None:
        """Make the plan that other collectives may be waiting for already; they fail with us if we fail."""
        try:
            promised.set_result(self._make_plan(*what))
        except BaseException as error:
            promised.set_exception(error)
            raise

    def _make_plan(
        self, lane: Lane, message: Tensor, reduction: Reduction, decision: Decision, number: int, timeout_s: float
    ) -> Compiled:
        """Compile the program for messages like this one, and make sure that the neighbours intend the same."""
        choice = decision.choice
        schedule, transfers = self._part_of(choice.schedule, decision.plan, decision.version)
        program = compile_program(schedule, transfers, message.numel(), choice.pipelining, self._members.neighbours)
        intent = Intent(
            operation=reduction.name,
            dtype=str(message.dtype),
            num_elements=message.numel(),
            schedule=choice.schedule,
            digest=schedule.digest,
            pipelining=", ".join(f"{name} {value}" for name, value in asdict(choice.pipelining).items()),
        )
        if self._members.group_size > 1:
            agree(intent, self._members, lane.transport, tag=tags.tag(number, tags.UNSIGNED), timeout_s=timeout_s)
        self._note_agreement(schedule, message.nbytes)
        return Compiled(program, tags.signature(str(intent)))

    def _part_of(
        self, name: str, plan: planning.Plan, version: int
    ) -> tuple[schedules.Schedule, tuple[schedules.Transfer, ...]]:
        if (version, name) not in self._parts:
            schedule = plan.generate(name)
            schedules.verify(schedule)
            part = schedule, schedules.project(schedule, self._members.group_rank)
            kept = {key: old for key, old in self._parts.items() if key[0] == version}  # not those of plans before
            self._parts = {**kept, (version, name): part}
            return part
        return self._parts[version, name]

    def _note_agreement(self, schedule: schedules.Schedule, num_bytes: int) -> None:
        if self._log is not None and self._members.group_rank == 0:
            rank = self._members.own.global_rank
            fields = {"schedule": schedule.name, "digest": schedule.digest, "bytes": num_bytes}
            self._log.write("schedule_agreed", rank=rank, group=self.counters.group, **fields)
