"""A lab whose nodes run sshd: what each has of its own, its faults, and what is left of it."""

import ctypes
import re
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ringweave import lab, topology
from ringweave.errors import LabError
from ringweave_bench import ssh_lab, ssh_node
from ringweave_bench.ssh_lab import SshLab
from tests import demands
from tests.polling import wait_until

pytestmark = pytest.mark.slow
BATCH = ["-o", "BatchMode=yes"]
OWNER = """
import sys, time
from ringweave_bench.ssh_lab import ssh_lab
with ssh_lab(num_nodes=1) as lab:
    lab.nodes[0].run(["sh", "-c", "setsid sleep 1000 > /dev/null 2>&1 & echo started"])
    print(lab.network.name, lab.nodes[0].init_pid, *(each.pid for each in lab.nodes[0].processes()), flush=True)
    time.sleep(1000)
"""


@pytest.fixture(scope="module")
def trio(request: pytest.FixtureRequest) -> Iterator[SshLab]:
    """Three nodes; a test leaves them as they were."""
    demands.need(request.config, demands.LAB, ssh_lab.problems())
    with ssh_lab.ssh_lab(num_nodes=3, home_bytes=2**24, tmp_bytes=2**22) as found:
        yield found


def ssh(where: SshLab, source: int, destination: str, script: str) -> tuple[int, str]:
    """Exit status and output of a command by ssh."""
    done = where.nodes[source].run(["ssh", *BATCH, destination, script], check=False)
    return done.returncode, done.stdout + done.stderr


def is_silent(where: SshLab, source: int, destination: str) -> bool:
    """True if nothing answers ssh within a second."""
    command = ["ssh", *BATCH, "-o", "ConnectTimeout=1", destination, "true"]
    return "timed out" in where.nodes[source].run(command, check=False).stderr


def test_ssh_by_name_from_every_node(trio: SshLab) -> None:
    assert ssh(trio, 0, "n1", "id -un; hostname; pwd; tty; true") == (0, "trainer\nn1\n/home/trainer\nnot a tty\n")
    assert ssh(trio, 2, trio.nodes[0].address, "hostname; exit 7") == (7, "n0\n")
    assert trio.nodes[0].run(["ssh", *BATCH, "-tt", "n2", "tty"]).stdout == "/dev/pts/0\n"
    assert [node.listening_ports() for node in trio.nodes] == [[22]] * 3
    assert "Accepted publickey for trainer from" in trio.nodes[1].sshd_log()


def test_each_node_has_its_own_users_files_and_processes(trio: SshLab) -> None:
    first, second, _ = trio.nodes
    before = set(first.files())
    first.write("a/b.txt", "of n0")
    assert first.read("/home/trainer/a/b.txt") == "of n0"
    first.run(["sh", "-c", "touch /tmp/c /var/tmp/d /dev/shm/e"])
    here = ["/dev/shm/e", "/home/trainer/a", "/home/trainer/a/b.txt", "/tmp/c", "/var/tmp/d"]
    assert sorted(set(first.files()) - before) == here
    assert not set(here) & {*second.files(), *trio.nodes[2].files()}
    first.run(["rm", "-r", "a", "/tmp/c", "/var/tmp/d", "/dev/shm/e"])
    assert [node.run(["id", "-u"]).stdout for node in trio.nodes] == ["10000\n", "10001\n", "10002\n"]
    commands = first.run(["sh", "-c", "cat /proc/[0-9]*/cmdline; true"]).stdout
    assert commands.count("node_init.py") == 1  # its own
    assert first.run(["touch", "/usr/new", "/etc/new"], user="root", check=False).returncode == 1
    assert first.run(["id", "-u"], user="root").stdout == "0\n"
    assert first.run(["nowhere"], check=False).returncode == 127
    with pytest.raises(subprocess.CalledProcessError, match="exit status 3") as caught:
        first.run(["sh", "-c", "echo said; exit 3"])
    assert caught.value.__notes__ == ["node n0: said\n"]


def test_a_process_gets_its_signals_and_its_exit_status_is_its_own(trio: SshLab) -> None:
    script = "import signal, sys; signal.signal(2, lambda *_: sys.exit(9)); print('set', flush=True); signal.pause()"
    with trio.nodes[0].popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "set\n"
        assert [each.pid for each in trio.nodes[0].processes()] == [process.pid]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 9


def test_sessions_and_processes_are_killed_and_sshd_stays(trio: SshLab) -> None:
    node = trio.nodes[1]
    clients = [trio.nodes[0].popen(["ssh", *BATCH, "n1", f"sleep {seconds}"]) for seconds in (1001, 1002)]
    wait_until(lambda: sum(each.command.startswith("sleep 100") for each in node.processes()) == 2)
    node.kill_ssh_sessions()
    assert [client.wait(60) for client in clients] == [255, 255]
    assert any(each.command.startswith("sleep 100") for each in node.processes())
    node.kill_all()
    assert (node.processes(), node.listening_ports()) == ([], [22])
    node.kill_all(sshd=True)
    assert (node.processes(), node.listening_ports()) == ([], [])
    assert ssh(trio, 0, "n1", "true")[1].endswith("port 22: Connection refused\n")
    node.start_sshd()
    assert ssh(trio, 0, "n1", "true")[0] == 0
    node.stop_sshd()
    assert node.listening_ports() == []
    node.start_sshd()


def test_keys(trio: SshLab) -> None:
    trio.nodes[2].change_host_key()
    assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in ssh(trio, 0, "n2", "true")[1]
    trio.nodes[0].run(["ssh-keygen", "-R", "n2"])
    trio.nodes[0].run(["ssh-keygen", "-R", trio.nodes[2].address])
    assert "Host key verification failed" in ssh(trio, 0, "n2", "true")[1]
    assert trio.nodes[0].run(["ssh", "-o", "StrictHostKeyChecking=accept-new", "n2", "hostname"]).stdout == "n2\n"
    key, authorized = trio.nodes[1].read(".ssh/id_ed25519"), trio.nodes[1].read(".ssh/authorized_keys")
    trio.nodes[1].remove_key()
    assert "Permission denied (publickey)" in ssh(trio, 1, "n0", "true")[1]
    trio.nodes[1].write(".ssh/id_ed25519", key, 0o600)
    trio.nodes[1].refuse_keys()
    assert "Permission denied (publickey)" in ssh(trio, 0, "n1", "true")[1]
    trio.nodes[1].write(".ssh/authorized_keys", authorized, 0o600)
    assert ssh(trio, 1, "n0", "true")[0] == ssh(trio, 0, "n1", "true")[0] == 0


def test_cuts_and_ports_that_are_blocked_in_one_direction(trio: SshLab) -> None:
    trio.cut("n1")
    assert is_silent(trio, 0, "n1")
    trio.mend("n1")
    assert ssh(trio, 0, "n1", "true")[0] == 0
    trio.block_port("n0", "n1", 22)
    assert is_silent(trio, 0, "n1")
    assert ssh(trio, 1, "n0", "true")[0] == ssh(trio, 2, "n1", "true")[0] == 0
    trio.unblock_ports("n1")
    assert ssh(trio, 0, "n1", "true")[0] == 0


def test_a_long_link(trio: SshLab) -> None:
    node = trio.nodes[1]
    node.delay_ms(200)
    for source, destination in ((0, "n1"), (1, "n0")):
        begun_s = time.monotonic()
        assert ssh(trio, source, destination, "hostname") == (0, f"{destination}\n")
        assert time.monotonic() - begun_s > 1.0  # five round trips at least: open, versions, keys, login, command
    node.stop_sshd()
    assert ssh(trio, 0, "n1", "true")[0] == 255
    node.start_sshd()
    node.delay_ms(0)
    assert ssh(trio, 0, "n1", "true")[0] == 0
    wait_until(lambda: (node.processes(), node.listening_ports()) == ([], [22]))


def test_a_full_disk_and_a_clock_ahead(trio: SshLab) -> None:
    node = trio.nodes[0]
    node.fill_disk()
    full = node.run(["cp", ".bashrc", "more"], check=False)
    assert "No space left on device" in full.stderr
    node.empty_disk()
    node.run(["rm", "-f", "more"])
    node.set_clock(days=1)
    ahead_s = int(ssh(trio, 1, "n0", "date +%s")[1]) - time.time()
    assert 86300 < ahead_s < 86500
    assert int(node.run(["date", "+%s"]).stdout) - time.time() > 86300
    node.set_clock(days=0)


def test_an_environment_of_the_users_own(trio: SshLab, tmp_path: Path) -> None:
    node, wheel = trio.nodes[2], tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny.py", "import click")
        archive.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        archive.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("tiny-1.0.dist-info/RECORD", "")
    python = node.make_venv("venv", wheel)
    assert python == "/home/trainer/venv/bin/python"
    assert node.run([python, "-c", "import tiny; print(tiny.__file__)"]).stdout.startswith("/home/trainer/venv/lib")
    assert "No module named 'ringweave'" in node.run([python, "-c", "import ringweave"], check=False).stderr
    node.run(["rm", "-r", "venv"])


def test_a_node_behind_another_one_and_one_without_python(request: pytest.FixtureRequest) -> None:
    demands.need(request.config, demands.LAB, ssh_lab.problems())
    with ssh_lab.ssh_lab(num_nodes=3) as trio:
        trio.put_behind("n2", "n1")
        origin = trio.nodes[2].run(["ssh", "n0", "echo $SSH_CLIENT"]).stdout.split()[0]
        assert origin == trio.nodes[1].address
        assert is_silent(trio, 0, "n2")
        node = trio.nodes[0]
        assert node.run([sys.executable, "-m", "ringweave", "--version"]).stdout.startswith("ringweave")
        node.hide_python()
        assert node.run([sys.executable, "-V"], check=False).returncode == 127
        assert node.run(["python3", "-V"], check=False).returncode == 127
        assert ssh(trio, 1, "n0", "python3 -V")[0] == 127
        assert ssh(trio, 1, "n0", "env echo here") == (0, "here\n")


def test_starts_that_fail(trio: SshLab, capfd: pytest.CaptureFixture[str]) -> None:
    with (
        pytest.raises(LabError, match=r"^node n0: not started, expected its first process\. See the output above\.$"),
        ssh_lab.ssh_lab(num_nodes=1, home_bytes=-1),
    ):
        pass
    assert "mount: /home" in capfd.readouterr().err
    node = trio.nodes[0]
    node.stop_sshd()
    config = node.read("/etc/ssh/sshd_config")
    node.path("/etc/ssh/sshd_config").write_text("Nothing yes\n")
    said = "sshd_config: terminating, 1 bad configuration options', expected it listens on port 22. See its log."
    with pytest.raises(LabError, match=rf"^sshd of node n0: '.*{re.escape(said)}$"):
        node.start_sshd()
    node.path("/etc/ssh/sshd_config").write_text(config)
    node.start_sshd()
    said = r"^process id namespace: Bad file descriptor, expected a kernel that has them\. Run as root\.$"
    with pytest.raises(LabError, match=said):
        ssh_node._check(ctypes.CDLL(None, use_errno=True).setns(-1, 0))


@pytest.mark.parametrize("by", ["its end", "a kill"])
def test_nothing_is_left(request: pytest.FixtureRequest, by: str) -> None:
    demands.need(request.config, demands.LAB, ssh_lab.problems())
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        name, *pids = owner.stdout.readline().split()
        started = [psutil.Process(int(pid)) for pid in pids]  # which knows them from later ones of the same number
        assert len(started) == 2
        owner.send_signal(signal.SIGKILL if by == "a kill" else signal.SIGINT)
    wait_until(lambda: name not in lab.names())
    wait_until(lambda: not any(map(is_alive, started)))
    assert name not in Path("/proc/self/mountinfo").read_text()
    assert not list(Path("/run/netns").glob(f"rw-{name}:*"))


def test_a_lab_of_a_process_that_is_gone_is_removed_by_the_next(request: pytest.FixtureRequest) -> None:
    demands.need(request.config, demands.LAB, ssh_lab.problems())
    with subprocess.Popen(["sleep", "1000"]) as owner:  # alive until its lab is up: other tests remove labs too
        name = f"ssh-{owner.pid}-0"
        lab.up(topology.loads("name: old\nnodes: [{name: a, nic: 1Gbit/s, devices: 1}]"), name)
        owner.kill()
    with ssh_lab.ssh_lab(num_nodes=1):
        assert name not in lab.names()


def test_programs_that_are_absent_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find = ssh_lab.tools.find_program
    monkeypatch.setattr(ssh_lab.tools, "find_program", lambda name: None if name in ("sshd", "nft") else find(name))
    assert ssh_lab.problems()[-1] == (
        "programs: 'sshd, nft not found', expected sshd, ssh, nft, setpriv. apt install nftables openssh-server."
    )


def is_alive(process: psutil.Process) -> bool:
    """A zombie is not: the first process of a container may never wait for it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
