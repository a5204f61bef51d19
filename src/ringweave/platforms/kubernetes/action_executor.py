"""Observation of a job in the API server, and executor of the actions of `reconcile`, which are idempotent."""

import asyncio
import contextlib
import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ringweave.errors import LaunchError, explain
from ringweave.jobs import records
from ringweave.jobs.records import Job, JobAction
from ringweave.launcher.workers import HostPort
from ringweave.platforms.agent import agent_channel
from ringweave.platforms.agent.job_config import JobConfig, RendezvousResult
from ringweave.platforms.kubernetes import api_client, job_resource, objects, pod_logs, pod_status
from ringweave.platforms.kubernetes.api_client import ApiError, KubernetesClient, Object, ResourceKind
from ringweave.platforms.kubernetes.job_resource import ApiRefusal
from ringweave.platforms.kubernetes.objects import JobOwner, PodSettings
from ringweave.platforms.kubernetes.pod_status import JobObjects, Pod
from ringweave.platforms.registry import with_platform_option

JobKey = tuple[str, str]
"""Namespace and name of a TrainingJob."""


@dataclass(kw_only=True, slots=True)
class ObservedJob:
    """Observation of a job. Each write replaces the resource by the API server's answer."""

    resource: Object
    job: Job
    objects: JobObjects

    @property
    def owner(self) -> JobOwner:
        return JobOwner.from_resource(self.resource)

    @property
    def status(self) -> Mapping[str, Any]:
        """Return the status as saved last."""
        return self.resource.get("status", {})


async def fetch_job_objects(client: KubernetesClient, owner: JobOwner, *, runs: bool = True) -> JobObjects:
    """Return the job's objects, without those of another job of the same name, or of others.

    `runs`: the job should run; then its Secret and Service are read too, without which no Pod starts.
    """
    config = (api_client.CONFIG_MAPS, objects.config_name(owner.name))
    beside = (
        (api_client.SECRETS, objects.config_name(owner.name)),
        (api_client.SERVICES, objects.service_name(owner.name)),
    )
    wanted = (config, *beside) if runs else (config,)
    pods, found = await asyncio.gather(
        client.list(api_client.PODS, owner.namespace, labelSelector=owner.selector),
        asyncio.gather(*(client.find(kind, owner.namespace, name) for kind, name in wanted)),
    )
    ours = [each if each is not None and owner.owns(each) else None for each in found]
    of_job = pod_status.pods_by_attempt(pod for pod in pods if owner.owns(pod))
    return JobObjects(config=ours[0], is_incomplete=None in ours[1:], pods=of_job)


FAILURE_REPORT_DELAY_S = 5.0
"""Time after which a failure that is no refusal, such as a webhook without an answer, is reported."""


class ObjectsRefusedError(LaunchError):
    """Objects of a job are refused or cannot be created: by a quota, PodSecurity, a webhook, or a taken name."""

    def __init__(self, refused: list[ApiRefusal]) -> None:
        super().__init__(f"objects of the job: {len(refused)} refused, expected none: {refused[0].message}")
        self.refusals = refused


class NameConflictError(LaunchError):
    """The name of a new object is taken by an object that is not the job's."""

    def __init__(self, kind: ResourceKind, namespace: str, name: str) -> None:
        shows = f"kubectl -n {namespace} get {kind.plural} {name} -o yaml"
        self.message = f"{kind.kind} {name} exists already, and does not belong to the job ({shows})"
        super().__init__(self.message)


class UnreadLogError(LaunchError):
    """The log of a Pod to delete cannot be read now; the Pod is kept for a while."""


class FailureTracker:
    """Tracker of the time since which actions of each job fail."""

    def __init__(self) -> None:
        self._failing_since_s: dict[str, float] = {}
        """uid of a job -> time of the first failed action since the last success."""

    def reset(self, uid: str) -> None:
        """Reset the job after a success."""
        self._failing_since_s.pop(uid, None)

    def raise_worst_failure(self, uid: str, failed: Mapping[JobAction, BaseException], now: float) -> None:
        """Raise the worst error of a job's actions that failed together.

        Raises:
            ObjectsRefusedError: The API server refuses them, or has failed for too long.
            BaseException: Any other error.
        """
        since_s = self._failing_since_s.setdefault(uid, now)
        refused = {
            action: _to_refusal(action, error, is_old=now - since_s >= FAILURE_REPORT_DELAY_S)
            for action, error in failed.items()
        }
        others = [failed[action] for action, refusal in refused.items() if refusal is None]
        if others:
            raise others[0]
        raise ObjectsRefusedError([refusal for refusal in refused.values() if refusal]) from next(iter(failed.values()))


def _to_refusal(action: JobAction, error: BaseException, *, is_old: bool) -> ApiRefusal | None:
    """Return the refusal; None if the next pass may succeed, or if there is no job to report it in."""
    if not isinstance(error, ApiError | NameConflictError) or isinstance(
        action, records.SaveRecord | records.ForgetJob
    ):
        return None
    is_refusal = isinstance(error, NameConflictError) or error.is_refusal
    if isinstance(error, ApiError) and (error.is_stale or not (is_refusal or is_old)):
        return None
    node = getattr(action, "node", None)
    return ApiRefusal(node=node, message=error.message, what=_ACTION_TEXTS[type(action)], is_failure=not is_refusal)


_ACTION_TEXTS: Mapping[type, str] = {
    records.CreateConfig: "its config",
    records.CreateGroup: "the Pod",
    records.RestartGroup: "a change of the Pod",
    records.ReleaseBarrier: "the release of the barrier",
    records.StopGroup: "the end of the Pod",
    records.DeleteGroup: "the removal of the Pod",
    records.DeleteConfig: "the removal of its config",
}


_WARNING_EVENTS = ("AttemptProgram", "AttemptPlatform", "Failed", *job_resource.REFUSAL_CODES)


class ActionExecutor:
    """Executes actions in order; consecutive actions of one kind run concurrently."""

    def __init__(self, client: KubernetesClient, settings: PodSettings, clock: Callable[[], float]) -> None:
        """`clock` returns seconds since 1970."""
        self._client, self._settings, self._clock = client, settings, clock
        self._unread_log_since_s: dict[str, float] = {}
        """uid of a Pod -> time of the first failed read of its log."""
        self._failure_tracker = FailureTracker()

    async def apply(self, observed: ObservedJob, wanted: Sequence[JobAction]) -> None:
        """Execute all actions. If some fail, those of the same kind are executed, and no later ones.

        Raises:
            ObjectsRefusedError: The API server refuses something, and will again; or it has failed for too long.
            UnreadLogError: A log cannot be read; everything else was done.
            ApiError: Another failure; `is_stale` if the object was changed meanwhile.
        """
        unread: UnreadLogError | None = None
        for _, alike in itertools.groupby(wanted, type):
            chosen = list(alike)
            results = await asyncio.gather(
                *(self._apply_one(observed, action) for action in chosen), return_exceptions=True
            )
            failed = {action: found for action, found in zip(chosen, results, strict=True) if found is not None}
            unread = next((error for error in failed.values() if isinstance(error, UnreadLogError)), unread)
            failed = {action: error for action, error in failed.items() if not isinstance(error, UnreadLogError)}
            if failed:
                self._failure_tracker.raise_worst_failure(observed.owner.uid, failed, self._clock())
        self._failure_tracker.reset(observed.owner.uid)
        if unread is not None:
            raise unread

    async def publish_refusal(self, observed: ObservedJob, refused: ObjectsRefusedError) -> None:
        """Write the API server's refusal into the status and an event, unless they say so already."""
        status = job_resource.status_with_refusals(observed.status, observed.job, refused.refusals, self._clock())
        if status == observed.status:
            return
        observed.resource = await self.write_status(observed.resource, status)
        why = job_resource.refusal_reason(observed.job, refused.refusals)
        await self._post_event(
            observed, records.JobEvent(key=f"round{observed.job.record.round}/{why.code}", kind=why.code, text=str(why))
        )

    async def _apply_one(self, observed: ObservedJob, action: JobAction) -> None:
        match action:
            case records.SaveRecord(record=record, events=events):
                await self.save_record(observed, replace(observed.job, record=record), events)
            case records.CreateConfig():
                await self._create_config(observed)
            case records.CreateGroup():
                hosts = job_resource.hosts_of(observed.resource)
                body = objects.worker_pod(
                    observed.job, observed.owner, action, host=hosts[action.node], settings=self._settings
                )
                await self._create_or_adopt(observed, api_client.PODS, body)
            case records.ReleaseBarrier(round=round_):
                await self._release_barrier(observed, round_)
            case records.RestartGroup() | records.StopGroup() | records.DeleteGroup():
                pod = observed.objects.pods.get((action.node, action.attempt))
                if pod is not None:
                    await self._change_pod(observed, pod, action)
            case records.DeleteConfig():
                await self._delete_config(observed)
            case records.ForgetJob():
                await self.forget_job(observed.resource)
            case records.RequeueAt():
                pass

    async def save_record(self, observed: ObservedJob, job: Job, events: Sequence[records.JobEvent]) -> None:
        """Save the record in the status, unless the job has changed since it was read."""
        status = job_resource.status_from_job(
            job,
            before=observed.status,
            generation=observed.resource["metadata"]["generation"],
            events=events,
            now=self._clock(),
        )
        observed.resource = await self.write_status(observed.resource, status)
        observed.job = job
        await asyncio.gather(*(self._post_event(observed, event) for event in events))

    async def write_status(self, resource: Object, status: Object) -> Object:
        """Write the status and return the resource as the API server has it then."""
        namespace = resource["metadata"]["namespace"]
        body = {**resource, "status": status}
        return await self._client.replace(api_client.TRAINING_JOBS, namespace, body, subresource="status")

    async def forget_job(self, resource: Object) -> None:
        """Release the job with its archived logs. An expired job is deleted first.

        Secrets and Service are deleted too: a job deleted while its config was created has them without a ConfigMap.
        """
        metadata = resource["metadata"]
        namespace, name = metadata["namespace"], metadata["name"]
        owner = objects.JobOwner.from_resource(resource)
        config_maps = await self._client.list(api_client.CONFIG_MAPS, namespace, labelSelector=owner.selector)
        for found in config_maps:
            if owner.owns(found):
                await self._client.delete_exactly(api_client.CONFIG_MAPS, found)
        await self._delete_secrets_and_service(resource)
        if "deletionTimestamp" not in metadata:
            await self._client.delete_exactly(api_client.TRAINING_JOBS, resource)
        await self._remove_finalizer(namespace, name, metadata["uid"])

    async def _remove_finalizer(self, namespace: str, name: str, uid: str) -> None:
        """Remove our finalizer from the current resource; finalizers that others added meanwhile stay."""
        found = await self._client.find(api_client.TRAINING_JOBS, namespace, name)
        if found is None or found["metadata"]["uid"] != uid:
            return
        metadata = found["metadata"]
        left = [finalizer for finalizer in metadata.get("finalizers", ()) if finalizer != objects.FINALIZER]
        body = {"metadata": {"resourceVersion": metadata["resourceVersion"], "finalizers": left}}
        await self._patch_if_exists(api_client.TRAINING_JOBS, found, body)

    async def _create_config(self, observed: ObservedJob) -> None:
        """Create Secret, Service and ConfigMap. The ConfigMap is last, so that its existence implies the others."""
        await self._create_or_adopt(observed, api_client.SECRETS, objects.token_secret(observed.owner))
        await self._create_or_adopt(observed, api_client.SERVICES, objects.headless_service(observed.owner))
        body = objects.config_map(observed.job, observed.owner, observed.resource["spec"].get("source"))
        await self._create_or_adopt(observed, api_client.CONFIG_MAPS, body)

    async def _create_or_adopt(self, observed: ObservedJob, kind: ResourceKind, body: Object) -> None:
        namespace, name = observed.owner.namespace, body["metadata"]["name"]
        try:
            await self._client.create(kind, namespace, body)
        except ApiError as error:
            if not error.already_exists:
                raise
            found = await self._client.get(kind, namespace, name)
            if not observed.owner.owns(found):
                raise NameConflictError(kind, namespace, name) from error

    async def _release_barrier(self, observed: ObservedJob, round_: int) -> None:
        """Release the barrier of a round for which all are ready: publish the meeting point and all addresses."""
        config = observed.objects.config
        if config is None:
            return  # created just now: the next pass sees it
        rendezvous = make_rendezvous(observed, objects.parse_config_data(config["data"]), round_)
        body = {
            # Of the observation: a barrier released meanwhile is not closed again.
            "metadata": {"resourceVersion": config["metadata"]["resourceVersion"]},
            "data": {objects.RENDEZVOUS_KEY: agent_channel.RENDEZVOUS_JSON.dump(rendezvous)},
        }
        await self._client.patch(api_client.CONFIG_MAPS, observed.owner.namespace, config["metadata"]["name"], body)

    async def _change_pod(
        self, observed: ObservedJob, pod: Pod, action: records.RestartGroup | records.StopGroup | records.DeleteGroup
    ) -> None:
        if isinstance(action, records.RestartGroup):
            await self._annotate_pod(pod, {objects.ROUND_ANNOTATION: str(action.round)}, {})
        elif isinstance(action, records.StopGroup) and pod.get("status", {}).get("phase") == "Running":
            # The kubelet ends a Pod whose deadline has passed, and keeps it for inspection.
            await self._annotate_pod(pod, {objects.STOPPED_ANNOTATION: "true"}, {"spec": {"activeDeadlineSeconds": 1}})
        else:
            keeps_logs = not observed.job.record.deleting  # archived logs are deleted with the job
            if keeps_logs:
                await self._archive_log(observed, pod)
            await self._client.delete_exactly(api_client.PODS, pod)
            if keeps_logs:
                await self._delete_old_logs(observed.owner, action)

    async def _delete_old_logs(self, owner: JobOwner, ended: records.StopGroup | records.DeleteGroup) -> None:
        """Delete archived logs of the node's attempts that ended long before this one."""
        selector = pod_logs.old_logs_selector(owner, ended.node, ended.attempt)
        with contextlib.suppress(ApiError):  # the end of the next attempt deletes them too
            for found in await self._client.list(api_client.CONFIG_MAPS, owner.namespace, labelSelector=selector):
                key = pod_status.attempt_key(found)
                if owner.owns(found) and key is not None and key[1] < ended.attempt:
                    await self._client.delete_exactly(api_client.CONFIG_MAPS, found)

    async def _annotate_pod(self, pod: Pod, annotations: dict[str, str], more: Object) -> None:
        body = {"metadata": {"uid": pod["metadata"]["uid"], "annotations": annotations}, **more}
        await self._patch_if_exists(api_client.PODS, pod, body)

    async def _patch_if_exists(self, kind: ResourceKind, found: Pod, body: Object) -> None:
        metadata = found["metadata"]
        try:
            await self._client.patch(kind, metadata["namespace"], metadata["name"], body)
        except ApiError as error:
            if not error.is_not_found:
                raise

    async def _archive_log(self, observed: ObservedJob, pod: Pod) -> None:
        """Archive the log of an attempt before its Pod is deleted; an attempt that never ran has none."""
        if not pod_logs.has_log(pod):
            return
        metadata = pod["metadata"]
        path = api_client.PODS.path(metadata["namespace"], metadata["name"], "log")
        log = pod_logs.LogTail()
        try:
            # Not with limitBytes: that cuts off the end of what tailLines chose.
            async with asyncio.timeout(pod_logs.LOG_READ_TIMEOUT_S):
                async for line in self._client.stream_lines(
                    path, pod_logs.log_parameters(tailLines=str(pod_logs.MAX_LOG_LINES))
                ):
                    log.add(line)
        except (LaunchError, TimeoutError) as error:
            if isinstance(error, ApiError) and error.is_no_log:
                return
            if not (isinstance(error, ApiError) and error.is_refusal):
                self._retry_log_later(metadata["uid"], error)
            log.add(pod_logs.unread_log_line(error))
        self._unread_log_since_s.pop(metadata["uid"], None)
        await self._create_or_adopt(
            observed, api_client.CONFIG_MAPS, pod_logs.log_config_map(observed.owner, pod, log.lines)
        )

    def _retry_log_later(self, uid: str, error: Exception) -> None:
        """Check whether to give up on a log whose node does not answer."""
        now = self._clock()
        since_s = self._unread_log_since_s.setdefault(uid, now)
        if now - since_s < pod_logs.LOG_RETRY_TIMEOUT_S:
            do = f"It is tried again for {pod_logs.LOG_RETRY_TIMEOUT_S:g} s"
            got = error.message if isinstance(error, ApiError) else str(error) or "no answer"
            text = explain(f"log of Pod {uid}", got=got, expected="its lines", do=do)
            raise UnreadLogError(text) from error

    async def _delete_config(self, observed: ObservedJob) -> None:
        """Delete Service, Secrets and ConfigMap. The ConfigMap is last: while it exists, others may."""
        await self._delete_secrets_and_service(observed.resource)
        if observed.objects.config is not None:
            await self._client.delete_exactly(api_client.CONFIG_MAPS, observed.objects.config)

    async def _delete_secrets_and_service(self, resource: Object) -> None:
        """Delete the Service and the Secrets that exist and belong to the job."""
        owner = objects.JobOwner.from_resource(resource)
        secrets = [(api_client.SECRETS, name) for name in objects.secret_names(resource)]
        of_job = [(api_client.SERVICES, objects.service_name(owner.name)), *secrets]
        for kind, name in of_job:
            found = await self._client.find(kind, owner.namespace, name)
            if found is not None and owner.owns(found):
                await self._client.delete_exactly(kind, found)

    async def _post_event(self, observed: ObservedJob, event: records.JobEvent) -> None:
        """Post an event for `kubectl describe`; the status has it too, so a failure loses nothing."""
        owner = observed.owner
        digest = hashlib.sha256(f"{owner.uid}/{event.key}".encode()).hexdigest()[:16]
        involved = {
            "apiVersion": objects.API_VERSION,
            "kind": objects.CRD_KIND,
            "name": owner.name,
            "namespace": owner.namespace,
            "uid": owner.uid,
        }
        now = objects.format_time(self._clock())
        body: dict[str, Any] = {
            "metadata": {"name": f"{owner.name}.{digest}", "namespace": owner.namespace},
            "involvedObject": involved,
            "reason": event.kind,
            "message": with_platform_option(event.text, owner.name, objects.PLATFORM_NAME)[:1024],
            "type": "Warning" if event.kind in _WARNING_EVENTS else "Normal",
            "source": {"component": "ringweave-operator"},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        try:
            await self._client.create(api_client.EVENTS, owner.namespace, body)
        except ApiError:
            return


def make_rendezvous(observed: ObservedJob, config: JobConfig, round_: int) -> RendezvousResult:
    """Return the rendezvous result from the agents' offers.

    Raises:
        LaunchError: The addresses of an elastic job's coordinators are not known any more.
    """
    current = {
        node: observed.objects.pods[node, observed.job.record.nodes[node].attempt] for node in observed.job.used_nodes
    }
    addresses = {observed.job.node_name(node): _pod_address(observed.owner, node, pod) for node, pod in current.items()}
    offers = {
        observed.job.node_name(node): report
        for node, pod in current.items()
        if (report := pod_status.agent_status(pod)) is not None
    }
    first = offers.get(config.master_node)
    coordinators = agent_channel.coordinator_addresses(config, offers)
    servers = agent_channel.server_addresses(config, offers)
    if coordinators is None or (servers is None and config.elastic_server_nodes):
        do = "Nothing to do; training workers continue, and when a node is lost all nodes join the next round"
        missing = "coordinators" if coordinators is None else "parameter servers"
        expected = f"the addresses that nodes {' and '.join(config.coordinator_nodes)} offered before they started"
        text = explain(f"barrier of round {round_}", got=f"no addresses of {missing}", expected=expected, do=do)
        raise LaunchError(text)
    return RendezvousResult(
        round=round_,
        master_address=first.master_address
        if first and first.master_address
        else HostPort(host=next(iter(addresses.values())), port=0),
        servers=servers or (),
        coordinators=coordinators,
        addresses=addresses,
    )


def _pod_address(owner: objects.JobOwner, node: int, pod: Pod) -> str:
    """Return the Pod's IP, or its DNS name if the API server knows no IP."""
    return pod.get("status", {}).get("podIP") or objects.pod_dns_name(owner.name, node, owner.namespace)
