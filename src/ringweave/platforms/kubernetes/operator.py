"""The operator process: leader election, watches, reconcile queue, agent gateway, health and metrics."""

import asyncio
import contextlib
import logging
import re
import signal
import time
from base64 import b64decode
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, TypeVar
from urllib.parse import urlsplit

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from ringweave import http_servers
from ringweave.accept_limits import ConnectionLimiter
from ringweave.errors import LaunchError, RingweaveError, UsageError
from ringweave.http_servers import HTTP_LIMITS
from ringweave.platforms import metrics
from ringweave.platforms.api import JobView
from ringweave.platforms.kubernetes import agent_gateway, api_client, objects
from ringweave.platforms.kubernetes import platform as kubernetes_platform
from ringweave.platforms.kubernetes.action_executor import ActionExecutor, JobKey
from ringweave.platforms.kubernetes.agent_gateway import AgentGateway, ServerCertificate
from ringweave.platforms.kubernetes.api_client import ApiError, ConnectionInfo, KubernetesClient, ResourceKind
from ringweave.platforms.kubernetes.objects import Object, PodSettings, Quantity, Toleration
from ringweave.platforms.kubernetes.reconciler import JobAdmission, ReconcileQueue, TrainingJobReconciler

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
                lease = await self._client.find(api_client.LEASES, self._settings.namespace, LEASE_NAME)
                if lease is not None and lease["spec"].get("holderIdentity") == self._settings.identity:
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
        lease = await self._client.find(api_client.LEASES, namespace, LEASE_NAME)
        if lease is None:
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
        now = objects.format_time_micro(self._clock())
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


_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
OperatorTask = Coroutine[Any, Any, Any]


async def run_until_one_ends(*parts: OperatorTask) -> None:
    """Run the parts, each as a task of its own, until one returns or fails; then cancel the others.

    Raises:
        Exception: The exception of the part that ended first.
    """
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        if task in done:
            task.result()


@contextlib.contextmanager
def stop_signals() -> Iterator[asyncio.Event]:
    """Yield an event that SIGTERM and SIGINT set while the context lasts."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in _STOP_SIGNALS:
        with contextlib.suppress(RuntimeError, ValueError):  # not the main thread
            loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number in _STOP_SIGNALS:
            loop.remove_signal_handler(number)


@contextlib.asynccontextmanager
async def serve_health_and_metrics(
    url: str | None,
    client: KubernetesClient,
    namespaces: Sequence[str],
    ready: asyncio.Event,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[None]:
    """Serve health and metrics while the context lasts, also while the operator waits for the lease.

    Args:
        url: URL of the health endpoint; at the same host, `/metrics` has the metrics, and `/readyz` is 200 if this
            operator leads, so that its gateway answers, else 503. None: nothing is served.
        client: Client for the metrics; requests that come soon after another one share its list of the jobs.
        namespaces: Namespaces of the jobs; empty: all.
        ready: Set while this operator leads.
        clock: Seconds, for the age of the metrics.
    """
    if url is None:
        yield
        return

    async def live(_: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def is_ready(_: web.Request) -> web.Response:
        return web.Response(text="ok") if ready.is_set() else web.Response(status=503, text="waits for the lease")

    shared, lock = metrics.SharedAnswer[bytes](clock), asyncio.Lock()

    async def tell(_: web.Request) -> web.Response:
        async with lock:
            if not shared.is_fresh:
                with shared.renewing() as answer:
                    answer(metrics.metrics_text(await _list_job_views(client, namespaces)).encode())
        try:
            return web.Response(body=shared.get(), headers={"Content-Type": CONTENT_TYPE_LATEST})
        except RingweaveError as error:
            return web.Response(status=503, text=f"{error}\n")

    location = urlsplit(url)
    app = web.Application()
    app.router.add_get(location.path or "/", live)
    app.router.add_get("/readyz", is_ready)
    app.router.add_get("/metrics", tell)
    address = (location.hostname, location.port or 80)
    limiter = ConnectionLimiter(HTTP_LIMITS)
    site = await http_servers.serve_application(app, limiter, address, shutdown_timeout_s=0.1)
    try:
        yield
    finally:
        await site.cleanup()


async def _list_job_views(client: KubernetesClient, namespaces: Sequence[str]) -> list[JobView]:
    """Return all jobs. The platform name of each includes its namespace, in which the job's name is unique."""
    views = []
    for namespace in namespaces or (None,):
        for resource in await client.list(api_client.TRAINING_JOBS, namespace):
            platform = f"{objects.PLATFORM_NAME}/{resource['metadata']['namespace']}"
            views.append(replace(kubernetes_platform.training_job_view(resource, time.time()), platform=platform))
    return views


_Read = TypeVar("_Read")
Connect = Callable[[], ConnectionInfo]
RENEW_FRACTION = 4 / 15
"""Renewal interval, as a fraction of the lease's duration."""
_GATEWAY_SECRET = "ringweave-operator-gateway"


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
    endpoint_removal_s: float = 5.0
    """Time for which an operator that has lost the lease still listens: until the readiness probe of deploy/base (every
    2 s) has taken it out of the Service, so that no endpoint ever refuses a connection."""


async def run_operator(
    connect: Connect,
    settings: OperatorSettings,
    *,
    ready: asyncio.Event | None = None,
) -> None:
    """Manage all jobs until SIGTERM or SIGINT, whenever the lease is ours.

    Args:
        connect: Returns address and credentials; called again when credentials expire.
        settings: Settings of the operator.
        ready: Set while this operator leads.

    Raises:
        ApiError: The API server does not accept our credentials, or we may not have the lease.
    """
    ready = ready or asyncio.Event()
    async with (
        KubernetesClient(connect) as client,
        serve_health_and_metrics(settings.liveness_url, client, settings.namespaces, ready),
    ):
        election = LeaderElection(client, settings.lease, time.time)
        with stop_signals() as stop:
            await run_until_one_ends(stop.wait(), _lead_until_stopped(client, election, settings, ready))
        await election.release()


async def _lead_until_stopped(
    client: KubernetesClient,
    election: LeaderElection,
    settings: OperatorSettings,
    ready: asyncio.Event,
) -> None:
    """Manage jobs while the lease is ours; wait for it when it is lost, however long the API server is away."""
    while True:
        await election.wait_acquired()
        try:
            await _lead(client, election, settings, ready)
        except LaunchError as error:  # the lease is lost, or the API server went away before the first watch
            if isinstance(error, ApiError) and error.status in (401, 403):
                raise
            logging.getLogger(__name__).warning("%s", error)
        finally:
            ready.clear()
        await asyncio.sleep(min(1.0, settings.lease.renew_s))


async def _lead(
    client: KubernetesClient,
    election: LeaderElection,
    settings: OperatorSettings,
    ready: asyncio.Event,
) -> None:
    """Manage jobs until the lease is lost; nothing of it runs on after that."""
    certificate = await _gateway_certificate(client, settings) if _uses_tls(settings) else None
    pods = settings.pods if certificate is None else replace(settings.pods, gateway_certificate=certificate.certificate)
    gateway = AgentGateway(client, time.time)
    executor, admission = ActionExecutor(client, pods, time.time), JobAdmission(client, pods, time.time)
    reconciler = TrainingJobReconciler(
        client, executor, admission, time.time, listener=gateway.publish_desired_states, on_gone=gateway.forget_job
    )
    queue = ReconcileQueue(election.guard(reconciler.reconcile), time.time, settings.num_workers)
    watches = [
        _enqueue_changes(client, kind, namespace, queue)
        for namespace in settings.namespaces or (None,)
        for kind in (api_client.TRAINING_JOBS, api_client.PODS, api_client.CONFIG_MAPS)
    ]
    async with contextlib.AsyncExitStack() as stack:
        if settings.gateway_port is not None:
            host, port = settings.gateway_host, settings.gateway_port
            site = await gateway.start_serving(host, port, certificate, leads=ready.is_set)
            stack.push_async_callback(site.cleanup)
        ready.set()
        try:
            await run_until_one_ends(election.renew_until_lost(), queue.run_workers(), *watches)
        except LostLeaseError:
            ready.clear()
            if settings.gateway_port is not None:
                await asyncio.sleep(settings.endpoint_removal_s)
            raise


async def _enqueue_changes(
    client: KubernetesClient, kind: ResourceKind, namespace: str | None, queue: ReconcileQueue
) -> None:
    """Enqueue a job for every change of it, or of one of its Pods or ConfigMaps, which alone have the label."""
    is_job = kind is api_client.TRAINING_JOBS
    async for found in client.watch(kind, namespace, **({} if is_job else {"labelSelector": objects.JOB_LABEL})):
        metadata = found["metadata"]
        queue.enqueue((metadata["namespace"], metadata["name"] if is_job else metadata["labels"][objects.JOB_LABEL]))


def _uses_tls(settings: OperatorSettings) -> bool:
    return settings.gateway_port is not None and settings.pods.gateway_url.startswith("https:")


async def _gateway_certificate(client: KubernetesClient, settings: OperatorSettings) -> ServerCertificate:
    """Return the gateway's certificate, shared by all successive operators, since Pods know it from their creation."""
    namespace = settings.lease.namespace
    host = urlsplit(settings.pods.gateway_url).hostname or ""
    issued = agent_gateway.issue_certificate([host], datetime.now(UTC))
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
            raise UsageError(f"--{option}", got=text, expected=expected, do=do) from None

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
        node_selector=tuple(
            read("node-selector", text, _parse_label, "KEY=VALUE") for text in options["node_selectors"]
        ),
        image_pull_secrets=tuple(options["image_pull_secrets"]),
        worker_cpu=amount("worker-cpu"),
        worker_memory=amount("worker-memory"),
    )


def _parse_label(text: str) -> tuple[str, str]:
    """Return key and value of a label; `ValueError` for another form."""
    match = _LABEL_PATTERN.fullmatch(text)
    if match is None:
        raise ValueError(text)
    return match[1], match[2]


_LABEL_PATTERN = re.compile(r"((?:[a-z0-9.-]{1,253}/)?[A-Za-z0-9][\w.-]{0,62})=([\w.-]{0,63})", re.ASCII)


def connector(environ: Mapping[str, str], context: str | None) -> Connect:
    """Return a function that finds the API server anew at each call, since tokens change."""
    return lambda: api_client.connection_info(environ, context=context)
