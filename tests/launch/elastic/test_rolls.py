from typing import Any

from ringweave.launch.elastic.rolls import roll


def epoch(members: list[str], newcomers: list[str]) -> dict[str, Any]:
    return {"kind": "epoch_begun", "members": members, "newcomers": newcomers}


def test_whoever_was_named_is_a_member_and_has_trained_once_others_had_its_steps() -> None:
    """A newcomer that nobody counts as level has done no step; the members of the first epoch are all newcomers."""
    events = [
        {"kind": "run_started"},
        epoch(["0.0", "1.0"], ["0.0", "1.0"]),
        epoch(["0.0", "1.1"], ["1.1"]),
        epoch(["0.0", "1.2", "2.0"], ["1.2", "2.0"]),
        {"kind": "members_level", "members": ["1.2"]},
    ]
    found = roll(events)
    assert found.members == {"0.0", "1.0", "1.1", "1.2", "2.0"}
    assert found.trained == {"0.0", "1.0", "1.2"}
    assert roll([*events, epoch(["1.2", "2.0"], [])]).trained == {"0.0", "1.0", "1.2", "2.0"}
    assert roll(events[:1]).members == set()
