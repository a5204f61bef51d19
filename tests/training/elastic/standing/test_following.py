"""A session whose member follows, with a coordinator, a group and a donor that do as the test says."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringweave.errors import ConnectionLostError, RingweaveError, TrainingError
from ringweave.membership.membership_records import Membership, MemberStatus
from ringweave.training.elastic import recovery, retained_reductions
from ringweave.training.elastic.retained_reductions import Commit, ReductionRow
from ringweave.training.elastic.session import ElasticSession
from ringweave.training.elastic.training_state import StateRead
from ringweave.training.elastic.wire_choice import WireChoice
from tests.polling import wait_until

# Longer than a file should be: the doubles are a third of it, and every test here follows with them.


OWN = "1.1"
NOTE = '{"store": "127.0.0.1 9"}'
LAYOUT = recovery.layout_to_text([[3, "float32", "cpu"]])
NUM_PARAMETERS = 3
OTHERS = 8.0
"""Their sum."""


class Groups:
    """Whose collectives wait until they are aborted, or until the others have come."""

    store_address, reduce_group = "127.0.0.1 9", None

    def __init__(self) -> None:
        self.num_aborts = 0
        self.aborted, self.others = threading.Event(), threading.Semaphore(0)

    def form_group(self, *_: Any, **__: Any) -> None:
        self.aborted = threading.Event()

    def abort(self) -> None:
        self.num_aborts += 1
        self.aborted.set()

    def wait_aborted(self, timeout_s: float) -> None: ...

    def all_reduce(self, summed: torch.Tensor, **_: Any) -> "Work":
        return Work(self, self.aborted, summed)

    def allgather_small(self, own: torch.Tensor) -> torch.Tensor:
        return torch.stack([retained_reductions.row_to_tensor(ReductionRow(num_planned=4), 0b100, NUM_PARAMETERS), own])

    def all_agree(self, *, agrees: bool) -> bool:
        return agrees


class Work:
    """The others' part is as they come."""

    def __init__(self, groups: Groups, aborted: threading.Event, summed: torch.Tensor) -> None:
        self._groups, self._aborted, self._summed = groups, aborted, summed
        self._is_done = False

    def wait(self) -> None:
        if self._is_done:
            return
        while not self._groups.others.acquire(timeout=0.01):
            if self._aborted.is_set():
                raise RuntimeError("aborted")
        self._summed += OTHERS
        self._is_done = True


class Crew:
    """Reads the state as the test says."""

    wires = WireChoice()

    is_between_steps = supports_replay = True
    state_address = "127.0.0.1 9"

    def __init__(self, pull: Callable[[int], None]) -> None:
        self._pull, self.num_pulls = pull, 0
        self.seen: list[Any] = []

    def status_details(self) -> dict[str, Any]:
        return {}

    def drawn_batches(self) -> tuple[int, str]:
        return 0, ""

    def check_membership(self, *_: Any) -> None: ...

    def reduction_row(self) -> ReductionRow:
        return ReductionRow()

    def begin_generation(self, membership: Membership, _: Any, *, is_joining: bool, recovering: frozenset[str]) -> None:
        self.seen.append((membership.generation_id, is_joining, sorted(recovering)))

    def unpublish_state(self) -> None: ...

    def apply_commit(self, commit: Commit) -> None:
        self.seen.append((commit.number, commit.caught_up))

    def fetch_state(self, *_: Any) -> None:
        self.num_pulls += 1
        self._pull(self.num_pulls)


def membership(number: int, *, committed: int, own: MemberStatus | None = None) -> Membership:
    holder = MemberStatus(member="0.0", has_state=True, committed=committed, note=NOTE, layout=LAYOUT)
    return Membership(generation_id=(1, number), statuses=(holder, own or MemberStatus(member=OWN, note=NOTE)))


class Coordinator:
    """The first epoch begins at once; after an accusation comes the next, in which the member stands as it says."""

    def __init__(self) -> None:
        self.session: Any = None
        self.accused: list[tuple[int, int]] = []
        self.stood: list[MemberStatus] = []
        self.left: list[bool] = []

    def leave_membership(self, *, is_finished: bool) -> None:
        self.left.append(is_finished)

    def start(self) -> None:
        self.session.begin_generation(membership(1, committed=4))

    def report_failure(self, generation_id: tuple[int, int], suspects: list[str]) -> None:
        assert suspects == [], "nobody is to blame"
        self.accused.append(generation_id)
        self.stood.append(self.session.pause_training(is_urgent=True))
        self.session.begin_generation(membership(generation_id[1] + 1, committed=6))


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Groups:
    made = Groups()
    monkeypatch.setattr(dist, "all_reduce", made.all_reduce)
    monkeypatch.setattr(recovery, "_HEAD_START_S", 0.0)
    return made


def joined(groups: Any, crew: Any) -> tuple[ElasticSession, Coordinator]:
    coordinator: Any = Coordinator()
    coordinator.session = session = ElasticSession(
        OWN, groups, crew, buffers=list, is_mean=False, num_parameters=NUM_PARAMETERS
    )
    return session, coordinator


def backward(session: ElasticSession, groups: Groups | None = None) -> float:
    """What a backward pass of one bucket gives, with others who come when it has been handed in."""
    future, used = session.commits.add_bucket(torch.ones(3)), session.commits.end_backward(0b1)
    if groups is not None:
        groups.others.release()
    session.wait_committed()
    total = future.value()[0].item()
    assert used.value() == (0b101 if total > OTHERS else 0b100), "its own only where its gradients are in it"
    return total


def test_its_script_does_what_counted_before_it_had_the_state_and_then_is_level(groups: Groups) -> None:
    is_read = threading.Event()

    def read(_: int) -> None:
        assert is_read.wait(60)

    crew = Crew(read)
    session, coordinator = joined(groups, crew)
    for _ in range(2):
        groups.others.release()
    agent: Any = coordinator
    thread = threading.Thread(target=session.start, args=(agent,))
    thread.start()
    wait_until(lambda: session.current_status().committed == 6)
    status = session.current_status()
    assert (status.has_state, status.is_recovering, status.at_step_boundary) == (False, True, True)
    assert session.num_committed == 4, "its script has done none of them"
    assert session.heartbeat(0.0).is_waiting, "for its donor"
    is_read.set()
    thread.join(60)
    drawn: list[int] = []
    for number in (5, 6):
        session.pass_step_boundary(lambda: drawn.append(1))
        assert backward(session) == 8.0
        assert session.num_committed == number
    session.pass_step_boundary(lambda: drawn.append(1))
    assert backward(session, groups) == 8.0
    assert drawn == [1, 1, 1]
    assert crew.seen == [((1, 1), True, [OWN]), (5, ()), (6, ()), (7, (OWN,))]
    assert session.current_status().has_state
    assert not session.current_status().is_recovering
    assert backward(session, groups) == 9.0, "its own gradient is in it"
    session.close()


def test_a_member_says_that_it_starts_until_it_has_taken_part_in_its_first_steps(groups: Groups) -> None:
    session, coordinator = joined(groups, Crew(lambda _: None))
    agent: Any = coordinator
    session.start(agent)
    said = []
    for _ in range(7):
        said.append((session.current_status().is_recovering, session.heartbeat(0.0).is_starting))
        session.pass_step_boundary(lambda: None)
        backward(session, groups)
    session.close()
    assert said == [(True, True), *[(False, True)] * 4, *[(False, False)] * 2]


def test_who_could_not_read_the_state_is_a_newcomer_again(groups: Groups) -> None:
    def fail_once(number: int) -> None:
        if number == 1:
            raise ConnectionLostError("the donor is gone")

    crew = Crew(fail_once)
    session, coordinator = joined(groups, crew)
    agent: Any = coordinator
    assert session.start(agent).generation_id == (1, 2)
    assert coordinator.accused == [(1, 1)]
    assert [(each.has_state, each.is_recovering, each.committed) for each in coordinator.stood] == [(False, False, 0)]
    assert session.current_status().is_recovering
    assert session.num_committed == 6
    assert crew.seen == [((1, 2), True, [OWN])]
    session.close()


def test_an_epoch_that_takes_it_for_a_follower_when_it_is_none_any_more_is_refused(groups: Groups) -> None:
    crew = Crew(lambda _: None)
    session, coordinator = joined(groups, crew)
    following = MemberStatus(member=OWN, is_recovering=True, committed=4, note=NOTE)
    coordinator.start = lambda: session.begin_generation(membership(1, committed=4, own=following))
    agent: Any = coordinator
    assert session.start(agent).generation_id == (1, 2)
    assert coordinator.accused == [(1, 1)]
    session.close()


def test_who_reads_from_one_that_is_put_out_begins_anew_at_once(groups: Groups) -> None:
    """It is stopped: its connection stands, and nothing comes."""
    is_over = threading.Event()

    def hang_once(number: int) -> None:
        if number == 1:
            is_over.wait(60)

    crew = Crew(hang_once)
    session, coordinator = joined(groups, crew)
    agent: Any = coordinator
    thread = threading.Thread(target=session.start, args=(agent,))
    thread.start()
    wait_until(lambda: crew.num_pulls == 1)
    session.pause_training(is_urgent=True)
    other = MemberStatus(member="2.0", has_state=True, committed=4, note=NOTE, layout=LAYOUT)
    own = MemberStatus(member=OWN, is_recovering=True, committed=4, note=NOTE)
    session.begin_generation(Membership(generation_id=(1, 2), statuses=(own, other)))
    thread.join(30)
    assert not thread.is_alive()
    assert coordinator.accused == [(1, 2)]
    assert [(each.has_state, each.is_recovering) for each in coordinator.stood] == [(False, False)]
    assert crew.num_pulls == 2
    is_over.set()
    session.close()


@pytest.mark.parametrize("epochs_end", ["as it reads", "before the donor offers it"])
def test_a_reading_that_is_given_up_takes_nothing_over(epochs_end: str) -> None:
    now_s, taken, is_there = [0.0], [], threading.Event()
    reading = StateRead(clock=lambda: now_s[0])

    def pull() -> None:
        is_there.wait(60)
        with pytest.raises(ConnectionLostError, match="state of the job"):
            reading.load_unless_cancelled(lambda: taken.append(1))
        is_there.clear()

    def end() -> None:
        if epochs_end == "as it reads":
            reading.cancel()
        else:
            reading.limit_wait()
            now_s[0] = 6.0

    threading.Timer(0.1, end).start()
    with pytest.raises(ConnectionLostError, match="that is to give it and does not"):
        reading.run(pull)
    is_there.set()
    wait_until(lambda: not is_there.is_set())
    assert taken == []


def test_a_donor_that_has_begun_is_not_hurried() -> None:
    now_s, taken = [0.0], []
    reading = StateRead(clock=lambda: now_s[0])

    def pull() -> None:
        reading.mark_begun()
        reading.limit_wait()
        now_s[0] = 60.0
        reading.load_unless_cancelled(lambda: taken.append(1))

    reading.run(pull)
    assert taken == [1]


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        (TrainingError("what goes along with the state: []"), "what goes along with the state"),
        (ConnectionLostError("the donor is gone"), "the donor is gone"),
    ],
)
def test_it_gives_up_after_a_few_times_or_where_another_time_is_of_no_use(
    groups: Groups, failure: RingweaveError, text: str
) -> None:
    def fail(_: int) -> None:
        raise failure

    crew = Crew(fail)
    session, coordinator = joined(groups, crew)
    agent: Any = coordinator
    with pytest.raises(RingweaveError, match=text):
        session.start(agent)
    assert crew.num_pulls == (1 if isinstance(failure, TrainingError) else 6)
    session.close()


def test_who_is_asked_to_leave_goes_at_once(groups: Groups) -> None:
    crew = Crew(lambda _: None)
    session, coordinator = joined(groups, crew)
    agent: Any = coordinator
    session.start(agent)
    for _ in range(2):
        groups.others.release()
    wait_until(lambda: session.current_status().committed == 6)
    session.pass_step_boundary(lambda: None)
    session.leave_at_next_boundary()
    assert coordinator.left == [False]
    with pytest.raises(SystemExit) as raised:
        backward(session)
    assert raised.value.code == 143, "whatever it could still do"
    session.close()


def test_who_has_said_that_it_is_level_leaves_as_members_do_since_the_others_count_on_it(
    groups: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_saying, may_say, exchange = threading.Event(), threading.Event(), groups.allgather_small

    def exchange_late(own: torch.Tensor) -> torch.Tensor:
        if ReductionRow.of_list(own.tolist()).is_caught_up:
            is_saying.set()
            assert may_say.wait(60)
        return exchange(own)

    monkeypatch.setattr(groups, "allgather_small", exchange_late)
    session, coordinator = joined(groups, Crew(lambda _: None))
    agent: Any = coordinator
    session.start(agent)
    session.pass_step_boundary(lambda: None)
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append(backward(session, groups)))
    thread.start()
    assert is_saying.wait(60)
    session.leave_at_next_boundary()
    assert coordinator.left == [False], "the coordinator lets it go at a border"
    assert not session.has_stopped
    may_say.set()
    thread.join(60)
    assert found == [8.0]
    status = session.current_status()
    assert (status.has_state, status.is_recovering, status.is_leaving) == (True, False, True)
    session.close()
