"""Runs on hosts over Debian's sshd: nodes with homes, host keys and disks of their own."""

import importlib.metadata
import re
import sys
from collections.abc import Callable, Iterator, Sequence

import pytest

from ringweave_bench import ssh_lab
from ringweave_bench.ssh_lab import SshLab
from ringweave_bench.ssh_node import SshNode
from tests import demands
from tests.polling import wait_until

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


def wait_nothing_left(lab: SshLab) -> None:
    wait_until(lambda: not present(lab), lambda: present(lab))  # an interpreter that has told its end needs a moment


def present(lab: SshLab) -> list[str]:
    """Processes, ports and files of runs on the nodes; the cache of files stays on purpose."""
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
    wait_nothing_left(lab)


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
    wait_nothing_left(lab)


def block_n1(nodes: Sequence[SshNode]) -> None:
    nodes[2].nft(
        "add table inet test",
        "add chain inet test in { type filter hook input priority 0; }",
        f"add rule inet test in ip saddr {nodes[1].address} tcp dport != 22 tcp flags & (syn | ack) == syn drop",
    )


def give_n2_other_torch(nodes: Sequence[SshNode]) -> None:
    """Let the node see metadata of another torch in the place of the installed one's."""
    (metadata,) = (each for each in importlib.metadata.files("torch") or () if each.match("*.dist-info/METADATA"))
    path = str(importlib.metadata.distribution("torch").locate_file(metadata))
    other = "/run/torch-metadata"
    change = f"sed 's/^Version: .*/Version: 1.13.1/' {path} > {other} && mount --bind {other} {path}"
    nodes[2].run(["sh", "-c", change], user="root")


@pytest.mark.parametrize(
    ("fault", "texts"),
    [
        (
            lambda nodes: nodes[1].change_host_key(),
            [
                "host n1: 'another host key than the known one', expected an answer by ssh.",
                "forget its old key (ssh-keygen -R n1), then ssh n1 once",
            ],
        ),
        (
            lambda nodes: nodes[2].hide_python(),
            ["host n2: 'no Python with ringweave', expected an answer by ssh. Install ringweave there"],
        ),
        (
            lambda nodes: nodes[1].fill_disk("/home"),
            ["free disk of host n1: '0B', expected at least 64MB. Free space for /home/trainer/.local/state"],
        ),
        (
            lambda nodes: nodes[1].refuse_keys(),
            ["host n1: 'no key that it accepts', expected an answer by ssh. Put your key there (ssh-copy-id n1)"],
        ),
        (
            give_n2_other_torch,
            ["torch on host n2: '1.13.1', expected", "Install the same minor version of torch on all hosts"],
        ),
        (
            block_n1,
            [
                "connection from host n1 to n2: 'timed out', expected a listener at",
                "Open TCP between them in the firewall, or give n2 another address.",
            ],
        ),
    ],
    ids=["host key", "no Python", "full disk", "wrong key", "other torch", "blocked in one direction"],
)
def test_a_host_that_cannot_take_part_is_named(
    lab: SshLab, fault: Callable[[Sequence[SshNode]], None], texts: list[str]
) -> None:
    fault(lab.nodes)
    code, _, errors = run(lab)
    assert code == 1
    assert all(text in errors for text in texts), errors
    wait_nothing_left(lab)


@pytest.mark.thorough
def test_a_host_that_is_far_away_is_named_and_takes_part(lab: SshLab) -> None:
    lab.nodes[1].delay_ms(300.0)
    code, out, errors = run(lab)
    assert code == 0, errors
    found = re.search(r"round trip to host n1: '([0-9.]+) s over ssh', expected at most 0.1 s", errors)
    assert found is not None, errors
    assert float(found[1]) >= 0.3
    assert "Leave the host out, or train in a mode that waits for it less often: --mode local, or ps-hra." in errors
    assert len(out.splitlines()) == 4
    lab.nodes[1].delay_ms(0.0)
    wait_nothing_left(lab)


def test_a_clock_that_is_off_is_refused(lab: SshLab) -> None:
    lab.nodes[1].set_clock(1.0)
    code, _, errors = run(lab)
    assert code == 1
    words = "clock of host n1: '(.*) s from this machine's', expected the same time. Set it"
    found = re.search(words, errors.replace('"', "'"))
    assert found is not None, errors
    assert float(found[1]) == pytest.approx(86400, abs=60)
    wait_nothing_left(lab)
