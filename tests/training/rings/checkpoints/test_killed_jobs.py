"""A job of rings that is killed as a whole goes on from its newest whole checkpoint, with other workers."""

import random
import signal
import time
from pathlib import Path

import pytest

from ringweave.testing.elastic import ElasticJob
from ringweave.training.checkpoints import disk
from tests.training.rings.checkpoints import saving_functions as functions
from tests.training.rings.elastic.test_deaths import value_of

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(600)]

LIMIT_S = 250.0


def kill_when_saved(job: ElasticJob, folder: Path, members: list[str], least_step: int) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not any(saved.train_step >= least_step for saved in disk.list_saved(folder)):
        assert time.monotonic() < deadline_s, "no checkpoint was saved"
        for member in members:
            job.read(member)
        time.sleep(0.01)
    time.sleep(random.uniform(0, 0.3))
    for member in members:
        job.signal(member, signal.SIGKILL)


@pytest.mark.parametrize("local_steps", [0, 3])
def test_resume(tmp_path: Path, local_steps: int) -> None:
    members = [f"{slot}.0" for slot in range(4)]
    with ElasticJob(functions.train, 4, str(tmp_path), 10**6, 2, local_steps, 2, 0.02, attended_by=("server",)) as job:
        kill_when_saved(job, tmp_path, members, 25)
    newest = disk.list_saved(tmp_path)[0]
    state = disk.read(newest).parts["loader"]
    num_epochs = state["epoch"] + 2
    with ElasticJob(functions.train, 3, str(tmp_path), num_epochs, 2, local_steps, attended_by=("server",)) as job:
        values = [value_of(job, f"{slot}.0") for slot in range(3)]
        print(newest, state, values)
