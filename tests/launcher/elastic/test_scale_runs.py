"""`ringweave scale` on real runs: workers are added and leave while the others train."""

import json
import os
import signal
import subprocess
from collections import defaultdict

import pytest

from ringweave.training.checkpoints import store
from tests.launcher.conftest import ringweave
from tests.launcher.small_training import SUM, epoch, prepared
from tests.polling import wait_until

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
    model, optimizer, loader = ringweave.prepare(model, optimizer, data, extra_state={"counter": counter})
    have_been_four, left = False, 16
    for epoch in loader.epochs(100000):
        for given, wanted in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(given), wanted).backward()
            optimizer.step()
            counter.steps += 1
            total = sum(float(each.detach().double().sum()) for each in model.parameters())
            print("step", counter.steps, len(loader.members), repr(total), flush=True)
            time.sleep(0.05)
            have_been_four |= len(loader.members) == 4
            left -= have_been_four and len(loader.members) == 2
        if left <= 0:
            break
    print("finished", flush=True)
"""

RING = f"""{prepared(options=", asynchronous=ringweave.training.Asynchronous(rings=1)")}
num_back = 0
for number in loader.epochs(100000):
{epoch(indent=4, also='print("step of", len(loader.members), flush=True); time.sleep(0.02)')}
    num_back += any(not each.endswith(".0") for each in loader.members)
    if num_back == 3:  # all who are there know that of each epoch
        break
{SUM}"""

SAVED = f"""{prepared()}
checkpoints = ringweave.Checkpoints("checkpoints", model=model, optimizer=optimizer, loader=loader)
done = checkpoints.load()
for number in loader.epochs(100000):
{epoch(indent=4, also='done += 1; print("done", done, flush=True); time.sleep(0.02)')}
"""


def scale(run, workers: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    return ringweave("scale", run.run_dir, "--workers", workers, *arguments)


def sums(run) -> dict[int, dict[str, str]]:
    """Train step -> rank -> the sum of the parameters after it."""
    found: dict[int, dict[str, str]] = defaultdict(dict)
    for line in run.stdout.splitlines():
        if " step " in line:
            rank, _, number, _, total = line.split()
            found[int(number)][rank.strip("[]")] = total
    return found


def has_members(run, slots: list[str]) -> bool:
    epochs = run.events("generation_begun")
    return bool(epochs) and [each.partition(".")[0] for each in epochs[-1]["members"]] == slots


def test_two_workers_become_four_and_two_again_no_more_and_no_fewer_and_no_step_is_lost(start, script) -> None:
    run = start("--elastic", "2:4", "--workers", "2", "--mode", "sync", script(FOUR_AND_BACK))
    wait_until(lambda: len(sums(run)) > 8, "steps of two")
    asked = scale(run, 5, "--json")
    assert asked.returncode == 2
    assert json.loads(asked.stdout)["error"].startswith("--workers: 5, expected 2 to 4 (--elastic 2:4).")
    assert scale(run, 1).stderr.startswith("ringweave: error: --workers: 1, expected 2 to 4 (--elastic 2:4).")
    assert not run.run_dir.joinpath("scale.json").exists(), "what is refused changes nothing"
    assert [event["refused"] != "" for event in run.events("workers_scaled")] == [True, True]
    assert sorted(run.pids()) == [0, 1]
    asked = scale(run, 4, "--json")
    assert asked.returncode == 0, asked.stderr
    assert json.loads(asked.stdout) == {"workers": 4, "before": 2, "starting": [2, 3], "leaving": []}
    wait_until(lambda: any(len(ranks) == 4 for ranks in sums(run).values()), lambda: f"steps of four: {run.stderr}")
    asked = scale(run, 2)
    said = "2 workers requested, 4 before; leaving after the train step: rank 2, 3"
    assert (asked.returncode, asked.stdout) == (0, f"{said}\n")
    assert run.wait_ended() == 0, run.stderr + run.stdout
    assert f"ringweave: {said}.\n" in run.stderr
    by_step = sums(run)
    assert sorted(by_step) == list(range(1, len(by_step) + 1)), "every step was done"
    assert all({"0", "1"} <= ranks.keys() and len(set(ranks.values())) == 1 for ranks in by_step.values())
    assert {rank for ranks in by_step.values() for rank in ranks} == {"0", "1", "2", "3"}
    epochs = [[each.partition(".")[0] for each in event["members"]] for event in run.events("generation_begun")]
    assert ["0", "1", "2", "3"] in epochs
    assert (epochs[0], epochs[-1]) == (["0", "1"], ["0", "1"])
    accounts = run.events("samples_accounted")
    assert accounts
    assert all(event["exact"] for event in accounts)
    assert run.events("samples_lost") == []
    exits = [(event["rank"], event["exit_code"]) for event in run.events("worker_exited")]
    assert sorted(exits) == [(0, 0), (1, 0), (2, 143), (3, 143)]
    assert run.record["outcome"] == "done"
    over = scale(run, 3)
    assert over.returncode == 2
    assert "which is over', expected a current run" in over.stderr


def test_a_run_that_is_not_elastic_is_refused(start, script) -> None:
    run = start("--workers", "1", script("print('up', flush=True); time.sleep(300)"))
    run.wait_printed("up")
    asked = scale(run, 2)
    assert asked.returncode == 2
    assert "expected a run with --elastic MIN:MAX" in asked.stderr


@pytest.mark.thorough
def test_workers_of_a_ring_leave_and_come_back_and_no_further_ones_come(start, script) -> None:
    run = start("--elastic", "1:3", "--workers", "2", "--mode", "ps-hra", script(RING))
    run.wait_printed("step of 2", times=4)
    asked = scale(run, 3)
    assert asked.returncode == 2
    assert "--workers: 3, expected 1 to 2 (the number of workers in its rings)." in asked.stderr
    asked = scale(run, 1)
    said = "1 workers requested, 2 before; leaving after the train step: rank 1"
    assert (asked.returncode, asked.stdout) == (0, f"{said}\n")
    run.wait_printed("step of 1", times=4)
    wait_until(lambda: run.events("worker_exited") != [], "the end of the one that leaves")
    asked = scale(run, 2)
    assert (asked.returncode, asked.stdout) == (0, "2 workers requested, 1 before; started: rank 1\n")
    assert run.wait_ended() == 0, run.stderr + run.stdout
    ends = [line.split()[-1] for line in run.stdout.splitlines() if " sum " in line]
    assert len(ends) == 2
    assert len(set(ends)) == 1, "the same parameters"
    exits = [(event["rank"], event["exit_code"]) for event in run.events("worker_exited")]
    assert exits[0] == (1, 143)
    assert sorted(exits[1:]) == [(0, 0), (1, 0)]
    assert run.events("samples_lost") == []
    accounts = run.events("samples_accounted")
    assert accounts
    assert all(event["exact"] for event in accounts)


@pytest.mark.thorough  # it takes the minute that replacements have; with less: tests/training/elastic/test_deaths.py
def test_where_one_leaves_and_too_few_are_left_the_run_fails_and_says_where_the_state_is(start, script) -> None:
    run = start("--elastic", "2:2", "--workers", "2", "--mode", "sync", script(SAVED))
    run.wait_printed("done 8", times=2)
    os.kill(run.pids()[1], signal.SIGTERM)
    assert run.wait_ended() == 1, run.stderr + run.stdout
    folder = run.folder / "checkpoints"
    (saved,) = store.list_checkpoints(folder)
    ended = "job is over: workers left: 1, expected at least 2, and no other came within 60 s."
    where = f"The state after {saved.train_step} train steps is in {folder}. Start the run again to go on from it."
    assert f"{ended} {where}" in run.stderr
    assert run.stdout.count(f"done {saved.train_step}\n") == 2, "the last one that counts"
    assert f"done {saved.train_step + 1}\n" not in run.stdout
    exits = [(event["rank"], event["exit_code"]) for event in run.events("worker_exited")]
    assert exits == [(1, 143), (0, 1)]
    assert run.record["outcome"] == "failed"
