import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from ringweave.errors import LabError
from ringweave.lab import cpu_quotas, lab_state, tools


@pytest.fixture
def unshare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make `unshare` a script that says this, then fails; being root is taken for granted."""

    def fake(script: str) -> None:
        for name in tools.DEBIAN_PACKAGES:
            path = tmp_path / name
            path.write_text(f"#!{shutil.which('sh')}\n{script}\nexit 1\n")
            path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.setattr(os, "geteuid", lambda: 0)

    return fake


def test_absent_programs_are_named_with_their_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "_search_path", lambda: "/nosuch")
    (problem,) = tools.lab_problems()
    assert problem == (
        "programs: 'ip, tc, nsenter, unshare, mountpoint, hostname, mount, umount, sh not found', expected ip, tc, "
        "nsenter, unshare, mountpoint, hostname, mount, umount, sh. apt install dash hostname iproute2 mount "
        "util-linux. [lab]"
    )


def test_who_is_not_root_is_told_so(unshare, monkeypatch: pytest.MonkeyPatch) -> None:
    unshare("exit 0")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    text = (
        "user: 'id 1000', expected root, or a user namespace of this user. Put ringweave lab unshare -- in front of "
        "the command, or sudo. [lab]"
    )
    assert tools.lab_problems() == [text]
    with pytest.raises(LabError, match=r"expected root, or a user namespace of this user\. Put ringweave lab unshare"):
        tools.require_root()


@pytest.mark.parametrize(
    ("script", "text"),
    [
        (
            "echo veth; echo bridge; echo tbf; echo 'Error: Specified qdisc kind is unknown.'",
            "links (tbf): 'Error: Specified qdisc kind is unknown.', expected a kernel that has it. "
            "Load it: modprobe sch_tbf. [lab]",
        ),
        (
            "echo veth; echo bridge; echo 'RTNETLINK answers: Operation not supported'",
            "links (bridge): 'RTNETLINK answers: Operation not supported', expected a kernel that has it. "
            "Load it: modprobe bridge. [lab]",
        ),
        (
            "echo 'unshare: unshare failed: Operation not permitted' >&2",
            "namespaces: 'unshare: unshare failed: Operation not permitted', expected namespaces for network, host "
            "name and mounts. Run as root outside of a container, or in one with --privileged. [lab]",
        ),
        (
            "printf 'veth\\nbridge\\ntbf\\nmounts\\nmount: permission denied.\\n'",
            "namespaces: 'mount: permission denied.', expected namespaces for network, host name and mounts. Run as "
            "root outside of a container, or in one with --privileged. [lab]",
        ),
    ],
)
def test_what_the_kernel_lacks_is_told_with_its_mend(unshare, script: str, text: str) -> None:
    unshare(script)
    assert tools.lab_problems() == [text]


def test_quotas_need_control_groups_only_if_there_are_quotas(unshare, monkeypatch: pytest.MonkeyPatch) -> None:
    unshare("exit 0")
    monkeypatch.setattr(cpu_quotas, "find_hierarchy", lambda: None)
    assert tools.lab_problems() == []
    (problem,) = tools.lab_problems(needs_quotas=True)
    assert problem.startswith("CPU quotas: 'no cgroup with the cpu controller', expected one that is mounted. mount -t")


def test_all_problems_are_told_at_once() -> None:
    tools.raise_lab_problems([])
    with pytest.raises(LabError, match=r"^one\ntwo$"):
        tools.raise_lab_problems(["one", "two"])


def test_a_command_that_fails_is_quoted() -> None:
    expected = r"command of the lab: 'no room', expected sh to succeed\. See what the kernel says .*\. \[sh -c .*\]"
    with pytest.raises(LabError, match=expected):
        tools.run_tool(["sh", "-c", "echo no room >&2; exit 3"])
    assert tools.run_tool(["sh", "-c", "echo so; exit 3"], may_fail=True) == "so\n"
    with pytest.raises(LabError, match="No such file or directory"):
        tools.run_tool(["/nosuch/ip"])


def test_what_a_command_starts_holds_the_lock_of_the_lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a lab whose `up` was killed is not cleared away before its last command is through."""
    monkeypatch.setattr(lab_state, "LAB_HOME", tmp_path)
    with lab_state.hold_lock("one") as lock:
        pid = int(tools.run_tool(["sh", "-c", "sleep 60 > /dev/null 2>&1 & echo $!"], lock=lock))
    try:
        with pytest.raises(LabError), lab_state.hold_lock("one", wait_s=0):
            pass
    finally:
        os.kill(pid, signal.SIGKILL)
    with lab_state.hold_lock("one"):
        pass
