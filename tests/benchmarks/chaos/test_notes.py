"""Notes to workers that are to die: whole, once, and for the right process."""

from pathlib import Path

from ringweave.benchmarks.chaos import hands, notes


def test_a_note_is_taken_once_and_by_the_process_that_it_is_for(tmp_path: Path) -> None:
    note = notes.path(tmp_path / "events.jsonl", 3)
    assert notes.take(note, 7) == ""
    notes.leave(note, 7, "bucket 2")
    assert notes.take(note, 7) == "bucket 2"
    assert notes.take(note, 7) == ""


def test_a_note_to_a_process_that_is_gone_is_not_its_successors(tmp_path: Path) -> None:
    note = notes.path(tmp_path / "events.jsonl", 3)
    notes.leave(note, 7, "commit")
    assert notes.take(note, 8) == ""
    assert not note.exists()


def test_a_coordinator_is_known_by_its_command_line() -> None:
    line = "python -m ringweave.membership.serving.main --host 10.99.0.1 --index 1 --standby"
    assert hands.is_service(line, 1)
    assert not hands.is_service(line, 0)
    assert not hands.is_service("python -m ringweave.membership.serving.main", 0)
    assert not hands.is_service("vim ringweave.membership.serving.main.py --index 0", 0)
