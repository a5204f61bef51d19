import threading
from typing import Any

import pytest

from ringweave.errors import RingweaveError, TrainingError
from ringweave.membership.rules.records import Decree, Standing
from ringweave.training.elastic.session import Session


class Groups:
    """Of processes that are not there."""

    store_place, num_aborts = "127.0.0.1 9", 0

    def abort(self) -> None: ...


class Crew:
    """Whose part in an epoch fails."""

    def __init__(self, failure: Exception) -> None:
        self._failure = failure

    def check(self, notes: Any) -> None:
        raise self._failure


class Agent:
    """The first order comes at once."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def start(self) -> None:
        standing = Standing(member="0.0", note='{"store": "127.0.0.1 9", "commit": null}')
        self._session.form(Decree(ballot=(1, 1), standings=(standing,)))


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        (TrainingError("option x of rank 1"), "option x of rank 1"),
        (KeyError("store"), r"elastic training: \"KeyError\('store'\)\", expected no failure\. Report this as a bug"),
    ],
)
def test_the_script_hears_why_its_member_cannot_go_on(failure: Exception, text: str) -> None:
    groups: Any = Groups()
    crew: Any = Crew(failure)
    session = Session("0.0", groups, crew, buffers=list, is_mean=True)
    agent: Any = Agent(session)
    with pytest.raises(RingweaveError, match=text) as raised:
        session.start(agent)
    assert isinstance(raised.value, TrainingError)
    session.close()


class SlowGroups:
    """Whose members take their time to meet."""

    store_place, num_aborts = "127.0.0.1 9", 0

    def __init__(self) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def form(self, *_: Any) -> None:
        self.has_begun.set()
        assert self.may_end.wait(60)

    def abort(self) -> None:
        self.num_aborts += 1


class EasyCrew:
    """That has nothing to do."""

    is_between_steps = True

    def note(self) -> dict[str, Any]:
        return {}

    def check(self, notes: Any) -> None: ...

    def begin(self, *_: Any, **__: Any) -> None: ...

    def offer(self) -> None: ...


@pytest.mark.parametrize("is_urgent", [False, True])
def test_an_epoch_that_is_ordered_is_formed_before_its_members_stop_at_a_border(is_urgent: bool) -> None:
    groups: Any = SlowGroups()
    crew: Any = EasyCrew()
    stood: list[Standing | None] = []

    class Superseding:
        """Orders the first epoch, and proposes the next one before its members have met."""

        def start(self) -> None:
            standing = Standing(member="0.0", note='{"store": "127.0.0.1 9", "commit": null}')
            session.form(Decree(ballot=(1, 1), standings=(standing,)))
            assert groups.has_begun.wait(60)
            stood.append(session.freeze(is_urgent=is_urgent))
            groups.may_end.set()
            if is_urgent:  # what it gave up has no effect, so only another epoch lets it go on
                session.form(Decree(ballot=(1, 2), standings=(standing,)))

    agent: Any = Superseding()
    session = Session("0.0", groups, crew, buffers=list, is_mean=True)
    assert session.start(agent).ballot == ((1, 2) if is_urgent else (1, 1))
    assert (stood[0] is not None, groups.num_aborts) == (is_urgent, int(is_urgent))
    session.close()
