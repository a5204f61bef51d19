"""Workers of real runs whose scripts fail by themselves: a device that is broken, a mistake, a metric of their own."""

import re

import pytest

from tests.polling import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(900)]

TRAINS = """
    import torch, ringweave
    import torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    slot, _, life = os.environ["RINGWEAVE_MEMBER"].partition(".")
    torch.manual_seed(0)
    inputs = torch.randn(96, 8)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=12, shuffle=True)
    model, optimizer, loader = ringweave.prepare(model, optimizer, data)

    def train(after_step, num_epochs=100000):
        for epoch in loader.epochs(num_epochs):
            for given, wanted in loader:
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(given), wanted)
                loss.backward()
                optimizer.step()
                time.sleep(0.02)
                if after_step(loss.detach()):
                    return
"""

BROKEN_DEVICE = """
    steps, alone = 0, 0

    def look(loss):
        global steps, alone
        steps += 1
        if slot == "1" and (life != "0" or steps == 4):
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
        alone = alone + 1 if steps > 4 and len(loader.members) == 2 else 0
        ready = torch.tensor(float(os.path.exists("given-up")))
        if alone < 8:
            return False
        try:
            dist.all_reduce(ready)
        except RuntimeError:  # slot 1 has come and failed once more
            return False
        return ready.item() == 2

    train(look)
    print("finished", repr(sum(float(each.detach().double().sum()) for each in model.parameters())), flush=True)
"""

MISTAKE = """
    steps = 0

    def look(loss):
        global steps
        steps += 1
        if steps == 6:
            raise KeyError("label of the validation set")

    train(look)
"""

MISTAKE_AT_THE_END = """
    steps = 0

    def look(loss):
        global steps
        steps += 1
        if slot == "0" and life == "0" and steps == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return steps == 7

    train(look)
    print("steps: " + steps)
"""

OWN_COLLECTIVE = """
    steps, missed = 0, 0

    def mean(loss):
        total = loss.clone()
        try:
            dist.all_reduce(total)
        except RuntimeError:  # a member was lost in its midst
            return None
        return total.item() / dist.get_world_size()

    def look(loss):
        global steps, missed
        steps += 1
        if slot == "2" and life == "0" and steps == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        missed += mean(loss) is None

    train(look, 5)
    print("finished", missed, flush=True)
"""


def test_a_mistake_that_all_meet_ends_the_run_at_once_with_its_traceback(start, script) -> None:
    run = start("--elastic", "1:3", "--workers", "3", "--mode", "sync", script(TRAINS + MISTAKE))
    assert run.wait_ended() == 1
    assert "raised KeyError: 'label of the validation set'." in run.stderr
    assert 'raise KeyError("label of the validation set")' in run.stderr
    assert max(len(event["members"]) for event in run.events("generation_begun")) == 3
    names = {name for event in run.events("generation_begun") for name in event["members"]}
    assert names == {"0.0", "1.0", "2.0"}, "nobody was started again to try it once more"


def test_a_mistake_in_the_last_line_is_the_cause_though_another_worker_was_killed(start, script) -> None:
    run = start("--elastic", "1:4", "--workers", "4", "--mode", "sync", script(TRAINS + MISTAKE_AT_THE_END))
    assert run.wait_ended() == 1
    assert re.search(r"rank [123] on node node0 raised TypeError: can only concatenate str", run.record["cause"])
    assert 'print("steps: " + steps)' in run.stderr
    assert "SIGKILL" in {event["signal"] for event in run.events("worker_exited")}


@pytest.mark.thorough
def test_a_broken_device_is_given_up_and_the_others_train_on(start, script, tmp_path) -> None:
    run = start("--elastic", "1:3", "--workers", "3", "--mode", "sync", script(TRAINS + BROKEN_DEVICE))
    says = "rank 1 on node node0 is given up: it failed by itself 3 times in a row"
    wait_until(lambda: says in run.stderr or run.process.poll() is not None, "the end of rank 1")
    (tmp_path / "given-up").touch()
    assert run.wait_ended() == 0, run.stderr + run.stdout
    assert "the last time it raised RuntimeError: CUDA error: uncorrectable ECC error encountered." in run.stderr
    sums = [line.split()[-1] for line in run.stdout.splitlines() if "finished" in line]
    assert (len(sums), len(set(sums)), run.record["outcome"]) == (2, 1, "done")
    assert [event["exit_code"] for event in run.events("worker_exited") if event["rank"] == 1] == [1, 1, 1]


@pytest.mark.thorough
def test_a_metric_of_the_scripts_own_costs_one_value_where_its_failure_is_caught(start, script) -> None:
    run = start("--elastic", "1:3", "--workers", "3", "--mode", "sync", script(TRAINS + OWN_COLLECTIVE))
    assert run.wait_ended() == 0, run.stderr + run.stdout
    missed = {line.split()[0]: int(line.split()[-1]) for line in run.stdout.splitlines() if "finished" in line}
    assert {"[0]", "[1]"} <= missed.keys()
    assert max(missed["[0]"], missed["[1]"]) >= 1, "it was killed while the others were in its collective"
    assert run.record["outcome"] == "done"
