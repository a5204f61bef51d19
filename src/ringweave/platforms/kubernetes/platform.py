"""Kubernetes platform of the job commands (`--on kubernetes`). Users act as themselves, with their own roles."""

import asyncio
import contextlib
import io
import queue
import re
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from ruamel.yaml import YAML

from ringweave.errors import JobError, LaunchError, RingweaveError
from ringweave.jobs import admission, records
from ringweave.jobs.advance import is_finished, with_pending_retry
from ringweave.jobs.records import EndCause, Job
from ringweave.jobs.request import JobRequest
from ringweave.jobs.states import JobState, Reason
from ringweave.platforms import api, submission
from ringweave.platforms.api import EventView, JobView, LogLine, LogQuery, Platform, RenderedObject, Submission
from ringweave.platforms.kubernetes import api_client, job_resource, objects, pod_logs, pod_status
from ringweave.platforms.kubernetes.api_client import ApiError, KubernetesClient, Object, connection_info
from ringweave.platforms.kubernetes.objects import JobOwner

LOG_POLL_S = 0.5
"""Interval between checks for new Pods."""
_RANK_LINE = re.compile(r"\[(\d+)\] (.*)", re.DOTALL)
_END_OF_LOGS = None
_LOST_LOG_TEXT = "its Pod was deleted from outside, and its log with it"


class JobLogReader:
    """Reader of the logs of one job."""

    def __init__(self, connect: Callable[[], Any], owner: JobOwner, job: Job, which: LogQuery) -> None:
        """`connect` returns address and credentials of the API server."""
        self._connect, self._owner, self._job, self._which = connect, owner, job, which
        self._lines: queue.Queue[LogLine | RingweaveError | None] = queue.Queue(maxsize=10_000)
        self._is_reader_gone = threading.Event()

    def read_lines(self) -> Iterator[LogLine]:
        """Yield the requested lines; with `follow`, until the job has ended.

        Raises:
            LaunchError: The API server cannot be reached.
        """
        thread = threading.Thread(target=lambda: asyncio.run(self._produce()), name="logs", daemon=True)
        thread.start()
        try:
            while (each := self._lines.get()) is not _END_OF_LOGS:
                if isinstance(each, RingweaveError):
                    raise each
                yield each
        finally:
            self._is_reader_gone.set()

    async def _produce(self) -> None:
        try:
            async with KubernetesClient(self._connect) as client:
                await self._read_all(client)
            await self._put_line(_END_OF_LOGS)
        except RingweaveError as error:
            await self._put_line(error)

    async def _read_all(self, client: KubernetesClient) -> None:
        begun: set[pod_status.AttemptKey] = set()
        tasks: list[asyncio.Task[None]] = []
        while True:
            is_over = not self._which.follow or await self._is_job_finished(client)
            for key, log in await self._archived_logs(client):
                if key not in begun:
                    begun.add(key)
                    await self._emit_lines(key, log["data"][pod_logs.LOG_KEY].splitlines())
            for key, pod in await self._list_pods(client):
                if key not in begun and pod_logs.has_log(pod):
                    begun.add(key)
                    tasks.append(asyncio.create_task(self._stream_pod_log(client, key, pod)))
                    if not self._which.follow:
                        await tasks[-1]
            if is_over or self._is_reader_gone.is_set():
                break
            await asyncio.sleep(LOG_POLL_S)
        await asyncio.gather(*tasks)
        await self._report_lost_logs(begun | {key for key, _ in await self._list_pods(client)})

    async def _report_lost_logs(self, known: set[pod_status.AttemptKey]) -> None:
        """Report attempts that ended by the platform's fault and whose log is lost, not only old."""
        for node in self._job.used_nodes:
            record = self._job.record.nodes[node]
            for ended in (*record.history, *([record.ended] if record.ended else ()))[-pod_logs.MAX_LOGS :]:
                key = (node, ended.attempt)
                if ended.cause is EndCause.PLATFORM and key not in known and self._matches_query(key):
                    name = self._job.node_name(node)
                    await self._put_line(
                        LogLine(node=name, attempt=ended.attempt, round=0, rank=None, text=_LOST_LOG_TEXT)
                    )

    async def _archived_logs(self, client: KubernetesClient) -> Sequence[tuple[pod_status.AttemptKey, Object]]:
        selector = f"{self._owner.selector},{pod_logs.LOG_LABEL}"
        found = await client.list(api_client.CONFIG_MAPS, self._owner.namespace, labelSelector=selector)
        return self._matching_objects(found)

    async def _list_pods(self, client: KubernetesClient) -> Sequence[tuple[pod_status.AttemptKey, Object]]:
        return self._matching_objects(
            await client.list(api_client.PODS, self._owner.namespace, labelSelector=self._owner.selector)
        )

    def _matching_objects(self, found: Sequence[Object]) -> Sequence[tuple[pod_status.AttemptKey, Object]]:
        """Return this job's objects that match the query, oldest attempts first."""
        kept = []
        for each in found:
            key = pod_status.attempt_key(each)
            if key is None or not self._owner.owns(each):
                continue
            if self._matches_query(key):
                kept.append((key, each))
        return sorted(kept, key=lambda pair: (pair[0][1], pair[0][0]))

    def _matches_query(self, key: pod_status.AttemptKey) -> bool:
        which, job = self._which, self._job
        is_node = which.node in (None, job.node_name(key[0]))
        has_rank = which.rank is None or which.rank in job.ranks_of_node(key[0])
        return is_node and has_rank and which.attempt in (None, key[1])

    async def _stream_pod_log(
        self, client: KubernetesClient, key: pod_status.AttemptKey, pod: Mapping[str, Any]
    ) -> None:
        path = api_client.PODS.path(self._owner.namespace, pod["metadata"]["name"], "log")
        params = pod_logs.log_parameters(follow="true") if self._which.follow else pod_logs.log_parameters()
        round_ = 1
        try:
            async for line in client.stream_lines(path, params):
                round_ = await self._emit_line(key, round_, line)
                if self._is_reader_gone.is_set():
                    return
        except ApiError as error:
            if error.status == 400 and not error.is_no_log:
                await self._emit_lines(key, [pod_logs.unread_log_line(error)])
            elif not error.is_no_log:  # else the archived logs have it, or will
                raise

    async def _emit_lines(self, key: pod_status.AttemptKey, lines: Sequence[str]) -> None:
        round_ = 1
        for line in lines:
            round_ = await self._emit_line(key, round_, line)

    async def _emit_line(self, key: pod_status.AttemptKey, round_: int, line: str) -> int:
        """Emit a line if it matches the query; return the round of the next line."""
        if line.startswith(pod_logs.ROUND_LINE_PREFIX):
            return int(line.removeprefix(pod_logs.ROUND_LINE_PREFIX))
        node = self._job.node_name(key[0])
        if line.startswith(pod_logs.EVENT_LINE_PREFIX):
            if self._which.events != "none" and self._which.rank is None:
                text = line.removeprefix(pod_logs.EVENT_LINE_PREFIX)
                await self._put_line(
                    LogLine(node=node, attempt=key[1], round=round_, rank=None, text=text, is_event=True)
                )
            return round_
        match = _RANK_LINE.match(line)
        # A line without a rank is the container's own (no Python in its image), or about the log itself.
        rank, text = (int(match[1]), match[2]) if match else (None, line)
        if self._which.rank in (None, rank) and self._which.events != "only":
            await self._put_line(LogLine(node=node, attempt=key[1], round=round_, rank=rank, text=text))
        return round_

    async def _put_line(self, each: LogLine | RingweaveError | None) -> None:
        while not self._is_reader_gone.is_set():
            try:
                self._lines.put_nowait(each)
            except queue.Full:
                await asyncio.sleep(0.01)
            else:
                return

    async def _is_job_finished(self, client: KubernetesClient) -> bool:
        resource = await client.find(api_client.TRAINING_JOBS, self._owner.namespace, self._owner.name)
        if resource is None:
            return True
        self._job = job_resource.job_from_resource(resource) or self._job
        return is_finished(self._job)


TrainingJobObject = Mapping[str, Any]


def training_job_view(resource: TrainingJobObject, now: float, *, with_events: bool = False) -> JobView:
    """Return the view of a TrainingJob for users."""
    events = resource.get("status", {}).get("events", ()) if with_events else ()
    event_views = [
        EventView(time_s=objects.parse_time(each["time"]), kind=each["kind"], text=each["text"]) for each in events
    ]
    metadata = resource["metadata"]
    namespace, name = metadata["namespace"], metadata["name"]
    files = f"kubectl -n {namespace} get pods,configmaps -l ringweave.dev/job={name}"
    return api.job_view(
        with_pending_retry(displayed_training_job(resource, now), now),
        platform=objects.PLATFORM_NAME,
        events=event_views,
        files=files,
    )


def displayed_training_job(resource: TrainingJobObject, now: float) -> Job:
    """Return the job to display, also one without a record that waits for the operator or was refused.

    A job that breaks a rule which the API server did not know when it was stored is shown as far as possible.
    """
    try:
        known = job_resource.job_from_resource(resource)
        request = job_resource.request_from_resource(resource)
    except JobError as error:
        return _invalid_job(resource, error, now)
    if known is not None:
        return job_resource.job_with_refusals(known, resource["status"])
    counts = request.split.counts or (0,) * len(request.nodes)
    status = resource.get("status", {})
    job = records.new_job(
        request, requester=job_resource.requester_of(resource), counts=counts, now=_created_s(resource, now)
    )
    if status.get("state") == job_resource.REFUSED_STATE:
        reason = Reason(code=status["reason"], text=status["message"], hint="Fix it; the operator tries again")
        return replace(job, record=replace(job.record, state=JobState.FAILED, reason=reason))
    manager = resource["spec"].get("managedBy") or "the operator"
    reason = Reason(
        code="NotAdmitted",
        text=f"waits for admission by {manager}",
        hint="Check that it runs: kubectl -n ringweave-system get pods",
    )
    return replace(job, record=replace(job.record, reason=reason))


def _invalid_job(resource: TrainingJobObject, error: JobError, now: float) -> Job:
    spec, name = resource["spec"], resource["metadata"]["name"]
    device, total = ("cuda", spec["gpus"]) if "gpus" in spec else ("cpu", spec.get("cpuWorkers", 1))
    hint = f"ringweave delete {name} --on {objects.PLATFORM_NAME}, and submit it again"
    reason = Reason(code="Invalid", text=str(error), hint=hint)
    requester, created_s = job_resource.requester_of(resource), _created_s(resource, now)
    return api.unreadable_job(name, requester, created_s, reason, num_workers=total, device=device)


def _created_s(resource: TrainingJobObject, now: float) -> float:
    made = resource["metadata"].get("creationTimestamp")
    return now if made is None else objects.parse_time(made)


ADMISSION_TIMEOUT_S = 10.0
"""Time for which a submit waits for the operator's admission; after that the job stays and waits for the operator."""
_ADMISSION_POLL_S = 0.1
_Result = TypeVar("_Result")


class KubernetesPlatform(Platform):
    """TrainingJobs of one namespace, accessed as the user of the kubeconfig."""

    def __init__(
        self,
        connect: Callable[[], Any],
        *,
        namespace: str | None = None,
        clock: Callable[[], float] = time.time,
        admission_timeout_s: float = ADMISSION_TIMEOUT_S,
    ) -> None:
        """Jobs of a namespace.

        Args:
            connect: Returns address and credentials of the API server.
            namespace: Namespace of the jobs; None: the kubeconfig's.
            clock: Seconds since 1970.
            admission_timeout_s: Time for which a submit waits for the operator's admission.
        """
        self._connect, self._namespace = connect, namespace
        self._clock, self._admission_timeout_s = clock, admission_timeout_s

    def submit(
        self, request: JobRequest, *, base: Path, script_text: str | None = None, dry_run: bool = False
    ) -> Submission:
        """Create the TrainingJob, and wait for the operator to admit it; a refused one is removed again."""
        _check_image_directory(request)
        submission.check_platform_keys(request, "kubernetes")
        script_text_sent = submission.read_request_script(request, base, script_text)
        return self._run_with_client(
            lambda client: self._create_job(client, request, script_text_sent, dry_run=dry_run)
        )

    def jobs(self) -> Sequence[JobView]:
        """Return all jobs of the namespace, oldest first."""
        found = self._run_with_client(
            lambda client: client.list(api_client.TRAINING_JOBS, self._namespace_or_default(client))
        )
        ordered = sorted(found, key=lambda each: (each["metadata"]["creationTimestamp"], each["metadata"]["name"]))
        return [training_job_view(each, self._clock()) for each in ordered]

    def job(self, name: str) -> JobView:
        return training_job_view(
            self._run_with_client(lambda client: self._get_resource(client, name)), self._clock(), with_events=True
        )

    def act(self, name: str, verb: str) -> JobView:
        """Change the job's desired state in its spec, or delete the job."""
        return self._run_with_client(lambda client: self._apply_verb(client, name, verb))

    def logs(self, name: str, which: LogQuery) -> Iterator[LogLine]:
        """Yield the output of its workers: archived logs of deleted Pods, and the logs of existing Pods."""
        resource = self._run_with_client(lambda client: self._get_resource(client, name))
        submission.check_log_query(displayed_training_job(resource, self._clock()), which)
        return JobLogReader(
            self._connect, JobOwner.from_resource(resource), displayed_training_job(resource, self._clock()), which
        ).read_lines()

    async def _create_job(
        self, client: KubernetesClient, request: JobRequest, source: str | None, *, dry_run: bool
    ) -> Submission:
        namespace = self._namespace_or_default(client)
        user = (await client.create(api_client.SELF_REVIEWS, None, {}))["status"]["userInfo"]
        body = job_resource.resource_from_request(
            request, namespace=namespace, source=source, username=user["username"], groups=user.get("groups") or ()
        )
        await self._check_admission(client, request, user["username"])
        params = {"fieldValidation": "Strict", **({"dryRun": "All"} if dry_run else {})}
        try:
            created = await client.create(api_client.TRAINING_JOBS, namespace, body, **params)
        except ApiError as error:
            if error.already_exists:
                taken_by = displayed_training_job(await self._get_resource(client, request.name), self._clock())
                raise admission.name_taken_error(taken_by, self._clock()) from error
            raise _to_user_error(error, f"job {request.name}") from error
        resource = created if dry_run else await self._wait_for_admission(client, created)
        objects = (RenderedObject(name=f"TrainingJob/{request.name}", text=_to_yaml(body)),)
        return Submission(job=training_job_view(resource, self._clock()), objects=objects)

    async def _check_admission(self, client: KubernetesClient, request: JobRequest, username: str) -> None:
        """Check name, permission and split, in this order. API server and operator make the final decision."""
        namespace = self._namespace_or_default(client)
        with contextlib.suppress(ApiError):  # there is none, or the user may not read it
            taken_by = await client.get(api_client.TRAINING_JOBS, namespace, request.name)
            raise admission.name_taken_error(displayed_training_job(taken_by, self._clock()), self._clock())
        permission = await api_client.fetch_permission(client, namespace, api_client.SUBMIT_VERB)
        if not permission.allowed:
            raise admission.not_allowed_error(api_client.SUBMIT_VERB, username, permission)
        if request.split.counts is None:
            raise JobError(request.split.refusal_text(f"job {request.name}"))

    async def _wait_for_admission(self, client: KubernetesClient, resource: Object) -> Object:
        """Return the job after the operator's decision, or after a timeout."""
        name, deadline_s = resource["metadata"]["name"], self._clock() + self._admission_timeout_s
        while self._clock() < deadline_s:
            status = resource.get("status", {})
            if "record" in status:
                return resource
            if status.get("state") == job_resource.REFUSED_STATE:
                await client.delete_exactly(api_client.TRAINING_JOBS, resource)
                raise JobError(status["message"])
            await asyncio.sleep(_ADMISSION_POLL_S)
            resource = await self._get_resource(client, name)
        return resource

    async def _apply_verb(self, client: KubernetesClient, name: str, verb: str) -> JobView:
        resource = await self._get_resource(client, name)
        job = displayed_training_job(resource, self._clock())
        desired = admission.apply_verb(verb, job, self._clock())
        try:
            if desired.delete:
                await client.delete_exactly(api_client.TRAINING_JOBS, resource)
            else:
                spec = job_resource.spec_changes(job.desired, desired)
                body = {"metadata": {"uid": resource["metadata"]["uid"]}, "spec": spec}
                namespace = resource["metadata"]["namespace"]
                resource = await client.patch(api_client.TRAINING_JOBS, namespace, name, body)
        except ApiError as error:
            raise _to_user_error(error, f"{verb} of job {name}") from error
        return training_job_view(resource, self._clock(), with_events=True)

    async def _get_resource(self, client: KubernetesClient, name: str) -> Object:
        namespace = self._namespace_or_default(client)
        try:
            found = await client.find(api_client.TRAINING_JOBS, namespace, name)
        except ApiError as error:
            raise _to_user_error(error, f"job {name}") from error
        if found is not None:
            return found
        names = [each["metadata"]["name"] for each in await client.list(api_client.TRAINING_JOBS, namespace)]
        where = f"kubernetes, namespace {namespace}"
        raise admission.unknown_job_error(name, names, look="See ringweave jobs --on kubernetes", where=where)

    def _namespace_or_default(self, client: KubernetesClient) -> str:
        return self._namespace or client.namespace

    def _run_with_client(self, work: Callable[[KubernetesClient], Coroutine[Any, Any, _Result]]) -> _Result:
        async def run() -> _Result:
            async with KubernetesClient(self._connect) as client:
                return await work(client)

        return asyncio.run(run())


def open_service(environ: Mapping[str, str]) -> KubernetesPlatform:
    """Return the platform for the kubeconfig's current cluster and namespace.

    Raises:
        UsageError: The kubeconfig is invalid.
        LaunchError: There is no kubeconfig.
    """
    connection_info(environ)  # fails now if it is invalid
    return KubernetesPlatform(lambda: connection_info(environ))


def _check_image_directory(request: JobRequest) -> None:
    """Refuse a relative directory: on Kubernetes a directory is one in the image, and local files are not uploaded."""
    if request.directory is not None and not Path(request.directory).is_absolute():
        do = "Put the folder into the image and give its path there, or leave directory out"
        expected = "an absolute path in the container image"
        raise JobError("directory", got=request.directory, expected=expected, do=do, where=request.name)


def _to_user_error(error: ApiError, what: str) -> LaunchError | JobError:
    """Return the API server's refusal as an error of the request; other errors stay unchanged."""
    if error.status not in (403, 422):
        return error
    do = "Correct it" if error.status == 422 else "Ask the administrator of the cluster for the role ringweave-user"
    return JobError(f"{what}: {error.message} {do}. [kubernetes]")


def _to_yaml(body: Object) -> str:
    stream = io.StringIO()
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style, yaml.sort_base_mapping_type_on_output = False, False
    yaml.dump(body, stream)
    return stream.getvalue()
