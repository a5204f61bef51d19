"""Runs on hosts over Debian's sshd: nodes with homes, host keys and disks of their own."""

import re
import sys
import time
from collections.abc import Iterator

import pytest

from ringweave_bench import ssh_lab
from ringweave_bench.ssh_lab import SshLab
from tests import demands

pytestmark = pytest.mark.timeout(240)

SCRIPT = """
import os, socket
print("rank", os.environ["RANK"], "on", socket.gethostname(), "in", os.path.basename(os.getcwd()))
open("written-here", "w").write("x")
"""
RUN = [sys.executable, "-m", "ringweave", "run", "--hosts", "n0:2,n1,n2"]


@pytest.fixture
def lab(request: pytest.FixtureRequest) -> Iterator[SshLab]:
    """Three nodes, with a script on the first one."""
    demands.need(request.config, demands.LAB, ssh_lab.problems())
    with ssh_lab.ssh_lab(num_nodes=3) as made:
        made.nodes[0].write("project/train.py", SCRIPT)
        yield made


def run(lab: SshLab, *program: str) -> tuple[int, str, str]:
    """Exit code, output and errors of the run, of `train.py` if no program is named."""
    words = ["sh", "-c", 'cd project && exec "$@"', "sh", *RUN, *(program or ("train.py",))]
    done = lab.nodes[0].run(words, check=False)
    return done.returncode, done.stdout, done.stderr


def left(lab: SshLab) -> list[str]:
    """Processes, ports and files of runs that stay on the nodes; the cache of files is kept on purpose."""
    deadline_s = time.monotonic() + 60.0  # an interpreter that has told its end needs a moment to go
    while (found := present(lab)) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return found


def present(lab: SshLab) -> list[str]:
    found = [f"{node.name}: {process.command}" for node in lab.nodes for process in node.processes()]
    found += [f"{node.name}: {port}" for node in lab.nodes for port in node.listening_ports() if port != 22]
    return found + [path for node in lab.nodes for path in node.files() if "/hosts/" in path and "/runs/" not in path]


def test_workers_run_in_a_copy_on_their_own_hosts(lab: SshLab) -> None:
    code, out, errors = run(lab)
    assert code == 0, errors
    hosts = ["n0", "n0", "n1", "n2"]
    assert sorted(out.splitlines()) == [f"[{rank}] rank {rank} on {hosts[rank]} in files" for rank in range(4)]
    assert "files: 1 of /home/trainer/project" in errors
    assert not lab.nodes[0].path("/home/trainer/project/written-here").exists()
    assert left(lab) == []


@pytest.mark.thorough
def test_a_module_and_a_command_run_in_the_copy_too(lab: SshLab) -> None:
    lab.nodes[0].write(
        "project/text/train.py", f"import sys\nfrom text import names{SCRIPT}print(names.WORD, sys.argv[1:])\n"
    )
    lab.nodes[0].write("project/text/names.py", "WORD = 'imported'\n")
    hosts = ["n0", "n0", "n1", "n2"]
    told = [f"[{rank}] rank {rank} on {hosts[rank]} in files" for rank in range(4)]
    code, out, errors = run(lab, "-m", "text.train", "--lr", "1")
    assert code == 0, errors
    assert sorted(out.splitlines()) == sorted([*told, *(f"[{rank}] imported ['--lr', '1']" for rank in range(4))])
    lab.nodes[0].write("project/run.sh", 'echo "rank $RANK on $(hostname) in $(basename "$PWD")"\n')
    code, out, errors = run(lab, "--", "sh", "run.sh")
    assert code == 0, errors
    assert sorted(out.splitlines()) == told
    assert left(lab) == []


def test_a_changed_host_key_is_refused(lab: SshLab) -> None:
    lab.nodes[1].change_host_key()
    code, _, errors = run(lab)
    assert code == 1
    assert "host n1: 'another host key than the known one', expected an answer by ssh." in errors
    assert "forget its old key (ssh-keygen -R n1), then ssh n1 once" in errors
    assert left(lab) == []


def test_a_host_without_python_is_refused(lab: SshLab) -> None:
    lab.nodes[2].hide_python()
    code, _, errors = run(lab)
    assert code == 1
    assert "host n2: 'no Python with ringweave', expected an answer by ssh. Install ringweave there" in errors
    assert left(lab) == []


def test_a_clock_that_is_off_is_refused(lab: SshLab) -> None:
    lab.nodes[1].set_clock(1.0)
    code, _, errors = run(lab)
    assert code == 1
    words = "clock of host n1: '(.*) s from this machine's', expected the same time. Set it"
    found = re.search(words, errors.replace('"', "'"))
    assert found is not None, errors
    assert float(found[1]) == pytest.approx(86400, abs=60)
    assert left(lab) == []


def test_a_full_disk_is_named(lab: SshLab) -> None:
    lab.nodes[1].fill_disk("/home")
    code, _, errors = run(lab)
    assert code == 1
    assert "host n1:" in errors
    assert "No space left on device" in errors
    assert left(lab) == []


def test_a_port_that_is_blocked_in_one_direction_is_named(lab: SshLab) -> None:
    lab.nodes[2].nft(
        "add table inet test",
        "add chain inet test in { type filter hook input priority 0; }",
        f"add rule inet test in ip saddr {lab.nodes[1].address} tcp dport != 22 tcp flags & (syn | ack) == syn drop",
    )
    code, _, errors = run(lab)
    assert code == 1
    assert "connection from host n1 to n2: 'timed out', expected a listener at" in errors
    assert "Open TCP between them in the firewall, or give n2 another address." in errors
    assert left(lab) == []
