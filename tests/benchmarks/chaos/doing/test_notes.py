"""Notes to workers that are to die, and their answers: whole, once, and of the right process."""

from pathlib import Path

from ringweave_bench.chaos import kill_requests


def test_a_note_is_taken_once_and_by_the_process_that_it_is_for(tmp_path: Path) -> None:
    note = kill_requests.kill_request_path(tmp_path / "events.jsonl", 3)
    assert kill_requests.take_kill_request(note, 7) == ""
    kill_requests.write_kill_request(note, 7, "bucket 2")
    assert kill_requests.take_kill_request(note, 7) == "bucket 2"
    assert kill_requests.take_kill_request(note, 7) == ""


def test_a_note_to_a_process_that_is_gone_is_not_its_successors(tmp_path: Path) -> None:
    note = kill_requests.kill_request_path(tmp_path / "events.jsonl", 3)
    kill_requests.write_kill_request(note, 7, "commit")
    assert kill_requests.take_kill_request(note, 8) == ""
    assert not note.exists()


def test_an_answer_is_of_the_process_that_gave_it_until_there_is_another_note(tmp_path: Path) -> None:
    note = kill_requests.kill_request_path(tmp_path / "events.jsonl", 3)
    kill_requests.write_kill_request(note, 7, "bucket 2")
    assert kill_requests.confirmed_moment(note, 7) == ""
    kill_requests.confirm_kill(note, 7, "commit")
    assert kill_requests.confirmed_moment(note, 7) == "commit"
    assert kill_requests.confirmed_moment(note, 8) == ""
    assert kill_requests.take_kill_request(note, 7) == "bucket 2", "the note is another file"
    kill_requests.write_kill_request(note, 7, "forward")
    assert kill_requests.confirmed_moment(note, 7) == ""
