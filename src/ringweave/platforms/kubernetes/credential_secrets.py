"""Secrets with the credentials of a round's processes, uploaded by one agent for the others.

A job with a parameter server and an elastic job have one Secret for each node, with several texts for each of its
processes, each removed when it is used.
"""

from base64 import b64decode
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ringweave.jobs.request import SERVER_MODES
from ringweave.platforms.agent.agent_channel import NUM_INCARNATIONS, NUM_SERVER_INCARNATIONS
from ringweave.platforms.kubernetes import names
from ringweave.platforms.kubernetes.objects import JobOwner, Object

_MAX_CREDENTIALS = 512
"""Credentials of about 1,700 bytes in one Secret, which holds 1 MiB."""
MAX_SERVER_WORKERS_PER_NODE = _MAX_CREDENTIALS // NUM_SERVER_INCARNATIONS
"""Limit for a node of a job with a parameter server."""
MAX_ELASTIC_WORKERS_PER_NODE = _MAX_CREDENTIALS // NUM_INCARNATIONS - 2
"""Limit for a node of an elastic job: the Secret also holds the credentials of its coordinator and its server."""

UploadVersion = tuple[int, int]
"""Round, and attempt of the uploading node; a later upload has the larger version."""


def credential_secret(owner: JobOwner, name: str, version: UploadVersion, texts: Mapping[str, str]) -> Object:
    """Return the Secret with the credentials of a round. No Pod mounts it; only the gateway reads it.

    Args:
        owner: The TrainingJob.
        name: Name of the Secret.
        version: Version of the upload.
        texts: `HOLDER.INCARNATION` -> credentials.
    """
    metadata = owner.metadata(name)
    metadata["annotations"] = {names.ROUND_ANNOTATION: str(version[0]), names.ATTEMPT_LABEL: str(version[1])}
    return {"metadata": metadata, "type": "Opaque", "stringData": dict(texts)}


def upload_version(found: Mapping[str, Any]) -> UploadVersion:
    """Return the upload version of a Secret of `credential_secret`."""
    annotations = found["metadata"]["annotations"]
    return int(annotations[names.ROUND_ANNOTATION]), int(annotations[names.ATTEMPT_LABEL])


def credential_texts(found: Mapping[str, Any], keys: Collection[str]) -> dict[str, str]:
    """Return the credentials under these keys, as far as they exist."""
    return {key: b64decode(text).decode() for key, text in (found.get("data") or {}).items() if key in keys}


def next_credential_keys(found: Mapping[str, Any], holders: Sequence[str]) -> dict[str, str]:
    """Return holder -> key of the next incarnation's credentials, without holders that have none left."""
    incarnations: dict[str, list[int]] = {}
    for key in found.get("data") or {}:
        holder, _, incarnation = key.rpartition(".")
        incarnations.setdefault(holder, []).append(int(incarnation))
    return {holder: f"{holder}.{min(incarnations[holder])}" for holder in holders if holder in incarnations}


def secret_names(resource: Mapping[str, Any]) -> list[str]:
    """Return the names of all Secrets that a TrainingJob may have."""
    spec, name = resource["spec"], resource["metadata"]["name"]
    has_services, encrypts = "elastic" in spec or spec.get("mode") in SERVER_MODES, spec.get("encrypt") != "off"
    nodes = range(len(spec["nodes"])) if has_services or (encrypts and len(spec["nodes"]) > 1) else ()
    return [
        names.config_name(name),
        *(names.credential_pool_name(name, node) for node in nodes),
    ]
