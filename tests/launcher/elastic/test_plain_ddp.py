"""A script with plain DistributedDataParallel under `ringweave run --elastic`: its own checkpoints carry it on."""

from itertools import pairwise

import pytest
import torch

from tests.launcher.conftest import Run

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(900)]

NUM_STEPS, SAVED, KILLED = 14, 5, 8

STEPS = """
def make():
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 2).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

def loss_of(model, step, rank):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(2 * step + rank), dtype=torch.float64)
    return torch.nn.functional.mse_loss(model(x), x[:, :2])
"""

SCRIPT = f"""
import torch, ringweave
import torch.distributed as dist
{STEPS}
dist.init_process_group()
model, optimizer = make()
model = torch.nn.parallel.DistributedDataParallel(model)
checkpoints = ringweave.Checkpoints("checkpoints", model=model, optimizer=optimizer)
done = begun_after = checkpoints.load()
print("goes on after", done, flush=True)
while done < {NUM_STEPS}:
    if done == {SAVED}:
        checkpoints.wait()
    if (begun_after, done, rank) == (0, {KILLED}, 1):
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    loss_of(model, done, rank).backward()
    optimizer.step()
    done += 1
    checkpoints.save(done)
    print("done", done, flush=True)
checkpoints.wait()
print("sum", repr(sum(float(each.detach().sum()) for each in model.parameters())), flush=True)
dist.destroy_process_group()
"""


def sum_of_one_process() -> float:
    """What the parameters add up to after all steps, computed without any other rank."""
    names: dict = {"torch": torch}
    exec(STEPS, names)  # noqa: S102 - the same lines as the workers'
    model, optimizer = names["make"]()
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        (sum(names["loss_of"](model, step, rank) for rank in (0, 1)) / 2).backward()
        optimizer.step()
    return sum(float(each.detach().sum()) for each in model.parameters())


def printed(run: Run, rank: int, word: str) -> list[str]:
    """What follows that word in the lines of a rank."""
    lines = [line.partition("] ")[2] for line in run.stdout.splitlines() if line.startswith(f"[{rank}]")]
    return [line.removeprefix(f"{word} ") for line in lines if line.startswith(f"{word} ")]


def test_when_a_worker_is_killed_all_start_again_and_go_on_from_the_checkpoint(start, script) -> None:
    run = start("--elastic", "1:2", "--workers", "2", script(SCRIPT))
    assert run.wait_ended() == 0, run.stderr + run.stdout
    said = "no worker had called ringweave.prepare, so all workers restart"
    assert f"ringweave: {said}, from their last checkpoint if there is one.\n" in run.stderr
    assert run.stderr.count(said) == 1
    assert "ringweave: attempt 2; files of attempt 1 are in" in run.stderr
    assert (run.record["attempt"], run.record["outcome"]) == (2, "done")
    for rank in (0, 1):
        first, then = map(int, printed(run, rank, "goes on after"))
        assert first == 0
        assert SAVED <= then <= KILLED, "not from the beginning"
        steps = [int(each) for each in printed(run, rank, "done")]
        (break_,) = [index for index, (one, other) in enumerate(pairwise(steps), 1) if other != one + 1] or [then]
        assert steps[:break_] == list(range(1, break_ + 1))
        assert steps[break_:] == list(range(then + 1, NUM_STEPS + 1)), "each step after the checkpoint, once"
    assert printed(run, 0, "goes on after") == printed(run, 1, "goes on after")
    sums = [float(each) for rank in (0, 1) for each in printed(run, rank, "sum")]
    assert sums == pytest.approx([sum_of_one_process()] * 2, abs=1e-12), "as if nothing had happened"
