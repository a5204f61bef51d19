"""What is read of other members: whoever has credentials can write anything there."""

import json
import random
import re
from typing import Any

import pytest

from ringweave.errors import TrainingError
from ringweave.membership.membership_records import MemberStatus
from ringweave.training.elastic import member_details
from tests.rpc.mutations import mutated

NOTE: dict[str, Any] = {
    "store": "10.0.0.1 4711",
    "cap": None,
    "assumed_speed": 1.0,
    "must_match": {"mode": "sync", "seed": 1},
    "speed": [0.1, 2.0, 0.0, 8.0, 1.0, 0.1],
    "exchange_s": 0.25,
    "position": [0, 32, 33, 0],
    "accounts": [[64, 2**64 - 1], [32, 5], [0, 0]],
    "ring": {"ring": 1, "num_pushed": 2, "pending": None},
    "collectives": 3,
    "operation": "gradients",
}


def test_what_members_say_is_read_as_it_was_said() -> None:
    note = member_details.parse_details("0.0", json.dumps(NOTE))
    assert note == NOTE
    member_details.check_trainer_details(MemberStatus(member="0.0", address="10.0.0.1 4712"), note)
    assert member_details.parse_profile("0.0", '{"speed": 1.5}') == {"speed": 1.5}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"store": "10.0.0.1"}, "store: String should match pattern"),
        ({"cap": 0}, "cap: Input should be greater than or equal to 1"),
        ({"assumed_speed": 0.0}, "assumed_speed: Input should be greater than 0"),
        ({"must_match": []}, "must_match: Input should be "),
        ({"speed": [float("nan"), 0.0, 0.0, 0.0, 0.0, 0.0]}, "speed.0: Input should be "),
        ({"exchange_s": -1.0}, "exchange_s: Input should be greater than or equal to 0"),
        ({"position": [0, -1, 0, 0]}, "position.1: Input should be greater than or equal to 0"),
        ({"position": [0, 0, 0]}, "position.3: Field required"),
        ({"accounts": [[1, 1], [1, 1], [1, 2**64]]}, "accounts.2.1: Input should be less than"),
    ],
)
def test_a_note_that_is_none_is_refused_and_says_whose_it_is(change: dict[str, Any], text: str) -> None:
    with pytest.raises(TrainingError) as error:
        member_details.check_trainer_details(
            MemberStatus(member="3.1", address="10.0.0.1 4712"),
            member_details.parse_details("3.1", json.dumps(NOTE | change)),
        )
    assert re.match(f"note of worker 3\\.1: ['\"]{re.escape(text)}", str(error.value))
    assert "expected the values of ringweave.prepare. Run the same ringweave on all workers" in str(error.value)


def test_a_member_that_says_nowhere_where_it_listens_is_refused() -> None:
    with pytest.raises(TrainingError, match=r"address of worker 3\.1: .none., expected where its state can be read"):
        member_details.check_trainer_details(MemberStatus(member="3.1"), NOTE)


@pytest.mark.parametrize("text", ["", "null", "[]", "[" * 100_000, '{"a":' * 100_000, "9" * 5000, "\ud800"])
def test_rubbish_is_refused_by_whoever_reads(text: str) -> None:
    for read in (member_details.parse_details, member_details.parse_profile):
        with pytest.raises(TrainingError, match=r"of worker 0\.0: "):
            read("0.0", text)


def test_what_is_too_long_is_not_read() -> None:
    with pytest.raises(TrainingError, match=r"note of worker 0\.0: '65537 characters', expected at most 65536"):
        member_details.parse_details("0.0", " " * 65537)


def test_mutated_notes_are_refused_or_read() -> None:
    rng, num_refused = random.Random(5), 0
    note = json.dumps(NOTE).encode()
    for _ in range(5_000):
        try:
            found = member_details.parse_details("0.0", mutated(rng, note).decode("latin-1"))
            member_details.check_trainer_details(MemberStatus(member="0.0", address="10.0.0.1 4712"), found)
            assert len(found["position"]) == 4
        except TrainingError:
            num_refused += 1
    assert num_refused > 1_500
