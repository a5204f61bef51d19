import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ringweave.launcher.restarts import EvictionWatcher, MembershipHistory, read_past_members
from ringweave.membership.membership_records import KEPT_INCARNATIONS
from ringweave.telemetry import EVENTS_FORMAT
from tests.telemetry.examples import example


def epoch(members: list[str], newcomers: list[str]) -> dict[str, Any]:
    return example("generation_begun", members=members, newcomers=newcomers, term=1, reported_in_term=1)


def test_whoever_was_named_is_a_member_and_has_trained_once_others_had_its_steps() -> None:
    """A newcomer that nobody counts as level has done no step; the members of the first epoch are all newcomers."""
    events = [
        {"kind": "run_started", "format": EVENTS_FORMAT},
        epoch(["0.0", "1.0"], ["0.0", "1.0"]),
        epoch(["0.0", "1.1"], ["1.1"]),
        epoch(["0.0", "1.2", "2.0"], ["1.2", "2.0"]),
        {"kind": "members_caught_up", "members": ["1.2"]},
    ]
    found = read_past_members(events)
    assert found.members == {"0.0", "1.0", "1.1", "1.2", "2.0"}
    assert found.trained == {"0.0", "1.0", "1.2"}
    assert read_past_members([*events, epoch(["1.2", "2.0"], [])]).trained == {"0.0", "1.0", "1.2", "2.0"}
    assert read_past_members(events[:1]).members == set()


class Told:
    """Stands where coordinators do."""

    def __init__(self, *members: str) -> None:
        self.members, self.asked = set(members), list[list[str]]()

    def __call__(self, names: Collection[str]) -> set[str]:
        self.asked.append(sorted(names))
        return self.members


def test_whom_the_log_does_not_know_coordinators_are_asked_about_and_what_they_said_is_kept(tmp_path: Path) -> None:
    """A full disk takes no events: the first death looked like one before any worker had called `prepare`."""
    told = Told("0.0", "1.0")
    rolls = MembershipHistory(tmp_path / "events.jsonl", told)
    found = rolls.read(["0.0", "1.0"])
    assert found.members == found.trained == {"0.0", "1.0"}
    told.members = {"0.0", "1.1"}
    assert rolls.read(["0.0", "1.0"]).members == {"0.0", "1.0"}, "nobody has to be asked again"
    assert rolls.read(["0.0", "1.1"]).members == {"0.0", "1.0", "1.1"}
    assert told.asked == [["0.0", "1.0"], ["0.0", "1.1"]]
    assert rolls.read().members == {"0.0", "1.0", "1.1"}, "also when the coordinators have ended"


def test_coordinators_are_not_asked_about_those_whom_the_log_knows_and_it_says_who_has_trained(tmp_path: Path) -> None:
    path, told = tmp_path / "events.jsonl", Told("0.0", "1.1")
    rolls = MembershipHistory(path, told)
    began = [example("run_started"), epoch(["0.0", "1.0"], ["0.0", "1.0"])]
    path.write_text("".join(f"{json.dumps(event)}\n" for event in began))
    assert rolls.read(["0.0", "1.0"]).members == {"0.0", "1.0"}
    assert told.asked == []
    assert "1.1" in rolls.read(["0.0", "1.1"]).trained, "they do not say who is a newcomer"
    with path.open("a") as log:
        log.write(f"{json.dumps(epoch(['0.0', '1.1'], ['1.1']))}\n")
    assert rolls.read(["0.0", "1.1"]).trained == {"0.0", "1.0"}


def test_a_log_that_cannot_be_read_says_what_it_said_before(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(f"{json.dumps(epoch(['0.0'], ['0.0']))}\n")
    rolls, put_out = MembershipHistory(path, Told()), EvictionWatcher(path)
    assert rolls.read(["0.0"]).members == {"0.0"}
    path.unlink()
    path.mkdir()
    assert rolls.read(["0.0"]).members == {"0.0"}
    assert put_out.evicted_members() == set()


def test_who_was_put_out_is_so_until_an_epoch_begins_with_it(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"

    def add(*events: dict[str, Any]) -> None:
        with path.open("a") as log:
            log.writelines(f"{json.dumps(event)}\n" for event in events)

    def lost(member: str, reason: str, term: int = 1) -> dict[str, Any]:
        return example("member_lost", member=member, reason=reason, term=term)

    def back(member: str, term: int = 1) -> dict[str, Any]:
        return example("member_returned", member=member, term=term)

    add(lost("7.0", "of an attempt before"))
    found = EvictionWatcher(path)
    assert found.evicted_members() == set()
    add(lost("0.0", "its heartbeats stay away"), lost("1.0", "it has finished"), lost("2.0", "it has left"))
    assert found.evicted_members() == {"0.0"}
    add(lost("4.0", "no heartbeat came in time"), back("4.0"))
    assert found.evicted_members() == {"0.0"}
    add(lost("3.0", "the others cannot reach it"), epoch(["0.0", "1.0"], []))
    assert found.evicted_members() == {"3.0"}
    add(epoch(["0.0", "1.0"], []) | {"reported_in_term": 2}, lost("1.0", "its heartbeats stay away"))
    assert found.evicted_members() == {"3.0"}, (
        "the coordinator of term 1 was cut off; in its last epoch all go on with another one"
    )
    add(lost("1.0", "its heartbeats stay away", term=2), back("1.0"))
    assert found.evicted_members() == {"1.0", "3.0"}, (
        "what came back to the one that was cut off was a heartbeat of before"
    )


def test_of_a_slot_that_dies_again_and_again_the_newest_members_are_remembered(tmp_path: Path) -> None:
    path, told = tmp_path / "events.jsonl", Told()
    rolls, evicted = MembershipHistory(path, told), EvictionWatcher(path)
    for number in range(300):
        name = f"1.{number}"
        death = example("member_lost", member=name, reason="no heartbeat came in time", term=1)
        with path.open("a") as log:
            log.writelines(f"{json.dumps(event)}\n" for event in (epoch(["0.0", name], [name]), death))
        assert name in rolls.read([name]).members
        assert name in evicted.evicted_members()
    assert told.asked == []
    kept = {f"1.{number}" for number in range(300 - KEPT_INCARNATIONS, 300)}
    assert rolls.read().members == kept | {"0.0"}
    assert evicted.evicted_members() <= kept
    told.members = {"0.0", *(f"1.{number}" for number in range(300, 600))}
    assert rolls.read(["1.599"]).members == kept | {"0.0"} | {f"1.{number}" for number in range(592, 600)}
