"""A look at one TrainingJob and everything of it: first the job with its record, then its objects."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ringweave.jobs.life.records import Job
from ringweave.launch.kubernetes import names
from ringweave.launch.kubernetes.api import kinds
from ringweave.launch.kubernetes.api.client import Client, Object
from ringweave.launch.kubernetes.api.failures import ApiError
from ringweave.launch.kubernetes.objects import seeing
from ringweave.launch.kubernetes.objects.owning import Owner
from ringweave.launch.kubernetes.objects.seeing import Seen

Key = tuple[str, str]
"""Namespace and name of a TrainingJob."""


@dataclass(kw_only=True, slots=True)
class Look:
    """What was read; the resource is replaced by what the API server answers when it is written."""

    resource: Object
    job: Job
    seen: Seen

    @property
    def owner(self) -> Owner:
        """Of everything that is made."""
        return Owner.of(self.resource)

    @property
    def status(self) -> Mapping[str, Any]:
        """As saved last."""
        return self.resource.get("status", {})


async def resource(client: Client, key: Key) -> Object | None:
    """The TrainingJob; None where there is none."""
    return await _found(client, kinds.TRAINING_JOBS, key[0], key[1])


async def objects(client: Client, owner: Owner, *, runs: bool = True) -> Seen:
    """Its objects; those of another job of the same name, or of somebody else, are left out.

    Args:
        client: Reads.
        owner: The job.
        runs: It is to run: then its Secret and its Service are looked for too, without which no Pod begins.
    """
    config = (kinds.CONFIG_MAPS, names.config(owner.name))
    beside = ((kinds.SECRETS, names.config(owner.name)), (kinds.SERVICES, names.service(owner.name)))
    wanted = (config, *beside) if runs else (config,)
    pods, found = await asyncio.gather(
        client.list(kinds.PODS, owner.namespace, labelSelector=owner.selector),
        asyncio.gather(*(_found(client, kind, owner.namespace, name) for kind, name in wanted)),
    )
    ours = [each if each is not None and owner.owns(each) else None for each in found]
    of_job = seeing.by_key(pod for pod in pods if owner.owns(pod))
    return Seen(config=ours[0], is_torn=None in ours[1:], pods=of_job)


async def _found(client: Client, kind: kinds.Kind, namespace: str, name: str) -> Object | None:
    try:
        return await client.get(kind, namespace, name)
    except ApiError as error:
        if error.is_gone:
            return None
        raise
