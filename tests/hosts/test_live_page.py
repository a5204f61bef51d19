"""The live page of runs on hosts: everything that workers measure comes while the run goes on."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ringweave_bench import ssh_lab
from ringweave_bench.ssh_lab import SshLab
from tests import demands
from tests.hosts.conftest import FakeHosts
from tests.page.live_runs import MEASURED, OVER, READER, read_page, training

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


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


def test_a_page_where_the_run_was_started_and_one_on_a_host(hosts: FakeHosts) -> None:
    folder, flag = hosts.write_script(training(str(hosts.root / "flag"))), hosts.root / "flag"
    command = hosts.start("run", "--hosts", "a,b", "--name", "mine", "--run-dir", "out", "train.py")
    hosts.wait(lambda: any(path.name == "events.jsonl" for path in hosts.run_files("b")), "workers begin")
    gone = f"{OVER} or run['head']['trouble']"  # after its end a run is soon removed from its hosts
    conditions = (MEASURED, OVER, f"{OVER} and run['head']['platform'] == 'runs'")
    with (
        read_page(*conditions, words=("out",), cwd=folder, environ=hosts.environ()) as here,
        read_page(MEASURED, gone, words=("mine",), cwd=hosts.home("b"), environ=hosts.environ("b")) as there,
    ):
        for pages in (here, there):
            check_live(next(pages), ["a", "b"])
        flag.touch()
        over = next(there)
        assert over["head"]["state"] == "Succeeded" or ": removed" in over["head"]["trouble"]
        over, whole = here
        assert over["head"]["state"] == "Succeeded"
        assert whole["head"]["name"] == "out", "its files have come"
        assert whole["timeline"]["attempts"][0]["outcome"] == "done"
        assert whole["progress"]["train_step"] >= over["progress"]["train_step"]
    assert command.wait(timeout=60) == 0


def test_why_of_a_run_that_goes_on(hosts: FakeHosts) -> None:
    slow = "if os.environ['RANK'] == '1':\n    model.register_forward_pre_hook(lambda *_: time.sleep(0.1))\nprint("
    hosts.write_script(training(str(hosts.root / "flag")).replace("print(", slow, 1))
    hosts.start("run", "--hosts", "a,b", "--name", "mine", "--run-dir", "out", "train.py")

    def said() -> bool:
        return "The others wait for rank 1 on node b" in hosts.ask("why", "mine").stdout

    hosts.wait(said, "a verdict", 90.0)
    (hosts.root / "flag").touch()


@pytest.fixture
def lab(request: pytest.FixtureRequest) -> Iterator[SshLab]:
    demands.need(request.config, demands.LAB, ssh_lab.problems())
    with ssh_lab.ssh_lab(num_nodes=2) as made:
        yield made


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
