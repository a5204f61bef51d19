"""What members say, read by a coordinator: bounds that no honest member meets."""

import math

import pydantic
import pytest

from ringweave.membership.election import Rejoin
from ringweave.membership.failure_detector import Heartbeat
from ringweave.membership.membership_records import Membership, MemberStatus
from ringweave.membership.messages import (
    MAX_BATCH_SHARES_CHARS,
    MAX_LAYOUT_CHARS,
    MAX_NOTE_CHARS,
    HeartbeatReport,
    Join,
    StatusReport,
)

SHORT = MemberStatus(member="0.0")


@pytest.mark.parametrize(
    ("what", "most"), [("note", MAX_NOTE_CHARS), ("layout", MAX_LAYOUT_CHARS), ("batch_shares", MAX_BATCH_SHARES_CHARS)]
)
def test_long_texts_are_refused_wherever_they_stand(what: str, most: int) -> None:
    long = MemberStatus(member="0.0", **{what: "x" * (most + 1)})
    rejoinings = (
        Rejoin(status=long, membership=None),
        Rejoin(status=SHORT, membership=Membership(generation_id=(1, 1), statuses=(SHORT, long))),
        Rejoin(status=SHORT, membership=Membership(generation_id=(1, 1), statuses=(SHORT,), finished=(long,))),
    )
    expected = f"a {what} of {most + 1} characters, expected at most {most}"
    with pytest.raises(pydantic.ValidationError, match=expected):
        StatusReport(generation_id=(1, 1), status=long)
    for rejoining in rejoinings:
        with pytest.raises(pydantic.ValidationError, match=expected):
            Join(rejoining=rejoining)
    assert Join(rejoining=Rejoin(status=SHORT, membership=None)).rejoining is not None


@pytest.mark.parametrize(
    "address", ["10.0.0.1", "10.0.0.1 x", "10.0.0.1 4711 5", "a\n 4711", "x" * 256 + " 1", " 4711", "a 1\n"]
)
def test_addresses_that_are_none_are_refused(address: str) -> None:
    with pytest.raises(pydantic.ValidationError, match=r"an address .*, expected HOST PORT"):
        StatusReport(generation_id=(1, 1), status=MemberStatus(member="0.0", address=address))
    for said in ("", "10.0.0.1 4711", "fe80::1 4711", "node-3 1"):
        assert (
            StatusReport(generation_id=(1, 1), status=MemberStatus(member="0.0", address=said)).status.address == said
        )


@pytest.mark.parametrize("name", ["", "0", "0.0.0", "x.1", "1" * 10 + ".0"])
def test_names_of_epochs_before_that_are_none_are_refused(name: str) -> None:
    membership = Membership(
        generation_id=(1, 2), statuses=(SHORT,), unconfirmed_predecessors=(("0.0", "1.0"), ("0.0", name))
    )
    with pytest.raises(pydantic.ValidationError, match=r"a member .*, expected SLOT\.INCARNATION"):
        Join(rejoining=Rejoin(status=SHORT, membership=membership))


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf])
def test_times_that_are_none_are_refused(seconds: float) -> None:
    for what in ("lost_s", "patience_s"):
        with pytest.raises(pydantic.ValidationError, match=f"{what} of {seconds}, expected seconds"):
            Join(rejoining=Rejoin(status=SHORT, membership=None, **{what: seconds}))
    for what in ("cpu_s", "no_progress_s", "overdue_s"):
        with pytest.raises(pydantic.ValidationError, match=f"{what} of {seconds}, expected seconds"):
            HeartbeatReport(heartbeat=Heartbeat(**{what: seconds}))
