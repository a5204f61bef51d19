"""Logs as the commands read them: kept ones, what no worker printed, and attempts of which nothing is left."""

import asyncio
from dataclasses import replace
from pathlib import Path

from ringweave.jobs import records
from ringweave.jobs.records import AttemptEnd, EndCause, Job
from ringweave.jobs.request import JobRequest, NodeRequest
from ringweave.platforms.api import LogQuery
from ringweave.platforms.kubernetes import api_client, objects, pod_logs
from ringweave.platforms.kubernetes.api_client import KubernetesClient
from ringweave.platforms.kubernetes.objects import JobOwner
from ringweave.platforms.kubernetes.platform import JobLogReader

OWNER = JobOwner(name="logs", namespace="default", uid="44444444-4444-4444-4444-444444444444")
UNREAD = pod_logs.unread_log_line(TimeoutError())


def job_with_lost_attempts() -> Job:
    """Two workers on n0, one on n1, which has had two attempts by now, one lost and one given back."""
    nodes = (NodeRequest(name="n0", capacity=2), NodeRequest(name="n1", capacity=1))
    request = JobRequest(name="logs", num_workers=3, script="s.py", nodes=nodes, min_per_node=1, device="cpu")
    job = records.new_job(request, requester="ann", counts=(2, 1), now=0.0)
    lost = AttemptEnd(attempt=1, cause=EndCause.PLATFORM, charged=True, text="its Pod was deleted")
    given_back = AttemptEnd(attempt=2, cause=EndCause.SUSPENDED, charged=False, text="the job was suspended")
    known = replace(job.record.nodes[1], attempt=3, history=(lost, given_back))
    return replace(job, record=replace(job.record, nodes=(job.record.nodes[0], known)))


def test_all_that_is_known_is_told(kubeconfig: Path) -> None:
    def connect():
        return api_client.connection_info({"KUBECONFIG": str(kubeconfig)})

    async def keep() -> None:
        labels = {objects.NODE_LABEL: "0", objects.ATTEMPT_LABEL: "1"}
        pod = {"metadata": {"name": "logs-0-1", "labels": labels}}
        lines = ["python: no torch", f"{pod_logs.ROUND_LINE_PREFIX}2", "[1] loss 1", "[0] loss 2", UNREAD]
        async with KubernetesClient(connect) as client:
            await client.create(api_client.CONFIG_MAPS, "default", pod_logs.log_config_map(OWNER, pod, lines))

    def told(**which: object) -> list[tuple[object, ...]]:
        lines = JobLogReader(connect, OWNER, job_with_lost_attempts(), LogQuery(**which)).read_lines()
        return [(line.node, line.attempt, line.round, line.rank, line.text) for line in lines]

    asyncio.run(keep())
    of_n0 = [("n0", 1, 2, 1, "loss 1"), ("n0", 1, 2, 0, "loss 2")]
    lost = ("n1", 1, 0, None, "its Pod was deleted from outside, and its log with it")
    assert told() == [("n0", 1, 1, None, "python: no torch"), *of_n0, ("n0", 1, 2, None, UNREAD), lost]
    assert told(rank=1) == of_n0[:1]
    assert told(node="n1") == told(rank=2) == [lost]
    assert told(attempt=2) == []
