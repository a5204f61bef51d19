"""An operator without its watches, as a process that kills itself after a number of writes: for tests of crashes."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping

import kopf

from ringweave.errors import LaunchError
from ringweave.launch.kubernetes.api import connecting
from ringweave.launch.kubernetes.api.client import Client, Object
from ringweave.launch.kubernetes.objects.pods import PodSettings
from ringweave.launch.kubernetes.operating.acting import Actor
from ringweave.launch.kubernetes.operating.admission import Admission
from ringweave.launch.kubernetes.operating.controller import Controller
from ringweave.launch.kubernetes.operating.looking import Key

_IDLE_S = 0.02


class CountingClient(Client):
    """Counts the writes that the API server has answered, and calls somebody after each."""

    def __init__(self, connect: Callable[[], kopf.ConnectionInfo], after: Callable[[int], None]) -> None:
        """`after` gets the number of writes so far."""
        super().__init__(connect)
        self._after, self.num_writes = after, 0

    async def _send(
        self, method: str, path: str, params: Mapping[str, str] | None, data: str | None, headers: Mapping[str, str]
    ) -> tuple[int, Object]:
        answer = await super()._send(method, path, params, data, headers)
        if method != "GET" and "reviews" not in path:
            self.num_writes += 1
            self._after(self.num_writes)
        return answer


def lead(kubeconfig: str, key: Key, crash_after: int | None) -> None:
    """Lead one job until killed; kill itself right after so many writes, if so many there are."""

    def after(num_writes: int) -> None:
        if num_writes == crash_after:
            os.kill(os.getpid(), signal.SIGKILL)

    if crash_after == 0:
        after(0)
    asyncio.run(_lead(kubeconfig, key, after))


async def _lead(kubeconfig: str, key: Key, after: Callable[[int], None]) -> None:
    environ = {"KUBECONFIG": kubeconfig}
    async with CountingClient(lambda: connecting.connection(environ), after) as client:
        settings = PodSettings(image="example/train:1")
        actor, admission = Actor(client, settings, time.time), Admission(client, settings, time.time)
        controller = Controller(client, actor, admission, time.time)
        while True:
            with contextlib.suppress(LaunchError):
                done = await controller.reconcile(key)
                if done.again:
                    continue
            await asyncio.sleep(_IDLE_S)
