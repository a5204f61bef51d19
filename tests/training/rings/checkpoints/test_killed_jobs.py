"""A job of rings that is killed as a whole goes on from its newest whole checkpoint, with other workers."""

import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ringweave.param_server import snapshots
from ringweave.param_server.data_shards import remaining_spans
from ringweave.training.checkpoints import store
from ringweave.training.checkpoints.exchange import SERVER_PART
from ringweave.training.checkpoints.store import CheckpointFile
from ringweave.training.data import order
from tests.fakes.elastic_job import ElasticJob
from tests.training.rings.checkpoints import saving_functions
from tests.training.rings.elastic import ring_functions
from tests.training.rings.elastic.ring_functions import BATCH, NUM_SAMPLES
from tests.training.rings.elastic.test_deaths import check_alike, value_of

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(600)]

LIMIT_S = 400.0
LEAST_STEP = 3 * NUM_SAMPLES // BATCH - NUM_SAMPLES // BATCH // 2
"""In the midst of an epoch, when the loss has long fallen."""


def kill_all(job: ElasticJob, folder: Path, num_workers: int) -> None:
    """kill -9 to every worker at once, at some moment after two checkpoints in the midst of the training."""
    deadline_s = time.monotonic() + LIMIT_S
    members = [f"{slot}.0" for slot in range(num_workers)]
    while sum(saved.train_step >= LEAST_STEP for saved in store.list_checkpoints(folder)) < 2:
        assert time.monotonic() < deadline_s, "no checkpoint was saved"
        for member in members:
            job.read_messages(member)
        time.sleep(0.05)
    time.sleep(random.uniform(0, 0.3))  # the moment is at random; what follows is asked for whatever it was
    for member in members:
        job.send_signal(member, signal.SIGKILL)
    for member in members:
        assert job.outcome(member).exit_code == -signal.SIGKILL


def first_run(folder: Path, local_steps: int = 0, fragments: int = 0) -> None:
    """Four workers in two rings that are killed, and leave their checkpoints."""
    settings = (str(folder), 10**6, 2, local_steps, 2, 0.02, fragments)
    with ElasticJob(saving_functions.train, 4, *settings, services=("server",)) as job:
        kill_all(job, folder, 4)


@pytest.fixture(scope="module")
def killed_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the checkpoints of a first run that pushes every step; a test works on its copy."""
    folder = tmp_path_factory.mktemp("killed")
    first_run(folder)
    return folder


def drawn(job: ElasticJob, num_workers: int, epoch: int) -> list[int]:
    """Samples of that epoch that any worker was given."""
    said = [said for slot in range(num_workers) for said, _ in job.messages(f"{slot}.0")]
    return sorted(sample for kind, at, samples, *_ in said if (kind, at) == ("drawn", epoch) for sample in samples)


def order_of(epoch: int, seed: int) -> list[int]:
    loader = saving_functions.loader_of(torch.Generator())
    return order.epoch_indices(loader, order.read_loader(loader), seed, epoch, lambda drawn: drawn).tolist()


def check_outer_state(saved: CheckpointFile, fragments: int) -> None:
    """The server's state has outer steps of each fragment, and the momentum of all parameters."""
    snapshot = snapshots.snapshot_from_parts(**server_parts_of(saved))
    assert len(snapshot.outer_progress) == fragments
    if fragments:
        assert all(each.num_finished for each in snapshot.outer_progress)
        assert sum(name.endswith("momentum_buffer") for name in snapshot.state) == len(snapshot.parameters)


def server_parts_of(saved: CheckpointFile) -> dict[str, Any]:
    logged = store.read_checkpoint(saved).parts[SERVER_PART]
    return {"text": logged["metadata"], "tensors": logged["tensors"]}


def check_goes_on(
    job: ElasticJob, num_workers: int, saved: CheckpointFile, state: dict[str, Any]
) -> list[dict[str, Any]]:
    """The second run took that checkpoint, and the rest of its epoch, each sample of that once; what workers say.

    `state` is where the data stood, as the checkpoint has it: it is removed when there are newer ones.
    """
    values = [value_of(job, f"{slot}.0") for slot in range(num_workers)]
    order = order_of(state["epoch"], state["seed"])
    rest = [
        place for first, count in remaining_spans(state["done"], NUM_SAMPLES) for place in range(first, first + count)
    ]
    first_epoch = state["epoch"] if rest else state["epoch"] + 1
    expected = sorted(order[place] for place in rest) if rest else list(range(NUM_SAMPLES))
    assert drawn(job, num_workers, first_epoch) == expected, "what is not in the parameters, each once"
    assert drawn(job, num_workers, first_epoch + 1) == list(range(NUM_SAMPLES)), "and then whole epochs"
    accounts = values[0]["accounts"]
    assert [each.epoch for each in accounts[:2]] == [first_epoch, first_epoch + 1]
    assert all(each.is_exact for each in accounts)
    assert accounts[0].expected.num_samples == len(expected)
    assert {value["loaded"] for value in values} == {saved.train_step}
    check_loss(job, num_workers, values)
    return values


def check_loss(job: ElasticJob, num_workers: int, values: list[dict[str, Any]]) -> None:
    """It goes on where it was: far below that of a new model, and further down."""
    began = [said[3] for slot in range(num_workers) for said, _ in job.messages(f"{slot}.0") if said[0] == "loaded"]
    assert max(began) - min(began) < 1e-12, "the same parameters for all"
    assert max(began) < 0.8 * saving_functions.loss_of(ring_functions.make_model())
    assert max(value["loss"] for value in values) < max(began)


@pytest.mark.parametrize(
    ("local_steps", "fragments"),
    [(0, 0), pytest.param(3, 0, marks=pytest.mark.thorough), (1, 4)],
    ids=["every step is pushed", "local steps", "fragments"],
)
def test_a_job_that_is_killed_goes_on_with_other_workers(
    tmp_path: Path, request: pytest.FixtureRequest, local_steps: int, fragments: int
) -> None:
    """With fragments: in the middle of their cycle, as each step pushes one of four."""
    if local_steps:
        first_run(tmp_path, local_steps, fragments)
    else:
        shutil.copytree(request.getfixturevalue("killed_run"), tmp_path, dirs_exist_ok=True)
    newest = store.list_checkpoints(tmp_path)[0]
    check_outer_state(newest, fragments)
    state = store.read_checkpoint(newest).parts["loader"]
    num_epochs = state["epoch"] + 6
    settings = (str(tmp_path), num_epochs, 2, local_steps, 2, 0.0, fragments)
    with ElasticJob(saving_functions.train, 3, *settings, services=("server",)) as job:
        values = check_goes_on(job, 3, newest, state)
    assert newest.train_step < store.list_checkpoints(tmp_path)[0].train_step <= NUM_SAMPLES // BATCH * num_epochs
    check_alike(values)


def test_where_too_few_are_left_one_saves_the_servers_state_and_the_next_run_goes_on_from_it(tmp_path: Path) -> None:
    settings = (str(tmp_path), 10**6, 2, 0, 10**6, 0.1)  # the script itself saves nothing
    with ElasticJob(saving_functions.train, 4, *settings, services=("server",), min_members=3, patience_s=15.0) as job:
        for slot in range(4):
            job.wait_message(f"{slot}.0", lambda said: said[:2] == ("drawn", 2))
        for slot in (0, 3):  # one of each ring
            job.send_signal(f"{slot}.0", signal.SIGKILL)
        errors = [job.outcome(f"{slot}.0").error for slot in (1, 2)]
    (saved,) = store.list_checkpoints(tmp_path)
    ended = "job is over: workers left: 2 in 2 rings, expected at least 3, and no other came within 15 s. "
    own = f"The state after {saved.train_step} train steps is in {tmp_path}. Start the run again to go on from it."
    assert f"{ended}{own}" in errors[0]
    assert f"{ended}Another ring saves the parameter server's state." in errors[1]
    state = store.read_checkpoint(saved).parts["loader"]
    with ElasticJob(saving_functions.train, 3, str(tmp_path), state["epoch"] + 6, 2, services=("server",)) as job:
        check_goes_on(job, 3, saved, state)


def test_a_damaged_file_is_said_and_the_one_before_it_is_used_also_by_one_ring(
    tmp_path: Path, killed_run: Path
) -> None:
    shutil.copytree(killed_run, tmp_path, dirs_exist_ok=True)
    newest, before, *_ = store.list_checkpoints(tmp_path)
    content = bytearray(newest.path.read_bytes())
    content[len(content) // 2] ^= 1
    newest.path.write_bytes(content)
    state = store.read_checkpoint(before).parts["loader"]
    environ = {"RINGWEAVE_RUN_DIR": str(tmp_path / "run")}
    (tmp_path / "run").mkdir()
    settings = (str(tmp_path), state["epoch"] + 6, 1)
    with ElasticJob(saving_functions.train, 2, *settings, services=("server",), environ=environ) as job:
        check_goes_on(job, 2, before, state)
    events = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    refused = [line for line in events if '"checkpoint_refused"' in line]
    assert refused
    assert all(newest.path.name in line for line in refused)
