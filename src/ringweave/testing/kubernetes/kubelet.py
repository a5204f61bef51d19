"""Plays the kubelet through the API alone: Pods become ready, run and end because their status says so.

It needs an API server and nothing else, so it serves against a real control plane without nodes as well. What a kubelet
and a group agent may never do is noted in `broken_rules`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ringweave.jobs.life.observing import Cause, Phase
from ringweave.launch.groups import posts
from ringweave.launch.groups.posts import Report
from ringweave.launch.kubernetes import names
from ringweave.launch.kubernetes.api import kinds
from ringweave.launch.kubernetes.api.client import Client, Object
from ringweave.launch.kubernetes.api.failures import ApiError
from ringweave.launch.kubernetes.objects import configs, seeing
from ringweave.launch.kubernetes.objects.pods import CONTAINER
from ringweave.launch.kubernetes.objects.seeing import Key
from ringweave.launch.kubernetes.operating.desk import condition_of
from ringweave.launch.kubernetes.resource import times
from ringweave.launch.workers import Meeting


@dataclass(slots=True)
class PlayedKubelet:
    """The Pods of one namespace."""

    client: Client
    namespace: str
    clock: Callable[[], float] = time.time
    broken_rules: list[str] = field(default_factory=list)
    created: set[tuple[str, str]] = field(default_factory=set)
    """(name, uid) of every Pod that was ever seen."""
    lost: set[str] = field(default_factory=set)
    """Names of Pods whose machine does nothing any more."""
    _ready: dict[tuple[str, int], set[int]] = field(default_factory=dict)

    async def pods(self, job: str) -> dict[Key, Object]:
        """The Pods of a job."""
        found = await self.client.list(kinds.PODS, self.namespace, labelSelector=f"{names.JOB_LABEL}={job}")
        self.created |= {(pod["metadata"]["name"], pod["metadata"]["uid"]) for pod in found}
        return {key: dict(pod) for key, pod in seeing.by_key(found).items()}

    async def step(self, job: str, *, hold: frozenset[int] = frozenset()) -> dict[Key, Object]:
        """Let every Pod of the job take its next step by itself; those of nodes in `hold` never get ready."""
        found = await self.pods(job)
        config = await self._config(job)  # in this order: a job's ConfigMap is there before its Pods
        opening = configs.opening_of(config)
        for (node, attempt), pod in found.items():
            is_over = "terminated" in seeing.state_of(pod) or pod["status"].get("phase") in ("Succeeded", "Failed")
            if is_over or pod["metadata"]["name"] in self.lost:
                continue
            if "deletionTimestamp" in pod["metadata"]:
                await self._let_go(pod)
                continue
            if names.STOPPED in pod["metadata"].get("annotations", {}):
                await self.end(pod, Report(round=seeing.round_of(pod), phase=Phase.STOPPED, pid=1, text="stopped"))
                continue
            round_, report = seeing.round_of(pod), seeing.report_of(pod)
            if report is None or report.round < round_:
                if node not in hold:
                    self._ready.setdefault((job, round_), set()).add(node)
                    meeting = Meeting(host=f"10.0.{attempt % 250}.{node}", port=29500)
                    ready = Report(round=round_, phase=Phase.READY, pid=1, meeting=meeting)
                    await self.tell(pod, replace(ready, coordinator=_coordinator(config, job, node, self.namespace)))
            elif report.phase is Phase.READY and opening is not None and opening.round == round_:
                await self._begin(job, config, pod, Report(round=round_, phase=Phase.RUNNING, pid=1))
        return found

    async def tell(self, pod: Object, report: Report) -> None:
        """The Pod runs, and its agent says this."""
        running = {"state": {"running": {"startedAt": times.show(self.clock())}}, "ready": True}
        is_ready = report.phase in (Phase.READY, Phase.RUNNING)
        conditions = [condition_of(report, self.clock()), _ready(is_ready), _condition("ContainersReady", is_so=True)]
        node, _ = seeing.key_of(pod) or (0, 0)
        address = {"podIP": f"10.1.{node % 250}.1"}
        await self._write(pod, {"phase": "Running", "conditions": conditions, **address}, running)

    async def end(self, pod: Object, report: Report | None, *, exit_code: int = 0, reason: str = "") -> None:
        """The Pod's container ended; with last words of its agent, or without."""
        now = self.clock()
        is_good = report is not None and report.phase is Phase.SUCCEEDED
        message = {"message": posts.dump_report(report)} if report else {}
        ended = {
            "exitCode": exit_code,
            "reason": reason or ("Completed" if is_good else "Error"),
            "startedAt": times.show(now - 1),
            "finishedAt": times.show(now),
            **message,
        }
        phase = "Succeeded" if is_good else "Failed"
        await self._write(
            pod, {"phase": phase, "conditions": [_ready(False)]}, {"state": {"terminated": ended}, "ready": False}
        )

    async def bind(self, pod: Object, machine: str) -> None:
        """What a scheduler does: the Pod has a machine, and stays from now on until somebody says that it has ended."""
        name = pod["metadata"]["name"]
        target = {"apiVersion": "v1", "kind": "Node", "name": machine}
        body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
        await self.client.request("POST", kinds.PODS.path(self.namespace, name, "binding"), body=body)

    async def lose_machine(self, pod: Object) -> None:
        """Nothing is heard of its machine any more: the control plane marks its Pods as not ready."""
        name = pod["metadata"]["name"]
        self.lost.add(name)
        unready = {"type": "Ready", "status": "False", "lastTransitionTime": times.show(self.clock())}
        await self.client.patch(
            kinds.PODS, self.namespace, name, {"status": {"conditions": [unready]}}, subresource="status"
        )

    async def lose_container(self, pod: Object) -> None:
        """After its machine was started anew the kubelet knows nothing of the container but that it is gone."""
        lost = {
            "exitCode": 137,
            "reason": "ContainerStatusUnknown",
            "message": "The container could not be located when the pod was terminated",
            "startedAt": None,
            "finishedAt": None,
        }
        await self._write(
            pod,
            {"phase": "Failed", "conditions": [_ready(False)]},
            {"state": {"terminated": lost}, "ready": False},
        )

    async def succeed(self, pod: Object, *, iterations: int = 100, last_loss: float = 1.5) -> None:
        """All its workers ended well."""
        report = Report(
            round=seeing.round_of(pod),
            phase=Phase.SUCCEEDED,
            pid=1,
            ended_s=self.clock(),
            iterations=iterations,
            last_loss=last_loss,
            exit_code=0,
        )
        await self.end(pod, report)

    async def fail(self, pod: Object, cause: Cause, *, exit_code: int | None = None, text: str = "") -> None:
        """Its workers ended badly, and the agent said so."""
        report = Report(
            round=seeing.round_of(pod),
            phase=Phase.FAILED,
            pid=1,
            cause=cause,
            exit_code=exit_code,
            text=text or f"ended by {cause}",
            ended_s=self.clock(),
        )
        await self.end(pod, report, exit_code=exit_code or 1)

    async def _let_go(self, pod: Object) -> None:
        """Of one that was deleted: nothing of it runs any more."""
        metadata = pod["metadata"]
        await self.client.delete(
            kinds.PODS, self.namespace, metadata["name"], gracePeriodSeconds=0, preconditions={"uid": metadata["uid"]}
        )

    async def _begin(self, job: str, config: Object | None, pod: Object, report: Report) -> None:
        """It starts, and had better be allowed to."""
        wanted = {node.index for node in configs.config_of(config["data"]).nodes} if config else set()
        missing = wanted - self._ready.get((job, report.round), set())
        if missing:
            self.broken_rules.append(
                f"{pod['metadata']['name']} started round {report.round} before {missing} were ready"
            )
        await self.tell(pod, report)

    async def _config(self, job: str) -> Object | None:
        try:
            return await self.client.get(kinds.CONFIG_MAPS, self.namespace, names.config(job))
        except ApiError as error:
            if error.is_gone:
                return None
            raise

    async def _write(self, pod: Object, status: dict[str, Any], container: dict[str, Any]) -> None:
        whole = {"name": CONTAINER, "image": "image", "imageID": "id", "restartCount": 0, "started": True, **container}
        metadata = pod["metadata"]
        beside = [
            {
                **whole,
                "name": each["name"],
                "ready": True,
                "state": {"running": {"startedAt": times.show(self.clock())}},
            }
            for each in pod["spec"]["containers"]
            if each["name"] != CONTAINER
        ]
        if beside:  # as long as one runs, the Pod does
            status = {**status, "phase": "Running"}
        body = {"metadata": {"uid": metadata["uid"]}, "status": {**status, "containerStatuses": [*beside, whole]}}
        try:
            await self.client.patch(kinds.PODS, self.namespace, metadata["name"], body, subresource="status")
        except ApiError as error:
            if not error.is_gone and not error.is_stale:
                raise


def _coordinator(config: Object | None, job: str, node: int, namespace: str) -> Meeting | None:
    """Where a node's coordinator listens, if the job is elastic and the node has one."""
    known = configs.config_of(config["data"]) if config else None
    if known is None or known.node(node).name not in known.coordinating:
        return None
    return Meeting(host=names.found_at(job, node, namespace), port=29600)


def _ready(is_so: bool) -> Object:
    return _condition("Ready", is_so=is_so)


def _condition(kind: str, *, is_so: bool) -> Object:
    return {"type": kind, "status": "True" if is_so else "False", "lastProbeTime": None, "lastTransitionTime": None}
