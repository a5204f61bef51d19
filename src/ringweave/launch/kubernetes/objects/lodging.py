"""The Secret with the credentials of a round's workers: what one agent lodges at the desk for the others."""

from base64 import b64decode
from collections.abc import Collection, Mapping
from typing import Any

from ringweave.launch.kubernetes import names
from ringweave.launch.kubernetes.objects.owning import Object, Owner

MAX_WORKERS = 512
"""Of a job with a parameter server: some 1,700 bytes for each in one Secret, which holds 1 MiB."""

Turn = tuple[int, int]
"""Round, and attempt of the node that has the server: who lodges later has the larger one."""


def secret(owner: Owner, turn: Turn, texts: Mapping[str, str]) -> Object:
    """Of all workers; no Pod has it as a volume, the desk alone reads it.

    Args:
        owner: The TrainingJob.
        turn: Whose they are.
        texts: Global rank -> credentials.
    """
    metadata = owner.metadata(names.server(owner.name))
    metadata["annotations"] = {names.ROUND: str(turn[0]), names.ATTEMPT_LABEL: str(turn[1])}
    return {"metadata": metadata, "type": "Opaque", "stringData": dict(texts)}


def turn_of(found: Mapping[str, Any]) -> Turn:
    """Whose the credentials of a Secret of `secret` are."""
    annotations = found["metadata"]["annotations"]
    return int(annotations[names.ROUND]), int(annotations[names.ATTEMPT_LABEL])


def texts_of(found: Mapping[str, Any], ranks: Collection[str]) -> dict[str, str]:
    """The credentials of these workers, as far as it has them."""
    return {rank: b64decode(text).decode() for rank, text in found["data"].items() if rank in ranks}
