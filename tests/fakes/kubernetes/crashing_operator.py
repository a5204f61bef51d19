"""Operator without watches, as a process that kills itself after a number of writes; for crash tests."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping

from ringweave.errors import LaunchError
from ringweave.platforms.kubernetes import api_client
from ringweave.platforms.kubernetes.action_executor import ActionExecutor, JobKey
from ringweave.platforms.kubernetes.api_client import ConnectionInfo, KubernetesClient, Object
from ringweave.platforms.kubernetes.objects import PodSettings
from ringweave.platforms.kubernetes.reconciler import JobAdmission, TrainingJobReconciler

_IDLE_POLL_S = 0.02


class CountingClient(KubernetesClient):
    """Client that counts the answered writes and calls a function after each."""

    def __init__(self, connect: Callable[[], ConnectionInfo], after: Callable[[int], None]) -> None:
        """`after` gets the number of writes so far."""
        super().__init__(connect)
        self._after, self.num_writes = after, 0

    async def _send_request(
        self, method: str, path: str, params: Mapping[str, str] | None, data: str | None, headers: Mapping[str, str]
    ) -> tuple[int, Object]:
        answer = await super()._send_request(method, path, params, data, headers)
        if method != "GET" and "reviews" not in path:
            self.num_writes += 1
            self._after(self.num_writes)
        return answer


def run_crashing_operator(kubeconfig: str, key: JobKey, crash_after: int | None) -> None:
    """Manage one job until killed; kill this process right after the given number of writes."""

    def after(num_writes: int) -> None:
        if num_writes == crash_after:
            os.kill(os.getpid(), signal.SIGKILL)

    if crash_after == 0:
        after(0)
    asyncio.run(_run_operator(kubeconfig, key, after))


async def _run_operator(kubeconfig: str, key: JobKey, after: Callable[[int], None]) -> None:
    environ = {"KUBECONFIG": kubeconfig}
    async with CountingClient(lambda: api_client.connection_info(environ), after) as client:
        settings = PodSettings(image="example/train:1")
        actor, admission = ActionExecutor(client, settings, time.time), JobAdmission(client, settings, time.time)
        controller = TrainingJobReconciler(client, actor, admission, time.time)
        while True:
            with contextlib.suppress(LaunchError):
                done = await controller.reconcile(key)
                if done.requeue:
                    continue
            await asyncio.sleep(_IDLE_POLL_S)
