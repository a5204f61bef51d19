"""Elastic jobs of rings on three nodes: workers, representatives and servers are killed; accounts stay right."""

import contextlib
import json
import os
import signal
from collections.abc import Collection
from pathlib import Path

import psutil
import pytest

from ringweave.jobs.request import ElasticRequest
from ringweave.param_server.leadership import FolderLeadershipLog, LeadershipRecord
from tests.launcher.small_training import SUM, epoch, prepared
from tests.platforms.local.conftest import Here, processes_of
from tests.polling import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(1800)]

LIMIT_S = 600.0
NUM_SAMPLES, BATCH, NUM_EPOCHS = 96, 24, 4


def script_of(folder: Path) -> str:
    """After the first and the third epoch each worker waits until the test has killed something."""
    options = ", asynchronous=ringweave.training.Asynchronous(rings=2)"
    return f"""{prepared(num_samples=NUM_SAMPLES, batch=BATCH, lr=0.1, shuffles=True, options=options)}
here = pathlib.Path({str(folder)!r})
for epoch in loader.epochs({NUM_EPOCHS}):
{epoch(indent=4)}
    if epoch in (0, 2):
        (here / f"waits-{{epoch}}-{{os.environ['RANK']}}").touch()
        while not (here / f"killed-{{epoch}}").exists():
            time.sleep(0.05)
{SUM}"""


def submit(here: Here, *capacities: int, **more: object) -> None:
    elastic, capacities = ElasticRequest(min=1), capacities or (1, 1, 1)
    here.submit(script_of(here.folder), *capacities, elastic=elastic, mode="ps-hra", max_retries=2, **more)


def job_folder(here: Here) -> Path:
    (folder,) = (here.state / "jobs").glob("job-*")
    return folder


def events(here: Here, round_: int = 1) -> list[dict]:
    paths = sorted((job_folder(here) / "runs").glob(f"*/*/round-{round_}/events.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def wait_epoch(here: Here, number: int, ranks: Collection[int] = range(3)) -> None:
    paths = [here.folder / f"waits-{number}-{rank}" for rank in ranks]
    wait_until(lambda: all(path.exists() for path in paths), f"all workers wait after epoch {number}", LIMIT_S)


def go_on(here: Here, number: int) -> None:
    (here.folder / f"killed-{number}").touch()


def kill_worker(here: Here, rank: int) -> None:
    started = [each for each in events(here) if each["kind"] == "worker_started" and each["rank"] == rank]
    os.kill(started[-1]["pid"], signal.SIGKILL)


def kill_node(here: Here, node: int) -> None:
    """The agent of the first attempt and all that it has started, at once."""
    (agent,) = [each.process for each in processes_of(here.state) if each.command[-2:] == [str(node), "1"]]
    for process in [agent, *agent.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGKILL)


def wait_pair(here: Here, after: int = -1) -> LeadershipRecord:
    """Until both servers have everything, by a later record than that one."""
    found: list[LeadershipRecord] = []

    def is_whole() -> bool:
        newest = FolderLeadershipLog(job_folder(here) / "claims" / "round-1").latest()
        found[:] = [newest] if newest is not None and newest.number > after and len(newest.members) == 2 else []
        return bool(found)

    wait_until(is_whole, "both servers have everything", LIMIT_S)
    return found[0]


def check_accounts(here: Here, round_: int = 1, *, is_first_server: bool = True) -> None:
    """Every sample of every epoch was pushed once: whatever died had nothing under way between two epochs."""
    found = events(here, round_)
    accounted = {
        each["epoch"]: (each["samples"], each["exact"]) for each in found if each["kind"] == "samples_accounted"
    }
    assert accounted == dict.fromkeys(range(NUM_EPOCHS), (NUM_SAMPLES, True))
    counted = max((each for each in found if each["kind"] == "params_counted"), key=lambda each: each["version"])
    assert counted["version"] >= NUM_EPOCHS * NUM_SAMPLES // BATCH, "a batch of all rings is at least one push"
    if is_first_server:  # a server that was started again counts from then on
        assert counted["samples"] == NUM_EPOCHS * NUM_SAMPLES
    logs = (job_folder(here) / "runs").glob(f"*/*/round-{round_}/logs/rank-*.log")
    sums = {line.split()[-1] for path in logs for line in path.read_text().splitlines() if line.startswith("sum ")}
    assert len(sums) == 1, "all workers have the same parameters at the end"


def test_a_representative_and_a_ring_of_one_are_killed_and_no_step_is_lost(here: Here) -> None:
    submit(here, 2, 1)  # each node imports torch once
    wait_epoch(here, 0)
    rings = next(each["rings"] for each in events(here) if each["kind"] == "rings_formed")
    representative, other = max(rings, key=len)
    (alone,) = min(rings, key=len)
    kill_worker(here, representative)
    go_on(here, 0)
    wait_epoch(here, 2, [other, alone])
    kill_worker(here, alone)
    go_on(here, 2)
    job = here.wait(lambda job: job.state.is_end, deadline_s=LIMIT_S)
    assert job.state == "Succeeded", job
    assert (job.round, [each.retries for each in job.nodes]) == (1, [0, 0]), "the agents restarted them"
    check_accounts(here)


@pytest.mark.thorough
@pytest.mark.parametrize("lost", ["node", "process"])
def test_without_a_standby_the_loss_of_the_server_restarts_all_nodes(here: Here, lost: str) -> None:
    submit(here)
    wait_epoch(here, 0)
    if lost == "node":
        kill_node(here, 0)
    else:
        (server,) = [each["pid"] for each in events(here) if each["kind"] == "server_started"]
        os.kill(server, signal.SIGKILL)
    job = here.wait(lambda job: job.round == 2, deadline_s=LIMIT_S)
    assert [each.retries for each in job.nodes] == [1, 0, 0]
    for number in (0, 2):
        go_on(here, number)
    job = here.wait(lambda job: job.state.is_end, deadline_s=LIMIT_S)
    assert job.state == "Succeeded", job
    check_accounts(here, 2)


@pytest.mark.thorough
def test_the_leading_server_is_killed_and_then_the_whole_node_of_the_leader(here: Here) -> None:
    submit(here, standby=True)
    first = wait_pair(here)
    assert first.leader == 0
    wait_epoch(here, 0)
    started = [each for each in events(here) if each["kind"] == "server_started" and each["node"] == "n0"]
    os.kill(started[-1]["pid"], signal.SIGKILL)
    second = wait_pair(here, after=first.number)
    assert (second.leader, second.term) == (1, first.term + 1), "the standby leads, and the killed one follows it"
    go_on(here, 0)
    wait_epoch(here, 2)
    kill_node(here, 1)
    go_on(here, 2)
    job = here.wait(lambda job: job.state.is_end, deadline_s=LIMIT_S)
    assert job.state == "Succeeded", job
    assert (job.round, [each.retries for each in job.nodes][0::2]) == (1, [0, 0])
    newest = FolderLeadershipLog(job_folder(here) / "claims" / "round-1").latest()
    assert newest is not None
    assert (newest.leader, newest.term) == (0, second.term + 1)
    check_accounts(here, is_first_server=False)


@pytest.mark.thorough
def test_when_both_servers_are_killed_at_once_all_nodes_start_again(here: Here) -> None:
    submit(here, standby=True)
    wait_pair(here)
    wait_epoch(here, 0)
    for each in [each for each in events(here) if each["kind"] == "server_started"][:2]:
        os.kill(each["pid"], signal.SIGKILL)
    go_on(here, 0)
    job = here.wait(lambda job: job.round == 2 or job.state.is_end, deadline_s=LIMIT_S)
    assert not job.state.is_end, job
    go_on(here, 2)
    job = here.wait(lambda job: job.state.is_end, deadline_s=LIMIT_S)
    assert job.state == "Succeeded", job
    check_accounts(here, 2)
