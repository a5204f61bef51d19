"""Labs of an ordinary user: the real command line, as a user without any rights."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ringweave import lab
from ringweave.errors import LabError
from ringweave.lab import cpu_quotas, tools, user_namespace
from tests.polling import wait_until

USER = 10_000_000 + os.getpid()
"""A user that no machine has, another one in each process of tests here: a user has one namespace for all labs."""
CLUSTER = """
name: unequal
nodes:
  - {name: a, nic: 100Mbit/s, devices: 1}
  - {name: b, switch: r, nic: 100Mbit/s, devices: [{speed: 0.25}]}
switches: [{name: r, uplink: 50Mbit/s}]
"""
BURN = """
import time
began, used = time.monotonic(), time.process_time()
while time.monotonic() < began + 2.5: pass
print((time.process_time() - used) / (time.monotonic() - began))
"""
CLI = "from ringweave.cli.main import main; main()"
NOTE = "a duty cycle by SIGSTOP and SIGCONT stands in for CPU quotas of control groups"


class OrdinaryUser:
    """Runs programs as a user without rights, in a folder of its own."""

    def __init__(self, python: str, folder: Path) -> None:
        self.folder, self.python = folder, python

    def command(self, *argv: str) -> list[str]:
        become = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"] if os.geteuid() == 0 else []
        return [*become, "env", f"HOME={self.folder}", f"PYTHONPATH={python_path()}", *argv]

    def ringweave(self, *words: str) -> list[str]:
        return self.command(self.python, "-c", CLI, *words)

    def run(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """The command line of ringweave, to its end."""
        return subprocess.run(
            self.ringweave(*words), cwd=self.folder, capture_output=True, text=True, check=False, timeout=120
        )

    def json(self, *words: str) -> dict:
        done = self.run(*words, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def processes(self) -> list[psutil.Process]:
        """All processes of pause processes and labs of this user."""
        uid = USER if os.geteuid() == 0 else os.geteuid()
        every = psutil.process_iter(["uids", "cmdline", "status"])
        found = [each for each in every if each.info["uids"].real == uid and each.info["status"] != "zombie"]
        return [each for each in found if os.geteuid() == 0 or user_namespace.__name__ in (each.info["cmdline"] or [])]

    def wait_nothing_left(self) -> None:
        wait_until(lambda: not self.processes(), self.processes)


def python_path() -> str:
    return os.pathsep.join(each for each in sys.path if each)


@pytest.fixture(scope="module")
def ordinary_python() -> str:
    """An interpreter that an ordinary user can run, with ringweave; skips where there can be no lab without root."""
    if shutil.which("setpriv") is None:
        pytest.skip("no setpriv (util-linux), which becomes an ordinary user")
    for python in (sys.executable, f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"):
        user = OrdinaryUser(python, Path("/"))
        program = "from ringweave.lab import tools; print('\\n'.join(tools.user_namespace_problems()))"
        done = subprocess.run(
            user.command(python, "-c", program), cwd="/", capture_output=True, text=True, check=False, timeout=120
        )
        if done.returncode == 0:
            if done.stdout.strip():
                pytest.skip(done.stdout.strip())
            return python
    pytest.skip(f"no interpreter that an ordinary user can run: {done.stderr}")


@pytest.fixture
def user(ordinary_python: str) -> Iterator[OrdinaryUser]:
    """An ordinary user, of whom nothing is left afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="ordinary-", dir="/tmp"))
    if os.geteuid() == 0:
        os.chown(folder, USER, USER)
    made = OrdinaryUser(ordinary_python, folder)
    (folder / "cluster.yaml").write_text(CLUSTER)
    yield made
    made.run("lab", "down", "--all")
    made.wait_nothing_left()
    shutil.rmtree(folder)


pytestmark = [pytest.mark.slow]


def test_every_verb_works_without_root(user: OrdinaryUser) -> None:
    made = user.json("lab", "up", "cluster.yaml")
    assert (made["addresses"], made["quotas"]) == ({"a": ["10.99.0.1"], "b": ["10.99.0.2"]}, "duty cycle")
    assert "unequal" not in (lab.names() if os.geteuid() == 0 else []), "it is this user's alone"

    inside = user.run("lab", "exec", "b", "--", "sh", "-c", "hostname; pwd; ls /sys/class/net; ls -A /dev/shm; id -u")
    assert inside.stdout.split() == ["b", str(user.folder), "eth0", "lo", "0"], inside.stderr
    assert user.run("lab", "exec", "a", "--", "sh", "-c", "exit 7").returncode == 7
    reach = "import socket; print(socket.create_connection(('b', 80), 1))"
    refused = user.run("lab", "exec", "a", "--", user.python, "-c", reach)
    assert "Connection refused" in refused.stderr, "b answers"

    quota = user.run("lab", "exec", "--device", "0", "b", "--", "sh", "-c", "echo $RINGWEAVE_CPU_QUOTA")
    assert 0 < float(quota.stdout) < 1

    assert user.json("lab", "set", "r<->core", "20Mbit/s")["rate_bytes_per_s"] == {"r->core": 2.5e6, "core->r": 2.5e6}
    assert user.json("lab", "cut", "a", "--out")["cut"] == "out"
    assert user.json("lab", "mend", "a")["cut"] is None
    (status,) = user.json("lab", "status")["labs"]
    assert (status["state"], status["quotas"]) == ("up", "duty cycle")
    assert NOTE in user.run("lab", "status").stdout
    again = user.run("lab", "up", "cluster.yaml")
    assert "expected one that no lab has" in again.stderr
    assert user.json("lab", "down") == {"down": ["unequal"]}
    user.wait_nothing_left()
    assert user.run("lab", "status").stdout == "no lab is up\n"
    assert user.processes() == [], "to look does not start anything"


def test_other_programs_make_labs_in_the_same_place_and_runs_and_programs_end_with_them(user: OrdinaryUser) -> None:
    program = "from ringweave import lab, topology as t; print(lab.up(t.load('cluster.yaml')).quota_kind, lab.names())"
    done = user.run("lab", "unshare", "--", user.python, "-c", program)
    assert done.stdout == "duty cycle ['unequal']\n", done.stderr

    done = user.run("lab", "run", "--run-dir", "run", "--", "sh", "-c", "hostname; touch made-$RANK")
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["[0] a", "[1] b"]), done.stderr
    assert f"ringweave: {NOTE}\n" in done.stderr, "it says what limits its processors"
    record = json.loads((user.folder / "run" / "run.json").read_text())
    assert (record["outcome"], record["lab"], record["lab_quotas"]) == ("done", "unequal", "duty cycle")
    owner = USER if os.geteuid() == 0 else os.geteuid()
    assert {(user.folder / f"made-{rank}").stat().st_uid for rank in (0, 1)} == {owner}

    inside = user.ringweave("lab", "exec", "--device", "0", "b", "--", "sh", "-c", "echo on; exec sleep 300")
    with subprocess.Popen(inside, stdout=subprocess.PIPE, text=True) as sleeping:
        assert sleeping.stdout is not None
        assert sleeping.stdout.readline() == "on\n"
        assert user.json("lab", "down") == {"down": ["unequal"]}
        assert sleeping.wait(timeout=300) == -signal.SIGTERM
    assert user.run("lab", "unshare", "--", "sh", "-c", "exit 3").returncode == 3
    missing = user.run("lab", "unshare", "--", "nosuch")
    assert missing.returncode == 127
    assert "on this machine" in missing.stderr or "nosuch" in missing.stderr


def test_the_duty_cycle_leaves_a_device_its_quota_and_nothing_stays_stopped(user: OrdinaryUser) -> None:
    user.run("lab", "up", "cluster.yaml")
    burn = ["lab", "exec", "--device", "0", "b", "--", user.python, "-c", BURN]
    (document,) = user.json("lab", "status")["labs"]
    (quota,) = document["nodes"][1]["cpus_of_devices"]
    assert 0 < float(user.run(*burn).stdout) < 1.5 * quota

    throttle = next(each for each in user.processes() if each.parent() in user.processes())
    throttle.kill()
    assert 0 < float(user.run(*burn).stdout) < 1.5 * quota, "another one has taken its place"

    began = f"print('on', flush=True)\n{BURN}"
    with subprocess.Popen(
        user.ringweave("lab", "exec", "--device", "0", "b", "--", user.python, "-c", began), stdout=subprocess.PIPE
    ) as burning:
        assert burning.stdout is not None
        assert burning.stdout.readline() == b"on\n"
        (pause,) = [each for each in user.processes() if user_namespace.__name__ in each.cmdline() and each.children()]
        pause.kill()
        assert burning.wait(timeout=300) == 0
    user.wait_nothing_left()
    assert user.json("lab", "down") == {"down": []}


# tests/lab/test_crashes.py kills it at every point; here it is the pause process that has to clear it away.
@pytest.mark.parametrize(
    "after_s",
    [
        pytest.param(each, marks=pytest.mark.thorough if each in (0.1, 0.3, 0.6) else ())
        for each in (0.1, 0.2, 0.3, 0.4, 0.6)
    ],
)
def test_an_up_that_is_killed_leaves_nothing(user: OrdinaryUser, after_s: float) -> None:
    with subprocess.Popen(
        user.ringweave("lab", "up", "cluster.yaml"), cwd=user.folder, stderr=subprocess.DEVNULL, stdout=subprocess.PIPE
    ) as up:
        time.sleep(after_s)
        up.kill()
        has_finished = up.wait() == 0
    if not has_finished:
        states = [each["state"] for each in user.json("lab", "status")["labs"]]
        if states == ["up"]:  # the lab was complete, and only the command had not ended
            user.json("lab", "down")
        user.wait_nothing_left()
    assert user.json("lab", "up", "cluster.yaml", "--name", "again")["name"] == "again"


def test_quotas_are_control_groups_where_the_user_has_one(user: OrdinaryUser) -> None:
    found = cpu_quotas.find_hierarchy() if os.geteuid() == 0 else None
    if found is None or found.version != 1:
        pytest.skip("only root gives a group of version 1 to another user here")
    group = found.root / f"rw-delegated-{os.getpid()}"
    group.mkdir()
    try:
        for path in (group, *group.iterdir()):
            os.chown(path, USER, USER)
        start = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "start"]
        up = subprocess.run(
            [*start, *user.ringweave("lab", "up", "cluster.yaml", "--json")],
            cwd=user.folder,
            capture_output=True,
            text=True,
            check=True,
        )
        assert json.loads(up.stdout)["quotas"] == "cgroup v1"
        lab_group = group / "rw-unequal"
        assert (lab_group / "rw-b:0" / "cpu.cfs_period_us").read_text() == "40000\n"
        inside = user.run("lab", "exec", "--device", "0", "b", "--", "cat", "/proc/self/cgroup")
        assert "/rw-unequal/rw-b:0\n" in inside.stdout
        assert user.json("lab", "down") == {"down": ["unequal"]}
        assert not lab_group.exists()
        user.wait_nothing_left()
    finally:
        group.rmdir()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as made:
        made.bind("")
        made.listen()
        yield made


def test_the_pause_process_stays_while_a_command_is_inside_or_a_lab_is_up(listener, monkeypatch) -> None:
    monkeypatch.setattr(user_namespace, "_CHECK_S", 0.01)
    state = {"up": True}
    counted: list[int] = []
    arguments = {"has_labs": lambda: state["up"], "on_check": lambda: counted.append(1)}
    serving = threading.Thread(target=user_namespace.serve, args=(listener,), kwargs=arguments)
    serving.start()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as command:
        command.connect(listener.getsockname())
        assert command.recv(1) == b"1"
        state["up"] = False
        serving.join(0.2)
        assert serving.is_alive(), "the command is inside"
        state["up"] = True
    serving.join(0.2)
    assert serving.is_alive(), "the lab is up"
    state["up"] = False
    serving.join(60)
    assert not serving.is_alive()
    assert counted


def test_root_enters_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("entered"))
    user_namespace.enter(["true"], starts=True)


def test_a_kernel_that_refuses_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    refused = "unshare: unshare failed: Operation not permitted"
    for name in tools.DEBIAN_PACKAGES:
        (tmp_path / name).write_text(f"#!{shutil.which('sh')}\necho '{refused}' >&2\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    setting = tmp_path / "setting"
    setting.write_text("1\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_000)
    monkeypatch.setattr(tools, "_USER_NAMESPACE_SETTINGS", {str(setting): ("1", "sysctl -w some.setting=0")})
    expected = (
        rf"user namespaces: '{refused}', expected a kernel that gives them to ordinary users\. "
        r"Let root run sysctl -w some\.setting=0; or put sudo in front\. \[lab\]"
    )
    with pytest.raises(LabError, match=expected):
        user_namespace.enter(["true"], starts=True)
    setting.write_text("0\n")
    assert tools.user_namespace_problems()[0].endswith("in a container, start it with --privileged. [lab]")
    user_namespace.enter(["true"], starts=False)  # to look needs no namespace
