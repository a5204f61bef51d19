"""Names that stand in the API server: of the resource, of labels and annotations, and of a job's objects."""

PLACE = "kubernetes"
"""What `--on` says."""
GROUP = "ringweave.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "TrainingJob"
PLURAL = "trainingjobs"
FINALIZER = f"{GROUP}/operator"
"""Kept on every job until all its objects are gone: there may be no garbage collector, and it may be late."""
MANAGER = f"{GROUP}/operator"
"""The `managedBy` that means us; absent means us too."""

JOB_LABEL = f"{GROUP}/job"
NODE_LABEL = f"{GROUP}/node"
ATTEMPT_LABEL = f"{GROUP}/attempt"
ROUND = f"{GROUP}/round"
"""Annotation of a Pod: the round of the gate that it shall gather for."""
STOPPED = f"{GROUP}/stopped"
"""Annotation of a Pod that was told to end and is kept."""
AT_GATE = f"{GROUP}/AtGate"
"""Condition of a Pod, in its readiness gates: what its agent says that it does."""
GATE_KEY = "gate"
"""Key of the ConfigMap: the gate is open for rounds up to this one."""


def config(job: str) -> str:
    """Name of the ConfigMap and of the Secret."""
    return f"{job}-config"


def server(job: str) -> str:
    """Name of the Secret with the credentials for its parameter server, where it has one."""
    return f"{job}-server"


def spares(job: str, node: int) -> str:
    """Name of the Secret with the credentials of a node's processes, where the job is elastic."""
    return f"{job}-spares-{node}"


def service(job: str) -> str:
    """Name of the headless Service: the workers' host names end in it."""
    return job


def pod(job: str, node: int, attempt: int) -> str:
    """Name of the Pod of a node's attempt. No two jobs share one, as the last two numbers are always node, attempt."""
    return f"{job}-{node}-{attempt}"


def host(job: str, node: int) -> str:
    """Host name of a node's Pod, the same for all attempts."""
    return f"{job}-{node}"


def found_at(job: str, node: int, namespace: str) -> str:
    """The name by which the Service lets other Pods find a node's Pod, whichever attempt it is."""
    return f"{host(job, node)}.{service(job)}.{namespace}.svc"
