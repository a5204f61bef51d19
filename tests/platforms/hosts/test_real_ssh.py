"""Runs on hosts over Debian's sshd: nodes with homes, host keys and disks of their own."""

import importlib.metadata
import re
import sys
from collections.abc import Iterator

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
RUN = [sys.executable, "-m", "ringweave", "run", "--hosts"]
ABLE = "n0:2,n1,n2"
"""The others take no part once a test has made them unable."""


@pytest.fixture(scope="module")
def lab(request: pytest.FixtureRequest) -> Iterator[SshLab]:
    """Nine nodes, with a script on the first one."""
    demands.need(request.config, demands.LAB, ssh_lab.problems())
    with ssh_lab.ssh_lab(num_nodes=9, home_bytes=2**27) as made:
        made.nodes[0].write("project/train.py", SCRIPT)
        yield made


def run(lab: SshLab, *program: str, hosts: str = ABLE, folder: str = "project") -> tuple[int, str, str]:
    """Exit code, output and errors of the run, of `train.py` if no program is named."""
    words = ["sh", "-c", f'cd {folder} && exec "$@"', "sh", *RUN, hosts, *(program or ("train.py",))]
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
        "other/text/train.py", f"import sys\nfrom text import names{SCRIPT}print(names.WORD, sys.argv[1:])\n"
    )
    lab.nodes[0].write("other/text/names.py", "WORD = 'imported'\n")
    hosts = ["n0", "n0", "n1", "n2"]
    told = [f"[{rank}] rank {rank} on {hosts[rank]} in files" for rank in range(4)]
    code, out, errors = run(lab, "-m", "text.train", "--lr", "1", folder="other")
    assert code == 0, errors
    assert sorted(out.splitlines()) == sorted([*told, *(f"[{rank}] imported ['--lr', '1']" for rank in range(4))])
    lab.nodes[0].write("other/run.sh", 'echo "rank $RANK on $(hostname) in $(basename "$PWD")"\n')
    code, out, errors = run(lab, "--", "sh", "run.sh", folder="other")
    assert code == 0, errors
    assert sorted(out.splitlines()) == told
    wait_nothing_left(lab)


def show_other_torch(node: SshNode) -> None:
    """Let the node see metadata of another torch in the place of the installed one's."""
    (metadata,) = (each for each in importlib.metadata.files("torch") or () if each.match("*.dist-info/METADATA"))
    path = str(importlib.metadata.distribution("torch").locate_file(metadata))
    other = "/run/torch-metadata"
    change = f"sed 's/^Version: .*/Version: 1.13.1/' {path} > {other} && mount --bind {other} {path}"
    node.run(["sh", "-c", change], user="root")


def test_hosts_that_ssh_does_not_reach_are_named(lab: SshLab) -> None:
    lab.node("n3").change_host_key()
    lab.node("n4").hide_python()
    lab.node("n5").refuse_keys()
    code, _, errors = run(lab, hosts="n0:2,n1,n3,n4,n5")
    assert code == 1
    for text in (
        "host n3: 'another host key than the known one', expected an answer by ssh.",
        "forget its old key (ssh-keygen -R n3), then ssh n3 once",
        "host n4: 'no Python with ringweave', expected an answer by ssh. Install ringweave there",
        "host n5: 'no key that it accepts', expected an answer by ssh. Put your key there (ssh-copy-id n5)",
    ):
        assert text in errors, errors
    wait_nothing_left(lab)


def test_hosts_that_differ_or_are_full_are_named(lab: SshLab) -> None:
    lab.node("n6").fill_disk("/home")
    show_other_torch(lab.node("n7"))
    lab.node("n8").set_clock(1.0)
    code, _, errors = run(lab, hosts="n0:2,n1,n6,n7,n8")
    assert code == 1
    for text in (
        "free disk of host n6: '0B', expected at least 64MB. Free space for /home/trainer/.local/state",
        "torch on host n7: '1.13.1', expected",
        "Install the same minor version of torch on all hosts",
    ):
        assert text in errors, errors
    words = "clock of host n8: '(.*) s from this machine's', expected the same time. Set it"
    found = re.search(words, errors.replace('"', "'"))
    assert found is not None, errors
    assert float(found[1]) == pytest.approx(86400, abs=60)
    assert len(re.findall(r"^(?:ringweave: error: )?(?:free disk|torch|clock) o", errors, re.MULTILINE)) == 3, errors
    wait_nothing_left(lab)


def test_hosts_that_do_not_reach_each_other_are_named(lab: SshLab) -> None:
    lab.node("n2").nft(
        "add table inet test",
        "add chain inet test in { type filter hook input priority 0; }",
        f"add rule inet test in ip saddr {lab.node('n1').address} tcp dport != 22 tcp flags & (syn | ack) == syn drop",
    )
    code, _, errors = run(lab)
    lab.node("n2").nft("delete table inet test")
    assert code == 1
    assert "connection from host n1 to n2: 'timed out', expected a listener at" in errors, errors
    assert "Open TCP between them in the firewall, or give n2 another address." in errors, errors
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
