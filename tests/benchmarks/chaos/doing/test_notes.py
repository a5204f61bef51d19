"""Notes to workers that are to die, and their answers: whole, once, and of the right process."""

from pathlib import Path

from ringweave.benchmarks.chaos.doing import notes


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


def test_an_answer_is_of_the_process_that_gave_it_until_there_is_another_note(tmp_path: Path) -> None:
    note = notes.path(tmp_path / "events.jsonl", 3)
    notes.leave(note, 7, "bucket 2")
    assert notes.answered(note, 7) == ""
    notes.answer(note, 7, "commit")
    assert notes.answered(note, 7) == "commit"
    assert notes.answered(note, 8) == ""
    assert notes.take(note, 7) == "bucket 2", "the note is another file"
    notes.leave(note, 7, "forward")
    assert notes.answered(note, 7) == ""
