"""Reads a TrainingJob and its objects from the API server: first the job with its record, then the objects."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ringweave.jobs.records import Job
from ringweave.platforms.kubernetes import api_client, names, pod_status
from ringweave.platforms.kubernetes.api_client import KubernetesClient, Object
from ringweave.platforms.kubernetes.objects import JobOwner
from ringweave.platforms.kubernetes.pod_status import JobObjects

JobKey = tuple[str, str]
"""Namespace and name of a TrainingJob."""


@dataclass(kw_only=True, slots=True)
class ObservedJob:
    """Observation of a job. Each write replaces the resource by the API server's answer."""

    resource: Object
    job: Job
    objects: JobObjects

    @property
    def owner(self) -> JobOwner:
        """Return the owner of all objects of the job."""
        return JobOwner.from_resource(self.resource)

    @property
    def status(self) -> Mapping[str, Any]:
        """Return the status as saved last."""
        return self.resource.get("status", {})


async def fetch_training_job(client: KubernetesClient, key: JobKey) -> Object | None:
    """Return the TrainingJob; None if there is none."""
    return await client.find(api_client.TRAINING_JOBS, *key)


async def fetch_job_objects(client: KubernetesClient, owner: JobOwner, *, runs: bool = True) -> JobObjects:
    """Return the job's objects, without those of another job of the same name, or of others.

    Args:
        client: Client for reading.
        owner: The job.
        runs: The job should run; then its Secret and Service are read too, without which no Pod starts.
    """
    config = (api_client.CONFIG_MAPS, names.config_name(owner.name))
    beside = (
        (api_client.SECRETS, names.config_name(owner.name)),
        (api_client.SERVICES, names.service_name(owner.name)),
    )
    wanted = (config, *beside) if runs else (config,)
    pods, found = await asyncio.gather(
        client.list(api_client.PODS, owner.namespace, labelSelector=owner.selector),
        asyncio.gather(*(client.find(kind, owner.namespace, name) for kind, name in wanted)),
    )
    ours = [each if each is not None and owner.owns(each) else None for each in found]
    of_job = pod_status.pods_by_attempt(pod for pod in pods if owner.owns(pod))
    return JobObjects(config=ours[0], is_incomplete=None in ours[1:], pods=of_job)
