"""What `reconcile` asks for, done in the API server. Each action may come again: create means create or adopt."""

import asyncio
import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ringweave.errors import LaunchError, explain
from ringweave.jobs.life import actions
from ringweave.jobs.life.actions import Action
from ringweave.jobs.life.records import Job
from ringweave.launch.groups import posts
from ringweave.launch.groups.config import Config
from ringweave.launch.groups.posts import Opening
from ringweave.launch.kubernetes import names
from ringweave.launch.kubernetes.api import kinds
from ringweave.launch.kubernetes.api.client import Client, Object
from ringweave.launch.kubernetes.api.failures import ApiError
from ringweave.launch.kubernetes.api.kinds import Kind
from ringweave.launch.kubernetes.objects import configs, keeping, lodging, pods, seeing
from ringweave.launch.kubernetes.objects.pods import PodSettings
from ringweave.launch.kubernetes.objects.seeing import Pod
from ringweave.launch.kubernetes.operating import looking
from ringweave.launch.kubernetes.operating.looking import Look
from ringweave.launch.kubernetes.operating.refusing import ForeignError, RefusedError, Troubles, UnreadLogError
from ringweave.launch.kubernetes.resource import reading, refusals, telling, times
from ringweave.launch.workers import Meeting

_WARNINGS = ("AttemptProgram", "AttemptPlace", "Failed", *refusals.CODES)


class Actor:
    """Does actions, in order; those of one kind that follow each other at the same time."""

    def __init__(self, client: Client, settings: PodSettings, clock: Callable[[], float]) -> None:
        """`clock` tells seconds since 1970."""
        self._client, self._settings, self._clock = client, settings, clock
        self._unread: dict[str, float] = {}
        """uid of a Pod -> when its log was first not to be had."""
        self._troubles = Troubles()

    async def do(self, look: Look, wanted: Sequence[Action]) -> None:
        """All of them; where some fail, those of the same kind are done, and no later ones.

        Raises:
            RefusedError: The API server refuses something, and will again; or it has failed for too long.
            UnreadLogError: A log cannot be read; everything else was done.
            ApiError: It failed otherwise; `is_stale` where somebody else was faster.
        """
        unread: UnreadLogError | None = None
        for _, alike in itertools.groupby(wanted, type):
            chosen = list(alike)
            done = await asyncio.gather(*(self._do(look, action) for action in chosen), return_exceptions=True)
            failed = {action: found for action, found in zip(chosen, done, strict=True) if found is not None}
            unread = next((error for error in failed.values() if isinstance(error, UnreadLogError)), unread)
            failed = {action: error for action, error in failed.items() if not isinstance(error, UnreadLogError)}
            if failed:
                self._troubles.raise_worst(look.owner.uid, failed, self._clock())
        self._troubles.forget(look.owner.uid)
        if unread is not None:
            raise unread

    async def tell_refused(self, look: Look, refused: RefusedError) -> None:
        """Have the status and an event say what the API server refuses, where they do not say so yet."""
        status = refusals.with_refusals(look.status, look.job, refused.refusals, self._clock())
        if status == look.status:
            return
        look.resource = await self.write_status(look.resource, status)
        why = refusals.reason_of(look.job, refused.refusals)
        await self._post(
            look, actions.Event(key=f"round{look.job.record.round}/{why.code}", kind=why.code, text=str(why))
        )

    async def _do(self, look: Look, action: Action) -> None:
        match action:
            case actions.SaveRecord(record=record, events=events):
                await self.save(look, replace(look.job, record=record), events)
            case actions.CreateConfig():
                await self._create_config(look)
            case actions.CreateGroup():
                hosts = reading.hosts_of(look.resource)
                body = pods.pod(look.job, look.owner, action, host=hosts[action.node], settings=self._settings)
                await self._create_or_adopt(look, kinds.PODS, body)
            case actions.OpenGate(round=round_):
                await self._open_gate(look, round_)
            case actions.Regather() | actions.StopGroup() | actions.DeleteGroup():
                pod = look.seen.pods.get((action.node, action.attempt))
                if pod is not None:
                    await self._change(look, pod, action)
            case actions.DeleteConfig():
                await self._delete_config(look)
            case actions.Forget():
                await self.forget(look.resource)
            case actions.Wake():
                pass

    async def save(self, look: Look, job: Job, events: Sequence[actions.Event]) -> None:
        """The status with this record; nothing is saved where somebody changed the job since the look."""
        status = telling.status_of(
            job,
            before=look.status,
            generation=look.resource["metadata"]["generation"],
            events=events,
            now=self._clock(),
        )
        look.resource = await self.write_status(look.resource, status)
        look.job = job
        await asyncio.gather(*(self._post(look, event) for event in events))

    async def write_status(self, resource: Object, status: Object) -> Object:
        """The resource with this status, as the API server has it then."""
        namespace = resource["metadata"]["namespace"]
        body = {**resource, "status": status}
        return await self._client.replace(kinds.TRAINING_JOBS, namespace, body, subresource="status")

    async def forget(self, resource: Object) -> None:
        """Let go of the job; its kept logs go with it. One whose time has come is deleted first.

        So do its Secrets and Service: a job that was deleted while its config was made has them, and no ConfigMap that
        says so.
        """
        metadata = resource["metadata"]
        namespace, name = metadata["namespace"], metadata["name"]
        owner = looking.Owner.of(resource)
        kept = await self._client.list(kinds.CONFIG_MAPS, namespace, labelSelector=owner.selector)
        for found in kept:
            if owner.owns(found):
                await self._delete(kinds.CONFIG_MAPS, found)
        await self._delete_beside(resource)
        if "deletionTimestamp" not in metadata:
            await self._delete(kinds.TRAINING_JOBS, resource)
        await self._let_go(namespace, name, metadata["uid"])

    async def _let_go(self, namespace: str, name: str, uid: str) -> None:
        """Take our finalizer from the job as it is now: one that somebody else has added since the look stays."""
        try:
            metadata = (await self._client.get(kinds.TRAINING_JOBS, namespace, name))["metadata"]
            if metadata["uid"] != uid:
                return
            left = [finalizer for finalizer in metadata.get("finalizers", ()) if finalizer != names.FINALIZER]
            body = {"metadata": {"resourceVersion": metadata["resourceVersion"], "finalizers": left}}
            await self._client.patch(kinds.TRAINING_JOBS, namespace, name, body)
        except ApiError as error:
            if not error.is_gone:
                raise

    async def _create_config(self, look: Look) -> None:
        """The ConfigMap last: where it is there, the others are."""
        await self._create_or_adopt(look, kinds.SECRETS, configs.secret(look.owner))
        await self._create_or_adopt(look, kinds.SERVICES, configs.service(look.owner))
        body = configs.config_map(look.job, look.owner, look.resource["spec"].get("source"))
        await self._create_or_adopt(look, kinds.CONFIG_MAPS, body)

    async def _create_or_adopt(self, look: Look, kind: Kind, body: Object) -> None:
        namespace, name = look.owner.namespace, body["metadata"]["name"]
        try:
            await self._client.create(kind, namespace, body)
        except ApiError as error:
            if not error.is_taken:
                raise
            found = await self._client.get(kind, namespace, name)
            if not look.owner.owns(found):
                raise ForeignError(kind, namespace, name) from error

    async def _open_gate(self, look: Look, round_: int) -> None:
        """For a round that all are ready for: where they meet, and where each one is."""
        config = look.seen.config
        if config is None:
            return  # made just now: the next look sees it
        opening = opening_of(look, configs.config_of(config["data"]), round_)
        body = {
            # Of the look: a gate that somebody else opened meanwhile is not shut again.
            "metadata": {"resourceVersion": config["metadata"]["resourceVersion"]},
            "data": {configs.OPENING: posts.dump_opening(opening)},
        }
        await self._client.patch(kinds.CONFIG_MAPS, look.owner.namespace, config["metadata"]["name"], body)

    async def _change(
        self, look: Look, pod: Pod, action: actions.Regather | actions.StopGroup | actions.DeleteGroup
    ) -> None:
        if isinstance(action, actions.Regather):
            await self._annotate(pod, {names.ROUND: str(action.round)}, {})
        elif isinstance(action, actions.StopGroup) and pod.get("status", {}).get("phase") == "Running":
            # The kubelet ends a Pod whose deadline has passed, and keeps it to be looked at.
            await self._annotate(pod, {names.STOPPED: "true"}, {"spec": {"activeDeadlineSeconds": 1}})
        else:
            if not look.job.record.deleting:  # kept logs go with the job
                await self._keep_log(look, pod)
            await self._delete(kinds.PODS, pod)

    async def _annotate(self, pod: Pod, annotations: dict[str, str], more: Object) -> None:
        metadata = pod["metadata"]
        body = {"metadata": {"uid": metadata["uid"], "annotations": annotations}, **more}
        try:
            await self._client.patch(kinds.PODS, metadata["namespace"], metadata["name"], body)
        except ApiError as error:
            if not error.is_gone:
                raise

    async def _keep_log(self, look: Look, pod: Pod) -> None:
        """What the attempt printed, before its Pod goes with it; there is nothing to keep of one that never ran."""
        if not keeping.has_log(pod):
            return
        metadata = pod["metadata"]
        path = kinds.PODS.path(metadata["namespace"], metadata["name"], "log")
        log = keeping.Tail()
        try:
            # Not with limitBytes: that cuts off the end of what tailLines chose.
            async with asyncio.timeout(keeping.READ_S):
                async for line in self._client.lines(path, keeping.asked_for(tailLines=str(keeping.MAX_LINES))):
                    log.add(line)
        except (LaunchError, TimeoutError) as error:
            if isinstance(error, ApiError) and keeping.has_nothing_to_tell(error):
                return
            if not (isinstance(error, ApiError) and error.is_refusal):
                self._give_up_later(metadata["uid"], error)
            log.add(keeping.unread(error))
        self._unread.pop(metadata["uid"], None)
        await self._create_or_adopt(look, kinds.CONFIG_MAPS, keeping.log_map(look.owner, pod, log.lines))

    def _give_up_later(self, uid: str, error: Exception) -> None:
        """Its node does not answer: perhaps not now, perhaps never again.

        Raises:
            UnreadLogError: It has not been tried for long.
        """
        now = self._clock()
        since_s = self._unread.setdefault(uid, now)
        if now - since_s < keeping.PATIENCE_S:
            do = f"It is tried again until {keeping.PATIENCE_S:g} s are over"
            got = error.message if isinstance(error, ApiError) else str(error) or "no answer"
            text = explain(f"log of Pod {uid}", got=got, expected="its lines", do=do)
            raise UnreadLogError(text) from error

    async def _delete(self, kind: Kind, found: Pod) -> None:
        metadata = found["metadata"]
        await self._client.delete(kind, metadata["namespace"], metadata["name"], preconditions={"uid": metadata["uid"]})

    async def _delete_config(self, look: Look) -> None:
        """The ConfigMap last: while it is there, there may be more."""
        await self._delete_beside(look.resource)
        if look.seen.config is not None:
            await self._delete(kinds.CONFIG_MAPS, look.seen.config)

    async def _delete_beside(self, resource: Object) -> None:
        """The Service and the Secrets, where they are there and the job's."""
        owner = looking.Owner.of(resource)
        secrets = [(kinds.SECRETS, name) for name in lodging.secrets_of(resource)]
        of_job = [(kinds.SERVICES, names.service(owner.name)), *secrets]
        for kind, name in of_job:
            try:
                found = await self._client.get(kind, owner.namespace, name)
            except ApiError as error:
                if not error.is_gone:
                    raise
                continue
            if owner.owns(found):
                await self._delete(kind, found)

    async def _post(self, look: Look, event: actions.Event) -> None:
        """For `kubectl describe`; the status has it too, so nothing is lost where this fails."""
        owner = look.owner
        digest = hashlib.sha256(f"{owner.uid}/{event.key}".encode()).hexdigest()[:16]
        involved = {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "name": owner.name,
            "namespace": owner.namespace,
            "uid": owner.uid,
        }
        now = times.show(self._clock())
        body: dict[str, Any] = {
            "metadata": {"name": f"{owner.name}.{digest}", "namespace": owner.namespace},
            "involvedObject": involved,
            "reason": event.kind,
            "message": event.text[:1024],
            "type": "Warning" if event.kind in _WARNINGS else "Normal",
            "source": {"component": "ringweave-operator"},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        try:
            await self._client.create(kinds.EVENTS, owner.namespace, body)
        except ApiError:
            return


def opening_of(look: Look, config: Config, round_: int) -> Opening:
    """Where all meet, by what their agents offer.

    Raises:
        LaunchError: Nobody says any more where the coordinators of an elastic job are.
    """
    current = {node: look.seen.pods[node, look.job.record.nodes[node].attempt] for node in look.job.used_nodes}
    addresses = {look.job.node_name(node): _address(look.owner, node, pod) for node, pod in current.items()}
    offers = {
        look.job.node_name(node): report
        for node, pod in current.items()
        if (report := seeing.report_of(pod)) is not None
    }
    first = offers.get(config.nodes[0].name)
    coordinators = posts.coordinators_of(config, offers)
    if coordinators is None:
        do = "Nothing to do: who trains goes on, and when a node is lost all gather at the gate of the next round"
        expected = f"what nodes {' and '.join(config.coordinating)} offered before they started"
        text = explain(f"gate of round {round_}", got="no addresses of coordinators", expected=expected, do=do)
        raise LaunchError(text)
    return Opening(
        round=round_,
        meeting=first.meeting if first and first.meeting else Meeting(host=next(iter(addresses.values())), port=0),
        server=next((report.server for report in offers.values() if report.server), None),
        coordinators=coordinators,
        addresses=addresses,
    )


def _address(owner: looking.Owner, node: int, pod: Pod) -> str:
    """Its IP; the host name of its node in the job where the API server knows none."""
    return pod.get("status", {}).get("podIP") or names.found_at(owner.name, node, owner.namespace)
