"""Options of `run --hosts` that workers see as on one machine, with real services on loopback addresses."""

import json
import os
import random
import signal
import socket
from typing import Any

import psutil
import pytest

from ringweave import ports
from ringweave.platforms.hosts import start
from ringweave.ports import PortRange
from tests.platforms.hosts.conftest import FakeHosts
from tests.platforms.hosts.test_join import JOB, read_checks

pytestmark = pytest.mark.slow

DDP = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(256, 256))
for step in range(3):
    model(torch.full((4, 256), 1.0 + dist.get_rank())).sum().backward()
gradient = next(model.parameters()).grad
names = ("NODE", "SCHEDULE", "TUNING", "LEADER_PER_NIC", "REPLACE_BACKEND", "MAX_LOSS_INCREASE")
print("told", *(os.environ.get(f"RINGWEAVE_{name}") for name in names), "mean", gradient[0, 0].item())
dist.destroy_process_group()
"""
"""Gradients of 256 KiB; their sum over three steps is that of three times the ranks' mean, which is 2."""
ALL_OPTIONS = ("--schedule", "ring", "--no-tuning", "--order", "round-robin", "--leader-per-nic", "--replace-backend")
ALL_OPTIONS += ("--max-loss-increase", "0.5%")


SHOWS_PORTS = """
import psutil
services = [each for each in psutil.process_iter(["cmdline"]) if {root!r} in str(each.info["cmdline"])]
services = [each for each in services if "ringweave.platforms.hosts.service" in each.info["cmdline"]]
for name, processes in (("own", [psutil.Process()]), ("of services", services)):
    found = [port for each in processes for port in each.net_connections("tcp") if port.status == "LISTEN"]
    print("ports", name, *(each.laddr.port for each in found))
dist.barrier()
dist.destroy_process_group()
"""


def free_range(count: int) -> PortRange:
    """Return a range of so many ports below the kernel's, on which nothing listens now."""
    for low in random.Random().sample(range(12_000, 30_000, count), 100):
        try:
            for port in range(low, low + count):
                socket.create_server(("", port)).close()
        except OSError:
            continue
        return PortRange(low, low + count - 1)
    raise AssertionError("no free range")


def run_ddp(hosts: FakeHosts, *words: str) -> tuple[list[str], dict[str, Any], str]:
    """Run on two workers on `a` and one on `b`; return the lines of the workers, run.json, and its standard error."""
    folder = hosts.root / "user" / "project"
    done = hosts.run("run", "--hosts", "a:2,b:1", "--run-dir", "out", *words, timeout_s=240.0)
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines()), json.loads((folder / "out" / "run.json").read_text()), done.stderr


def test_every_option_reaches_the_workers_of_all_hosts_and_listeners_stay_in_their_ports(hosts: FakeHosts) -> None:
    within = free_range(60)
    hosts.write_script(DDP.replace("dist.destroy_process_group()", "") + SHOWS_PORTS.format(root=str(hosts.root)))
    lines, record, said = run_ddp(hosts, *ALL_OPTIONS, "--ports", str(within), "train.py")
    own, of_services = (
        [[int(port) for port in line.partition(f"{name} ")[2].split()] for line in lines if f"ports {name}" in line]
        for name in ("own", "of services")
    )
    each = ports.LISTENERS_PER_WORKER + ports.ENCRYPTED_LISTENERS_PER_WORKER - 1  # Gloo's door is closed by then
    assert sorted(sum(port in within for port in line) for line in own) == [each, each, each + 1]  # one has the store
    assert all(port in within or port in ports.kernel_ports() for line in own for port in line), own
    assert len(of_services) == 3
    assert all(len(line) == 2 and all(port in within for port in line) for line in of_services), of_services
    assert f"listeners of Gloo and NCCL stay outside of {within}" in said
    told = [line for line in lines if "told" in line]
    assert told == [f"[{rank}] told {node} ring 0 1 1 0.5% mean 24.0" for rank, node in enumerate(("a", "b", "a"))]
    assert {key: record[key] for key in ("schedule", "tuning", "order", "leader_per_nic")} == {
        "schedule": "ring",
        "tuning": False,
        "order": "round-robin",
        "leader_per_nic": True,
    }
    assert record["cluster"]["nodes"] == [{"name": "a", "workers": [0, 2]}, {"name": "b", "workers": [1]}]
    assert record["collectives_by_schedule"]["ring"]["collectives"] >= 3
    assert {agreed["schedule"] for agreed in record["plan"]} == {"ring"}


@pytest.mark.thorough
def test_without_options_a_named_backend_stays(hosts: FakeHosts) -> None:
    hosts.write_script(DDP)
    lines, record, _ = run_ddp(hosts, "train.py")
    assert lines == [
        f"[{rank}] told {node} None None None None None mean 24.0" for rank, node in enumerate(("a", "a", "b"))
    ]
    assert (record["schedule"], record["order"], record["collectives_by_schedule"]) == (None, "block", {})


def test_a_module_of_the_current_directory_runs(hosts: FakeHosts) -> None:
    folder = hosts.write_script("")
    (folder / "text").mkdir()
    (folder / "text" / "words.py").write_text("WORD = 'shipped'\n")
    program = (
        "import os, sys\nfrom text.words import WORD\nprint(WORD, os.environ['RANK'], sys.argv[1:], __package__)\n"
    )
    (folder / "text" / "train.py").write_text(program)
    done = hosts.run("run", "--hosts", "a:2", "--run-dir", "out", "-m", "text.train", "--lr", "1")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] shipped {rank} ['--lr', '1'] text" for rank in range(2)]
    assert json.loads((folder / "out" / "run.json").read_text())["command"] == ["-m", "text.train", "--lr", "1"]


@pytest.mark.thorough
def test_a_command_starts_in_the_current_directory(hosts: FakeHosts) -> None:
    folder = hosts.write_script(
        '#!/bin/sh\necho "$1 $RANK of $WORLD_SIZE on $RINGWEAVE_NODE"\ncat data.txt\n', "run.sh"
    )
    (folder / "run.sh").chmod(0o755)
    (folder / "data.txt").write_text("some data\n")
    told = [f"[{rank}] rank {rank} of 2 on {node}" for rank, node in enumerate("ab")]
    wanted = sorted([*told, "[0] some data", "[1] some data"])
    for command in (("./run.sh", "rank"), ("sh", "-c", "sh run.sh rank")):
        done = hosts.run("run", "--hosts", "a,b", "--", *command)
        assert done.returncode == 0, done.stderr
        assert sorted(done.stdout.splitlines()) == wanted


@pytest.mark.thorough
def test_a_job_file_has_the_same_options(hosts: FakeHosts) -> None:
    folder = hosts.write_script(DDP, "train.py")
    job = (
        "name: optional\ncpu_workers: 3\nmodule: train\ndirectory: .\nmin_per_node: 1\n"
        "nodes: [{name: a, capacity: 2}, {name: b, capacity: 1}]\n"
        "schedule: ring\ntuning: false\norder: round-robin\nreplace_backend: true\nleader_per_nic: true\n"
        "max_loss_increase: 0.5%\n"
    )
    (folder / "job.yaml").write_text(job)
    for platform in ("hosts", "local"):
        done = hosts.run("submit", "--on", platform, "--yes", "job.yaml", timeout_s=240.0)
        assert done.returncode == 0, done.stderr
        assert sorted(done.stdout.splitlines()) == [
            f"[{rank}] told {node} ring 0 1 1 0.5% mean 24.0" for rank, node in enumerate(("a", "b", "a"))
        ]
        assert "first    ring for 25MB, as the job asks, predicted " in done.stderr
        assert "  a: 2 of 2, ranks 0 2\n" in done.stderr
        assert hosts.ask("delete", "optional", "--on", platform).returncode == 0


def coordinators(hosts: FakeHosts) -> list[psutil.Process]:
    """Coordinators of runs that were started on the user's machine."""
    return [each for each in hosts.processes("user") if "ringweave.membership.main" in each.cmdline()]


@pytest.mark.thorough
def test_an_elastic_run_on_this_machine_outlives_its_command_its_coordinator_and_a_worker(hosts: FakeHosts) -> None:
    hosts.write_script(JOB.read_text())
    checks = hosts.root / "checks"
    words = ["train.py", str(hosts.root / "disk"), "--checks", str(checks), "--fresh", "--width", "64"]
    started = hosts.run("run", "--workers", "3", "--elastic", "2:3", "--name", "train", "--detach", *words)
    assert started.returncode == 0, started.stderr
    hosts.wait(lambda: sum(len(done) > 3 for done in read_checks(checks).values()) == 3, "three workers train")
    (coordinator,) = coordinators(hosts)
    assert "--other" not in coordinator.cmdline()
    coordinator.kill()
    (path,) = checks.glob("1.0-*.txt")
    os.kill(int(path.stem.partition("-")[2]), signal.SIGKILL)
    hosts.wait(lambda: len(read_checks(checks).get("1.1", {})) > 3, "the second one trains again")
    assert hosts.ask("stop", "train").returncode == 0
    assert hosts.run("attach", "train").returncode == 1
    done = read_checks(checks)
    assert set(done) == {"0.0", "1.0", "1.1", "2.0"}, "no other worker was started again"
    assert set(done["0.0"]) == set(range(1, max(done["0.0"]) + 1))
    for each in done.values():
        assert each.items() <= done["0.0"].items() or max(each) > max(done["0.0"])


def test_variables_of_libraries_and_of_probing_go_to_all_hosts() -> None:
    environ = {"NCCL_DEBUG": "INFO", "RINGWEAVE_PROBE": "never", "RINGWEAVE_MODE": "ps", "HOME": "/"}
    assert start.forwarded_environ(environ) == {"NCCL_DEBUG": "INFO", "RINGWEAVE_PROBE": "never"}
