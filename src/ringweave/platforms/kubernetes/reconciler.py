"""Admission of TrainingJobs, their reconciler and its work queue.

The reconciler is level-triggered: a pass can run at any time, and again.
"""

import asyncio
import heapq
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from ringweave.errors import JobError, LaunchError, RingweaveError, explain
from ringweave.jobs import admission, records
from ringweave.jobs import request as jobs_request
from ringweave.jobs.admission import DENY_TTL_S, Permission, PermissionCache
from ringweave.jobs.advance import should_run
from ringweave.jobs.reconcile import reconcile
from ringweave.jobs.records import Job
from ringweave.jobs.restart_policy import backoff_s
from ringweave.platforms.kubernetes import action_executor, api_client, job_resource, objects
from ringweave.platforms.kubernetes.action_executor import ActionExecutor, JobKey, ObjectsRefusedError, ObservedJob
from ringweave.platforms.kubernetes.api_client import KubernetesClient, Object
from ringweave.platforms.kubernetes.objects import JobOwner, PodSettings


class AdmissionRefusedError(RingweaveError):
    """Job that is not admitted; `code` is the condition's reason."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class JobAdmission:
    """Admission of jobs, with cached permissions for each namespace and set of groups."""

    def __init__(self, client: KubernetesClient, settings: PodSettings, clock: Callable[[], float]) -> None:
        """`clock` returns seconds since 1970."""
        self._client, self._settings, self._clock = client, settings, clock
        self._caches: dict[tuple[str, tuple[str, ...]], PermissionCache] = {}
        self._lock = asyncio.Lock()

    async def admit(self, resource: Object) -> Job:
        """Return the admitted job of the resource.

        Raises:
            AdmissionRefusedError: The job may not run; the text has the reason and a hint.
            LaunchError: The API server does not answer now.
        """
        requester = job_resource.requester_of(resource)
        if not requester:
            raise AdmissionRefusedError("RequesterUnknown", _NO_REQUESTER)
        try:
            request = job_resource.request_from_resource(resource)
            most = max(request.split.counts or (0,))
            if request.mode in jobs_request.SERVER_MODES and most > objects.MAX_SERVER_WORKERS_PER_NODE:
                raise AdmissionRefusedError("TooManyWorkersForServer", _too_many_for_server(request.mode, most))
            if request.elastic is not None and most > objects.MAX_ELASTIC_WORKERS_PER_NODE:
                raise AdmissionRefusedError("TooManyWorkersForElastic", _too_many_on_node(most))
            loop = asyncio.get_running_loop()
            async with self._lock:  # one question at a time, and none twice
                job = await asyncio.to_thread(
                    admission.admit_job,
                    request,
                    requester=requester,
                    existing=(),  # the API server has reserved the name already
                    permissions=self._permission_cache(resource, loop),
                    now=self._clock(),
                )
            if request.image is None and self._settings.image is None:
                raise AdmissionRefusedError("NoImage", _NO_IMAGE)
            objects.config_map(job, JobOwner.from_resource(resource), resource["spec"].get("source"))
        except JobError as error:
            raise AdmissionRefusedError(_refusal_code(error), str(error)) from error
        return job

    def _permission_cache(self, resource: Object, loop: asyncio.AbstractEventLoop) -> PermissionCache:
        namespace, groups = resource["metadata"]["namespace"], job_resource.groups_of(resource)

        def authorise(requester: str, verb: str) -> Permission:
            asked = api_client.fetch_permission(self._client, namespace, verb, user=requester, groups=groups)
            return asyncio.run_coroutine_threadsafe(asked, loop).result()

        if (namespace, groups) not in self._caches:
            self._caches[namespace, groups] = PermissionCache(authorise)
        return self._caches[namespace, groups]


def _too_many_for_server(mode: str, num_workers: int) -> str:
    most = objects.MAX_SERVER_WORKERS_PER_NODE
    expected = f"at most {most} with mode {mode}, whose credentials one Secret holds"
    do = "Share them out over more nodes, or use mode balanced"
    return explain("workers of a node", got=num_workers, expected=expected, do=do)


def _too_many_on_node(num_workers: int) -> str:
    expected = (
        f"at most {objects.MAX_ELASTIC_WORKERS_PER_NODE} in an elastic job, whose spare credentials one Secret holds"
    )
    do = "Share them out over more nodes, or leave elastic out"
    return explain("workers of a node", got=num_workers, expected=expected, do=do)


def _refusal_code(error: JobError) -> str:
    text = str(error)
    if text.startswith(f"{api_client.SUBMIT_VERB} by "):
        return "Forbidden"
    return "ConfigTooLarge" if text.startswith("bytes of the ConfigMap") else "Invalid"


_NO_REQUESTER = (
    "requester: none, expected the user who made the job. Submit it with ringweave submit --on kubernetes, write "
    "spec.requester.username as printed by kubectl auth whoami, or let the admission policies of deploy/ set it."
)
_NO_IMAGE = (
    "image: none, expected a container image with Python and ringweave. Write spec.image, or start the operator "
    "with --image."
)


ObservationListener = Callable[[ObservedJob], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReconcileResult:
    """Result of a pass over a job."""

    requeue: bool = False
    """Something was done: run the next pass at once."""
    requeue_at_s: float | None = None
    """Run the next pass at this time, even if nothing changes before."""
    is_active: bool = False
    """The job exists, and this operator manages it."""


class TrainingJobReconciler:
    """Reconciler of TrainingJobs; it keeps nothing between two passes that may not be lost."""

    def __init__(
        self,
        client: KubernetesClient,
        executor: ActionExecutor,
        admission: JobAdmission,
        clock: Callable[[], float],
        listener: ObservationListener = lambda _: None,
        on_gone: Callable[[JobKey], None] = lambda _: None,
    ) -> None:
        """Create a reconciler.

        Args:
            client: Client for reading.
            executor: Executes actions.
            admission: Admits jobs.
            clock: Seconds since 1970.
            listener: Called with each observation of an admitted job: the gateway publishes the desired states.
            on_gone: Called with each job that does not exist.
        """
        self._client, self._executor, self._admission = client, executor, admission
        self._clock, self._listener, self._on_gone = clock, listener, on_gone

    async def reconcile(self, key: JobKey) -> ReconcileResult:
        """Run one pass over the TrainingJob.

        Raises:
            ApiError: The API server refused something; the next pass finds what is left.
        """
        resource = await self._client.find(api_client.TRAINING_JOBS, *key)
        if resource is None:
            self._on_gone(key)
        if resource is None or not job_resource.is_managed_here(resource):
            return ReconcileResult()
        is_deleting = "deletionTimestamp" in resource["metadata"]
        if objects.FINALIZER not in resource["metadata"].get("finalizers", ()):
            if is_deleting:
                return ReconcileResult()
            await self._add_finalizer(resource)
            return ReconcileResult(requeue=True)
        if "record" not in resource.get("status", {}):
            if is_deleting:
                await self._executor.forget_job(resource)
                return ReconcileResult()
            return await self._admit(resource)
        return await self._reconcile_admitted(resource)

    async def _add_finalizer(self, resource: Object) -> None:
        """Add our finalizer before any object of the job is created."""
        metadata = resource["metadata"]
        body = {
            "metadata": {
                "resourceVersion": metadata["resourceVersion"],
                "finalizers": [*metadata.get("finalizers", ()), objects.FINALIZER],
            }
        }
        await self._client.patch(api_client.TRAINING_JOBS, metadata["namespace"], metadata["name"], body)

    async def _admit(self, resource: Object) -> ReconcileResult:
        now = self._clock()
        generation = resource["metadata"]["generation"]
        try:
            job = await self._admission.admit(resource)
        except AdmissionRefusedError as refusal:
            before = resource.get("status", {})
            refused_status = job_resource.refused_status(
                before, reason=refusal.code, text=str(refusal), generation=generation, now=now
            )
            if refused_status != before:
                await self._executor.write_status(resource, refused_status)
            # Roles change without a notification.
            return ReconcileResult(requeue_at_s=now + DENY_TTL_S)
        status = job_resource.status_from_job(job, before={}, generation=generation, events=(), now=now)
        await self._executor.write_status(resource, status)
        return ReconcileResult(requeue=True)

    async def _reconcile_admitted(self, resource: Object) -> ReconcileResult:
        job = job_resource.job_from_resource(resource)
        assert job is not None
        runs = should_run(job, job.record)
        found = await action_executor.fetch_job_objects(self._client, JobOwner.from_resource(resource), runs=runs)
        observed = ObservedJob(resource=resource, job=job, objects=found)
        now = self._clock()
        wanted = reconcile(job, found.to_observed_state(now), now)
        self._listener(observed)
        requeue_at_s = min((action.at_s for action in wanted if isinstance(action, records.RequeueAt)), default=None)
        todo = [action for action in wanted if not isinstance(action, records.RequeueAt)]
        try:
            await self._executor.apply(observed, todo)
        except ObjectsRefusedError as refused:
            await self._executor.publish_refusal(observed, refused)
            raise
        is_current = resource["metadata"]["generation"] == resource["status"].get("observedGeneration")
        is_published = is_current and job_resource.recorded_refusal(resource["status"]) is None
        if (
            not is_published
            and not any(isinstance(action, records.SaveRecord) for action in todo)
            and not _forgets_job(todo)
        ):
            await self._executor.save_record(observed, observed.job, ())
        return ReconcileResult(
            requeue=bool(todo) and not _forgets_job(todo), requeue_at_s=requeue_at_s, is_active=not _forgets_job(todo)
        )


def _forgets_job(todo: Sequence[records.JobAction]) -> bool:
    return any(isinstance(action, records.ForgetJob) for action in todo)


RESYNC_S = 60.0
"""Interval between passes over a job that has not ended, without any event: a watch may miss one."""
_CONFLICT_RETRY_S = 0.02
_MIN_BACKOFF_S, _MAX_BACKOFF_S = 0.25, 60.0


@dataclass(slots=True)
class _QueueEntry:
    is_running: bool = False
    is_queued: bool = False
    num_failures: int = 0
    due_s: float | None = None
    """Time of the entry's timer; timers for other times are ignored."""


class ReconcileQueue:
    """Work queue of jobs to reconcile; lives in one event loop."""

    def __init__(
        self, reconcile: Callable[[JobKey], Awaitable[ReconcileResult]], clock: Callable[[], float], num_workers: int
    ) -> None:
        """`clock` returns seconds since 1970, the clock of `ReconcileResult.requeue_at_s`."""
        self._reconcile, self._clock, self._num_workers = reconcile, clock, num_workers
        self._entries: dict[JobKey, _QueueEntry] = {}
        self._ready_keys: asyncio.Queue[JobKey] = asyncio.Queue()
        self._timers: list[tuple[float, int, JobKey]] = []
        self._count = itertools.count()
        self._timer_set = asyncio.Event()
        self._log = logging.getLogger(__name__)

    def enqueue(self, key: JobKey) -> None:
        """Add a job that may have changed."""
        entry = self._entries.setdefault(key, _QueueEntry())
        if entry.is_queued:
            return
        entry.is_queued = True
        if not entry.is_running:
            self._ready_keys.put_nowait(key)

    async def run_workers(self) -> None:
        """Run the workers until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch_timers())
            for _ in range(self._num_workers):
                group.create_task(self._run_worker())

    async def _run_worker(self) -> None:
        while True:
            key = await self._ready_keys.get()
            entry = self._entries[key]
            entry.is_running, entry.is_queued, entry.due_s = True, False, None
            try:
                result = await self._reconcile(key)
            except LaunchError as error:
                self._handle_failure(key, entry, error)
            except Exception:
                self._log.exception("job %s/%s: unexpected error", *key)
                self._handle_failure(key, entry, None)
            else:
                self._handle_result(key, entry, result)
            entry.is_running = False
            if entry.is_queued:
                self._ready_keys.put_nowait(key)
            elif entry.due_s is None:
                del self._entries[key]

    def _handle_result(self, key: JobKey, entry: _QueueEntry, result: ReconcileResult) -> None:
        entry.num_failures = 0
        if result.requeue:
            entry.is_queued = True
        elif result.requeue_at_s is not None:
            self._set_timer(key, entry, min(result.requeue_at_s, self._clock() + RESYNC_S))
        elif result.is_active:
            self._set_timer(key, entry, self._clock() + RESYNC_S)

    def _handle_failure(self, key: JobKey, entry: _QueueEntry, error: LaunchError | None) -> None:
        if getattr(error, "is_stale", False):  # another pass may succeed at once: the object was changed meanwhile
            self._set_timer(key, entry, self._clock() + _CONFLICT_RETRY_S)
            return
        entry.num_failures += 1
        delay_s = backoff_s(entry.num_failures, first_s=_MIN_BACKOFF_S, max_s=_MAX_BACKOFF_S)
        if error is not None:
            self._log.warning("job %s/%s: %s Tried again in %.2g s.", *key, error, delay_s)
        self._set_timer(key, entry, self._clock() + delay_s)

    def _set_timer(self, key: JobKey, entry: _QueueEntry, at_s: float) -> None:
        entry.due_s = at_s
        heapq.heappush(self._timers, (at_s, next(self._count), key))
        self._timer_set.set()

    async def _watch_timers(self) -> None:
        while True:
            self._timer_set.clear()
            now = self._clock()
            while self._timers and self._timers[0][0] <= now:
                at_s, _, key = heapq.heappop(self._timers)
                entry = self._entries.get(key)
                if entry is not None and entry.due_s == at_s:
                    self.enqueue(key)
            wait_s = self._timers[0][0] - now if self._timers else None
            try:
                async with asyncio.timeout(wait_s):
                    await self._timer_set.wait()
            except TimeoutError:
                continue
