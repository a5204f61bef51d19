"""Simulated kubelet: sets Pods ready, running and ended by their status alone, through the API.

It needs only an API server, so it also works against a real control plane without nodes. It records violations of the
rules of kubelets and agents in `broken_rules`."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ringweave.jobs.records import EndCause, GroupPhase
from ringweave.launcher.workers import HostPort
from ringweave.platforms.agent import agent_channel
from ringweave.platforms.agent.agent_channel import AgentStatus
from ringweave.platforms.kubernetes import api_client, objects, pod_status
from ringweave.platforms.kubernetes.agent_gateway import barrier_condition
from ringweave.platforms.kubernetes.api_client import ApiError, KubernetesClient, Object
from ringweave.platforms.kubernetes.objects import WORKER_CONTAINER
from ringweave.platforms.kubernetes.pod_status import AttemptKey


@dataclass(slots=True)
class SimulatedKubelet:
    """Simulated kubelet for the Pods of one namespace."""

    client: KubernetesClient
    namespace: str
    clock: Callable[[], float] = time.time
    broken_rules: list[str] = field(default_factory=list)
    created: set[tuple[str, str]] = field(default_factory=set)
    """(name, uid) of all Pods seen so far."""
    lost_pods: set[str] = field(default_factory=set)
    """Names of Pods on lost machines."""
    _ready_nodes: dict[tuple[str, int], set[int]] = field(default_factory=dict)

    async def list_pods(self, job: str) -> dict[AttemptKey, Object]:
        """Return the Pods of a job."""
        found = await self.client.list(api_client.PODS, self.namespace, labelSelector=f"{objects.JOB_LABEL}={job}")
        self.created |= {(pod["metadata"]["name"], pod["metadata"]["uid"]) for pod in found}
        return {key: dict(pod) for key, pod in pod_status.pods_by_attempt(found).items()}

    async def advance_pods(self, job: str, *, hold: frozenset[int] = frozenset()) -> dict[AttemptKey, Object]:
        """Advance each Pod of the job by one step; Pods of nodes in `hold` never get ready."""
        found = await self.list_pods(job)
        config = await self._get_config_map(job)  # in this order: a job's ConfigMap exists before its Pods
        rendezvous = objects.rendezvous_in(config)
        for (node, attempt), pod in found.items():
            is_over = "terminated" in pod_status.container_state(pod) or pod["status"].get("phase") in (
                "Succeeded",
                "Failed",
            )
            if is_over or pod["metadata"]["name"] in self.lost_pods:
                continue
            if "deletionTimestamp" in pod["metadata"]:
                await self._finish_deletion(pod)
                continue
            if objects.STOPPED_ANNOTATION in pod["metadata"].get("annotations", {}):
                await self.end_container(
                    pod,
                    AgentStatus(round=pod_status.requested_round(pod), phase=GroupPhase.STOPPED, pid=1, text="stopped"),
                )
                continue
            round_, status = pod_status.requested_round(pod), pod_status.agent_status(pod)
            if status is None or status.round < round_:
                if node not in hold:
                    self._ready_nodes.setdefault((job, round_), set()).add(node)
                    address = HostPort(host=f"10.0.{attempt % 250}.{node}", port=29500)
                    ready = AgentStatus(round=round_, phase=GroupPhase.READY, pid=1, master_address=address)
                    await self.set_running(
                        pod, replace(ready, coordinator=_coordinator_address(config, job, node, self.namespace))
                    )
            elif status.phase is GroupPhase.READY and rendezvous is not None and rendezvous.round == round_:
                await self._start_workers(job, config, pod, AgentStatus(round=round_, phase=GroupPhase.RUNNING, pid=1))
        return found

    async def set_running(self, pod: Object, agent_status: AgentStatus) -> None:
        """Set a Pod running, with this status of its agent."""
        running = {"state": {"running": {"startedAt": objects.format_time(self.clock())}}, "ready": True}
        is_ready = agent_status.phase in (GroupPhase.READY, GroupPhase.RUNNING)
        conditions = [
            barrier_condition(agent_status, self.clock()),
            _ready_condition(is_ready),
            _make_condition("ContainersReady", is_so=True),
        ]
        node, _ = pod_status.attempt_key(pod) or (0, 0)
        address = {"podIP": f"10.1.{node % 250}.1"}
        await self._write_status(pod, {"phase": "Running", "conditions": conditions, **address}, running)

    async def end_container(
        self, pod: Object, agent_status: AgentStatus | None, *, exit_code: int = 0, reason: str = ""
    ) -> None:
        """End the Pod's container, with or without a termination message of its agent."""
        now = self.clock()
        is_good = agent_status is not None and agent_status.phase is GroupPhase.SUCCEEDED
        message = {"message": agent_channel.STATUS_JSON.dump(agent_status)} if agent_status else {}
        ended = {
            "exitCode": exit_code,
            "reason": reason or ("Completed" if is_good else "Error"),
            "startedAt": objects.format_time(now - 1),
            "finishedAt": objects.format_time(now),
            **message,
        }
        phase = "Succeeded" if is_good else "Failed"
        await self._write_status(
            pod,
            {"phase": phase, "conditions": [_ready_condition(False)]},
            {"state": {"terminated": ended}, "ready": False},
        )

    async def bind_pod(self, pod: Object, machine: str) -> None:
        """Bind the Pod to a node, as a scheduler does; from now on it stays until its end is reported."""
        name = pod["metadata"]["name"]
        target = {"apiVersion": "v1", "kind": "Node", "name": machine}
        body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
        await self.client.request("POST", api_client.PODS.path(self.namespace, name, "binding"), body=body)

    async def lose_machine(self, pod: Object) -> None:
        """Lose the Pod's machine: the control plane marks its Pods as not ready."""
        name = pod["metadata"]["name"]
        self.lost_pods.add(name)
        unready = {"type": "Ready", "status": "False", "lastTransitionTime": objects.format_time(self.clock())}
        await self.client.patch(
            api_client.PODS, self.namespace, name, {"status": {"conditions": [unready]}}, subresource="status"
        )

    async def lose_container(self, pod: Object) -> None:
        """Lose the container: after a reboot of its machine the kubelet only knows that it is gone."""
        lost = {
            "exitCode": 137,
            "reason": "ContainerStatusUnknown",
            "message": "The container could not be located when the pod was terminated",
            "startedAt": None,
            "finishedAt": None,
        }
        await self._write_status(
            pod,
            {"phase": "Failed", "conditions": [_ready_condition(False)]},
            {"state": {"terminated": lost}, "ready": False},
        )

    async def succeed_pod(self, pod: Object, *, iterations: int = 100, last_loss: float = 1.5) -> None:
        """End the Pod with the success of all its workers."""
        status = AgentStatus(
            round=pod_status.requested_round(pod),
            phase=GroupPhase.SUCCEEDED,
            pid=1,
            ended_s=self.clock(),
            iterations=iterations,
            last_loss=last_loss,
            exit_code=0,
        )
        await self.end_container(pod, status)

    async def fail_pod(self, pod: Object, cause: EndCause, *, exit_code: int | None = None, text: str = "") -> None:
        """End the Pod with a failure that its agent reports."""
        status = AgentStatus(
            round=pod_status.requested_round(pod),
            phase=GroupPhase.FAILED,
            pid=1,
            cause=cause,
            exit_code=exit_code,
            text=text or f"ended by {cause}",
            ended_s=self.clock(),
        )
        await self.end_container(pod, status, exit_code=exit_code or 1)

    async def _finish_deletion(self, pod: Object) -> None:
        """Finish the deletion of a Pod of which nothing runs any more."""
        metadata = pod["metadata"]
        await self.client.delete(
            api_client.PODS,
            self.namespace,
            metadata["name"],
            gracePeriodSeconds=0,
            preconditions={"uid": metadata["uid"]},
        )

    async def _start_workers(self, job: str, config: Object | None, pod: Object, status: AgentStatus) -> None:
        """Start the workers, and record a broken rule if they may not start."""
        wanted = {node.index for node in objects.parse_config_data(config["data"]).nodes} if config else set()
        missing = wanted - self._ready_nodes.get((job, status.round), set())
        if missing:
            self.broken_rules.append(
                f"{pod['metadata']['name']} started round {status.round} before {missing} were ready"
            )
        await self.set_running(pod, status)

    async def _get_config_map(self, job: str) -> Object | None:
        try:
            return await self.client.get(api_client.CONFIG_MAPS, self.namespace, objects.config_name(job))
        except ApiError as error:
            if error.is_not_found:
                return None
            raise

    async def _write_status(self, pod: Object, status: dict[str, Any], container: dict[str, Any]) -> None:
        whole = {
            "name": WORKER_CONTAINER,
            "image": "image",
            "imageID": "id",
            "restartCount": 0,
            "started": True,
            **container,
        }
        metadata = pod["metadata"]
        beside = [
            {
                **whole,
                "name": each["name"],
                "ready": True,
                "state": {"running": {"startedAt": objects.format_time(self.clock())}},
            }
            for each in pod["spec"]["containers"]
            if each["name"] != WORKER_CONTAINER
        ]
        if beside:  # while one of them runs, the Pod does
            status = {**status, "phase": "Running"}
        body = {"metadata": {"uid": metadata["uid"]}, "status": {**status, "containerStatuses": [*beside, whole]}}
        try:
            await self.client.patch(api_client.PODS, self.namespace, metadata["name"], body, subresource="status")
        except ApiError as error:
            if not error.is_not_found and not error.is_stale:
                raise


def _coordinator_address(config: Object | None, job: str, node: int, namespace: str) -> HostPort | None:
    """Return the address of a node's coordinator, if the job is elastic and the node has one."""
    known = objects.parse_config_data(config["data"]) if config else None
    if known is None or known.node(node).name not in known.coordinator_nodes:
        return None
    return HostPort(host=objects.pod_dns_name(job, node, namespace), port=29600)


def _ready_condition(is_so: bool) -> Object:
    return _make_condition("Ready", is_so=is_so)


def _make_condition(kind: str, *, is_so: bool) -> Object:
    return {"type": kind, "status": "True" if is_so else "False", "lastProbeTime": None, "lastTransitionTime": None}
