import subprocess
import sys
from pathlib import Path

import pytest

from ringweave.errors import LabError, UsageError
from ringweave.files import file_io
from ringweave.lab import lab, lab_state
from ringweave.lab.lab_state import LabRecord

RECORD = LabRecord(name="one", cluster_text="name: c", quotas={"a": (1_000,)}, is_complete=True, boot_id="b")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(lab_state, "LAB_HOME", tmp_path)
    return tmp_path


def test_what_was_written_is_read() -> None:
    assert lab_state.read_record("one") is None
    lab_state.write_record(RECORD)
    assert lab_state.read_record("one") == RECORD
    assert lab_state.lab_names() == ["one"]
    lab_state.remove_lab_folder("one")
    assert (lab_state.read_record("one"), lab_state.lab_names()) == (None, [])


def test_what_jobs_found_out_goes_with_the_lab_and_is_none_of_another_lab(home: Path) -> None:
    for name in ("one", "other"):
        lab_state.probe_results_folder(name).mkdir(parents=True)
    assert home not in lab_state.probe_results_folder("one").parents, "nodes do not see that folder"
    lab_state.remove_lab_folder("one")
    assert not lab_state.probe_results_folder("one").exists()
    assert lab_state.probe_results_folder("other").exists()


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"quotas": 3}', '{"quotas": null, "new": 1}', "[" * 9999])
def test_what_cannot_be_read_is_a_lab_all_the_same(home: Path, content: str) -> None:
    path = home / "labs" / "one" / "lab.json"
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert lab_state.read_record("one") is None
    assert lab_state.lab_names() == ["one"]


def test_a_lab_of_an_earlier_boot_is_not_up() -> None:
    lab_state.write_record(RECORD)
    assert not lab.is_up("one")


def test_a_lock_is_held_by_one_and_freed_after_it() -> None:
    with (
        lab_state.hold_lock("one"),
        pytest.raises(LabError, match=r"lab: 'one', expected one that no other command works on for 0 s\. Wait"),
        lab_state.hold_lock("one", wait_s=0),
    ):
        pass
    with lab_state.hold_lock("one", wait_s=0), lab_state.hold_lock("two", wait_s=0):
        pass


def test_a_lock_that_was_forgotten_is_not_taken_for_the_new_one() -> None:
    with lab_state.hold_lock("one"):
        old = (lab_state.LAB_HOME / "locks" / "one").open("rb")  # somebody who waits for it
        lab_state.remove_lock_file("one")
        with lab_state.hold_lock("one", wait_s=0):
            pass
    with old:
        assert not file_io.is_same_file(lab_state.LAB_HOME / "locks" / "one.gone", old.fileno())
        assert not file_io.is_same_file(lab_state.LAB_HOME / "locks" / "one", old.fileno())


def test_whoever_inherits_a_lock_holds_it_too() -> None:
    wait = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with lab_state.hold_lock("one") as lock:
        child = subprocess.Popen(wait, stdin=subprocess.PIPE, pass_fds=(lock,))
    with pytest.raises(LabError), lab_state.hold_lock("one", wait_s=0):  # we let go, the child did not
        pass
    child.communicate()
    with lab_state.hold_lock("one", wait_s=0):
        pass


def test_in_a_node_there_are_no_labs(home: Path) -> None:
    lab_state.refuse_inside_node()
    (home / "inside").write_text("a0\n")
    with pytest.raises(UsageError, match=r"lab: 'inside of node a0', expected the machine itself\. Leave the node"):
        lab_state.refuse_inside_node()
