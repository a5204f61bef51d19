"""A run of rings that is killed with all its processes, and started again with other workers, by the real command."""

import contextlib
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from ringweave.training.checkpoints import store
from tests.launcher.conftest import Run
from tests.launcher.small_training import SUM, epoch, prepared
from tests.polling import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(1800)]

LIMIT_S = 600.0
NUM_SAMPLES, BATCH = 96, 16

SCRIPT = f"""{prepared(num_samples=NUM_SAMPLES, batch=BATCH, lr=0.1, shuffles=True)}
checkpoints = ringweave.Checkpoints("checkpoints", model=model, optimizer=optimizer, loader=loader)
done = checkpoints.load()
print("goes on after", done, "in epoch", loader.next_epoch, flush=True)
for epoch in loader.epochs(int(os.environ["EPOCHS"])):
{epoch(indent=4, also="done += 1; checkpoints.save(done); time.sleep(0.02)")}
{SUM}"""


def kill_all(run: Run) -> None:
    """kill -9 to the launcher and all that it has started, at once."""
    launcher = psutil.Process(run.process.pid)
    everybody = [launcher, *launcher.children(recursive=True)]
    for process in everybody:
        with contextlib.suppress(psutil.NoSuchProcess):
            os.kill(process.pid, signal.SIGKILL)
    run.process.wait()
    _, left = psutil.wait_procs(everybody, 60)
    assert not left


@pytest.mark.thorough
def test_a_run_that_is_killed_goes_on_with_fewer_workers_and_trains_on_each_sample_once(
    start, script, tmp_path: Path
) -> None:
    program = script(SCRIPT)
    run = start("--elastic", "2:4", "--workers", "4", "--mode", "ps-hra", program, EPOCHS="1000000")
    folder = tmp_path / "checkpoints"
    least = 2 * NUM_SAMPLES // BATCH + 2

    def is_in_an_epoch() -> bool:
        assert run.process.poll() is None, run.stderr
        return any(saved.train_step >= least for saved in store.list_checkpoints(folder))

    wait_until(is_in_an_epoch, "a checkpoint", LIMIT_S)
    time.sleep(0.1)
    kill_all(run)
    saved = store.list_checkpoints(folder)[0]
    state = store.read_checkpoint(saved).parts["loader"]
    left = NUM_SAMPLES - sum(count for _, count in state["done"])
    (run.run_dir / "events.jsonl").unlink()
    first_epoch = state["epoch"] + (not left)
    run = start("--elastic", "1:3", "--workers", "3", "--mode", "ps-hra", program, EPOCHS=str(first_epoch + 2))
    assert run.process.wait(LIMIT_S) == 0, run.stderr
    assert run.stdout.count(f"goes on after {saved.train_step} in epoch {first_epoch}\n") == 3
    accounts = {each["epoch"]: each for each in run.events("samples_accounted")}
    assert [accounts[first_epoch + number]["samples"] for number in (0, 1)] == [left or NUM_SAMPLES, NUM_SAMPLES]
    assert all(each["exact"] for each in accounts.values())
    assert run.record["training"]["exact"]
