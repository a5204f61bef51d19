"""Objects of a job in the API server: names, labels and times; ConfigMap, Secret, headless Service, Pods. Pure."""

import re
import secrets
from base64 import b64decode
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from ringweave.errors import JobError
from ringweave.jobs.records import CreateGroup, Job
from ringweave.jobs.request import SERVER_MODES
from ringweave.platforms.agent import agent_channel, job_config
from ringweave.platforms.agent.agent_channel import NUM_INCARNATIONS, NUM_SERVER_INCARNATIONS
from ringweave.platforms.agent.job_config import RendezvousResult

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


Object = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOwner:
    """TrainingJob that owns an object."""

    name: str
    namespace: str
    uid: str
    """Unique id; a later job of the same name has another one."""

    @classmethod
    def from_resource(cls, resource: Mapping[str, Any]) -> "JobOwner":
        metadata = resource["metadata"]
        return cls(name=metadata["name"], namespace=metadata["namespace"], uid=metadata["uid"])

    def metadata(self, name: str, **labels: str) -> Object:
        reference = {
            "apiVersion": API_VERSION,
            "kind": CRD_KIND,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }
        ours = {"app.kubernetes.io/managed-by": "ringweave", JOB_LABEL: self.name}
        return {
            "name": name,
            "namespace": self.namespace,
            "labels": {**ours, **labels},
            "ownerReferences": [reference],
        }

    def owns(self, found: Mapping[str, Any]) -> bool:
        """Return whether the object belongs to this job, and not to an earlier job of this name or to anything else."""
        references = found["metadata"].get("ownerReferences", ())
        return any(reference["uid"] == self.uid for reference in references)

    @property
    def selector(self) -> str:
        return f"{JOB_LABEL}={self.name}"


MAX_CONFIG_MAP_BYTES = 2**20
"""Maximum size of keys and values of a ConfigMap, as the API server counts them."""
CONFIG_KEY = "config.json"
SCRIPT_KEY = "script"
RENDEZVOUS_KEY = "rendezvous.json"
_RENDEZVOUS_RESERVE_BYTES = 16 * 1024
"""Reserve for the rendezvous result: addresses of 128 nodes."""
TOKEN_KEY = "token"


def config_map(job: Job, owner: JobOwner, source: str | None) -> Object:
    """Return the ConfigMap: node names with worker counts, the script, and a closed start barrier.

    Raises:
        JobError: The ConfigMap would be too large.
    """
    whole = job_config.job_config(job, directory=job.request.directory, script_text=source)
    data = {CONFIG_KEY: job_config.JOB_CONFIG_JSON.dump(replace(whole, script_text=None))}
    if source is not None:
        data[SCRIPT_KEY] = source
    num_bytes = sum(len(key) + len(value.encode()) for key, value in data.items())
    if num_bytes > MAX_CONFIG_MAP_BYTES - _RENDEZVOUS_RESERVE_BYTES:
        do = "Put the script into the image and give its folder as directory"
        expected = f"at most {MAX_CONFIG_MAP_BYTES - _RENDEZVOUS_RESERVE_BYTES} (1 MiB less the rendezvous result)"
        raise JobError(f"bytes of the ConfigMap of job {job.request.name}", got=num_bytes, expected=expected, do=do)
    return {"metadata": owner.metadata(config_name(owner.name)), "data": data}


def parse_config_data(data: Mapping[str, str]) -> job_config.JobConfig:
    """Parse the data of `config_map`, with the script."""
    known = job_config.JOB_CONFIG_JSON.parse(data[CONFIG_KEY])
    return replace(known, script_text=data.get(SCRIPT_KEY))


def rendezvous_in(found: Mapping[str, Any] | None) -> RendezvousResult | None:
    """Return the last rendezvous result in a ConfigMap."""
    text = (found or {}).get("data", {}).get(RENDEZVOUS_KEY)
    return None if text is None else agent_channel.RENDEZVOUS_JSON.parse(text)


def token_secret(owner: JobOwner) -> Object:
    """Return the Secret with a token that authenticates the agents of the job."""
    metadata = owner.metadata(config_name(owner.name))
    return {"metadata": metadata, "type": "Opaque", "stringData": {TOKEN_KEY: secrets.token_urlsafe(32)}}


def headless_service(owner: JobOwner) -> Object:
    """Return the headless Service; it publishes Pods before they are ready, since they meet at the barrier."""
    return {
        "metadata": owner.metadata(service_name(owner.name)),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {JOB_LABEL: owner.name},
        },
    }


CONFIG_DIR = "/etc/ringweave/config"
SECRET_DIR = "/etc/ringweave/secret"
HOME_DIR = "/var/lib/ringweave"
CLAIM_DIR = "/claim"
WORKER_CONTAINER = "workers"
AGENT_COMMAND = ("python", "-m", "ringweave.platforms.kubernetes.agent_main")
TERMINATION_GRACE_S = 30


_SECURITY_CONTEXT = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
"""Workers need no more, and a namespace that enforces `restricted` accepts no more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantity:
    """Resource quantity of the API: `500m`, `16Gi`."""

    number: int
    suffix: str

    @classmethod
    def parse(cls, text: str) -> "Quantity":
        """Parse a quantity.

        Raises:
            ValueError: The text is no quantity.
        """
        match = _QUANTITY_PATTERN.fullmatch(text)
        if match is None:
            raise ValueError(text)
        return cls(number=int(match[1]), suffix=match[2])

    def multiplied(self, count: int) -> str:
        return f"{self.number * count}{self.suffix}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Toleration:
    """Tolerated taint."""

    key: str
    value: str | None = None
    """None: any value."""
    effect: str | None = None
    """None: all effects."""

    @classmethod
    def parse(cls, text: str) -> "Toleration":
        """Parse `KEY`, `KEY=VALUE`, `KEY:EFFECT` or `KEY=VALUE:EFFECT`.

        Raises:
            ValueError: The text has another form.
        """
        match = _TOLERATION_PATTERN.fullmatch(text)
        if match is None:
            raise ValueError(text)
        return cls(key=match[1], value=match[2], effect=match[3])

    def to_object(self) -> Object:
        """Return the toleration in the form of a Pod."""
        match = {"operator": "Exists"} if self.value is None else {"operator": "Equal", "value": self.value}
        return {"key": self.key, **match, **({"effect": self.effect} if self.effect else {})}


_QUANTITY_PATTERN = re.compile(r"([1-9]\d*)(|m|k|M|G|T|Ki|Mi|Gi|Ti)")
_TOLERATION_PATTERN = re.compile(r"([^=:\s]+)(?:=([^=:\s]+))?(?::(NoSchedule|PreferNoSchedule|NoExecute))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class PodSettings:
    """Settings of the operator for all Pods."""

    image: str | None = None
    """Image of jobs that name none; None: each job must name one."""
    gpu_resource: str = "nvidia.com/gpu"
    gateway_url: str = "https://ringweave-operator.ringweave-system.svc:8443"
    """URL of the operator's gateway for agents."""
    gateway_certificate: str = ""
    """Certificate of the gateway, as PEM; empty without TLS."""
    user: int | None = None
    """User id of the workers, never root; None: the image's."""
    tolerations: tuple[Toleration, ...] = ()
    """Taints that the Pods tolerate."""
    node_selector: tuple[tuple[str, str], ...] = ()
    """Labels that the nodes of the Pods have: a kind of GPU, a pool of nodes."""
    image_pull_secrets: tuple[str, ...] = ()
    """Secrets, in the namespaces of the jobs, with the credentials of private registries."""
    worker_cpu: Quantity | None = None
    """CPUs of each worker, as request and limit; None: a request of one for a CPU worker, and no limit."""
    worker_memory: Quantity | None = None
    """Memory of each worker, as request and limit; None: neither."""


def worker_pod(job: Job, owner: JobOwner, action: CreateGroup, *, host: str | None, settings: PodSettings) -> Object:
    """Return the Pod for a `CreateGroup` action. `host`: required Kubernetes node; None: any."""
    labels = {NODE_LABEL: str(action.node), ATTEMPT_LABEL: str(action.attempt)}
    metadata = owner.metadata(pod_name(owner.name, action.node, action.attempt), **labels)
    metadata["annotations"] = {ROUND_ANNOTATION: str(action.round)}
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": TERMINATION_GRACE_S,
        "hostname": pod_hostname(owner.name, action.node),
        "subdomain": service_name(owner.name),
        "readinessGates": [{"conditionType": BARRIER_CONDITION}],
        "containers": [_worker_container(job, owner, action, settings)],
        "volumes": [
            {"name": "config", "configMap": {"name": config_name(owner.name)}},
            # Root owns the files, and the image may run as any user.
            {"name": "secret", "secret": {"secretName": config_name(owner.name), "defaultMode": 0o444}},
            {"name": "home", "emptyDir": {}},
            # The default of Docker and containerd is 64 MB; workers of one node exchange gradients through it.
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }
    if job.request.claim is not None:
        spec["volumes"].append({"name": "claim", "persistentVolumeClaim": {"claimName": job.request.claim}})
        spec["containers"][0]["volumeMounts"].append({"name": "claim", "mountPath": CLAIM_DIR})
        spec["containers"][0]["env"].append({"name": "RINGWEAVE_CLAIM", "value": CLAIM_DIR})
    if settings.user is not None:
        user = settings.user
        spec["securityContext"] = {"runAsNonRoot": True, "runAsUser": user, "runAsGroup": user, "fsGroup": user}
    if settings.tolerations:
        spec["tolerations"] = [each.to_object() for each in settings.tolerations]
    if settings.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in settings.image_pull_secrets]
    selector = dict(settings.node_selector) | ({} if host is None else {"kubernetes.io/hostname": host})
    if selector:
        spec["nodeSelector"] = selector
    return {"metadata": metadata, "spec": spec}


def _worker_container(job: Job, owner: JobOwner, action: CreateGroup, settings: PodSettings) -> Object:
    field = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    variables = {
        "RINGWEAVE_GATEWAY": settings.gateway_url,
        "RINGWEAVE_GATEWAY_CA": settings.gateway_certificate,
        "RINGWEAVE_POD": f"{owner.namespace}/{owner.name}/{action.node}/{action.attempt}",
        "RINGWEAVE_CONFIG_DIR": CONFIG_DIR,
        "RINGWEAVE_SECRET_DIR": SECRET_DIR,
        "RINGWEAVE_HOME": HOME_DIR,
    }
    return {
        "name": WORKER_CONTAINER,
        "image": job.request.image or settings.image,
        "command": list(AGENT_COMMAND),
        "env": [field, *({"name": name, "value": value} for name, value in variables.items() if value)],
        "resources": _resources(job, action, settings),
        "securityContext": _SECURITY_CONTEXT,
        "terminationMessagePolicy": "File",
        "volumeMounts": [
            {"name": "config", "mountPath": CONFIG_DIR, "readOnly": True},
            {"name": "secret", "mountPath": SECRET_DIR, "readOnly": True},
            {"name": "home", "mountPath": HOME_DIR},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }


def _resources(job: Job, action: CreateGroup, settings: PodSettings) -> Object:
    """Return the resources: one GPU or one CPU for each worker, and the operator's settings."""
    is_cuda, count = job.request.device == "cuda", action.workers
    per_worker = {"cpu": settings.worker_cpu, "memory": settings.worker_memory}
    amounts = {name: each.multiplied(count) for name, each in per_worker.items() if each is not None}
    limits = {**({settings.gpu_resource: str(count)} if is_cuda else {}), **amounts}
    requests = {**({} if is_cuda else {"cpu": str(count)}), **amounts}
    return {name: each for name, each in (("limits", limits), ("requests", requests)) if each}


_MAX_CREDENTIALS = 512
"""Credentials of about 1,700 bytes in one Secret, which holds 1 MiB."""
MAX_SERVER_WORKERS_PER_NODE = _MAX_CREDENTIALS // NUM_SERVER_INCARNATIONS
"""Limit for a node of a job with a parameter server."""
MAX_ELASTIC_WORKERS_PER_NODE = _MAX_CREDENTIALS // NUM_INCARNATIONS - 2
"""Limit for a node of an elastic job: the Secret also holds the credentials of its coordinator and its server."""

UploadVersion = tuple[int, int]
"""Round, and attempt of the uploading node; a later upload has the larger version."""


def credential_secret(owner: JobOwner, name: str, version: UploadVersion, texts: Mapping[str, str]) -> Object:
    """Return the Secret with the credentials of a node's processes in a round, uploaded by one agent for the others.

    No Pod mounts it; only the gateway reads it. It has several texts for each process, each removed when it is used.

    `texts`: `HOLDER.INCARNATION` -> credentials.
    """
    metadata = owner.metadata(name)
    metadata["annotations"] = {ROUND_ANNOTATION: str(version[0]), ATTEMPT_LABEL: str(version[1])}
    return {"metadata": metadata, "type": "Opaque", "stringData": dict(texts)}


def upload_version(found: Mapping[str, Any]) -> UploadVersion:
    """Return the upload version of a Secret of `credential_secret`."""
    annotations = found["metadata"]["annotations"]
    return int(annotations[ROUND_ANNOTATION]), int(annotations[ATTEMPT_LABEL])


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
        config_name(name),
        *(credential_pool_name(name, node) for node in nodes),
    ]
