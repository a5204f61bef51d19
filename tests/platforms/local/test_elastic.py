"""An elastic job of real processes: a whole group is killed, the other one goes on, the killed one comes back."""

import contextlib
import json
import os
import signal

import psutil
import pytest

from ringweave.jobs.request import ElasticRequest
from tests.launcher import until_back
from tests.platforms.local.conftest import Here, processes_of
from tests.polling import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(900)]


def said(here: Here, node: str, attempt: int, rank: int) -> list[dict]:
    """What a worker printed in the first round."""
    (folder,) = (here.state / "jobs").glob("job-*")
    path = folder / "runs" / node / str(attempt) / "round-1" / "logs" / f"rank-{rank}.log"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]


def kill_group(here: Here, node: int, attempt: int) -> None:
    """The agent and all that it has started, at once."""
    (agent,) = [each.process for each in processes_of(here.state) if each.command[-2:] == [str(node), str(attempt)]]
    for process in [agent, *agent.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("node", [pytest.param(0, marks=pytest.mark.thorough), 1])
def test_a_killed_worker_and_then_its_whole_group_come_back_while_the_other_trains_on(here: Here, node: int) -> None:
    """Node 0 has the coordinator that decides, node 1 its standby.

    That one reports no members: the agent of node 1 asks the coordinators for them. Only a group pays a retry.
    """
    script = until_back.SCRIPT.replace("NUM_BACK = 1", "NUM_BACK = 2")
    here.submit(script, 2, 2, elastic=ElasticRequest(min=2), mode="sync", max_retries=2)
    rank, other = 3 * node, 1 - node
    wait_until(lambda: all(len(said(here, f"n{each // 2}", 1, each)) > 5 for each in range(4)), "training")
    (folder,) = (here.state / "jobs").glob("job-*")
    events = folder / "runs" / f"n{node}" / "1" / "round-1" / "events.jsonl"
    starts = [event for event in map(json.loads, events.read_text().splitlines()) if event["kind"] == "worker_started"]
    (pid,) = [event["pid"] for event in starts if event["rank"] == rank]
    os.kill(pid, signal.SIGKILL)

    def is_back() -> bool:
        words = said(here, f"n{node}", 1, rank)
        return any(each["member"] == f"{rank}.1" and len(each.get("members", ())) == 4 for each in words)

    wait_until(is_back, "the worker is back")
    kill_group(here, node, 1)
    job = here.wait(lambda job: job.state.is_end)
    assert job.state == "Succeeded", (job, said(here, f"n{other}", 1, 2 * other)[-3:])
    assert (job.round, [each.retries for each in job.nodes]) == (1, [int(node == 0), int(node == 1)])
    attempts = [[end.text for end in each.attempts] for each in job.nodes]
    assert attempts[node] == ["its agent was killed", ""]
    assert attempts[other] == [""]
    members = {each["member"] for each in said(here, f"n{node}", 1, rank) if "member" in each}
    assert members == {f"{rank}.0", f"{rank}.1"}, "in its node"
    check_steps(here, node)
    wait_until(lambda: not (folder / "secrets").exists(), "the end of credentials that nobody needed")
    assert not [path for path in folder.rglob("*") if path.is_file() and b"PRIVATE KEY" in path.read_bytes()]


def check_steps(here: Here, node: int) -> None:
    """No step was lost: those who stayed did each once, some of them alone, and all end with the same parameters."""
    other = 1 - node
    words = said(here, f"n{other}", 1, 2 * other)
    steps = [each["step"] for each in words if "step" in each]
    assert steps == list(range(1, len(steps) + 1))
    sizes = [len(each["members"]) for each in words if "step" in each]
    assert sizes[0] == sizes[-1] == 4
    assert 2 in sizes, "the others went on alone"
    epochs = [each for each in words if "epoch" in each]
    assert all(each["trained"] + each["lost"] == 96 for each in epochs), "every sample is accounted for"
    assert sum(each["lost"] for each in epochs) <= 12, "at most those of the batch that the killed ones computed"
    sums = [
        each["sum"]
        for name, attempt, ranks in (
            (f"n{other}", 1, (2 * other, 2 * other + 1)),
            (f"n{node}", 2, (2 * node, 2 * node + 1)),
        )
        for rank in ranks
        for each in said(here, name, attempt, rank)
        if "sum" in each
    ]
    assert len(sums) == 4
    assert len(set(sums)) == 1


SECOND_TIME = """
    import os, pathlib, time
    flag = pathlib.Path("began-" + os.environ["RANK"])
    if not flag.exists():
        flag.touch()
        time.sleep(600)
"""


def test_the_only_node_of_an_elastic_job_starts_again_in_another_round(here: Here) -> None:
    """No worker is left to train on, and the coordinator is lost with its node."""
    here.submit(SECOND_TIME, 2, elastic=ElasticRequest(min=1), max_retries=2)
    wait_until(lambda: all((here.folder / f"began-{rank}").exists() for rank in range(2)), "both workers")
    kill_group(here, 0, 1)
    job = here.wait(lambda job: job.state.is_end)
    assert (job.state, job.round, job.nodes[0].retries) == ("Succeeded", 2, 1)


@pytest.mark.thorough
def test_a_spare_of_the_node_replaces_a_killed_worker(here: Here) -> None:
    here.submit(until_back.SCRIPT, 1, 1, elastic=ElasticRequest(min=1, spares=1), mode="sync", max_retries=2)
    wait_until(lambda: all(len(said(here, f"n{each}", 1, each)) > 5 for each in range(2)), "training")

    def events(node: str, kind: str) -> list[dict]:
        (folder,) = (here.state / "jobs").glob("job-*")
        path = folder / "runs" / node / "1" / "round-1" / "events.jsonl"
        return [event for event in map(json.loads, path.read_text().splitlines()) if event["kind"] == kind]

    wait_until(lambda: len(events("n1", "spare_ready")) == 1, "a spare of node n1")
    os.kill(events("n1", "worker_started")[0]["pid"], signal.SIGKILL)
    job = here.wait(lambda job: job.state.is_end)
    assert (job.state, [each.retries for each in job.nodes]) == ("Succeeded", [0, 0])
    (used,) = events("n1", "spare_used")
    assert (used["member"], used["pid"]) == ("1.1", events("n1", "spare_ready")[0]["pid"])
    spares = [event["pid"] for node in ("n0", "n1") for event in events(node, "spare_ready")]
    assert not [pid for pid in spares if psutil.pid_exists(pid)], "they end with the workers"
