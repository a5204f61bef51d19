"""What the script has once what it began counts: the session's own thread may be late with handing it over."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringweave.errors import TrainingError
from ringweave.membership.rules.records import Decree, Standing
from ringweave.training.elastic.kept import Reduction, Spread
from ringweave.training.elastic.rows import Commit, Row
from ringweave.training.elastic.session import Session
from ringweave.training.elastic.standing.counting import _Prepared

NOTE = '{"store": "127.0.0.1 9"}'
PATIENCE_S = 60.0


class Groups:
    store_place = "127.0.0.1 9"
    num_aborts = 0
    reducing = None

    def abort(self) -> None:
        pass

    def form(self, *_: Any, **__: Any) -> None:
        pass

    def exchange(self, own: torch.Tensor) -> torch.Tensor:
        return own[None]

    def vote(self, *, is_for: bool) -> bool:
        return is_for


class Crew:
    is_between_steps = can_be_followed = True

    def __init__(self) -> None:
        self.tells: list[bool] = []
        self.is_teller: Callable[[], bool] = lambda: False

    def commit(self, _: Commit) -> None:
        self.tells.append(self.is_teller())

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: {"note": {}, "drawn": (0, ""), "row": Row()}.get(name)


class Agent:
    """The only member of its job: the first epoch is begun at once."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def start(self) -> None:
        self._session.form(Decree(ballot=(1, 1), standings=(Standing(member="0.0", note=NOTE),)))

    def accuse(self, *_: Any) -> None:
        pass

    def leave(self, **_: Any) -> None:
        pass


@pytest.fixture
def session() -> Iterator[Session]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    made = Session("0.0", Groups(), Crew(), buffers=list, is_mean=True)  # pyrefly: ignore - what it asks of them
    made.start(Agent(made))  # pyrefly: ignore - likewise
    yield made
    made.close()
    dist.destroy_process_group()


def test_the_script_goes_on_when_what_counts_was_handed_over(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, may_hand_over, resolve = threading.Event(), threading.Event(), Spread.resolve

    def late(self: Spread, *args: Any, **named: Any) -> None:
        counts.set()
        assert may_hand_over.wait(PATIENCE_S)
        resolve(self, *args, **named)

    monkeypatch.setattr(Spread, "resolve", late)
    heard: list[Any] = []
    script = threading.Thread(target=lambda: heard.append(session.spread(lambda: {"version": 4})))
    script.start()
    assert counts.wait(PATIENCE_S)
    script.join(0.2)
    assert heard == [], "it counts, and nobody has it yet"
    may_hand_over.set()
    script.join(PATIENCE_S)
    assert heard == [{"version": 4}]


def test_what_goes_wrong_as_a_reduction_comes_to_count_the_script_hears(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An account that is wrong, say. Once the script waited for ever for what was not handed over."""

    def fail(_: Commit) -> None:
        raise TrainingError("account of reduction 1")

    monkeypatch.setattr(session._footing.crew, "commit", fail)
    heard: list[BaseException] = []

    def run() -> None:
        try:
            session.spread(lambda: {"version": 4})
        except BaseException as error:
            heard.append(error)

    script = threading.Thread(target=run, daemon=True)
    script.start()
    script.join(PATIENCE_S)
    assert [str(each) for each in heard] == ["account of reduction 1"]


def test_the_script_waits_for_no_gradients_that_cannot_be_handed_over(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of a device shows up anywhere."""

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(Reduction, "resolve", fail)
    future = session.reduce(torch.ones(3))
    session.end_pass(0)
    with pytest.raises(TrainingError, match="CUDA error"):
        future.wait()
    with session._footing.lock:
        assert session._footing.lock.wait_for(lambda: session._footing.refusal is not None, PATIENCE_S)
    with pytest.raises(TrainingError, match=r"elastic training: .*CUDA error.*, expected no failure"):
        session.wait_counted()


def test_what_a_member_says_of_itself_changes_only_while_it_is_asked_nothing(session: Session) -> None:
    session.freeze(is_urgent=True)
    changes: list[bool] = []
    script = threading.Thread(target=lambda: session.change(lambda: changes.append(session._footing.is_frozen)))
    script.start()
    script.join(0.2)
    assert changes == []
    session.form(Decree(ballot=(1, 2), standings=(Standing(member="0.0", has_state=True, note=NOTE),)))
    script.join(PATIENCE_S)
    assert changes == [False]


@pytest.mark.parametrize(("members", "tells"), [(("1.0", "2.0"), True), (("0.1", "1.0"), False)])
def test_what_an_epoch_left_unfinished_is_told_by_the_first_of_the_next(members: tuple[str, ...], tells: bool) -> None:
    crew = Crew()
    session = Session("1.0", Groups(), crew, buffers=list, is_mean=True)  # pyrefly: ignore - what it asks of them
    crew.is_teller = lambda: session.is_teller
    footing = session._footing
    footing.decree = Decree(ballot=(1, 1), standings=tuple(Standing(member=each) for each in ("0.0", "1.0", "2.0")))
    footing.reduction = Reduction(number=1, is_whole=True)
    footing.where = replace(footing.where, has_state=True, is_prepared=True, at_border=False)
    session._counting._prepared = _Prepared(Commit(number=1, members=("0.0", "1.0"), rows=(Row(), Row())), ())
    gone = Standing(member="0.0", has_state=True, committed=1)
    standings = tuple(Standing(member=each, has_state=True) for each in members)
    decree = Decree(ballot=(1, 2), standings=standings, finished=(gone,))
    session.form(decree)
    assert session._counting.end(decree, footing.generation)
    assert crew.tells == [tells]


@pytest.mark.parametrize(
    "begin",
    [
        lambda session: session.reduce(torch.ones(3)),
        lambda session: session._counting.begin_spread(dict, ()),
    ],
    ids=["reduce", "spread"],
)
def test_a_broken_group_says_nothing_of_the_epoch_that_was_ordered_meanwhile(
    session: Session, monkeypatch: pytest.MonkeyPatch, begin: Callable[[Session], object]
) -> None:
    footing, accused = session._footing, []
    failures = [RuntimeError("the group is broken")]
    start, tell = footing.start_buckets, footing.tell_broken

    def tell_late(error: Exception | None, *args: Any) -> None:
        if error is not None:
            session.freeze(is_urgent=True)
            session.form(Decree(ballot=(1, 2), standings=(Standing(member="0.0", has_state=True, note=NOTE),)))
        tell(error, *args)

    monkeypatch.setattr(footing.agent, "accuse", lambda *args: accused.append(args))
    monkeypatch.setattr(footing, "start_buckets", lambda: failures.pop() if failures else start())
    monkeypatch.setattr(footing, "tell_broken", tell_late)
    generation = footing.generation
    begin(session)
    assert (accused, footing.generation) == ([], generation + 1), "the order alone has ended the epoch before"
    with footing.lock:
        assert footing.lock.wait_for(lambda: footing.is_up, PATIENCE_S)
    assert session.decree.ballot == (1, 2)
