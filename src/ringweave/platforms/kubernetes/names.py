"""Names and times in the API server: resource, labels, annotations, objects of a job, and RFC 3339 time stamps."""

from datetime import UTC, datetime

PLATFORM_NAME = "kubernetes"
"""Value of `--on`."""
API_GROUP = "ringweave.dev"
CRD_VERSION = "v1alpha2"
API_VERSION = f"{API_GROUP}/{CRD_VERSION}"
CRD_KIND = "TrainingJob"
CRD_PLURAL = "trainingjobs"
FINALIZER = f"{API_GROUP}/operator"
"""Set on each job until all its objects are gone: there may be no garbage collector, and it may be late."""
MANAGER = f"{API_GROUP}/operator"
"""Value of `managedBy` for this operator; absent means the same."""

JOB_LABEL = f"{API_GROUP}/job"
NODE_LABEL = f"{API_GROUP}/node"
ATTEMPT_LABEL = f"{API_GROUP}/attempt"
ROUND_ANNOTATION = f"{API_GROUP}/round"
"""Annotation of a Pod: round of the start barrier that it has to join."""
STOPPED_ANNOTATION = f"{API_GROUP}/stopped"
"""Annotation of a Pod that was told to stop and is kept."""
BARRIER_CONDITION = f"{API_GROUP}/AtBarrier"
"""Condition of a Pod, in its readiness gates: the status of its agent."""


LEADERSHIP_ANNOTATION = f"{API_GROUP}/leadership"
"""Annotation of a job's ConfigMap: the latest leadership record of its parameter servers, with its round, as JSON."""


def config_name(job: str) -> str:
    """Return the name of the ConfigMap and of the Secret."""
    return f"{job}-config"


def credential_pool_name(job: str, node: int) -> str:
    """Return the name of the Secret with the credentials of a node's processes.

    Jobs with a parameter server and elastic jobs have them.
    """
    return f"{job}-credentials-{node}"


def service_name(job: str) -> str:
    """Return the name of the headless Service, the domain of the workers' host names."""
    return job


def pod_name(job: str, node: int, attempt: int) -> str:
    """Return the name of the Pod of a node's attempt. It is unique, since it always ends in node and attempt."""
    return f"{job}-{node}-{attempt}"


def pod_hostname(job: str, node: int) -> str:
    """Return the host name of a node's Pod, equal for all attempts."""
    return f"{job}-{node}"


def pod_dns_name(job: str, node: int, namespace: str) -> str:
    """Return the DNS name of a node's Pod, equal for all attempts."""
    return f"{pod_hostname(job, node)}.{service_name(job)}.{namespace}.svc"


def parse_time(text: str) -> float:
    """Parse `2026-11-21T13:00:00Z`, with or without a fraction, into seconds since 1970."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def format_time(seconds: float) -> str:
    """Return `2026-11-21T13:00:00Z`, without a fraction, for the fields of the API."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def format_time_micro(seconds: float) -> str:
    """Return the time with microseconds, for Leases."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
