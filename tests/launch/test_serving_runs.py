"""A run with a parameter server, through the real command."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TIMEOUT_S = 600.0
"""Five processes import torch: two minutes where the machine has a load of thirty."""

SCRIPT = """
import torch, ringweave
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(130, 6)
model = torch.nn.Linear(6, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(x, x[:, :2]), batch_size=32, shuffle=True)
model, optimizer, loader = ringweave.prepare(model, optimizer, loader)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
for _ in range(3):
    for a, b in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(a), b).backward()
        optimizer.step()
    schedule.step()
print("sum", sum(p.sum().item() for p in model.parameters()))
"""


KEEPS_SECRETS = """
import os, pathlib
from ringweave.wire import Credentials
own = os.environ["RINGWEAVE_CREDENTIALS"]
pathlib.Path("secrets").mkdir(exist_ok=True)
Credentials.from_descriptor(os.dup(int(own.removeprefix("fd:")))).save(pathlib.Path("secrets", os.environ["RANK"]))
"""
"""Before the script: what was given to the worker, for the test to look for."""


def run(folder: Path, script: str, *options: str) -> "subprocess.CompletedProcess[str]":
    (folder / "train.py").write_text(script)
    argv = [sys.executable, "-m", "ringweave", "run", *options, "--run-dir", str(folder / "run"), "train.py"]
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_a_run_in_rings(tmp_path):
    done = run(tmp_path, KEEPS_SECRETS + SCRIPT, "--workers", "3", "--mode", "ps-hra")
    assert done.returncode == 0, done.stderr
    sums = {line.split()[-1] for line in done.stdout.splitlines() if " sum " in line}
    assert len(sums) == 1  # all rings have the same parameters at the end of an epoch
    assert "pushes applied" in done.stderr
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["server"]["node"] == "node0"
    assert (record["training"]["mode"], record["training"]["exact"]) == ("ps-hra", True)
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    kinds = [event["kind"] for event in events]
    assert {"server_started", "rings_formed", "server_exited"} <= set(kinds)
    counted = [event for event in events if event["kind"] == "params_counted"][-1]
    formed = [event for event in events if event["kind"] == "rings_formed"]  # several if the machine was busy
    assert counted["samples"] == 390
    # Two, unless the machine was so busy that speeds differed.
    assert 2 <= counted["most_peers"] <= max(len(event["rings"]) for event in formed)
    check_no_secrets(tmp_path / "run", tmp_path / "secrets")


def check_no_secrets(run_dir: Path, secrets: Path) -> None:
    """Nothing that the job's processes kept from others is in any file of the run, and no file is for all to write."""
    told = [json.loads(path.read_text()) for path in secrets.iterdir()]
    assert len(told) == 3
    keys = [line for each in told for line in each["key_pem"].splitlines() if line and "-----" not in line]
    hidden = {each["token"] for each in told} | set(keys)
    assert len(hidden) > 3
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    assert {"run.json", "events.jsonl", "server.log", "rank-0.log"} <= {path.name for path in files}
    for path in files:
        content = path.read_text(errors="replace")
        assert "PRIVATE KEY" not in content
        assert not [secret for secret in hidden if secret in content], path
        assert path.stat().st_mode & 0o022 == 0, path


BREAKS_OFF = """
import os, torch, ringweave
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(400, 6)
model = torch.nn.Linear(6, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(x, x[:, :2]), batch_size=40, shuffle=True)
model, optimizer, loader = ringweave.prepare(model, optimizer, loader)
for epoch in range(3):
    count = 0
    for a, b in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(a), b).backward()
        optimizer.step()
        count += len(a)
        if epoch < 2 and os.environ["RANK"] == "0":
            break
    torch.distributed.barrier()  # a script that evaluates: nobody may wait for rank 0 elsewhere
print("sum", sum(p.sum().item() for p in model.parameters()))
"""


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_a_ring_that_breaks_off_its_epochs_holds_nobody_up(tmp_path):
    done = run(tmp_path, BREAKS_OFF, "--workers", "2", "--mode", "ps-hra")
    assert done.returncode == 0, done.stderr
    sums = {line.split()[-1] for line in done.stdout.splitlines() if " sum " in line}
    assert len(sums) == 1
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    accounts = [event for event in events if event["kind"] == "samples_accounted"]
    assert [(each["epoch"], each["samples"], each["exact"]) for each in accounts] == [(2, 400, True)]


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_without_a_server_the_script_says_how_to_get_one(tmp_path):
    script = SCRIPT.replace("(model, optimizer, loader)\nschedule", '(model, optimizer, loader, mode="ps")\nschedule')
    done = run(tmp_path, script, "--workers", "1")
    assert done.returncode == 1
    assert "parameter server: 'none in this run', expected one that the launcher has started." in done.stderr


DRIFTS = """
import torch, ringweave
from ringweave.planning.balancing import Speed
from ringweave.training import Asynchronous
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(240, 6)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
loader = DataLoader(TensorDataset(x, x[:, :2]), batch_size=48, shuffle=True)
settings = Asynchronous(rings=2)
model, optimizer, loader = ringweave.prepare(model, optimizer, loader, asynchronous=settings)
shares = loader._parts.shares
measure, now = shares.meet, []
def meet():  # what is measured on a busy machine says little: speeds are told, after the ranks have exchanged theirs
    measure()
    return [Speed(s_per_sample=each_s) for each_s in now]
shares.meet = meet
for now in ((1, 4, 1, 4), (1, 1, 4, 4), (4, 4, 1, 1), (4, 4, 1, 1)):
    for a, b in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(a), b).backward()
        optimizer.step()
print("sum", sum(p.sum().item() for p in model.parameters()))
"""


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_rings_are_formed_anew_when_speeds_drift(tmp_path):
    done = run(tmp_path, DRIFTS, "--workers", "4", "--mode", "ps-hra")
    assert done.returncode == 0, done.stderr
    assert len({line.split()[-1] for line in done.stdout.splitlines() if " sum " in line}) == 1
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    accounts = [event for event in events if event["kind"] == "samples_accounted"]
    assert [(each["samples"], each["exact"]) for each in accounts] == [(240, True)] * 4
    formed = [sorted(map(sorted, event["rings"])) for event in events if event["kind"] == "rings_formed"]
    # The first ones follow a trial; from (1, 1, 4, 4) to (4, 4, 1, 1) ranks stay with those who are as fast.
    assert formed[-1] == [[0, 1], [2, 3]]
    assert formed.count([[0, 2], [1, 3]]) == 1
    [counted] = [event for event in events if event["kind"] == "params_counted" and event["last"]]
    assert (counted["samples"], counted["most_peers"] <= 4) == (960, True)
