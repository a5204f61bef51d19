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
