"""The operator from begin to end: kopf watches and is told to stop, the queue works, a Lease says who may."""

import asyncio
import contextlib
import logging
import time
from base64 import b64decode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, TypeVar
from urllib.parse import urlsplit

import kopf

from ringweave.errors import UsageError, explain
from ringweave.launch.kubernetes import names
from ringweave.launch.kubernetes.api import certificates, connecting, kinds
from ringweave.launch.kubernetes.api.certificates import ServerCertificate
from ringweave.launch.kubernetes.api.client import Client
from ringweave.launch.kubernetes.api.failures import ApiError
from ringweave.launch.kubernetes.api.pooling import Pool
from ringweave.launch.kubernetes.objects.pods import PodSettings, Quantity, Toleration
from ringweave.launch.kubernetes.operating import ending, exposing
from ringweave.launch.kubernetes.operating.acting import Actor
from ringweave.launch.kubernetes.operating.admission import Admission
from ringweave.launch.kubernetes.operating.controller import Controller
from ringweave.launch.kubernetes.operating.desk import Desk
from ringweave.launch.kubernetes.operating.leading import Leader, LeaseSettings
from ringweave.launch.kubernetes.operating.queueing import Queue

_Read = TypeVar("_Read")
Connect = Callable[[], kopf.ConnectionInfo]
RENEWALS = 4 / 15
"""Of the time of a lease, from one renewal to the next."""
_DESK = "ringweave-operator-desk"
_OF_JOBS = ("pods", "configmaps")
"""What is watched beside jobs: those of ours, which have a label; the API server keeps the others to itself."""
_MOST_IN_A_LIST = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorSettings:
    """What `ringweave operator` is told."""

    lease: LeaseSettings
    pods: PodSettings = field(default_factory=PodSettings)
    namespaces: tuple[str, ...] = ()
    """Whose jobs it leads; empty: those of all."""
    num_workers: int = 8
    """Jobs that are looked at at the same time."""
    desk_host: str = "0.0.0.0"
    desk_port: int | None = 8443
    """None: no desk; then agents have to hear from somebody else."""
    liveness: str | None = None
    """Where to say that it lives, `http://0.0.0.0:8080/healthz`, and beside that its metrics; None: nowhere."""


async def operate(
    connect: Connect,
    settings: OperatorSettings,
    *,
    client_class: Callable[[Connect], Client] = Client,
    clock: Callable[[], float] = time.time,
    ready: asyncio.Event | None = None,
    ends: Callable[[], None] = lambda: None,
) -> None:
    """Lead all jobs until told to stop, by SIGTERM or SIGINT.

    Args:
        connect: Says where the API server is, and as whom; asked again when credentials end.
        settings: Of the operator.
        client_class: Makes the client; tests put something in between.
        clock: Seconds since 1970.
        ready: Set when it leads.
        ends: Called when its end begins.

    Raises:
        LostLeaseError: Another operator leads.
    """
    stop = asyncio.Event()
    async with client_class(connect) as client, exposing.exposed(settings.liveness, client, settings.namespaces):
        leader = Leader(client, settings.lease, clock)
        with ending.heard(stop) as hear:
            parts = _Parts(
                client=client, leader=leader, settings=settings, clock=clock, connect=connect, hear=hear, ends=ends
            )
            lead = _lead(parts, ready or asyncio.Event())
            await ending.until_one_ends(_wait(stop), lead, grace_s=ending.WHOLE_S, begins=ends)
        await leader.release()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Parts:
    """What an operator is made of."""

    client: Client
    leader: Leader
    settings: OperatorSettings
    clock: Callable[[], float]
    connect: Connect
    hear: Callable[[], None]
    """Has signals heard again, which kopf takes for itself."""
    ends: Callable[[], None]


async def _wait(stop: asyncio.Event) -> None:
    await stop.wait()


async def _lead(parts: _Parts, ready: asyncio.Event) -> None:
    """Wait for the lease, and lead as long as it is ours."""
    client, settings, clock = parts.client, parts.settings, parts.clock
    await parts.leader.acquire()
    certificate = await _certificate(client, settings) if _is_tls(settings) else None
    pods = settings.pods if certificate is None else replace(settings.pods, desk_authority=certificate.certificate)
    desk = Desk(client, clock)
    actor, admission = Actor(client, pods, clock), Admission(client, pods, clock)
    controller = Controller(client, actor, admission, clock, listener=desk.note, gone=desk.forget)
    queue = Queue(parts.leader.guarding(controller.reconcile), clock, settings.num_workers)
    async with contextlib.AsyncExitStack() as stack:
        if settings.desk_port is not None:
            runner = await desk.serve(settings.desk_host, settings.desk_port, certificate)
            stack.push_async_callback(runner.cleanup)
        ready.set()
        await ending.until_one_ends(parts.leader.keep(), queue.serve(), _watch(parts, queue), begins=parts.ends)


async def _watch(parts: _Parts, queue: Queue) -> None:
    """Poke the queue for everything that changes."""
    settings, registry = parts.settings, kopf.OperatorRegistry()
    pools: list[Pool] = []

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.AiohttpSession:
        connection = await asyncio.to_thread(parts.connect)
        pools.append(Pool(connection, limit=0, headers=connection.as_http_headers()))
        return kopf.AiohttpSession(
            server=connection.server,
            default_namespace=connection.default_namespace,
            expiration=connection.expiration,
            aiohttp_session=pools[-1].session,
        )

    @kopf.on.event(names.GROUP, names.VERSION, names.PLURAL, registry=registry)
    async def job_changed(*, namespace: str | None, name: str | None, **_: Any) -> None:
        queue.poke((str(namespace), str(name)))

    async def object_changed(*, namespace: str | None, labels: kopf.Labels, **_: Any) -> None:
        queue.poke((str(namespace), labels[names.JOB_LABEL]))

    for plural in _OF_JOBS:
        kopf.on.event("v1", plural, labels={names.JOB_LABEL: kopf.PRESENT}, registry=registry)(object_changed)
    before = asyncio.all_tasks()
    tasks = await kopf.spawn_tasks(
        registry=registry,
        settings=_kopf_settings(),
        standalone=True,
        clusterwide=not settings.namespaces,
        namespaces=settings.namespaces,
    )
    parts.hear()
    try:
        await kopf.run_tasks(tasks, ignored=before)
    finally:
        await asyncio.gather(*(pool.close() for pool in pools))


def _kopf_settings() -> kopf.OperatorSettings:
    """Kopf watches for us; it posts no events and writes into no object."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.watching.server_timeout = 270
    settings.watching.reconnect_backoff = 0.1
    settings.watching.chunk_size = _MOST_IN_A_LIST
    for plural in _OF_JOBS:
        settings.watching.label_selectors["v1", plural] = names.JOB_LABEL
    settings.queueing.exit_timeout = 0.5  # its handlers only poke
    settings.process.ultimate_exiting_timeout = None  # `ending` sees to that
    return settings


def _is_tls(settings: OperatorSettings) -> bool:
    return settings.desk_port is not None and settings.pods.desk.startswith("https:")


async def _certificate(client: Client, settings: OperatorSettings) -> ServerCertificate:
    """The desk's certificate, the same for all operators, one after another: Pods know it from when they were made."""
    namespace = settings.lease.namespace
    host = urlsplit(settings.pods.desk).hostname or ""
    made = certificates.issue([host], datetime.now(UTC))
    body = {
        "metadata": {"name": _DESK, "namespace": namespace},
        "type": "kubernetes.io/tls",
        "stringData": {"tls.crt": made.certificate, "tls.key": made.key},
    }
    try:
        await client.create(kinds.SECRETS, namespace, body)
    except ApiError as error:
        if not error.is_taken:
            raise
    found = (await client.get(kinds.SECRETS, namespace, _DESK))["data"]
    texts = {key: b64decode(found[key]).decode() for key in ("tls.crt", "tls.key")}
    return ServerCertificate(certificate=texts["tls.crt"], key=texts["tls.key"])


def quiet() -> None:
    """Kopf tells much of what it does; of that only what went wrong."""
    logging.getLogger("kopf").setLevel(logging.WARNING)


def settings_of(given: Mapping[str, Any], *, identity: str) -> OperatorSettings:
    """The settings that the command line makes.

    Raises:
        UsageError: An amount or a taint is none.
    """
    return OperatorSettings(
        lease=LeaseSettings(
            namespace=given["lease_namespace"],
            identity=identity,
            duration_s=given["lease_s"],
            renew_s=given["lease_s"] * RENEWALS,
        ),
        pods=_pods_of(given),
        namespaces=tuple(given["namespaces"]),
        num_workers=given["workers"],
        desk_port=None if given["no_desk"] else given["desk_port"],
        liveness=given["liveness"],
    )


def _pods_of(given: Mapping[str, Any]) -> PodSettings:
    def read(option: str, text: str, parse: Callable[[str], _Read], expected: str) -> _Read:
        try:
            return parse(text)
        except ValueError:
            do = "Write it as Kubernetes does"
            raise UsageError(explain(f"--{option}", got=text, expected=expected, do=do)) from None

    def amount(option: str) -> Quantity | None:
        text = given[option.replace("-", "_")]
        return None if text is None else read(option, text, Quantity.parse, "a whole number and a unit: 4, 500m, 16Gi")

    taints = (read("toleration", text, Toleration.parse, "KEY[=VALUE][:EFFECT]") for text in given["tolerations"])
    return PodSettings(
        image=given["image"],
        gpu_resource=given["gpu_resource"],
        desk=given["desk"],
        user=given["run_as"],
        tolerations=tuple(taints),
        worker_cpu=amount("worker-cpu"),
        worker_memory=amount("worker-memory"),
    )


def connector(environ: Mapping[str, str], context: str | None) -> Connect:
    """Finds the API server anew whenever it is asked, since tokens change."""
    return lambda: connecting.connection(environ, context=context)
