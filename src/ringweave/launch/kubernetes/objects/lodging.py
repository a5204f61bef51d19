"""Secrets with the credentials of a round's processes: what one agent lodges at the desk for the others.

Of a job with a parameter server there is one, which holds a text for each worker. Of an elastic job there is one for
each node, which holds several for each of its processes, and is emptied as they are started.
"""

from base64 import b64decode
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ringweave.launch.groups.spares import NUM_LIVES
from ringweave.launch.kubernetes import names
from ringweave.launch.kubernetes.objects.owning import Object, Owner

MAX_WORKERS = 512
"""Of a job with a parameter server: some 1,700 bytes for each in one Secret, which holds 1 MiB."""
MAX_WORKERS_OF_NODE = MAX_WORKERS // NUM_LIVES - 1
"""Of an elastic job, on one node: the same, for each life, and the node may have a coordinator as well."""

Turn = tuple[int, int]
"""Round, and attempt of the node whose agent lodges: who lodges later has the larger one."""


def secret(owner: Owner, name: str, turn: Turn, texts: Mapping[str, str]) -> Object:
    """Of a round; no Pod has it as a volume, the desk alone reads it.

    Args:
        owner: The TrainingJob.
        name: Of the Secret.
        turn: Whose they are.
        texts: Global rank -> credentials; of an elastic job `HOLDER.LIFE` -> credentials.
    """
    metadata = owner.metadata(name)
    metadata["annotations"] = {names.ROUND: str(turn[0]), names.ATTEMPT_LABEL: str(turn[1])}
    return {"metadata": metadata, "type": "Opaque", "stringData": dict(texts)}


def turn_of(found: Mapping[str, Any]) -> Turn:
    """Whose the credentials of a Secret of `secret` are."""
    annotations = found["metadata"]["annotations"]
    return int(annotations[names.ROUND]), int(annotations[names.ATTEMPT_LABEL])


def texts_of(found: Mapping[str, Any], keys: Collection[str]) -> dict[str, str]:
    """The credentials under these keys, as far as it has them."""
    return {key: b64decode(text).decode() for key, text in (found.get("data") or {}).items() if key in keys}


def next_lives(found: Mapping[str, Any], holders: Sequence[str]) -> dict[str, str]:
    """Holder -> key of what its next process gets; those of whom nothing is left are left out."""
    lives: dict[str, list[int]] = {}
    for key in found.get("data") or {}:
        holder, _, life = key.rpartition(".")
        lives.setdefault(holder, []).append(int(life))
    return {holder: f"{holder}.{min(lives[holder])}" for holder in holders if holder in lives}


def secrets_of(resource: Mapping[str, Any]) -> list[str]:
    """Names of all Secrets that a TrainingJob may have."""
    spec, name = resource["spec"], resource["metadata"]["name"]
    nodes = range(len(spec["nodes"])) if "elastic" in spec else ()
    return [names.config(name), names.server(name), *(names.spares(name, node) for node in nodes)]
