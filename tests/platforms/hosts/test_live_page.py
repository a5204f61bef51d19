"""The live page of runs on hosts: everything that workers measure comes while the run goes on."""

import contextlib
import json
import random
import re
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ringweave.launcher.node_context import free_port
from ringweave_bench import ssh_lab
from ringweave_bench.ssh_lab import SshLab
from tests import demands, polling
from tests.page.live_runs import MEASURED, OVER, READER, read_page, training
from tests.platforms.hosts.conftest import FakeHosts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(480)]


def check_live(run: dict[str, Any], nodes: list[str]) -> None:
    """Check the sections of a run of one worker on each node that goes on."""
    assert run["head"]["state"] == "Running"
    assert [row["node"] for row in run["ranks"]["rows"]] == nodes
    assert all(row["step"]["wall_s"] > 0 for row in run["ranks"]["rows"])
    assert {row["state"] for row in run["ranks"]["rows"]} == {"running"}
    assert run["steps"]["samples_per_s"]
    assert set(run["steps"]["waits"]["ranks"]) == set(range(len(nodes)))
    assert run["progress"]["total"] == 1_000_000
    assert run["loss"]["mean"]
    assert run["training"]["mode"]
    assert {"worker_started", "training_prepared"} <= {row["kind"] for row in run["events"]["rows"]}
    assert [row["source"] for row in run["logs"]["sources"]] == [f"rank {rank}" for rank in range(len(nodes))]
    assert run["counts"]["unread_text"] == ""
    assert [each["label"].partition(",")[0] for each in run["topology"]["tree"]["children"]] == nodes


def kill_connections() -> int:
    """Kill the processes by which pages reach hosts; return how many they were."""
    programs = psutil.Process().children(recursive=True)
    pages = []
    for each in programs:
        with contextlib.suppress(psutil.NoSuchProcess):  # ended, or a zombie
            pages += [each] if {"ringweave", "ui"} <= set(each.cmdline()) else []
    connections = [each for page in pages for each in page.children(recursive=True)]
    for each in connections:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    return len(connections)


def ranks_with_steps(port: int) -> set[str]:
    """Ranks of which an export has served steps."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            return set(re.findall(r'ringweave_rank_steps_total{node="\w+",rank="(\d+)"}', answer.read().decode()))
    except OSError:
        return set()


def test_pages_exports_and_a_verdict_where_the_run_was_started_and_on_a_host(hosts: FakeHosts) -> None:
    flag = hosts.root / "flag"
    slow = "if os.environ['RANK'] == '1':\n    model.register_forward_pre_hook(lambda *_: time.sleep(0.1))\nprint("
    folder = hosts.write_script(training(str(flag)).replace("print(", slow, 1))
    command = hosts.start("run", "--hosts", "a,b", "--name", "mine", "--run-dir", "out", "train.py")
    hosts.wait(lambda: any(path.name == "events.jsonl" for path in hosts.run_files("b")), "workers begin")
    ports = {host: free_port(random.SystemRandom()) for host in (None, "b")}
    exports = [
        hosts.start("export", "mine", "--prometheus", str(port), "--tensorboard", "curves", host=host)
        for host, port in ports.items()
    ]
    conditions = (MEASURED, OVER, f"{OVER} and run['head']['platform'] == 'runs'")
    with (
        read_page(*conditions, words=("out",), cwd=folder, environ=hosts.environ()) as here,
        read_page(MEASURED, OVER, words=("mine",), cwd=hosts.home("b"), environ=hosts.environ("b")) as there,
    ):
        for pages in (here, there):
            check_live(next(pages), ["a", "b"])
        assert kill_connections() >= 2, "of the page here to both hosts: it makes others"
        for port in ports.values():
            hosts.wait(lambda port=port: ranks_with_steps(port) == {"0", "1"}, "steps of both ranks")
        said = "The others wait for rank 1 on node b"
        polling.wait_until(lambda: said in hosts.ask("why", "mine").stdout, "a verdict", pause_s=3.0)
        flag.touch()
        assert next(there)["head"]["state"] in ("Succeeded", "Removed")
        over, whole = here
        assert over["head"]["state"] == "Succeeded"
        assert whole["head"]["name"] == "out", "its files have come"
        assert whole["timeline"]["attempts"][0]["outcome"] == "done"
        assert whole["progress"]["train_step"] >= over["progress"]["train_step"]
    assert command.wait(timeout=60) == 0
    assert [each.wait(timeout=60) for each in exports] == [0, 0]
    assert all(list((each / "curves").iterdir()) for each in (folder, hosts.home("b")))


@pytest.fixture
def lab(request: pytest.FixtureRequest) -> Iterator[SshLab]:
    demands.need(request.config, demands.LAB, ssh_lab.problems())
    with ssh_lab.ssh_lab(num_nodes=2) as made:
        yield made


@pytest.mark.thorough  # daily over a stand-in for ssh, and other verbs over the real one
def test_over_debian_s_sshd(lab: SshLab) -> None:
    first = lab.nodes[0]
    first.write("project/train.py", training("/home/trainer/flag"))
    first.write("read.py", READER)
    run = [sys.executable, "-m", "ringweave", "run", "--hosts", "n0,n1", "--run-dir", "out", "train.py"]
    process = first.popen(["sh", "-c", 'cd project && exec "$@"', "sh", *run])
    conditions = json.dumps([MEASURED])
    read = ["sh", "-c", 'cd project && exec "$@"', "sh", sys.executable, "../read.py", conditions, "out"]
    while not any(path.endswith("/events.jsonl") for path in lab.nodes[1].files()):
        assert process.poll() is None
    done = first.run(read)
    check_live(json.loads(done.stdout.splitlines()[0]), ["n0", "n1"])
    for node in lab.nodes:
        node.write("flag", "")
    assert process.wait(timeout=60) == 0
    assert Path(first.path("/home/trainer/project/out/run.json")).exists()
