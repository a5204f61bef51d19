"""Logs of attempts whose Pod goes: kept in a ConfigMap each until the job is forgotten."""

from collections.abc import Mapping, Sequence
from typing import Any

from ringweave.launch.kubernetes import names
from ringweave.launch.kubernetes.objects.owning import Object, Owner

MAX_BYTES = 512 * 1024
"""Of one attempt's log, its end; a ConfigMap has room for 1 MiB."""
MAX_LINES = 20_000
LOG = "log"
LOG_LABEL = f"{names.GROUP}/log"


def has_log(pod: Mapping[str, Any]) -> bool:
    """A container of it has run."""
    statuses = pod.get("status", {}).get("containerStatuses", ())
    return any({"running", "terminated"} & item.get("state", {}).keys() for item in statuses)


def log_map(owner: Owner, pod: Mapping[str, Any], lines: Sequence[str]) -> Object:
    """The ConfigMap that keeps what a Pod printed."""
    labels = pod["metadata"]["labels"]
    of_attempt = {key: labels[key] for key in (names.NODE_LABEL, names.ATTEMPT_LABEL)}
    text = "\n".join(lines).replace("\0", "")
    kept = text.encode()[-MAX_BYTES:].decode("utf-8", "ignore")
    metadata = owner.metadata(f"{pod['metadata']['name']}-log", **{LOG_LABEL: "true"}, **of_attempt)
    return {"metadata": metadata, "data": {LOG: kept}}
