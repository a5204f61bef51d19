"""`ringweave scale` on real runs: workers are added and leave while the others train."""

import json
import subprocess
import sys
from collections import defaultdict

import pytest

from tests.launch.conftest import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(900)]

FOUR_AND_BACK = """
    import torch, ringweave
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    class Counter:
        steps = 0
        def state_dict(self):
            return {"steps": self.steps}
        def load_state_dict(self, state):
            self.steps = state["steps"]

    torch.manual_seed(0)
    inputs = torch.randn(96, 8)
    model, counter = nn.Linear(8, 1), Counter()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=12, shuffle=True)
    model, optimizer, loader = ringweave.prepare(model, optimizer, data, carried={"counter": counter})
    have_been_four, left = False, 16
    for epoch in loader.epochs(100000):
        for given, wanted in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(given), wanted).backward()
            optimizer.step()
            counter.steps += 1
            total = sum(float(each.detach().double().sum()) for each in model.parameters())
            print("step", counter.steps, len(loader.members), repr(total), flush=True)
            time.sleep(0.02)
            have_been_four |= len(loader.members) == 4
            left -= have_been_four and len(loader.members) == 2
        if left <= 0:
            break
    print("finished", flush=True)
"""

ONE = """
    import torch, ringweave
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    data = DataLoader(TensorDataset(torch.ones(96, 8), torch.ones(96, 1)), batch_size=12)
    model, optimizer, loader = ringweave.prepare(model, optimizer, data)
    print("prepared", flush=True)
    for epoch in loader.epochs(100000):
        for given, wanted in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(given), wanted).backward()
            optimizer.step()
            time.sleep(0.02)
"""


def events(run, kind: str) -> list[dict]:
    lines = (run.run_dir / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def scale(run, workers: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = "from ringweave.cli.main import main; main()"
    command = [sys.executable, "-c", program, "scale", str(run.run_dir), "--workers", str(workers), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def sums(run) -> dict[int, dict[str, str]]:
    """Train step -> rank -> the sum of the parameters after it."""
    found: dict[int, dict[str, str]] = defaultdict(dict)
    for line in run.stdout.splitlines():
        if " step " in line:
            rank, _, number, _, total = line.split()
            found[int(number)][rank.strip("[]")] = total
    return found


def has_members(run, slots: list[str]) -> bool:
    epochs = events(run, "epoch_begun")
    return bool(epochs) and [each.partition(".")[0] for each in epochs[-1]["members"]] == slots


def test_two_workers_become_four_and_two_again_and_no_step_is_lost(start, script) -> None:
    run = start("--elastic", "2:4", "--workers", "2", "--mode", "sync", script(FOUR_AND_BACK))
    wait_until(lambda: len(sums(run)) > 8, "steps of two")
    asked = scale(run, 4, "--json")
    assert asked.returncode == 0, asked.stderr
    assert json.loads(asked.stdout) == {"workers": 4, "before": 2, "starting": [2, 3], "leaving": []}
    wait_until(lambda: any(len(ranks) == 4 for ranks in sums(run).values()), lambda: f"steps of four: {run.stderr}")
    asked = scale(run, 2)
    said = "2 workers are asked for, 4 before; asked to leave after its train step: rank 2, 3"
    assert (asked.returncode, asked.stdout) == (0, f"{said}\n")
    assert run.wait_ended() == 0, run.stderr + run.stdout
    assert f"ringweave: {said}.\n" in run.stderr
    by_step = sums(run)
    assert sorted(by_step) == list(range(1, len(by_step) + 1)), "every step was done"
    assert all({"0", "1"} <= ranks.keys() and len(set(ranks.values())) == 1 for ranks in by_step.values())
    assert {rank for ranks in by_step.values() for rank in ranks} == {"0", "1", "2", "3"}
    epochs = [[each.partition(".")[0] for each in event["members"]] for event in events(run, "epoch_begun")]
    assert ["0", "1", "2", "3"] in epochs
    assert (epochs[0], epochs[-1]) == (["0", "1"], ["0", "1"])
    accounts = events(run, "samples_accounted")
    assert accounts
    assert all(event["exact"] for event in accounts)
    assert events(run, "samples_lost") == []
    exits = [(event["rank"], event["exit_code"]) for event in events(run, "worker_exited")]
    assert sorted(exits) == [(0, 0), (1, 0), (2, 143), (3, 143)]
    assert run.record["outcome"] == "done"
    over = scale(run, 3)
    assert over.returncode == 2
    assert "which is over', expected one that is under way" in over.stderr


def test_what_a_run_cannot_have_is_refused_and_changes_nothing(start, script) -> None:
    run = start("--elastic", "1:2", "--workers", "1", "--mode", "sync", script(ONE))
    run.wait_printed("prepared")
    asked = scale(run, 3, "--json")
    assert asked.returncode == 2
    assert json.loads(asked.stdout)["error"].startswith("--workers: 3, expected 1 to 2 (--elastic 1:2).")
    assert scale(run, 0).stderr.startswith("ringweave: error: --workers: 0, expected 1 to 2 (--elastic 1:2).")
    assert not run.run_dir.joinpath("scale.json").exists()
    assert [event["refused"] != "" for event in events(run, "workers_asked")] == [True, True]
    assert list(run.pids()) == [0]


def test_a_run_that_is_not_elastic_is_refused(start, script) -> None:
    run = start("--workers", "1", script("print('up', flush=True); time.sleep(300)"))
    run.wait_printed("up")
    asked = scale(run, 2)
    assert asked.returncode == 2
    assert "expected one that was started with --elastic MIN:MAX" in asked.stderr
