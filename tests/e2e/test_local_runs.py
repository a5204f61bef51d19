"""Mode `local` through the real command line: two nodes are two sites, and the script is the one of other modes."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from ringweave.telemetry import read_events

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.distributed]

RUN = [str(Path(sys.executable).parent / "ringweave"), "run"]
SCRIPT = """
import json, sys, torch, ringweave
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
data = TensorDataset(torch.randn(640, 4), torch.randint(2, (640,)))
loader = DataLoader(data, batch_size=8, shuffle=True)
model, optimizer, loader = ringweave.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
weights = [each.tolist() for each in model.parameters()]
end = {"weights": weights, "exact": loader.account.is_exact, "steps": loader.num_train_steps}
sys.stdout.write(json.dumps(end) + "\\n")
"""


def run(
    folder: Path, *options: str, script: str = SCRIPT, args: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    path = folder / "train.py"
    path.write_text(script)
    command = [*RUN, *options, "--run-dir", str(folder / "run"), str(path), *args]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=200, env=environ)


def test_an_unchanged_script_trains_in_sites(tmp_path: Path) -> None:
    done = run(tmp_path, "--workers", "2,2", "--mode", "local")
    assert done.returncode == 0, done.stdout + done.stderr
    results = [json.loads(line[line.index("{") :]) for line in done.stdout.splitlines() if '"weights"' in line]
    assert len(results) == 4
    assert all(each == results[0] for each in results), "all ranks end with the same parameters"
    assert results[0]["exact"]
    assert results[0]["steps"] == 160
    events = list(read_events(tmp_path / "run" / "events.jsonl"))
    (formed,) = [event for event in events if event["kind"] == "sites_formed"]
    assert formed["sites"] == [[0, 1], [2, 3]]
    assert formed["inner_lr_factor"] == 1, "SGD"
    assert json.loads((tmp_path / "run" / "run.json").read_text())["training"]["mode"] == "local"
    steps = [event for event in events if event["kind"] == "outer_step"]
    assert steps[-1]["train_steps"] == 160
    assert sum(map(sum, (event["samples"] for event in steps))) == 2 * 640


THIN = """
name: thin
nodes:
  - {name: a, switch: r0, nic: 1Gbit/s, devices: 1}
  - {name: b, switch: r1, nic: 1Gbit/s, devices: 1}
switches:
  - {name: r0, uplink: 1Mbit/s}
  - {name: r1, uplink: 1Mbit/s}
"""
LARGE = SCRIPT.replace("Linear(4, 2)", "Sequential(torch.nn.Linear(4, 40_000), torch.nn.Linear(40_000, 2))")


@pytest.mark.parametrize(
    ("options", "mode", "chosen"),
    [
        pytest.param((), "balanced", "", marks=pytest.mark.thorough),
        pytest.param(
            ("--max-loss-increase", "100%"),
            "local",
            "; chosen: local with outer steps every ",
            marks=pytest.mark.thorough,  # daily in a lab: launcher/test_lab_runs.py
        ),
        pytest.param(
            ("--mode", "balanced", "--wire", "auto", "--max-loss-increase", "1%"),
            "balanced",
            "; chosen: balanced in int8",
            marks=pytest.mark.thorough,  # daily in a lab: launcher/test_lab_runs.py
        ),
    ],
)
def test_auto_takes_over_a_thin_uplink_what_the_bound_allows(
    options: tuple[str, ...], mode: str, chosen: str, tmp_path: Path
) -> None:
    (tmp_path / "thin.yaml").write_text(THIN)
    script = LARGE.replace("range(2)", "range(1)").replace("640", "64")
    done = run(tmp_path, "--cluster", str(tmp_path / "thin.yaml"), *options, script=script)
    assert done.returncode == 0, done.stdout + done.stderr
    training = json.loads((tmp_path / "run" / "run.json").read_text())["training"]
    assert training["mode"] == mode
    assert chosen in training["reason"]
    assert ("loss at equal samples is allowed" in training["reason"]) == bool(options)
    assert training["exact"]


KILLED = """
import os, signal, pathlib
from ringweave.environment import WorkerEnvironment
slot = int(os.environ["RINGWEAVE_MEMBER"].split(".")[0].lstrip("w"))
marker = pathlib.Path(sys.argv[1]) / str(slot)
count = 0
def maybe_die():
    global count
    count += 1
    if count == 20 and slot in LOST and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("lost", [pytest.param((3,), marks=pytest.mark.thorough), (2, 3)], ids=["a worker", "a site"])
def test_an_elastic_job_loses_no_sample_with_a_worker_or_a_site(tmp_path: Path, lost: tuple[int, ...]) -> None:
    head, loop = SCRIPT.split("model, optimizer, loader = ringweave.prepare(", 1)
    killed = KILLED.replace("LOST", repr(lost))
    loop = loop.replace("        optimizer.step()", "        optimizer.step()\n        maybe_die()")
    prepare = "model, optimizer, loader = ringweave.prepare("
    script = f"{head}{killed}\n{prepare}{loop}".replace("640", "320")
    script = script.replace("for epoch in range(2)", "for epoch in loader.epochs(2)").replace(
        "is_exact", "is_accounted"
    )
    script = script.replace('"steps": loader.num_train_steps', '"lost": loader.account.lost.num_samples')
    done = run(tmp_path, "--workers", "2,2", "--mode", "local", "--elastic", "1:4", script=script, args=[str(tmp_path)])
    assert done.returncode == 0, done.stdout + done.stderr
    results = [json.loads(line[line.index("{") :]) for line in done.stdout.splitlines() if '"weights"' in line]
    assert all((tmp_path / str(slot)).exists() for slot in lost)
    assert len(results) >= 4 - len(lost), "a worker that comes back may find the job done"
    assert all(each["exact"] and each["lost"] == 0 for each in results)
    assert all(each["weights"] == results[0]["weights"] for each in results)
    (formed,) = [event for event in read_events(tmp_path / "run" / "events.jsonl") if event["kind"] == "rings_formed"]
    assert formed["rings"] == [[0, 1], [2, 3]], "a ring is a site"
