"""The checks that look at the machine: what they make of what they see, and that they leave nothing."""

import functools
import json
import os
from pathlib import Path

import pytest

from ringweave import lab
from ringweave.cli import doctor, main
from ringweave.cli.doctor import REQUIREMENTS, CheckResult
from ringweave.lab import cpu_quotas, tools
from ringweave.lab.cpu_quotas import CgroupHierarchy

LONG_S = 300.0
"""For a process that imports torch where others do so, too."""


def program(folder: Path, text: str) -> list[str]:
    path = folder / "tool"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return [str(path), "--version"]


def test_programs_say_their_version(tmp_path: Path) -> None:
    assert doctor.check_program_version(program(tmp_path, "echo tool 1.2; echo more")) == CheckResult(
        state="ok", seen="tool 1.2"
    )


def test_programs_may_be_broken(tmp_path: Path) -> None:
    seen = doctor.check_program_version(program(tmp_path, "echo no such library >&2; exit 3"))
    assert (seen.state, seen.seen) == ("broken", f"{tmp_path}/tool: exit code 3, no such library")
    (tmp_path / "tool").write_bytes(b"\0")
    assert doctor.check_program_version([str(tmp_path / "tool")]).state == "broken"


def test_programs_may_be_missing() -> None:
    assert doctor.check_program_version(["nosuch"]) == CheckResult(state="missing", seen="nosuch is not on the PATH")


def test_a_program_that_hangs_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PROGRAM_TIMEOUT_S", 0.1)
    assert doctor.check_program_version(program(tmp_path, "exec sleep 60")).seen.endswith("TimeoutExpired")


def test_autoload() -> None:
    assert (
        doctor.check_autoload({}).state == doctor.check_autoload({"TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}).state == "ok"
    )
    off = doctor.check_autoload({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    assert off == CheckResult(state="broken", seen="switched off by TORCH_DEVICE_BACKEND_AUTOLOAD=0")


def test_extras_that_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.check_example_packages().state == "ok"
    monkeypatch.setattr(doctor, "EXAMPLE_PACKAGES", ("tqdm", "nosuch-a", "nosuch-b"))
    assert doctor.check_example_packages() == CheckResult(state="missing", seen="not installed: nosuch-a, nosuch-b")


def test_the_package_itself() -> None:
    assert doctor.check_python().state == "ok"
    assert doctor.check_ringweave().seen.endswith(", entry point ringweave.comm.autoload:register")


def test_without_torch_all_that_depends_on_it_is_missing() -> None:
    found = doctor.parse_torch_trial('{"torch": ["missing", "No module named \'torch\'"]}\n', "", 0)
    assert found.keys() == {"torch", "backend", "gloo", "nccl", "gpus"}
    assert found["torch"].seen == "No module named 'torch'"
    assert found["gloo"] == CheckResult(state="missing", seen="torch is not installed")


def test_a_torch_that_crashes_is_broken() -> None:
    found = doctor.parse_torch_trial("", "Traceback\nImportError: libc10.so", 1)
    assert set(found.values()) == {CheckResult(state="broken", seen="exit code 1: ImportError: libc10.so")}
    assert doctor.parse_torch_trial("", "", -11)["torch"].seen == "exit code -11: no output"


def test_a_torch_that_hangs_is_broken() -> None:
    assert doctor.check_torch(timeout_s=0.01)["gloo"].seen == "no answer in 0 s"


def test_without_a_cpu_controller_there_is_no_quota(tmp_path: Path) -> None:
    assert doctor.check_cpu_quota(tmp_path) == CheckResult(state="missing", seen=f"no cpu controller in {tmp_path}")


def test_a_quota_that_cannot_be_set_is_broken(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").touch()
    (tmp_path / f"ringweave-doctor-{os.getpid()}").touch()
    seen = doctor.check_cpu_quota(tmp_path)
    assert (seen.state, seen.seen.split(" (")[0]) == ("broken", "cgroup v2: File exists")


def test_a_lab_that_cannot_be_is_said_with_all_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "lab_problems", lambda: ["user: 'id 7', expected root.", "links: none."])
    assert doctor.check_lab() == CheckResult(state="broken", seen="user: 'id 7', expected root. links: none.")


def test_a_lab_whose_programs_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "find_program", lambda name: None)
    found = doctor.check_lab()
    assert (found.state, found.seen.split(",")[0]) == ("missing", "programs: 'ip")


def test_a_lab_can_be(lab_problems: list[str]) -> None:
    if lab_problems:
        pytest.skip(" ".join(lab_problems))
    assert doctor.check_lab() == CheckResult(state="ok", seen="made namespaces, a bridge and a link limited by tbf")


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.distributed
def test_the_backend_is_tried_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGWEAVE_CLUSTER", "/nosuch.yaml")
    monkeypatch.setenv("RINGWEAVE_SCHEDULE", "native")
    assert doctor.check_torch(LONG_S)["backend"] == CheckResult(
        state="ok", seen="allreduce of 256 KiB by ring, 2 processes"
    )


@pytest.mark.slow
@pytest.mark.distributed
def test_a_backend_that_is_not_registered_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    found = doctor.check_torch(LONG_S)
    assert found["backend"] == CheckResult(state="broken", seen="not registered on import torch")
    assert found["gloo"].state == "ok"


@pytest.mark.slow
@pytest.mark.distributed
def test_the_real_doctor_answers_and_leaves_nothing(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "check_torch", functools.partial(doctor.check_torch, LONG_S))

    def traces() -> tuple[str, list[Path]]:
        """Of this process's doctor: others on this machine have theirs."""
        links = Path("/proc/net/dev").read_text().splitlines()[2:]
        names = sorted(line.split(":")[0].strip() for line in links if line.strip().startswith("rw-"))
        own = [above / f"ringweave-doctor-{os.getpid()}" for above in (doctor.CGROUP_ROOT, doctor.CGROUP_ROOT / "cpu")]
        return str(names), [path for path in own if path.exists()]

    before = traces()
    exit_code = main.run_command_line(["doctor", "--json"])
    document = json.loads(capfd.readouterr().out)
    assert [check["name"] for check in document["checks"]] == list(REQUIREMENTS)
    assert exit_code == (0 if document["fit"] else 1)
    states = {check["name"]: check["state"] for check in document["checks"]}
    assert (states["python"], states["ringweave"], states["torch"], states["gloo"]) == ("ok", "ok", "ok", "ok")
    assert traces() == before


def test_an_ordinary_user_is_told_which_lab_there_can_be(monkeypatch) -> None:
    monkeypatch.setattr(doctor.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(tools, "user_namespace_problems", list)
    assert doctor.check_lab() == CheckResult(
        state="ok", seen="without root, in a user namespace: made namespaces, a bridge and a link limited by tbf"
    )
    monkeypatch.setattr(tools, "user_namespace_problems", lambda: ["user namespaces: 'no', expected some."])
    assert doctor.check_lab() == CheckResult(state="broken", seen="user namespaces: 'no', expected some.")


def test_an_ordinary_user_is_told_what_limits_processors(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(cpu_quotas, "find_hierarchy", lambda: None)
    found = doctor.check_cpu_quota()
    assert found.state == "missing"
    assert found.seen.endswith("a duty cycle by SIGSTOP and SIGCONT stands in for CPU quotas of control groups")
    monkeypatch.setattr(cpu_quotas, "find_hierarchy", lambda: CgroupHierarchy(version=1, root=tmp_path))
    seen = f"cgroup v1, this user's group {tmp_path}, set a quota"
    assert doctor.check_cpu_quota() == CheckResult(state="ok", seen=seen)
