"""The checks that look at the machine: what they make of what they see, and that they leave nothing."""

import functools
import json
import os
from pathlib import Path

import pytest

from ringweave.cli import main
from ringweave.cli.checks import machine, software
from ringweave.cli.checks.diagnosis import NEEDS, Observation
from ringweave.lab import tools

LONG_S = 300.0
"""For a process that imports torch where others do so, too."""


def program(folder: Path, text: str) -> list[str]:
    path = folder / "tool"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return [str(path), "--version"]


def test_programs_say_their_version(tmp_path: Path) -> None:
    assert software.program(program(tmp_path, "echo tool 1.2; echo more")) == Observation(state="ok", seen="tool 1.2")


def test_programs_may_be_broken(tmp_path: Path) -> None:
    seen = software.program(program(tmp_path, "echo no such library >&2; exit 3"))
    assert (seen.state, seen.seen) == ("broken", f"{tmp_path}/tool: exit code 3, no such library")
    (tmp_path / "tool").write_bytes(b"\0")
    assert software.program([str(tmp_path / "tool")]).state == "broken"


def test_programs_may_be_missing() -> None:
    assert software.program(["nosuch"]) == Observation(state="missing", seen="nosuch is not on the PATH")


def test_a_program_that_hangs_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "TIMEOUT_S", 0.1)
    assert software.program(program(tmp_path, "exec sleep 60")).seen.endswith("TimeoutExpired")


def test_autoload() -> None:
    assert software.autoload({}).state == software.autoload({"TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}).state == "ok"
    off = software.autoload({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    assert off == Observation(state="broken", seen="switched off by TORCH_DEVICE_BACKEND_AUTOLOAD=0")


def test_extras_that_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert software.extras().state == "ok"
    monkeypatch.setattr(software, "EXTRAS", ("tqdm", "nosuch-a", "nosuch-b"))
    assert software.extras() == Observation(state="missing", seen="not installed: nosuch-a, nosuch-b")


def test_the_package_itself() -> None:
    assert software.python().state == "ok"
    assert software.ringweave().seen.endswith(", entry point ringweave.comm.autoload:register")


def test_without_torch_all_that_depends_on_it_is_missing() -> None:
    found = machine.read_trial('{"torch": ["missing", "No module named \'torch\'"]}\n', "", 0)
    assert found.keys() == {"torch", "backend", "gloo", "nccl", "gpus"}
    assert found["torch"].seen == "No module named 'torch'"
    assert found["gloo"] == Observation(state="missing", seen="torch is not installed")


def test_a_torch_that_crashes_is_broken() -> None:
    found = machine.read_trial("", "Traceback\nImportError: libc10.so", 1)
    assert set(found.values()) == {Observation(state="broken", seen="exit code 1: ImportError: libc10.so")}
    assert machine.read_trial("", "", -11)["torch"].seen == "exit code -11: no output"


def test_a_torch_that_hangs_is_broken() -> None:
    assert machine.torch(timeout_s=0.01)["gloo"].seen == "no answer in 0 s"


def test_without_a_cpu_controller_there_is_no_quota(tmp_path: Path) -> None:
    assert machine.cpu_quota(tmp_path) == Observation(state="missing", seen=f"no cpu controller in {tmp_path}")


def test_a_quota_that_cannot_be_set_is_broken(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").touch()
    (tmp_path / f"ringweave-doctor-{os.getpid()}").touch()
    seen = machine.cpu_quota(tmp_path)
    assert (seen.state, seen.seen.split(" (")[0]) == ("broken", "cgroup v2: File exists")


def test_a_lab_that_cannot_be_is_said_with_all_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.ringweave_lab, "problems", lambda: ["user: 'id 7', expected root.", "links: none."])
    assert machine.lab() == Observation(state="broken", seen="user: 'id 7', expected root. links: none.")


def test_a_lab_whose_programs_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "find", lambda name: None)
    found = machine.lab()
    assert (found.state, found.seen.split(",")[0]) == ("missing", "programs: 'ip")


def test_a_lab_can_be(lab_problems: list[str]) -> None:
    if lab_problems:
        pytest.skip(" ".join(lab_problems))
    assert machine.lab() == Observation(state="ok", seen="made namespaces, a bridge and a link limited by tbf")


@pytest.mark.slow
@pytest.mark.distributed
def test_the_backend_is_tried_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGWEAVE_CLUSTER", "/nosuch.yaml")
    monkeypatch.setenv("RINGWEAVE_SCHEDULE", "host")
    assert machine.torch(LONG_S)["backend"] == Observation(state="ok", seen="allreduce of 256 KiB by ring, 2 processes")


@pytest.mark.slow
@pytest.mark.distributed
def test_a_backend_that_is_not_registered_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    found = machine.torch(LONG_S)
    assert found["backend"] == Observation(state="broken", seen="not registered on import torch")
    assert found["gloo"].state == "ok"


@pytest.mark.slow
@pytest.mark.distributed
def test_the_real_doctor_answers_and_leaves_nothing(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "torch", functools.partial(machine.torch, LONG_S))

    def traces() -> tuple[str, list[Path]]:
        """Of this process's doctor: others on this machine have theirs."""
        links = Path("/proc/net/dev").read_text().splitlines()[2:]
        names = sorted(line.split(":")[0].strip() for line in links if line.strip().startswith("rw-"))
        own = [above / f"ringweave-doctor-{os.getpid()}" for above in (machine.CGROUP, machine.CGROUP / "cpu")]
        return str(names), [path for path in own if path.exists()]

    before = traces()
    exit_code = main.call(["doctor", "--json"])
    document = json.loads(capfd.readouterr().out)
    assert [check["name"] for check in document["checks"]] == list(NEEDS)
    assert exit_code == (0 if document["fit"] else 1)
    states = {check["name"]: check["state"] for check in document["checks"]}
    assert (states["python"], states["ringweave"], states["torch"], states["gloo"]) == ("ok", "ok", "ok", "ok")
    assert traces() == before
