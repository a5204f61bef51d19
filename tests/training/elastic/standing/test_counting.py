"""What the script has once what it began counts: the session's own thread may be late with handing it over."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringweave.errors import TrainingError
from ringweave.membership.membership_records import Membership, MemberStatus
from ringweave.training.elastic.commit import _PreparedCommit
from ringweave.training.elastic.retained_reductions import (
    Commit,
    FetchOnceBroadcast,
    ReductionRow,
    RetainedReduction,
)
from ringweave.training.elastic.session import ElasticSession
from ringweave.training.elastic.wire_choice import WireChoice

NOTE = '{"store": "127.0.0.1 9"}'
PATIENCE_S = 60.0


class Groups:
    store_address = "127.0.0.1 9"
    num_aborts = 0
    reduce_group = None

    def abort(self) -> None:
        pass

    def wait_aborted(self, timeout_s: float) -> None: ...

    def form_group(self, *_: Any, **__: Any) -> None:
        pass

    def allgather_small(self, own: torch.Tensor) -> torch.Tensor:
        return own[None]

    def all_agree(self, *, agrees: bool) -> bool:
        return agrees


class Crew:
    wires = WireChoice()

    is_between_steps = supports_replay = True

    def __init__(self) -> None:
        self.tells: list[bool] = []
        self.is_primary: Callable[[], bool] = lambda: False

    def apply_commit(self, _: Commit) -> None:
        self.tells.append(self.is_primary())

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: {"status_details": {}, "drawn_batches": (0, ""), "reduction_row": ReductionRow()}.get(
            name
        )


class Agent:
    """The only member of its job: the first epoch is begun at once."""

    def __init__(self, session: ElasticSession) -> None:
        self._session = session

    def start(self) -> None:
        self._session.begin_generation(
            Membership(generation_id=(1, 1), statuses=(MemberStatus(member="0.0", note=NOTE),))
        )

    def report_failure(self, *_: Any) -> None:
        pass

    def leave_membership(self, **_: Any) -> None:
        pass


@pytest.fixture
def session() -> Iterator[ElasticSession]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    made = ElasticSession("0.0", Groups(), Crew(), buffers=list, is_mean=True)  # pyrefly: ignore - what it asks of them
    made.start(Agent(made))  # pyrefly: ignore - likewise
    yield made
    made.close()
    dist.destroy_process_group()


def test_the_script_goes_on_when_what_counts_was_handed_over(
    session: ElasticSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, may_hand_over, resolve = threading.Event(), threading.Event(), FetchOnceBroadcast.deliver

    def late(self: FetchOnceBroadcast, *args: Any, **named: Any) -> None:
        counts.set()
        assert may_hand_over.wait(PATIENCE_S)
        resolve(self, *args, **named)

    monkeypatch.setattr(FetchOnceBroadcast, "deliver", late)
    heard: list[Any] = []
    script = threading.Thread(target=lambda: heard.append(session.broadcast_from_first(lambda: {"version": 4})))
    script.start()
    assert counts.wait(PATIENCE_S)
    script.join(0.2)
    assert heard == [], "it counts, and nobody has it yet"
    may_hand_over.set()
    script.join(PATIENCE_S)
    assert heard == [{"version": 4}]


def test_what_goes_wrong_as_a_reduction_comes_to_count_the_script_hears(
    session: ElasticSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An account that is wrong, say. Once the script waited for ever for what was not handed over."""

    def fail(_: Commit) -> None:
        raise TrainingError("account of reduction 1")

    monkeypatch.setattr(session._state.trainer, "apply_commit", fail)
    heard: list[BaseException] = []

    def run() -> None:
        try:
            session.broadcast_from_first(lambda: {"version": 4})
        except BaseException as error:
            heard.append(error)

    script = threading.Thread(target=run, daemon=True)
    script.start()
    script.join(PATIENCE_S)
    assert [str(each) for each in heard] == ["account of reduction 1"]


def test_the_script_waits_for_no_gradients_that_cannot_be_handed_over(
    session: ElasticSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of a device shows up anywhere."""

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(RetainedReduction, "deliver", fail)
    future = session.commits.add_bucket(torch.ones(3))
    session.commits.end_backward(0)
    with pytest.raises(TrainingError, match="CUDA error"):
        future.wait()
    with session._state.lock:
        assert session._state.lock.wait_for(lambda: session._state.error is not None, PATIENCE_S)
    with pytest.raises(TrainingError, match=r"elastic training: .*CUDA error.*, expected no failure"):
        session.wait_committed()


def test_what_a_member_says_of_itself_changes_only_while_it_is_asked_nothing(session: ElasticSession) -> None:
    session.pause_training(is_urgent=True)
    changes: list[bool] = []
    script = threading.Thread(
        target=lambda: session.change_atomically(lambda: changes.append(session._state.is_paused))
    )
    script.start()
    script.join(0.2)
    assert changes == []
    session.begin_generation(
        Membership(generation_id=(1, 2), statuses=(MemberStatus(member="0.0", has_state=True, note=NOTE),))
    )
    script.join(PATIENCE_S)
    assert changes == [False]


@pytest.mark.parametrize(("members", "tells"), [(("1.0", "2.0"), True), (("0.1", "1.0"), False)])
def test_what_an_epoch_left_unfinished_is_told_by_the_first_of_the_next(members: tuple[str, ...], tells: bool) -> None:
    crew = Crew()
    session = ElasticSession("1.0", Groups(), crew, buffers=list, is_mean=True)  # pyrefly: ignore - what it asks of them
    crew.is_primary = lambda: session.is_primary
    footing = session._state
    footing.membership = Membership(
        generation_id=(1, 1), statuses=tuple(MemberStatus(member=each) for each in ("0.0", "1.0", "2.0"))
    )
    footing.reduction = RetainedReduction(number=1, is_complete=True)
    footing.status = replace(footing.status, has_state=True, is_prepared=True, at_step_boundary=False)
    session.commits._prepared = _PreparedCommit(
        Commit(number=1, members=("0.0", "1.0"), rows=(ReductionRow(), ReductionRow())), ()
    )
    gone = MemberStatus(member="0.0", has_state=True, committed=1)
    statuses = tuple(MemberStatus(member=each, has_state=True) for each in members)
    membership = Membership(generation_id=(1, 2), statuses=statuses, finished=(gone,))
    session.begin_generation(membership)
    assert session.commits.settle_unfinished(membership, footing.abort_count)
    assert crew.tells == [tells]


@pytest.mark.parametrize(
    "begin",
    [
        lambda session: session.commits.add_bucket(torch.ones(3)),
        lambda session: session.commits.begin_broadcast(dict, ()),
    ],
    ids=["reduce", "spread"],
)
def test_a_broken_group_says_nothing_of_the_epoch_that_was_ordered_meanwhile(
    session: ElasticSession, monkeypatch: pytest.MonkeyPatch, begin: Callable[[ElasticSession], object]
) -> None:
    footing, accused = session._state, []
    failures = [RuntimeError("the group is broken")]
    start, tell = footing.start_reduction, footing.report_broken_group

    def tell_late(error: Exception | None, *args: Any) -> None:
        if error is not None:
            session.pause_training(is_urgent=True)
            session.begin_generation(
                Membership(generation_id=(1, 2), statuses=(MemberStatus(member="0.0", has_state=True, note=NOTE),))
            )
        tell(error, *args)

    monkeypatch.setattr(footing.client, "report_failure", lambda *args: accused.append(args))
    monkeypatch.setattr(footing, "start_reduction", lambda: failures.pop() if failures else start())
    monkeypatch.setattr(footing, "report_broken_group", tell_late)
    generation = footing.abort_count
    begin(session)
    assert (accused, footing.abort_count) == ([], generation + 1), "the order alone has ended the epoch before"
    with footing.lock:
        assert footing.lock.wait_for(lambda: footing.is_group_up, PATIENCE_S)
    assert session.membership.generation_id == (1, 2)
