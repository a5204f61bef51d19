"""Elastic jobs of which one node stands still: agent, workers and all, as when its machine hangs."""

import contextlib
import json
import signal

import psutil
import pytest

from ringweave.jobs.failures import EVICTED_HANG
from ringweave.jobs.request import ElasticRequest
from tests.launcher import until_back
from tests.platforms.local.conftest import Here, processes_of
from tests.polling import wait_until

# Minutes each, most of them of waiting: every day the rules of it are tested (jobs/life), and one life on Kubernetes.
pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.thorough, pytest.mark.timeout(1200)]
SHORT = until_back.SCRIPT.replace("loader.epochs(100000)", "loader.epochs(40)")


def said(here: Here, node: int, attempt: int) -> list[dict]:
    """What the worker of a node printed in the first round."""
    (folder,) = (here.state / "jobs").glob("job-*")
    path = folder / "runs" / f"n{node}" / str(attempt) / "round-1" / "logs" / f"rank-{node}.log"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]


def stop_group(here: Here, node: int) -> None:
    """The agent and all that it has started stand still from now on."""
    (agent,) = [each.process for each in processes_of(here.state) if each.command[-2:] == [str(node), "1"]]
    for process in [agent, *agent.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGSTOP)


def submit(here: Here, script: str) -> None:
    here.submit(script, 1, 1, 1, elastic=ElasticRequest(min=2), mode="sync", max_retries=2)
    wait_until(lambda: all(len(said(here, node, 1)) > 5 for node in range(3)), "training")


@pytest.mark.parametrize("node", [0, 1])
def test_a_node_that_stands_still_is_replaced_while_the_others_train_on(here: Here, node: int) -> None:
    """Node 0 has the coordinator that decides, node 1 its standby: either tells who was put out."""
    submit(here, until_back.SCRIPT)
    stop_group(here, node)
    job = here.wait(lambda job: job.state.is_end, deadline_s=800)
    assert job.state == "Succeeded", (job, said(here, 2, 1)[-3:])
    assert (job.round, [each.retries for each in job.nodes]) == (1, [int(node == each) for each in range(3)])
    assert [[end.text for end in each.attempts] for each in job.nodes][node] == [EVICTED_HANG.text, ""]
    words = said(here, 2, 1)
    steps = [each["step"] for each in words if "step" in each]
    assert steps == list(range(1, len(steps) + 1)), "the others lost no step"
    assert {len(each["members"]) for each in words if "step" in each} == {2, 3}
    assert not [each for each in processes_of(here.state) if each.command[-2:] == [str(node), "1"]]


def test_a_job_ends_without_a_node_that_stands_still(here: Here) -> None:
    submit(here, SHORT)
    stop_group(here, 1)
    job = here.wait(lambda job: job.state.is_end, deadline_s=800)
    assert job.state == "Succeeded", job
    assert job.reason is not None
    assert job.reason.text == f"all nodes but node n1 finished their iterations: {EVICTED_HANG.text}"
    assert [each.retries for each in job.nodes] == [0, 0, 0]
    assert [each.state for each in job.nodes] == ["Succeeded", "Stopped", "Succeeded"]
    wait_until(lambda: not processes_of(here.state), "the end of what stood still")
