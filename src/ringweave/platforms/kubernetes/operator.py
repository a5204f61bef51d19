"""The operator process: watches through kopf, leader election, reconcile queue, health and metrics, bounded shutdown.

kopf cancels its tasks once. A watch that was just cut loses a cancellation that arrives within two iterations of the
event loop, and kopf then waits for it for ever. So remaining tasks are cancelled repeatedly, and a thread ends the
process if even that does not help.
"""

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from base64 import b64decode
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, TypeVar
from urllib.parse import urlsplit

import kopf
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from ringweave.errors import LaunchError, RingweaveError, UsageError, explain
from ringweave.platforms import metrics
from ringweave.platforms.api import JobView
from ringweave.platforms.kubernetes import api_client, certificates, names
from ringweave.platforms.kubernetes import platform as kubernetes_platform
from ringweave.platforms.kubernetes.action_executor import ActionExecutor
from ringweave.platforms.kubernetes.agent_gateway import AgentGateway
from ringweave.platforms.kubernetes.api_client import ConnectionPool, KubernetesClient, Object
from ringweave.platforms.kubernetes.api_errors import ApiError
from ringweave.platforms.kubernetes.certificates import ServerCertificate
from ringweave.platforms.kubernetes.job_admission import JobAdmission
from ringweave.platforms.kubernetes.job_objects import JobKey
from ringweave.platforms.kubernetes.objects import PodSettings, Quantity, Toleration
from ringweave.platforms.kubernetes.reconciler import ReconcileQueue, TrainingJobReconciler

LEASE_NAME = "ringweave-operator"
LEASE_RELEASE_TIMEOUT_S = 2.0
"""Time for which an operator that ends tries to release its lease."""
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseSettings:
    """Settings of the operator's lease."""

    namespace: str
    identity: str
    """Identity of this operator; unchanged by a restart of its container, so that it continues at once."""
    duration_s: float = 15.0
    """A holder that has not renewed for this time has lost the lease."""
    renew_s: float = 4.0
    """Interval between renewals. A holder gives up one interval before its lease ends."""


class LostLeaseError(LaunchError):
    """Another operator leads, or may; this one has stopped."""


class LeaderElection:
    """Leader election by a Lease."""

    def __init__(
        self,
        client: KubernetesClient,
        settings: LeaseSettings,
        clock: Callable[[], float],
        elapsed: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start as a follower.

        Args:
            client: Client for the lease.
            settings: Settings of the lease.
            clock: Seconds since 1970, for the times in the lease; never compared with another machine's.
            elapsed: Monotonic clock, in seconds, for the duration of the lease.
        """
        self._client, self._settings = client, settings
        self._clock, self._elapsed = clock, elapsed
        self._log = logging.getLogger(__name__)
        self._last_change: tuple[str, float] = ("", 0.0)
        """Version of the lease when it was last seen to change, and the time of that."""
        self._held_until_s = float("-inf")
        """End of our lease by `elapsed`: counted from before the renewal was sent, less one renewal interval."""

    @property
    def is_leader(self) -> bool:
        """Return whether the lease is ours, so that no other operator can have it yet."""
        return self._elapsed() < self._held_until_s

    async def wait_acquired(self) -> None:
        """Wait until the lease is ours, also while the API server is down or overloaded.

        Raises:
            ApiError: The API server does not accept our credentials, or we may not have the lease.
        """
        while True:
            try:
                async with asyncio.timeout(self._settings.renew_s):
                    if await self._try_acquire():
                        return
            except (LaunchError, TimeoutError) as error:
                if isinstance(error, ApiError) and error.status in (401, 403):
                    raise
                why = str(error) or f"no answer in {self._settings.renew_s:g} s"
                self._log.warning("lease: not requested: %s", why)
            await asyncio.sleep(min(self._settings.renew_s, self._settings.duration_s / 4))

    async def renew_until_lost(self) -> None:
        """Renew the lease while it is ours; return before another operator may start.

        Raises:
            LostLeaseError: The lease is not ours any more, or may not be.
        """
        while True:
            await asyncio.sleep(min(self._settings.renew_s, self._left_s()))
            try:
                async with asyncio.timeout(min(self._settings.renew_s, self._left_s())):
                    # Twice: a renewal of ours without a timely answer conflicts with the next one.
                    is_ours = await self._try_acquire() or await self._try_acquire()
            except (LaunchError, TimeoutError) as error:
                self._log.warning("lease: not renewed: %s", str(error) or "no answer")
                is_ours = None
            if is_ours is False or not self.is_leader:
                raise _lost_lease_error()

    def guard(self, reconcile: Callable[[JobKey], Awaitable[Result]]) -> Callable[[JobKey], Awaitable[Result]]:
        """Return the same work, started only while the lease is ours, so that a paused operator stays idle.

        Raises:
            LostLeaseError: The lease is not ours.
        """

        async def guarded(key: JobKey) -> Result:
            if not self.is_leader:
                raise _lost_lease_error()
            return await reconcile(key)

        return guarded

    def _left_s(self) -> float:
        return max(0.0, self._held_until_s - self._elapsed())

    async def release(self) -> None:
        """Release the lease for another operator; without a quick answer of the API server it has to expire."""
        self._held_until_s = float("-inf")
        try:
            async with asyncio.timeout(LEASE_RELEASE_TIMEOUT_S):
                lease = await self._client.get(api_client.LEASES, self._settings.namespace, LEASE_NAME)
                if lease["spec"].get("holderIdentity") == self._settings.identity:
                    lease["spec"]["holderIdentity"] = ""
                    await self._client.replace(api_client.LEASES, self._settings.namespace, lease)
        except (LaunchError, TimeoutError) as error:
            self._log.warning("lease: not released: %s", str(error) or "no answer")

    async def _try_acquire(self) -> bool:
        """Try to acquire or renew the lease; return whether it is ours."""
        begun_s = self._elapsed()
        is_ours = await self._write_if_available()
        if is_ours:
            self._held_until_s = begun_s + self._settings.duration_s - self._settings.renew_s
        return is_ours

    async def _write_if_available(self) -> bool:
        namespace = self._settings.namespace
        try:
            lease = await self._client.get(api_client.LEASES, namespace, LEASE_NAME)
        except ApiError as error:
            if not error.is_not_found:
                raise
            return await self._write_lease({"metadata": {"name": LEASE_NAME, "namespace": namespace}}, transitions=0)
        spec = lease.get("spec", {})
        holder = spec.get("holderIdentity") or ""
        if holder not in ("", self._settings.identity) and not self._has_expired(lease):
            return False
        is_new = holder != self._settings.identity
        return await self._write_lease(lease, transitions=spec.get("leaseTransitions", 0) + is_new)

    def _has_expired(self, lease: Object) -> bool:
        """Return whether the lease was not renewed for its whole duration since we first saw this version."""
        version, now = lease["metadata"]["resourceVersion"], self._elapsed()
        if version != self._last_change[0]:
            self._last_change = (version, now)
        lasts_s = max(self._settings.duration_s, float(lease["spec"].get("leaseDurationSeconds") or 0))
        return now - self._last_change[1] > lasts_s

    async def _write_lease(self, lease: Object, *, transitions: int) -> bool:
        now = names.format_time_micro(self._clock())
        spec = lease.get("spec", {})
        is_held = spec.get("holderIdentity") == self._settings.identity
        spec = {
            "holderIdentity": self._settings.identity,
            "leaseDurationSeconds": max(1, round(self._settings.duration_s)),
            "acquireTime": spec.get("acquireTime", now) if is_held else now,
            "renewTime": now,
            "leaseTransitions": transitions,
        }
        write = self._client.replace if "resourceVersion" in lease["metadata"] else self._client.create
        try:
            await write(api_client.LEASES, self._settings.namespace, {**lease, "spec": spec})
        except ApiError as error:
            if error.is_stale or error.already_exists:
                return False  # another one was faster
            raise
        return True


def _lost_lease_error() -> LostLeaseError:
    return LostLeaseError("lease of the operator: lost, expected to hold it. Another operator leads now, or will.")


GRACE_S = 1.0
"""Time for cancelled parts to end by themselves."""
CANCEL_LIMIT_S = 3.0
"""Time for which remaining tasks are cancelled repeatedly; then they are abandoned."""
RECANCEL_INTERVAL_S = 0.25
"""Interval between cancellations of one task."""
NESTED_GRACE_S = GRACE_S + CANCEL_LIMIT_S + 1.0
"""Grace period for a part that itself ends parts in this way."""
PROCESS_EXIT_LIMIT_S = 10.0
"""A process that still runs so long after its parts began to end is killed."""
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
OperatorTask = Coroutine[Any, Any, None]


async def run_until_one_ends(
    *parts: OperatorTask, grace_s: float = GRACE_S, on_shutdown: Callable[[], None] = lambda: None
) -> None:
    """Run the parts until one returns or fails; then end the others, and every task that they have started.

    Args:
        parts: Coroutines; each runs as a task of its own.
        grace_s: Time for them to end by themselves.
        on_shutdown: Called before anything is cancelled.

    Raises:
        Exception: The exception of the part that failed first.
    """
    before = asyncio.all_tasks()
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        on_shutdown()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=grace_s)
        await cancel_other_tasks(before)
    for task in tasks:
        if task in done:
            task.result()


async def cancel_other_tasks(kept: set[asyncio.Task[Any]], limit_s: float = CANCEL_LIMIT_S) -> set[asyncio.Task[Any]]:
    """Cancel all other tasks until they have ended; return the ones that have not after the limit."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + limit_s
    while left := asyncio.all_tasks() - kept - {asyncio.current_task()}:
        if loop.time() >= deadline_s:
            names = ", ".join(sorted(task.get_name() for task in left))
            logging.getLogger(__name__).warning("abandoned after %.2g s: %s", limit_s, names)
            return left
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=RECANCEL_INTERVAL_S)
    return set()


@contextlib.contextmanager
def handle_stop_signals(stop: asyncio.Event) -> Iterator[Callable[[], None]]:
    """Set the event at SIGTERM and SIGINT. Yields a function that installs the handlers again after a replacement."""
    loop = asyncio.get_running_loop()
    is_main = threading.current_thread() is threading.main_thread()

    def hear() -> None:
        for number in _STOP_SIGNALS if is_main else ():
            loop.add_signal_handler(number, stop.set)

    hear()
    try:
        yield hear
    finally:
        for number in _STOP_SIGNALS if is_main else ():
            loop.remove_signal_handler(number)


def kill_process_later(after_s: float = PROCESS_EXIT_LIMIT_S) -> None:
    """Kill this process after a time if it still runs, and dump its stacks."""

    def end() -> None:
        sys.stderr.write(f"operator: still running {after_s:g} s after it was told to stop; killed\n")
        faulthandler.dump_traceback()
        sys.stderr.flush()
        os._exit(1)

    timer = threading.Timer(after_s, end)
    timer.daemon = True
    timer.start()


@contextlib.asynccontextmanager
async def serve_health_and_metrics(
    url: str | None, client: KubernetesClient, namespaces: Sequence[str]
) -> AsyncIterator[None]:
    """Serve health and metrics while the context lasts, also while the operator waits for the lease.

    Args:
        url: URL of the health endpoint; the metrics are at `/metrics` of the same host. None: neither.
        client: Client for the metrics, which each request reads anew.
        namespaces: Namespaces of the jobs; empty: all.
    """
    if url is None:
        yield
        return

    async def live(_: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def tell(_: web.Request) -> web.Response:
        try:
            text = metrics.metrics_text(await _list_job_views(client, namespaces))
        except RingweaveError as error:
            return web.Response(status=503, text=f"{error}\n")
        return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    location = urlsplit(url)
    app = web.Application()
    app.router.add_get(location.path or "/", live)
    app.router.add_get("/metrics", tell)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, location.hostname, location.port or 80).start()
        yield
    finally:
        await runner.cleanup()


async def _list_job_views(client: KubernetesClient, namespaces: Sequence[str]) -> list[JobView]:
    """Return all jobs. The platform name of each includes its namespace, in which the job's name is unique."""
    views = []
    for namespace in namespaces or (None,):
        for resource in await client.list(api_client.TRAINING_JOBS, namespace):
            platform = f"{names.PLATFORM_NAME}/{resource['metadata']['namespace']}"
            views.append(replace(kubernetes_platform.training_job_view(resource, time.time()), platform=platform))
    return views


_Read = TypeVar("_Read")
Connect = Callable[[], kopf.ConnectionInfo]
RENEW_FRACTION = 4 / 15
"""Renewal interval, as a fraction of the lease's duration."""
_GATEWAY_SECRET = "ringweave-operator-gateway"
_WATCHED_RESOURCES = ("pods", "configmaps")
"""Resources watched besides jobs. Only ours have the label; the API server filters out the others."""
_LIST_CHUNK_SIZE = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorSettings:
    """Settings of `ringweave operator`."""

    lease: LeaseSettings
    pods: PodSettings = field(default_factory=PodSettings)
    namespaces: tuple[str, ...] = ()
    """Namespaces of the jobs to manage; empty: all."""
    num_workers: int = 8
    """Number of jobs reconciled at a time."""
    gateway_host: str = "0.0.0.0"
    gateway_port: int | None = 8443
    """None: no gateway; then agents need another channel."""
    liveness_url: str | None = None
    """URL of the health endpoint, `http://0.0.0.0:8080/healthz`, with the metrics beside it; None: neither."""


async def run_operator(
    connect: Connect,
    settings: OperatorSettings,
    *,
    client_class: Callable[[Connect], KubernetesClient] = KubernetesClient,
    clock: Callable[[], float] = time.time,
    ready: asyncio.Event | None = None,
    on_shutdown: Callable[[], None] = lambda: None,
) -> None:
    """Manage all jobs until SIGTERM or SIGINT.

    Args:
        connect: Returns address and credentials; called again when credentials expire.
        settings: Settings of the operator.
        client_class: Creates the client; tests replace it.
        clock: Seconds since 1970.
        ready: Set when this operator leads.
        on_shutdown: Called when the shutdown begins.

    Raises:
        LostLeaseError: Another operator leads.
    """
    stop = asyncio.Event()
    async with (
        client_class(connect) as client,
        serve_health_and_metrics(settings.liveness_url, client, settings.namespaces),
    ):
        election = LeaderElection(client, settings.lease, clock)
        with handle_stop_signals(stop) as install_handlers:
            parts = _OperatorParts(
                client=client,
                election=election,
                settings=settings,
                clock=clock,
                connect=connect,
                install_handlers=install_handlers,
                on_shutdown=on_shutdown,
            )
            lead = _run_as_leader(parts, ready or asyncio.Event())
            await run_until_one_ends(_wait_for_stop(stop), lead, grace_s=NESTED_GRACE_S, on_shutdown=on_shutdown)
        await election.release()


@dataclass(frozen=True, kw_only=True, slots=True)
class _OperatorParts:
    """Components of an operator."""

    client: KubernetesClient
    election: LeaderElection
    settings: OperatorSettings
    clock: Callable[[], float]
    connect: Connect
    install_handlers: Callable[[], None]
    """Installs the signal handlers again, which kopf replaces."""
    on_shutdown: Callable[[], None]


async def _wait_for_stop(stop: asyncio.Event) -> None:
    await stop.wait()


async def _run_as_leader(parts: _OperatorParts, ready: asyncio.Event) -> None:
    """Wait for the lease, and manage jobs while it is ours."""
    client, settings, clock = parts.client, parts.settings, parts.clock
    await parts.election.wait_acquired()
    certificate = await _gateway_certificate(client, settings) if _uses_tls(settings) else None
    pods = settings.pods if certificate is None else replace(settings.pods, gateway_certificate=certificate.certificate)
    gateway = AgentGateway(client, clock)
    executor, admission = ActionExecutor(client, pods, clock), JobAdmission(client, pods, clock)
    reconciler = TrainingJobReconciler(
        client, executor, admission, clock, listener=gateway.publish_desired_states, on_gone=gateway.forget_job
    )
    queue = ReconcileQueue(parts.election.guard(reconciler.reconcile), clock, settings.num_workers)
    async with contextlib.AsyncExitStack() as stack:
        if settings.gateway_port is not None:
            runner = await gateway.start_serving(settings.gateway_host, settings.gateway_port, certificate)
            stack.push_async_callback(runner.cleanup)
        ready.set()
        await run_until_one_ends(
            parts.election.renew_until_lost(),
            queue.run_workers(),
            _watch_objects(parts, queue),
            on_shutdown=parts.on_shutdown,
        )


async def _watch_objects(parts: _OperatorParts, queue: ReconcileQueue) -> None:
    """Enqueue a job for every change."""
    settings, registry = parts.settings, kopf.OperatorRegistry()
    pools: list[ConnectionPool] = []

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.AiohttpSession:
        connection = await asyncio.to_thread(parts.connect)
        pools.append(ConnectionPool(connection, limit=0, headers=connection.as_http_headers()))
        return kopf.AiohttpSession(
            server=connection.server,
            default_namespace=connection.default_namespace,
            expiration=connection.expiration,
            aiohttp_session=pools[-1].session,
        )

    @kopf.on.event(names.API_GROUP, names.CRD_VERSION, names.CRD_PLURAL, registry=registry)
    async def job_changed(*, namespace: str | None, name: str | None, **_: Any) -> None:
        queue.enqueue((str(namespace), str(name)))

    async def object_changed(*, namespace: str | None, labels: kopf.Labels, **_: Any) -> None:
        queue.enqueue((str(namespace), labels[names.JOB_LABEL]))

    for plural in _WATCHED_RESOURCES:
        kopf.on.event("v1", plural, labels={names.JOB_LABEL: kopf.PRESENT}, registry=registry)(object_changed)
    before = asyncio.all_tasks()
    tasks = await kopf.spawn_tasks(
        registry=registry,
        settings=_kopf_settings(),
        standalone=True,
        clusterwide=not settings.namespaces,
        namespaces=settings.namespaces,
    )
    parts.install_handlers()
    try:
        await kopf.run_tasks(tasks, ignored=before)
    finally:
        await asyncio.gather(*(pool.close() for pool in pools))


def _kopf_settings() -> kopf.OperatorSettings:
    """Return the settings of kopf, which only watches; it posts no events and writes into no object."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.watching.server_timeout = 270
    settings.watching.reconnect_backoff = 0.1
    settings.watching.chunk_size = _LIST_CHUNK_SIZE
    for plural in _WATCHED_RESOURCES:
        settings.watching.label_selectors["v1", plural] = names.JOB_LABEL
    settings.queueing.exit_timeout = 0.5  # its handlers only enqueue
    settings.process.ultimate_exiting_timeout = None  # run_until_one_ends limits the shutdown
    return settings


def _uses_tls(settings: OperatorSettings) -> bool:
    return settings.gateway_port is not None and settings.pods.gateway_url.startswith("https:")


async def _gateway_certificate(client: KubernetesClient, settings: OperatorSettings) -> ServerCertificate:
    """Return the gateway's certificate, shared by all successive operators, since Pods know it from their creation."""
    namespace = settings.lease.namespace
    host = urlsplit(settings.pods.gateway_url).hostname or ""
    issued = certificates.issue_certificate([host], datetime.now(UTC))
    body = {
        "metadata": {"name": _GATEWAY_SECRET, "namespace": namespace},
        "type": "kubernetes.io/tls",
        "stringData": {"tls.crt": issued.certificate, "tls.key": issued.key},
    }
    try:
        await client.create(api_client.SECRETS, namespace, body)
    except ApiError as error:
        if not error.already_exists:
            raise
    found = (await client.get(api_client.SECRETS, namespace, _GATEWAY_SECRET))["data"]
    texts = {key: b64decode(found[key]).decode() for key in ("tls.crt", "tls.key")}
    return ServerCertificate(certificate=texts["tls.crt"], key=texts["tls.key"])


def quiet_kopf() -> None:
    """Limit the logs of kopf to warnings and errors."""
    logging.getLogger("kopf").setLevel(logging.WARNING)


def operator_settings(options: Mapping[str, Any], *, identity: str) -> OperatorSettings:
    """Return the settings for the command line's options.

    Raises:
        UsageError: A quantity or a taint is invalid.
    """
    return OperatorSettings(
        lease=LeaseSettings(
            namespace=options["lease_namespace"],
            identity=identity,
            duration_s=options["lease_s"],
            renew_s=options["lease_s"] * RENEW_FRACTION,
        ),
        pods=_pod_settings(options),
        namespaces=tuple(options["namespaces"]),
        num_workers=options["workers"],
        gateway_port=None if options["no_desk"] else options["desk_port"],
        liveness_url=options["liveness"],
    )


def _pod_settings(options: Mapping[str, Any]) -> PodSettings:
    def read(option: str, text: str, parse: Callable[[str], _Read], expected: str) -> _Read:
        try:
            return parse(text)
        except ValueError:
            do = "Write it in Kubernetes' notation"
            raise UsageError(explain(f"--{option}", got=text, expected=expected, do=do)) from None

    def amount(option: str) -> Quantity | None:
        text = options[option.replace("-", "_")]
        return None if text is None else read(option, text, Quantity.parse, "a whole number and a unit: 4, 500m, 16Gi")

    taints = (read("toleration", text, Toleration.parse, "KEY[=VALUE][:EFFECT]") for text in options["tolerations"])
    return PodSettings(
        image=options["image"],
        gpu_resource=options["gpu_resource"],
        gateway_url=options["desk"],
        user=options["run_as"],
        tolerations=tuple(taints),
        worker_cpu=amount("worker-cpu"),
        worker_memory=amount("worker-memory"),
    )


def connector(environ: Mapping[str, str], context: str | None) -> Connect:
    """Return a function that finds the API server anew at each call, since tokens change."""
    return lambda: api_client.connection_info(environ, context=context)
