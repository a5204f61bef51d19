import json
from pathlib import Path
from typing import Any

from ringweave.launch.elastic.rolls import PutOut, roll


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


def test_who_was_put_out_is_so_until_an_epoch_begins_with_it(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"

    def add(*events: dict[str, Any]) -> None:
        with path.open("a") as log:
            log.writelines(f"{json.dumps(event)}\n" for event in events)

    def lost(member: str, reason: str) -> dict[str, Any]:
        return {"kind": "member_lost", "member": member, "reason": reason}

    add(lost("7.0", "of an attempt before"))
    found = PutOut(path)
    assert found.look() == set()
    add(lost("0.0", "its heartbeats stay away"), lost("1.0", "it has finished"), lost("2.0", "it has left"))
    assert found.look() == {"0.0"}
    add(lost("3.0", "the others cannot reach it"), epoch(["0.0", "1.0"], []))
    assert found.look() == {"3.0"}
