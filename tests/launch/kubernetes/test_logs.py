"""Logs as the commands read them: kept ones, what no worker printed, and attempts of which nothing is left."""

import asyncio
from dataclasses import replace
from pathlib import Path

from ringweave.jobs.life import records
from ringweave.jobs.life.observing import Cause
from ringweave.jobs.life.records import Ended, Job
from ringweave.jobs.requests.request import NodeRequest, Request
from ringweave.launch.kubernetes import names
from ringweave.launch.kubernetes.api import connecting, kinds
from ringweave.launch.kubernetes.api.client import Client
from ringweave.launch.kubernetes.logs import Logs
from ringweave.launch.kubernetes.objects import keeping
from ringweave.launch.kubernetes.objects.owning import Owner
from ringweave.launch.services.service import LogQuery

OWNER = Owner(name="logs", namespace="default", uid="44444444-4444-4444-4444-444444444444")
UNREAD = keeping.unread(TimeoutError())


def job_with_lost_attempts() -> Job:
    """Two workers on n0, one on n1, which has had two attempts by now, one lost and one given back."""
    nodes = (NodeRequest(name="n0", capacity=2), NodeRequest(name="n1", capacity=1))
    request = Request(name="logs", num_workers=3, script="s.py", nodes=nodes, min_per_node=1, device="cpu")
    job = records.new_job(request, requester="ann", counts=(2, 1), now=0.0)
    lost = Ended(attempt=1, cause=Cause.PLACE, charged=True, text="its Pod is gone")
    given_back = Ended(attempt=2, cause=Cause.SUSPENDED, charged=False, text="the job was suspended")
    known = replace(job.record.nodes[1], attempt=3, history=(lost, given_back))
    return replace(job, record=replace(job.record, nodes=(job.record.nodes[0], known)))


def test_all_that_is_known_is_told(kubeconfig: Path) -> None:
    def connect():
        return connecting.connection({"KUBECONFIG": str(kubeconfig)})

    async def keep() -> None:
        labels = {names.NODE_LABEL: "0", names.ATTEMPT_LABEL: "1"}
        pod = {"metadata": {"name": "logs-0-1", "labels": labels}}
        lines = ["python: no torch", f"{keeping.ROUND}2", "[1] loss 1", "[0] loss 2", UNREAD]
        async with Client(connect) as client:
            await client.create(kinds.CONFIG_MAPS, "default", keeping.log_map(OWNER, pod, lines))

    def told(**which: object) -> list[tuple[object, ...]]:
        lines = Logs(connect, OWNER, job_with_lost_attempts(), LogQuery(**which)).read()
        return [(line.node, line.attempt, line.round, line.rank, line.text) for line in lines]

    asyncio.run(keep())
    of_n0 = [("n0", 1, 2, 1, "loss 1"), ("n0", 1, 2, 0, "loss 2")]
    lost = ("n1", 1, 0, None, "its Pod was removed by somebody else, and its log with it")
    assert told() == [("n0", 1, 1, None, "python: no torch"), *of_n0, ("n0", 1, 2, None, UNREAD), lost]
    assert told(rank=1) == of_n0[:1]
    assert told(node="n1") == told(rank=2) == [lost]
    assert told(attempt=2) == []
