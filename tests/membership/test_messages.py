"""What members say, read by a coordinator: bounds that no honest member meets."""

import math

import pydantic
import pytest

from ringweave.membership.messages import MAX_LAYOUT, MAX_NOTE, MAX_SHARING, Enter, Heartbeat, Stand
from ringweave.membership.rules.electing import Rejoining
from ringweave.membership.rules.records import Decree, Standing
from ringweave.membership.rules.signs import Beat

SHORT = Standing(member="0.0")


@pytest.mark.parametrize(("what", "most"), [("note", MAX_NOTE), ("layout", MAX_LAYOUT), ("sharing", MAX_SHARING)])
def test_long_texts_are_refused_wherever_they_stand(what: str, most: int) -> None:
    long = Standing(member="0.0", **{what: "x" * (most + 1)})
    rejoinings = (
        Rejoining(standing=long, decree=None),
        Rejoining(standing=SHORT, decree=Decree(ballot=(1, 1), standings=(SHORT, long))),
        Rejoining(standing=SHORT, decree=Decree(ballot=(1, 1), standings=(SHORT,), finished=(long,))),
    )
    expected = f"a {what} of {most + 1} characters, expected at most {most}"
    with pytest.raises(pydantic.ValidationError, match=expected):
        Stand(ballot=(1, 1), standing=long)
    for rejoining in rejoinings:
        with pytest.raises(pydantic.ValidationError, match=expected):
            Enter(rejoining=rejoining)
    assert Enter(rejoining=Rejoining(standing=SHORT, decree=None)).rejoining is not None


@pytest.mark.parametrize(
    "place", ["10.0.0.1", "10.0.0.1 x", "10.0.0.1 4711 5", "a\n 4711", "x" * 256 + " 1", " 4711", "a 1\n"]
)
def test_places_that_are_none_are_refused(place: str) -> None:
    with pytest.raises(pydantic.ValidationError, match=r"a place of .*, expected HOST PORT"):
        Stand(ballot=(1, 1), standing=Standing(member="0.0", place=place))
    for said in ("", "10.0.0.1 4711", "fe80::1 4711", "node-3 1"):
        assert Stand(ballot=(1, 1), standing=Standing(member="0.0", place=said)).standing.place == said


@pytest.mark.parametrize("name", ["", "0", "0.0.0", "x.1", "1" * 10 + ".0"])
def test_names_of_epochs_before_that_are_none_are_refused(name: str) -> None:
    decree = Decree(ballot=(1, 2), standings=(SHORT,), forerunners=(("0.0", "1.0"), ("0.0", name)))
    with pytest.raises(pydantic.ValidationError, match=r"a member .*, expected SLOT\.INCARNATION"):
        Enter(rejoining=Rejoining(standing=SHORT, decree=decree))


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf])
def test_times_that_are_none_are_refused(seconds: float) -> None:
    for what in ("lost_s", "patience_s"):
        with pytest.raises(pydantic.ValidationError, match=f"{what} of {seconds}, expected seconds"):
            Enter(rejoining=Rejoining(standing=SHORT, decree=None, **{what: seconds}))
    for what in ("cpu_s", "still_s", "stuck_s"):
        with pytest.raises(pydantic.ValidationError, match=f"{what} of {seconds}, expected seconds"):
            Heartbeat(beat=Beat(**{what: seconds}))
