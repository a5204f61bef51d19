"""The ConfigMap, the Secret and the headless Service of a job."""

import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ringweave.errors import JobError, explain
from ringweave.jobs.life.records import Job
from ringweave.launch.groups import config, posts
from ringweave.launch.groups.posts import Opening
from ringweave.launch.kubernetes import names
from ringweave.launch.kubernetes.objects.owning import Object, Owner

MAX_BYTES = 2**20
"""Of the keys and values of a ConfigMap, as the API server counts them."""
CONFIG = "config.json"
SCRIPT = "script"
OPENING = "opening.json"
_FOR_THE_OPENING = 16 * 1024
"""Left free: addresses of 128 nodes."""
TOKEN = "token"


def config_map(job: Job, owner: Owner, source: str | None) -> Object:
    """Node names with their counts, the script, and the gate, which is closed.

    Raises:
        JobError: It is larger than a ConfigMap may be.
    """
    whole = config.of_job(job, directory=job.request.directory, script_text=source)
    data = {CONFIG: config.dumps(replace(whole, script_text=None))}
    if source is not None:
        data[SCRIPT] = source
    num_bytes = sum(len(key) + len(value.encode()) for key, value in data.items())
    if num_bytes > MAX_BYTES - _FOR_THE_OPENING:
        do = "Put the script into the image and name its folder as directory; then it need not travel with the job"
        expected = f"at most {MAX_BYTES - _FOR_THE_OPENING} (1 MiB less the opening of the gate)"
        raise JobError(
            explain(f"bytes of the ConfigMap of job {job.request.name}", got=num_bytes, expected=expected, do=do)
        )
    return {"metadata": owner.metadata(names.config(owner.name)), "data": data}


def config_of(data: Mapping[str, str]) -> config.Config:
    """The config that the data of `config_map` holds, with its script."""
    known = config.loads(data[CONFIG])
    return replace(known, script_text=data.get(SCRIPT))


def opening_of(found: Mapping[str, Any] | None) -> Opening | None:
    """The last opening of the gate that a ConfigMap holds."""
    text = (found or {}).get("data", {}).get(OPENING)
    return None if text is None else posts.parse_opening(text)


def secret(owner: Owner) -> Object:
    """A token by which the agents of the job show that they are its."""
    metadata = owner.metadata(names.config(owner.name))
    return {"metadata": metadata, "type": "Opaque", "stringData": {TOKEN: secrets.token_urlsafe(32)}}


def service(owner: Owner) -> Object:
    """Host names for the Pods; also before they are ready, since they look for each other at the gate."""
    return {
        "metadata": owner.metadata(names.service(owner.name)),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {names.JOB_LABEL: owner.name},
        },
    }
