"""What the operator refuses before it asks anybody."""

import asyncio
from typing import Any

import pytest

from ringweave.platforms.agent.agent_channel import NUM_INCARNATIONS, NUM_SERVER_INCARNATIONS
from ringweave.platforms.kubernetes.objects import (
    MAX_ELASTIC_WORKERS_PER_NODE,
    MAX_SERVER_WORKERS_PER_NODE,
    PodSettings,
)
from ringweave.platforms.kubernetes.reconciler import AdmissionRefusedError, JobAdmission
from ringweave.rpc import CertificateAuthority


def test_a_job_whose_credentials_no_secret_holds_is_refused() -> None:
    client: Any = None
    spec = {
        "cpuWorkers": MAX_SERVER_WORKERS_PER_NODE + 1,
        "script": "a.py",
        "mode": "ps",
        "minPerNode": 3,
        "nodes": [{"name": "n0", "capacity": 1000, "maxRetries": 3, "deletionPolicy": "delete"}],
        "requester": {"username": "ann"},
    }
    resource = {"metadata": {"name": "many", "namespace": "default", "uid": "u"}, "spec": spec}
    most = MAX_SERVER_WORKERS_PER_NODE
    text = rf"workers of a node: {most + 1}, expected at most {most} with mode ps, whose credentials one Secret"
    with pytest.raises(AdmissionRefusedError, match=text) as caught:
        asyncio.run(JobAdmission(client, PodSettings(), lambda: 0.0).admit(resource))
    assert caught.value.code == "TooManyWorkersForServer"


def test_a_secret_holds_the_credentials_of_as_many_as_may() -> None:
    longest = CertificateAuthority("j" * 60).issue("worker", "2147483647").to_text()
    key = len("worker-2147483647.1")
    assert MAX_SERVER_WORKERS_PER_NODE * NUM_SERVER_INCARNATIONS * (len(longest) + key) < 2**20 - 2**16


def test_an_elastic_job_with_too_many_workers_on_a_node_is_refused() -> None:
    client: Any = None
    many = MAX_ELASTIC_WORKERS_PER_NODE + 1
    node = {"capacity": many, "maxRetries": 3, "deletionPolicy": "delete"}
    spec = {
        "cpuWorkers": 2 * many,
        "script": "a.py",
        "minPerNode": 3,
        "elastic": {"min": many},
        "nodes": [{"name": "n0", **node}, {"name": "n1", **node}],
        "requester": {"username": "ann"},
    }
    resource = {"metadata": {"name": "many", "namespace": "default", "uid": "u"}, "spec": spec}
    text = (
        rf"workers of a node: {many}, expected at most {many - 1} in an elastic job, whose spare credentials one Secret"
    )
    with pytest.raises(AdmissionRefusedError, match=text) as caught:
        asyncio.run(JobAdmission(client, PodSettings(), lambda: 0.0).admit(resource))
    assert caught.value.code == "TooManyWorkersForElastic"


def test_a_secret_holds_the_spare_credentials_of_as_many_as_may() -> None:
    longest = CertificateAuthority("j" * 60).issue("worker", "2147483647.7").to_text()
    key = len("worker-2147483647.7")
    assert (MAX_ELASTIC_WORKERS_PER_NODE + 2) * NUM_INCARNATIONS * (len(longest) + key) < 2**20 - 2**16
