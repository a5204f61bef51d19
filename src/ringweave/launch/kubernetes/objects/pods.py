"""The Pod of one attempt of one node: a group agent that waits at the gate, and starts the workers when it opens."""

import re
from dataclasses import dataclass
from typing import Any

from ringweave.jobs.life.actions import CreateGroup
from ringweave.jobs.life.records import Job
from ringweave.launch.kubernetes import names
from ringweave.launch.kubernetes.objects.owning import Object, Owner

CONFIG_DIR = "/etc/ringweave/config"
SECRET_DIR = "/etc/ringweave/secret"
HOME = "/var/lib/ringweave"
CLAIM = "/claim"
CONTAINER = "workers"
AGENT = ("python", "-m", "ringweave.launch.kubernetes.agent")
GRACE_S = 30


_SECURITY = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
"""Workers need no more, and a namespace that enforces `restricted` takes no Pod with more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantity:
    """An amount as the API writes it: `500m`, `16Gi`."""

    number: int
    suffix: str

    @classmethod
    def parse(cls, text: str) -> "Quantity":
        """The amount that a text is.

        Raises:
            ValueError: It is none.
        """
        match = _QUANTITY.fullmatch(text)
        if match is None:
            raise ValueError(text)
        return cls(number=int(match[1]), suffix=match[2])

    def times(self, count: int) -> str:
        """So often this amount."""
        return f"{self.number * count}{self.suffix}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Toleration:
    """A taint that does not matter."""

    key: str
    value: str | None = None
    """None: any."""
    effect: str | None = None
    """None: all."""

    @classmethod
    def parse(cls, text: str) -> "Toleration":
        """What `KEY`, `KEY=VALUE`, `KEY:EFFECT` or `KEY=VALUE:EFFECT` is.

        Raises:
            ValueError: It is none of them.
        """
        match = _TOLERATION.fullmatch(text)
        if match is None:
            raise ValueError(text)
        return cls(key=match[1], value=match[2], effect=match[3])

    def to_object(self) -> Object:
        """As a Pod has it."""
        wanted = {"operator": "Exists"} if self.value is None else {"operator": "Equal", "value": self.value}
        return {"key": self.key, **wanted, **({"effect": self.effect} if self.effect else {})}


_QUANTITY = re.compile(r"([1-9]\d*)(|m|k|M|G|T|Ki|Mi|Gi|Ti)")
_TOLERATION = re.compile(r"([^=:\s]+)(?:=([^=:\s]+))?(?::(NoSchedule|PreferNoSchedule|NoExecute))?")


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
    user: int | None = None
    """Number of the user that workers run as, never root; None: as the image says."""
    tolerations: tuple[Toleration, ...] = ()
    """Taints of nodes that Pods may be on all the same."""
    worker_cpu: Quantity | None = None
    """CPUs of each worker, as request and limit; None: a request of one for a CPU worker, and no limit."""
    worker_memory: Quantity | None = None
    """Memory of each worker, as request and limit; None: nothing is said."""


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
    if job.request.claim is not None:
        spec["volumes"].append({"name": "claim", "persistentVolumeClaim": {"claimName": job.request.claim}})
        spec["containers"][0]["volumeMounts"].append({"name": "claim", "mountPath": CLAIM})
        spec["containers"][0]["env"].append({"name": "RINGWEAVE_CLAIM", "value": CLAIM})
    if settings.user is not None:
        user = settings.user
        spec["securityContext"] = {"runAsNonRoot": True, "runAsUser": user, "runAsGroup": user, "fsGroup": user}
    if settings.tolerations:
        spec["tolerations"] = [each.to_object() for each in settings.tolerations]
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
        "securityContext": _SECURITY,
        "terminationMessagePolicy": "File",
        "volumeMounts": [
            {"name": "config", "mountPath": CONFIG_DIR, "readOnly": True},
            {"name": "secret", "mountPath": SECRET_DIR, "readOnly": True},
            {"name": "home", "mountPath": HOME},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }


def _resources(job: Job, action: CreateGroup, settings: PodSettings) -> Object:
    """A GPU each, or a CPU each, and what the operator was told to add."""
    is_cuda, count = job.request.device == "cuda", action.workers
    told = {"cpu": settings.worker_cpu, "memory": settings.worker_memory}
    amounts = {name: each.times(count) for name, each in told.items() if each is not None}
    limits = {**({settings.gpu_resource: str(count)} if is_cuda else {}), **amounts}
    requests = {**({} if is_cuda else {"cpu": str(count)}), **amounts}
    return {name: each for name, each in (("limits", limits), ("requests", requests)) if each}
