"""Elastic supervision on a virtual clock, with workers that die when the test says so."""

import itertools
import signal
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

import pytest

from ringweave import environment
from ringweave.errors import LaunchError
from ringweave.launcher.outcome import RunRecorder, WorkerFailure, conclude_run, run_failure_text
from ringweave.launcher.processes import LocalLauncher
from ringweave.launcher.restarts import LEFT_EXIT_CODE, PastMembers
from ringweave.launcher.scale_requests import ScaleRequests
from ringweave.launcher.services import ServiceProcesses
from ringweave.launcher.supervise import ElasticRules, NodePlan, NodeWorkers, with_member_name
from ringweave.launcher.workers import WorkerExit, WorkerGroup, WorkerSpec, WorkerState
from ringweave.membership.membership_records import REASON_ALL_DONE, REASON_STATE_LOST

# Longer than a file should be: every way in which a worker ends is here, each with the same workers and clock.


SOON_S = 5.0
"""Shorter than what makes a death a quick one, longer than any delay in these tests."""


class AnyMember(frozenset[str]):
    """Everybody has been a member."""

    def __contains__(self, name: object) -> bool:
        return True

    def __len__(self) -> int:
        return 1


class Workers:
    """Stands where the launcher does. A script says when, in seconds, which slot ends and how (None: well).

    A number in place of a signal is an exit code. Slots of `doomed` die again as soon as they are started again, those
    of `unstartable` cannot be started so many times.
    """

    def __init__(
        self,
        num_slots: int,
        script: list[tuple[float, int, str | int | None]],
        doomed: Mapping[int, str | int] = {},
        unstartable: Mapping[int, int] = {},
    ) -> None:
        self.now_s, self.failures = 0.0, list[WorkerFailure]()
        self.pauses_at_boundary: list[signal.Signals] = []
        self.asked: list[tuple[float, int, signal.Signals]] = []
        self.started: list[tuple[float, str]] = []
        self.refused: list[float] = []
        self._unstartable = dict(unstartable)
        self._script, self._doomed = sorted(script, key=lambda each: each[0]), doomed
        self._exits: dict[int, WorkerExit | None] = dict.fromkeys(range(num_slots))

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        assert self.now_s < 1000, "it never ends"

    def observe(self) -> list[WorkerState]:
        while self._script and self._script[0][0] <= self.now_s:
            _, slot, how = self._script.pop(0)
            self._end(slot, how, stopped=False)
        return [WorkerState(global_rank=slot, exit=found) for slot, found in self._exits.items()]

    says: Mapping[int, str] = {}

    def start(self, group: WorkerGroup) -> None:
        """They run from the beginning."""

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is left anyway."""

    def pid(self, slot: int) -> int:
        return slot

    def logs(self, slot: int, num_lines: int) -> list[str]:
        return ["Traceback (most recent call last):", self.says.get(slot, "ValueError: no")]

    def restart(self, worker: WorkerSpec, argv: tuple[str, ...]) -> None:
        if self._unstartable.get(worker.global_rank, 0):
            self._unstartable[worker.global_rank] -= 1
            self.refused.append(self.now_s)
            raise LaunchError(f"worker {worker.global_rank} could not be started: no room. [python]")
        self._exits[worker.global_rank] = None
        self.started.append((self.now_s, worker.environ[environment.MEMBER]))
        if worker.global_rank in self._doomed:
            self._end(worker.global_rank, self._doomed[worker.global_rank], stopped=False)

    def signal_worker(self, slot: int, how: signal.Signals) -> None:
        self.asked.append((self.now_s, slot, how))
        if how is signal.SIGKILL:
            self._end(slot, how.name, stopped=False)

    def stop(self, how: signal.Signals) -> None:
        self.pauses_at_boundary.append(how)
        for slot in [slot for slot, found in self._exits.items() if found is None]:
            self._end(slot, how.name, stopped=True)

    def _end(self, slot: int, how: str | int | None, *, stopped: bool) -> None:
        signal_name = how if isinstance(how, str) else None
        code = None if signal_name else how or 0
        self._exits[slot] = WorkerExit(exit_code=code, signal_name=signal_name, time_s=self.now_s, was_stopped=stopped)


class Stubborn(Workers):
    """Only SIGKILL ends them."""

    on_stop: Callable[[], object]

    def stop(self, how: signal.Signals) -> None:
        if how is signal.SIGKILL:
            super().stop(how)
            return
        self.pauses_at_boundary.append(how)
        self.on_stop()


class Exits(list[WorkerState]):
    """Stands where the recorder does: the ends in the order in which they are recorded."""

    worker_exited = list.append

    def workers_started(self, pid_of: Callable[[int], int]) -> None:
        """Not of interest here."""

    def worker_started(self, worker: WorkerSpec, pid: int) -> None:
        """Likewise."""

    def close(self, **_: object) -> None:
        """Likewise."""


class Asked:
    """Stands where the desk of a run does: asked for numbers of workers at given times."""

    def __init__(self, workers: Workers, begin: int, *requests: tuple[float, int]) -> None:
        self.workers, self._clock, self._requests = begin, workers, list(requests)
        self.granted: list[tuple[int, list[int], list[int]]] = []
        self.refused: list[str] = []

    def take_request(self) -> int | None:
        due = self._requests and self._requests[0][0] <= self._clock.now_s
        return self._requests.pop(0)[1] if due else None

    def refuse_request(self, workers: int, why_not_now: str) -> bool:
        del workers
        self.refused += [why_not_now] if why_not_now else []
        return bool(why_not_now)

    def grant_request(self, workers: int, *, starting: list[int], leaving: list[int]) -> None:
        self.workers = workers
        self.granted.append((workers, starting, leaving))


def supervise(
    workers: Workers,
    num_slots: int,
    exits: Exits | None = None,
    *,
    members: Collection[str] = AnyMember(),
    says: Mapping[int, str] = {},
    given_up: list[tuple[int, str]] | None = None,
    desk: "Asked | None" = None,
    put_out: Callable[[], Collection[str]] = frozenset,
    said: list[str] | None = None,
    interrupts: list[signal.Signals] | None = None,
    services: Sequence[ServiceProcesses] = (),
) -> list[int]:
    """Supervise to the end; the slots that ended well, and those whose failures decide the outcome."""
    specs = [WorkerSpec(global_rank=slot, local_rank=slot, node="a", environ={}) for slot in range(num_slots)]
    slots = WorkerGroup(argv=("python",), workers=tuple(with_member_name(each, 0) for each in specs))
    begin = desk.workers if desk else num_slots

    def give_up(failure: WorkerFailure, why: str) -> None:
        ([] if given_up is None else given_up).append((failure.global_rank, why))

    workers.says = says
    rules = ElasticRules(
        slots=slots,
        past_members=lambda names: PastMembers(
            members=cast(frozenset[str], members), trained=cast(frozenset[str], members)
        ),
        scale_requests=cast(ScaleRequests, desk),
        evicted_members=put_out,
        notify_user=([] if said is None else said).append,
        on_give_up=give_up,
    )
    plan = NodePlan(
        group=WorkerGroup(argv=slots.argv, workers=slots.workers[:begin]),
        environ={},
        services=services,
        elastic=rules,
        is_node_of_job=bool(services),
    )
    recorder = cast(RunRecorder, Exits() if exits is None else exits)
    crew = NodeWorkers(plan, cast(LocalLauncher, workers), recorder, interrupts, lambda: workers.now_s)
    workers.failures = crew.wait(workers.sleep)
    decisive = crew._slots.decisive(workers.observe()) if crew._slots else []
    return [state.global_rank for state in decisive]


def test_a_slot_that_is_killed_again_comes_back_each_time_and_nobody_is_stopped() -> None:
    """The fourth time it waits for longer than a failure is let stand."""
    kills: list[tuple[float, int, str | int | None]] = [(10.0 + k * SOON_S, 1, "SIGKILL") for k in range(4)]
    workers = Workers(3, [*kills, (60.0, 0, None), (60.0, 1, None), (60.0, 2, None)])
    exits = Exits()
    assert supervise(workers, 3, exits) == [0, 1, 2]
    assert workers.pauses_at_boundary == []
    assert [member for _, member in workers.started] == ["1.1", "1.2", "1.3", "1.4"]
    assert workers.started[3][0] >= 10.0 + 3 * SOON_S + 1.5
    assert not workers.failures
    ends = [(each.global_rank, each.exit and each.exit.signal_name) for each in exits]
    assert ends == [*[(1, "SIGKILL")] * 4, (0, None), (1, None), (2, None)]


def test_who_dies_while_another_is_started_again_comes_back_too() -> None:
    workers = Workers(2, [(10.0, 0, "SIGKILL"), (11.01, 1, "SIGKILL"), (60.0, 0, None), (60.0, 1, None)])
    states = supervise(workers, 2)
    assert workers.pauses_at_boundary == []
    assert [member for _, member in workers.started] == ["0.1", "1.1"]
    assert states == [0, 1]


def test_who_was_put_out_and_does_not_end_is_killed_and_started_again() -> None:
    """Stopped, or in a call that never ends; one that hears of it ends by itself."""
    workers = Workers(3, [(25.0, 2, 1), (200.0, 0, None), (200.0, 1, None), (200.0, 2, None)])
    names = {10.0: {"1.0"}, 20.0: {"1.0", "2.0"}, 100.0: {"1.0", "2.0", "1.1"}, 110.0: {"1.0", "2.0"}}

    def put_out() -> set[str]:
        return next((found for since_s, found in reversed(names.items()) if workers.now_s >= since_s), set())

    supervise(workers, 3, put_out=put_out)
    (killed,) = workers.asked
    assert 50.0 <= killed[0] < 53.0
    assert killed[1:] == (1, signal.SIGKILL), "and nobody who came back as a member"
    assert [member for _, member in workers.started] == ["2.1", "1.1"]
    assert workers.pauses_at_boundary == []


def test_who_was_cut_off_has_time_to_hear_that_it_was_put_out_and_its_successor_to_come() -> None:
    """It looks for a coordinator for 30 s. Of two, the one that is left waits a minute for a process in its slot."""
    workers = Workers(2, [(200.0, 0, None), (200.0, 1, None)])
    supervise(workers, 2, put_out=lambda: {"0.0"} if workers.now_s >= 10.0 else set())
    ((killed_s, *_),) = workers.asked
    assert killed_s - 10.0 > 35.0
    ((started_s, _),) = workers.started
    assert started_s - 10.0 < 45.0, "then it imports torch, and joins"


def test_a_slot_that_cannot_be_started_is_tried_again_and_the_others_train_on() -> None:
    script: list[tuple[float, int, str | int | None]] = [(30.0, 1, "SIGKILL"), (90.0, 0, None), (90.0, 1, None)]
    workers, said = Workers(2, script, unstartable={1: 4}), list[str]()
    states = supervise(workers, 2, said=said)
    assert said == [
        "worker 1 could not be started: no room. [python] It is tried again with growing delay; "
        "the others continue meanwhile"
    ]
    assert [round(late - soon) for soon, late in itertools.pairwise(workers.refused)] == [1, 1, 2]
    assert [name for _, name in workers.started] == ["1.1"]
    assert (workers.pauses_at_boundary, states) == ([], [0, 1])


def test_a_slot_that_can_never_be_started_is_given_up_and_the_others_finish() -> None:
    workers, said = Workers(2, [(10.0, 1, "SIGKILL"), (900.0, 0, None)], unstartable={1: 1000}), list[str]()
    states = supervise(workers, 2, said=said)
    assert (len(workers.refused), workers.started, workers.pauses_at_boundary) == (10, [], [])
    assert said[1:] == [
        "rank 1 on node a is given up: it could not be started, or died before it joined the others, "
        "too often. Last error: worker 1 could not be started: no room. [python] The others continue without it"
    ]
    assert states == [0]


def test_a_run_of_which_nobody_can_be_started_again_has_failed() -> None:
    workers = Workers(1, [(10.0, 0, "SIGKILL")], unstartable={0: 1000})
    assert supervise(workers, 1) == [0]
    assert [each.exit.signal_name for each in workers.failures] == ["SIGKILL"]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_who_interrupts_has_members_leave_and_at_the_second_time_ends_them(how: signal.Signals) -> None:
    """SIGINT ends a training as it stands: only on SIGTERM a member finishes its step, and the last one saves."""
    workers = Workers(2, [])
    supervise(workers, 2, interrupts=[how])
    assert workers.pauses_at_boundary == [signal.SIGTERM]
    workers, interrupts = Stubborn(2, []), [how]
    workers.on_stop = lambda: interrupts.append(how)
    supervise(workers, 2, interrupts=interrupts)
    assert workers.pauses_at_boundary == [signal.SIGTERM, signal.SIGKILL]
    assert workers.now_s < 1.0, "at once"


OVER = "ringweave.errors.MembershipError: job is over: workers left: 1, expected at least 2."


NEVER_JOINED = "it died before it joined the others too often"


def test_a_slot_whose_device_fails_again_and_again_is_given_up_and_the_others_finish() -> None:
    """CUDA errors are exceptions: the third one on one slot ended the run, and all healthy workers with it."""
    script: list[tuple[float, int, str | int | None]] = [(10.0, 1, 1), (900.0, 0, None), (900.0, 2, None)]
    workers, given_up = Workers(3, script, doomed={1: 1}), list[tuple[int, str]]()
    says = {1: "torch.AcceleratorError: CUDA error: unspecified launch failure"}
    states = supervise(workers, 3, members={"0.0", "1.0", "1.1", "1.2", "2.0"}, says=says, given_up=given_up)
    assert given_up == [(1, "it failed by itself 3 times in a row")]
    assert (workers.pauses_at_boundary, len(workers.started)) == ([], 2)
    assert states == [0, 2]
    assert not workers.failures


def test_a_device_that_fails_once_an_hour_is_worth_having_back() -> None:
    script: list[tuple[float, int, str | int | None]] = [(100.0 * number, 1, 1) for number in range(1, 9)]
    workers, given_up = Workers(2, [*script, (950.0, 0, None), (950.0, 1, None)]), list[tuple[int, str]]()
    states = supervise(workers, 2, given_up=given_up)
    assert (given_up, len(workers.started)) == ([], 8)
    assert states == [0, 1]


def test_a_mistake_in_the_script_ends_the_run_at_once_with_all_that_failed_of_it() -> None:
    """Nobody is started again three times first, to hear that the job is over."""
    workers = Workers(3, [(10.0, 0, 1), (10.3, 2, 1), (10.5, 1, 1)])
    states = supervise(workers, 3, members={"0.0", "1.0", "2.0"})
    assert (workers.now_s < 12, workers.started) == (True, [])
    assert states == [0, 1, 2]
    assert [each.exit.exit_code for each in workers.failures] == [1, 1, 1]


def test_a_mistake_that_comes_later_to_some_ends_what_was_started_again_meanwhile() -> None:
    workers = Workers(2, [(10.0, 0, 1), (14.0, 1, 1)])
    supervise(workers, 2, members={"0.0", "1.0"})
    assert [name for _, name in workers.started] == ["0.1"]
    assert workers.pauses_at_boundary == [signal.SIGTERM], "the newcomer has nobody to read the state from"
    first = [each.exit for each in workers.failures if not each.exit.was_stopped]
    assert [each.exit_code for each in first] == [1], "what the user hears of"


STATE_LOST = f"ringweave.errors.MembershipError: job is over: {REASON_STATE_LOST}"


class Latecomers(Workers):
    """Those that are started again fail 0.3 s later, since nobody has the parameters any more."""

    def restart(self, worker: WorkerSpec, argv: tuple[str, ...]) -> None:
        super().restart(worker, argv)
        self._script.append((self.now_s + 0.3, worker.global_rank, 1))

    def logs(self, slot: int, num_lines: int) -> list[str]:
        is_first = not any(name.startswith(f"{slot}.") for _, name in self.started)
        return ["Traceback (most recent call last):", self.says[slot] if is_first else STATE_LOST]


@pytest.mark.parametrize("killed_s", [9.0, 10.15, 10.6])
def test_the_cause_is_the_exception_that_failed_first_whenever_another_worker_is_killed(killed_s: float) -> None:
    """Only those that were started again count for the outcome, and they blame their membership."""
    ends: list[tuple[float, int, str | int | None]] = [(10.0, 3, 1), (10.1, 1, 1), (10.2, 2, 1)]
    says = dict.fromkeys(range(4), "TypeError: unsupported operand") | {3: "TypeError: the first one"}
    workers = Latecomers(4, [(killed_s, 0, "SIGKILL"), *ends])
    supervise(workers, 4, members={"0.0", "1.0", "2.0", "3.0"}, says=says)
    result = conclude_run(workers.failures, [])
    assert (result.outcome, result.cause) == ("failed", "rank 3 on node a raised TypeError: the first one")
    text = run_failure_text(result, wall_s=12.0, log_pattern="rank-{rank}.log")
    assert "After it, rank 2 on node a raised TypeError: unsupported operand." in text
    assert "raised ringweave.errors.MembershipError: job is over: no worker is left" in text


def test_an_exception_before_others_finish_their_job_is_not_the_cause_of_anything() -> None:
    class Late(Latecomers):
        def logs(self, slot: int, num_lines: int) -> list[str]:
            done = f"ringweave.errors.MembershipError: job is over: {REASON_ALL_DONE}"
            return [line.replace(STATE_LOST, done) for line in super().logs(slot, num_lines)]

    workers = Late(2, [(10.0, 0, 1), (10.1, 1, "SIGKILL")])
    supervise(workers, 2, members={"0.0", "1.0"}, says={0: "TypeError: no", 1: ""})
    assert {each.exception for each in workers.failures} == {
        f"ringweave.errors.MembershipError: job is over: {REASON_ALL_DONE}"
    }


def test_a_slot_that_dies_whenever_it_is_started_is_given_up_and_the_others_finish() -> None:
    """It was started again every 30 s for as long as the run went on."""
    workers, given_up = (
        Workers(2, [(10.0, 1, "SIGSEGV"), (900.0, 0, None)], doomed={1: "SIGSEGV"}),
        list[tuple[int, str]](),
    )
    states = supervise(workers, 2, members={"0.0", "1.0"}, given_up=given_up)
    assert given_up == [(1, NEVER_JOINED)]
    assert len(workers.started) == 10
    assert states == [0], "the job was done without it"


def test_a_run_whose_job_is_over_starts_nobody_again_and_has_failed() -> None:
    """Those who were left ended because they were too few; the slot that was lost came back for ever."""
    script: list[tuple[float, int, str | int | None]] = [(10.0, 1, "SIGSEGV"), (70.0, 0, 1)]
    workers = Workers(2, script, doomed={1: "SIGSEGV"})
    states = supervise(workers, 2, members={"0.0", "1.0"}, says={0: OVER})
    assert workers.now_s < 75
    assert 0 in states, "what it said is the cause"


def test_a_run_of_which_only_slots_are_left_that_were_given_up_has_failed() -> None:
    script: list[tuple[float, int, str | int | None]] = [(10.0, 0, "SIGSEGV"), (10.0, 1, "SIGBUS")]
    workers, given_up = Workers(2, script, doomed={0: "SIGSEGV", 1: "SIGBUS"}), list[tuple[int, str]]()
    assert supervise(workers, 2, members={"0.0", "1.0"}, given_up=given_up) == [0, 1]
    assert given_up == [(0, NEVER_JOINED), (1, NEVER_JOINED)]
    assert [each.exit.signal_name for each in workers.failures] == ["SIGSEGV", "SIGBUS"]


def test_further_slots_are_started_when_they_are_asked_for_and_leave_when_they_are_not() -> None:
    script: list[tuple[float, int, str | int | None]] = [
        (40.0, 3, LEFT_EXIT_CODE),
        (41.0, 2, "SIGTERM"),
        (90.0, 0, None),
        (90.0, 1, None),
    ]
    workers = Workers(2, script)
    desk = Asked(workers, 2, (10.0, 4), (30.0, 2))
    states = supervise(workers, 4, desk=desk)
    assert [name for _, name in workers.started] == ["2.0", "3.0"]
    assert [(slot, how) for _, slot, how in workers.asked] == [(2, signal.SIGTERM), (3, signal.SIGTERM)]
    assert desk.granted == [(4, [2, 3], []), (2, [], [2, 3])]
    assert (workers.pauses_at_boundary, states) == ([], [0, 1])


def test_who_is_asked_for_again_while_it_leaves_comes_back() -> None:
    script: list[tuple[float, int, str | int | None]] = [(20.0, 1, LEFT_EXIT_CODE), (60.0, 0, None), (60.0, 1, None)]
    workers = Workers(2, script)
    supervise(workers, 2, desk=Asked(workers, 2, (10.0, 1), (15.0, 2)))
    assert [name for _, name in workers.started] == ["1.1"]


def test_a_slot_that_was_given_up_is_started_again_when_it_is_asked_for() -> None:
    script: list[tuple[float, int, str | int | None]] = [(10.0, 1, 1), (11.5, 1, 1), (14.0, 1, 1)]
    workers, given_up = Workers(2, [*script, (60.0, 0, None), (60.0, 1, None)]), list[tuple[int, str]]()
    desk = Asked(workers, 2, (40.0, 2))
    states = supervise(workers, 2, given_up=given_up, desk=desk, members={"0.0", "1.0", "1.1", "1.2"})
    assert [slot for slot, _ in given_up] == [1]
    assert desk.granted == [(2, [1], [])]
    assert [name for _, name in workers.started][-1] == "1.3"
    assert states == [0, 1]


def test_who_does_not_leave_is_killed_in_the_end() -> None:
    workers = Workers(2, [(900.0, 0, None)])
    supervise(workers, 2, desk=Asked(workers, 2, (10.0, 1)))
    assert [(slot, how) for _, slot, how in workers.asked] == [(1, signal.SIGTERM), (1, signal.SIGKILL)]
    assert 310 <= workers.asked[1][0] < 311


def test_before_the_first_epoch_and_at_the_end_workers_neither_come_nor_go() -> None:
    workers = Workers(1, [(60.0, 0, None)])
    desk = Asked(workers, 1, (10.0, 2))
    supervise(workers, 2, desk=desk, members=frozenset())
    assert len(desk.refused) == 1
    assert "expected workers that have called ringweave.prepare. Wait for the event generation_begun" in desk.refused[0]
    workers = Workers(2, [(10.0, 0, None), (60.0, 1, None)])
    desk = Asked(workers, 2, (20.0, 3))
    supervise(workers, 3, desk=desk)
    assert desk.refused == ["run: 'at its end', expected a run that trains. Start it again with more workers."]
    assert workers.started == []


class Lingering:
    """Stands where a coordinator does that workers of other nodes need until the given time."""

    failure_text = ""

    def __init__(self, until_s: float) -> None:
        self._until_s = until_s

    def is_needed(self, now_s: float) -> bool:
        return now_s < self._until_s

    @contextmanager
    def running(self, environ: Mapping[str, str]) -> Iterator[None]:
        yield

    def restart_dead(self) -> None:
        """It lives."""


def test_the_coordinator_of_a_node_that_gave_a_worker_up_stays_for_other_nodes_too() -> None:
    workers = Workers(2, [(10.0, 1, "SIGSEGV"), (900.0, 0, None)], doomed={1: "SIGSEGV"})
    service = Lingering(until_s=905.0)
    assert supervise(workers, 2, members={"0.0", "1.0"}, services=[cast(ServiceProcesses, service)]) == [0]
    assert workers.now_s >= 905.0
