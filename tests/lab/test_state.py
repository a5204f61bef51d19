import subprocess
import sys
from pathlib import Path

import pytest

from ringweave.errors import LabError, UsageError
from ringweave.lab import lab, state
from ringweave.lab.state import Record

RECORD = Record(name="one", cluster_text="name: c", quotas={"a": (1_000,)}, is_complete=True, boot_id="b")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(state, "HOME", tmp_path)
    return tmp_path


def test_what_was_written_is_read() -> None:
    assert state.read("one") is None
    state.write(RECORD)
    assert state.read("one") == RECORD
    assert state.names() == ["one"]
    state.forget("one")
    assert (state.read("one"), state.names()) == (None, [])


def test_what_jobs_found_out_goes_with_the_lab_and_is_none_of_another_lab(home: Path) -> None:
    for name in ("one", "other"):
        state.findings_folder(name).mkdir(parents=True)
    assert home not in state.findings_folder("one").parents, "nodes do not see that folder"
    state.forget("one")
    assert not state.findings_folder("one").exists()
    assert state.findings_folder("other").exists()


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"quotas": 3}', '{"quotas": null, "new": 1}', "[" * 9999])
def test_what_cannot_be_read_is_a_lab_all_the_same(home: Path, content: str) -> None:
    path = home / "labs" / "one" / "lab.json"
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert state.read("one") is None
    assert state.names() == ["one"]


def test_a_lab_of_an_earlier_boot_is_not_up() -> None:
    state.write(RECORD)
    assert not lab.is_up("one")


def test_a_lock_is_held_by_one_and_freed_after_it() -> None:
    with (
        state.locked("one"),
        pytest.raises(LabError, match=r"lab: 'one', expected one that no other command works on for 0 s\. Wait"),
        state.locked("one", wait_s=0),
    ):
        pass
    with state.locked("one", wait_s=0), state.locked("two", wait_s=0):
        pass


def test_a_lock_that_was_forgotten_is_not_taken_for_the_new_one() -> None:
    with state.locked("one"):
        old = (state.HOME / "locks" / "one").open("rb")  # somebody who waits for it
        state.forget_lock("one")
        with state.locked("one", wait_s=0):
            pass
    with old:
        assert not state._is_still(state.HOME / "locks" / "one.gone", old.fileno())
        assert not state._is_still(state.HOME / "locks" / "one", old.fileno())


def test_whoever_inherits_a_lock_holds_it_too() -> None:
    wait = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with state.locked("one") as lock:
        child = subprocess.Popen(wait, stdin=subprocess.PIPE, pass_fds=(lock,))
    with pytest.raises(LabError), state.locked("one", wait_s=0):  # we let go, the child did not
        pass
    child.communicate()
    with state.locked("one", wait_s=0):
        pass


def test_in_a_node_there_are_no_labs(home: Path) -> None:
    state.refuse_inside()
    (home / "inside").write_text("a0\n")
    with pytest.raises(UsageError, match=r"lab: 'inside of node a0', expected the machine itself\. Leave the node"):
        state.refuse_inside()
