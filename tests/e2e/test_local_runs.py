"""Mode `local` through the real command line: two nodes are two sites, and the script is the one of other modes."""

import json
import os
import subprocess
import sys
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


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    command = [*RUN, *options, "--run-dir", str(folder / "run"), str(script)]
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
    steps = [event for event in events if event["kind"] == "outer_step"]
    assert steps[-1]["train_steps"] == 160
    assert sum(map(sum, (event["samples"] for event in steps))) == 2 * 640


def test_elastic_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, "--workers", "2,2", "--mode", "local", "--elastic", "2:4")
    assert done.returncode == 2
    assert (
        "mode of an elastic job: 'local', expected one of auto, sync, balanced, ps-hra, ps. Take ps-hra with "
        "Asynchronous(local_steps=8), whose rings lose and gain workers, or run without elastic and go on from "
        "ringweave.Checkpoints after a failure. [--mode]"
    ) in " ".join(done.stderr.split())
