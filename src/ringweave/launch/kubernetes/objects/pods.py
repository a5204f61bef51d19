"""The Pod of one attempt of one node: a group agent that waits at the gate, and starts the workers when it opens."""

from dataclasses import dataclass
from typing import Any

from ringweave.jobs.life.actions import CreateGroup
from ringweave.jobs.life.records import Job
from ringweave.launch.kubernetes import names
from ringweave.launch.kubernetes.objects.owning import Object, Owner

CONFIG_DIR = "/etc/ringweave/config"
SECRET_DIR = "/etc/ringweave/secret"
HOME = "/var/lib/ringweave"
CONTAINER = "workers"
AGENT = ("python", "-m", "ringweave.launch.kubernetes.agent")
GRACE_S = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class PodSettings:
    """What the operator adds to what a job says."""

    image: str | None = None
    """Of jobs that name none; None: they must."""
    gpu_resource: str = "nvidia.com/gpu"
    """Name of the resource that a GPU is in this cluster."""
    desk: str = "https://ringweave-operator.ringweave-system.svc:8443"
    """Where agents find the operator."""
    desk_authority: str = ""
    """Certificate that the operator shows there, as PEM; empty where it is reached without TLS."""


def pod(job: Job, owner: Owner, action: CreateGroup, *, host: str | None, settings: PodSettings) -> Object:
    """The Pod that an action asks for.

    Args:
        job: As admitted.
        owner: Its TrainingJob.
        action: Which node and attempt, with how many workers, for which round.
        host: The Kubernetes node that it must be; None: any.
        settings: Of the operator.
    """
    labels = {names.NODE_LABEL: str(action.node), names.ATTEMPT_LABEL: str(action.attempt)}
    metadata = owner.metadata(names.pod(owner.name, action.node, action.attempt), **labels)
    metadata["annotations"] = {names.ROUND: str(action.round)}
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": GRACE_S,
        "hostname": names.host(owner.name, action.node),
        "subdomain": names.service(owner.name),
        "readinessGates": [{"conditionType": names.AT_GATE}],
        "containers": [_container(job, owner, action, settings)],
        "volumes": [
            {"name": "config", "configMap": {"name": names.config(owner.name)}},
            # The files are root's, and the image may run as anybody.
            {"name": "secret", "secret": {"secretName": names.config(owner.name), "defaultMode": 0o444}},
            {"name": "home", "emptyDir": {}},
            # What Docker and containerd give is 64 MB; workers of one node exchange gradients through it.
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }
    if host is not None:
        spec["nodeSelector"] = {"kubernetes.io/hostname": host}
    return {"metadata": metadata, "spec": spec}


def _container(job: Job, owner: Owner, action: CreateGroup, settings: PodSettings) -> Object:
    field = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    told = {
        "RINGWEAVE_DESK": settings.desk,
        "RINGWEAVE_DESK_AUTHORITY": settings.desk_authority,
        "RINGWEAVE_POD": f"{owner.namespace}/{owner.name}/{action.node}/{action.attempt}",
        "RINGWEAVE_CONFIG_DIR": CONFIG_DIR,
        "RINGWEAVE_SECRET_DIR": SECRET_DIR,
        "RINGWEAVE_HOME": HOME,
    }
    return {
        "name": CONTAINER,
        "image": job.request.image or settings.image,
        "command": list(AGENT),
        "env": [field, *({"name": name, "value": value} for name, value in told.items() if value)],
        "resources": _resources(job, action, settings),
        "terminationMessagePolicy": "File",
        "volumeMounts": [
            {"name": "config", "mountPath": CONFIG_DIR, "readOnly": True},
            {"name": "secret", "mountPath": SECRET_DIR, "readOnly": True},
            {"name": "home", "mountPath": HOME},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }


def _resources(job: Job, action: CreateGroup, settings: PodSettings) -> Object:
    """A GPU each, or a CPU each."""
    if job.request.device == "cuda":
        return {"limits": {settings.gpu_resource: str(action.workers)}}
    return {"requests": {"cpu": str(action.workers)}}
