"""Sites and pipelines on hosts over Debian's sshd: accounts, losses and parameters, to the end of the run."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from ringweave_bench import ssh_lab
from ringweave_bench.ssh_lab import SshLab
from tests import demands
from tests.platforms.hosts.test_real_ssh import wait_nothing_left
from tests.polling import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
RINGWEAVE = [sys.executable, "-P", "-m", "ringweave"]
TWO_SITES = """
name: ssh
nodes:
  - {name: a0, switch: a, nic: 1Gbit/s, devices: 1}
  - {name: a1, switch: a, nic: 1Gbit/s, devices: 1}
  - {name: b0, switch: b, nic: 1Gbit/s, devices: 1}
  - {name: b1, switch: b, nic: 1Gbit/s, devices: 1}
switches:
  - {name: a, uplink: 20Mbit/s}
  - {name: b, uplink: 20Mbit/s}
"""
SITES = """
import json, sys, time, torch, ringweave
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(640, 16)
y = x @ torch.randn(16, 3)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 3))
mse = torch.nn.functional.mse_loss
begun = mse(model(x), y).item()
loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
model, optimizer, loader = ringweave.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
for epoch in loader.epochs(NUM_EPOCHS):
    for inputs, targets in loader:
        optimizer.zero_grad()
        mse(model(inputs), targets).backward()
        optimizer.step()
        time.sleep(SLEEP_S)
    print("epoch", epoch, flush=True)
with torch.no_grad():
    ended = mse(model(x), y).item()
end = {"weights": [each.tolist() for each in model.parameters()], "begun": begun, "ended": ended}
end |= {"accounted": loader.account.ACCOUNT}
sys.stdout.write(json.dumps(end) + "\\n")
"""
PIPELINE = """
import torch
from torch import nn
from ringweave import pipeline
torch.manual_seed(0)
blocks = [nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Dropout(0.2)) for _ in range(5)]
blocks.append(nn.Linear(12, 4))
settings = pipeline.Settings(num_microbatches=4, schedule="1f1b-overlap", seed=7)
make = lambda block: torch.optim.AdamW(block.parameters(), lr=1e-2)
model = pipeline.Pipeline(blocks, nn.CrossEntropyLoss(), make, torch.empty(32, 12), settings)
def batch(index):
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(32, 12, generator=generator)
    return x, x[:, :4].argmax(1)
for index in range(30):
    x, y = batch(index)
    print("loss", model.train_step(x, target=y, max_norm=1.0).item().hex(), flush=True)
x, y = batch(1000)
print("held out", model.evaluate(x, target=y).item().hex(), flush=True)
"""


def make_lab(request: pytest.FixtureRequest, **options: Any) -> Iterator[SshLab]:
    demands.need(request.config, demands.LAB, ssh_lab.problems())
    with ssh_lab.ssh_lab(**options) as found:
        yield found


@pytest.fixture
def two_sites(request: pytest.FixtureRequest) -> Iterator[SshLab]:
    yield from make_lab(request, cluster_text=TWO_SITES)


@pytest.fixture
def trio(request: pytest.FixtureRequest) -> Iterator[SshLab]:
    yield from make_lab(request, num_nodes=3)


def start(lab: SshLab, script: str, *words: str) -> "subprocess.Popen[str]":
    """Start a command in the folder of the script, on the first node."""
    lab.nodes[0].write("project/train.py", script)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environ = {"OMP_NUM_THREADS": "1"}  # nodes share few processors, on which further threads would only spin
    return lab.nodes[0].popen(["sh", "-c", 'cd project && exec "$@"', "sh", *words], environ=environ, **pipes)


def run_to_end(lab: SshLab, script: str, *words: str) -> tuple[str, str]:
    """Run such a command; return its output and its errors."""
    command = start(lab, script, *words)
    out, errors = command.communicate(timeout=400)
    assert command.returncode == 0, out + errors
    return out, errors


def sites_script(num_epochs: int, sleep_s: float = 0.0, account: str = "is_exact") -> str:
    return SITES.replace("NUM_EPOCHS", str(num_epochs)).replace("SLEEP_S", str(sleep_s)).replace("ACCOUNT", account)


def run_json(lab: SshLab) -> dict[str, Any]:
    return json.loads(lab.nodes[0].read("project/runs/out/run.json"))


def events_of(lab: SshLab, kind: str) -> list[dict[str, Any]]:
    """Events of that kind in the run directory, into which the command has copied those of all hosts."""
    found = []
    for path in lab.nodes[0].path("/home/trainer/project/runs/out/hosts").rglob("events.jsonl"):
        found += [json.loads(line) for line in path.read_text().splitlines() if f'"{kind}"' in line]
    return [event for event in found if event["kind"] == kind]


def ends(out: str) -> list[dict[str, Any]]:
    """Last line of each worker's script."""
    return [json.loads(line[line.index("{") :]) for line in out.splitlines() if '"weights"' in line]


def check_trained(found: Sequence[dict[str, Any]]) -> None:
    """Check that all have the same parameters, which have learned."""
    assert all(each["weights"] == found[0]["weights"] for each in found)
    assert found[0]["ended"] < 0.2 * found[0]["begun"], (found[0]["begun"], found[0]["ended"])
    assert all(each["accounted"] for each in found)


@pytest.mark.thorough  # daily: sites on one machine (e2e/test_local_runs.py), and the pipeline here
def test_local_trains_in_the_sites_that_the_links_show_and_an_elastic_run_in_the_same(two_sites: SshLab) -> None:
    hosts = ("--hosts", "a0,a1,b0,b1", "--mode", "local", "--run-dir", "runs/out")
    out, errors = run_to_end(two_sites, sites_script(6), *RINGWEAVE, "run", *hosts, "train.py")
    found = ends(out)
    assert len(found) == 4, errors
    check_trained(found)
    training = run_json(two_sites)["training"]
    assert training["mode"] == "local"
    assert "sites by measured links: a0 a1 | b0 b1" in training["reason"], training["reason"]
    assert training["samples_accounted"] == 6 * 640
    assert ". 3840 samples in 6 epochs, each exactly once.\n" in errors
    steps = events_of(two_sites, "outer_step")
    assert {event["train_steps"] for event in steps} >= {240}
    assert sum(map(sum, (event["samples"] for event in steps))) == 6 * 640
    wait_nothing_left(two_sites)

    elastic = (*RINGWEAVE, "run", *hosts, "--elastic", "2:4", "train.py")
    account = "is_accounted and not loader.account.lost.num_samples"
    command = start(two_sites, sites_script(12, sleep_s=0.02, account=account), *elastic)
    wait_until(lambda: "epoch 1" in worker_output(two_sites, 3), lambda: worker_output(two_sites, 3))
    two_sites.nodes[3].kill_all()
    out, errors = command.communicate(timeout=400)
    assert command.returncode == 0, out + errors
    found = ends(out)
    assert len(found) >= 3, errors  # the killed one may find the run done
    check_trained(found)
    formed = events_of(two_sites, "rings_formed")
    assert {json.dumps(event["rings"]) for event in formed} == {"[[0, 1], [2, 3]]"}, "as an earlier run has measured"
    assert "sites by measured links: a0 a1 | b0 b1" in run_json(two_sites)["training"]["reason"]
    wait_nothing_left(two_sites)


def worker_output(lab: SshLab, rank: int) -> str:
    path = lab.nodes[0].path(f"/home/trainer/project/runs/out/logs/rank-{rank}.log")
    return path.read_text() if path.exists() else ""


def lines_of(out: str) -> dict[str, list[str]]:
    """Losses that each rank has printed."""
    found: dict[str, list[str]] = {}
    for rank, text in re.findall(r"^\[(\d)\] ((?:loss|held out) .*)$", out, re.MULTILINE):
        found.setdefault(rank, []).append(text)
    return found


@pytest.mark.parametrize("options", [(), pytest.param(("--wire", "int8"), marks=pytest.mark.thorough)], ids=str)
def test_a_pipeline_has_the_losses_of_one_process(trio: SshLab, options: tuple[str, ...]) -> None:
    alone, _ = run_to_end(trio, PIPELINE, sys.executable, "train.py")
    single = [line for line in alone.splitlines() if line.startswith(("loss", "held out"))]
    values = [float.fromhex(line.split()[-1]) for line in single]
    assert (len(values), values[-1] < 0.8 * values[0]) == (31, True)
    hosts = ("--hosts", "n0,n1,n2", "--run-dir", "runs/out")
    out, errors = run_to_end(trio, PIPELINE, *RINGWEAVE, "run", *hosts, *options, "train.py")
    found = lines_of(out)
    assert sorted(found) == ["0", "1", "2"], errors
    if not options:
        assert all(each == single for each in found.values())
    else:
        coded = [float.fromhex(line.split()[-1]) for line in found["0"]]
        assert coded != values
        assert coded == pytest.approx(values, rel=0.1)
    record = run_json(trio)
    assert (record["outcome"], record["world_size"]) == ("done", 3)
    assert record["cluster"]["nodes"] == [{"name": f"n{rank}", "workers": [rank]} for rank in range(3)]
    wait_nothing_left(trio)
