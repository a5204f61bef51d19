"""What members say, read by a coordinator: bounds that no honest member meets."""

import math

import pydantic
import pytest

from ringweave.membership.election import Rejoin
from ringweave.membership.failure_detector import Heartbeat
from ringweave.membership.membership_records import Membership, MemberStatus
from ringweave.membership.messages import (
    MAX_LAYOUT_CHARS,
    MAX_NOTE_CHARS,
    MAX_SHARING_CHARS,
    HeartbeatReport,
    Join,
    StatusReport,
)

SHORT = MemberStatus(member="0.0")


@pytest.mark.parametrize(
    ("what", "most"), [("note", MAX_NOTE_CHARS), ("layout", MAX_LAYOUT_CHARS), ("sharing", MAX_SHARING_CHARS)]
)
def test_long_texts_are_refused_wherever_they_stand(what: str, most: int) -> None:
    long = MemberStatus(member="0.0", **{what: "x" * (most + 1)})
    rejoinings = (
        Rejoin(standing=long, decree=None),
        Rejoin(standing=SHORT, decree=Membership(ballot=(1, 1), standings=(SHORT, long))),
        Rejoin(standing=SHORT, decree=Membership(ballot=(1, 1), standings=(SHORT,), finished=(long,))),
    )
    expected = f"a {what} of {most + 1} characters, expected at most {most}"
    with pytest.raises(pydantic.ValidationError, match=expected):
        StatusReport(ballot=(1, 1), standing=long)
    for rejoining in rejoinings:
        with pytest.raises(pydantic.ValidationError, match=expected):
            Join(rejoining=rejoining)
    assert Join(rejoining=Rejoin(standing=SHORT, decree=None)).rejoining is not None


@pytest.mark.parametrize(
    "place", ["10.0.0.1", "10.0.0.1 x", "10.0.0.1 4711 5", "a\n 4711", "x" * 256 + " 1", " 4711", "a 1\n"]
)
def test_places_that_are_none_are_refused(place: str) -> None:
    with pytest.raises(pydantic.ValidationError, match=r"a place of .*, expected HOST PORT"):
        StatusReport(ballot=(1, 1), standing=MemberStatus(member="0.0", place=place))
    for said in ("", "10.0.0.1 4711", "fe80::1 4711", "node-3 1"):
        assert StatusReport(ballot=(1, 1), standing=MemberStatus(member="0.0", place=said)).standing.place == said


@pytest.mark.parametrize("name", ["", "0", "0.0.0", "x.1", "1" * 10 + ".0"])
def test_names_of_epochs_before_that_are_none_are_refused(name: str) -> None:
    decree = Membership(ballot=(1, 2), standings=(SHORT,), forerunners=(("0.0", "1.0"), ("0.0", name)))
    with pytest.raises(pydantic.ValidationError, match=r"a member .*, expected SLOT\.INCARNATION"):
        Join(rejoining=Rejoin(standing=SHORT, decree=decree))


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf])
def test_times_that_are_none_are_refused(seconds: float) -> None:
    for what in ("lost_s", "patience_s"):
        with pytest.raises(pydantic.ValidationError, match=f"{what} of {seconds}, expected seconds"):
            Join(rejoining=Rejoin(standing=SHORT, decree=None, **{what: seconds}))
    for what in ("cpu_s", "still_s", "stuck_s"):
        with pytest.raises(pydantic.ValidationError, match=f"{what} of {seconds}, expected seconds"):
            HeartbeatReport(beat=Heartbeat(**{what: seconds}))
