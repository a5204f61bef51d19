"""A service on the fake API server, an operator, and Pods that are real processes; for tests of whole jobs."""

import asyncio
import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ringweave.jobs.states import JobState
from ringweave.launcher.node_context import free_port
from ringweave.platforms.kubernetes import api_client, objects
from ringweave.platforms.kubernetes.api_client import KubernetesClient
from ringweave.platforms.kubernetes.platform import KubernetesPlatform
from tests.fakes.kubernetes.fake_cluster import FakeCluster
from tests.fakes.kubernetes.operator_process import OperatorProcess
from tests.fakes.kubernetes.process_kubelet import ProcessKubelet

SOON_S = 300.0
BAD = (JobState.FAILED, JobState.STOPPED)


class Place:
    """The service, and a kubelet in a thread."""

    def __init__(self, cluster: FakeCluster, kubeconfig: Path, root: Path) -> None:
        self.environ = {**os.environ, "KUBECONFIG": str(kubeconfig)}
        self.service = KubernetesPlatform(self._connect, admission_timeout_s=SOON_S)
        self._cluster, self._root = cluster, root
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.kubelet: ProcessKubelet | None = None

    def _connect(self):
        return api_client.connection_info(self.environ)

    async def _serve(self) -> None:
        async with KubernetesClient(self._connect) as client:
            self.kubelet = ProcessKubelet(client, "default", self._root)
            self._cluster.handler.logs = self.kubelet.logs
            await self.kubelet.run_until_cancelled()

    def __enter__(self) -> "Place":
        self._thread.start()
        self._serving = asyncio.run_coroutine_threadsafe(self._serve(), self._loop)
        return self

    def __exit__(self, *_: object) -> None:
        self._serving.cancel()
        deadline_s = time.monotonic() + SOON_S
        while asyncio.all_tasks(self._loop) and time.monotonic() < deadline_s:
            time.sleep(0.02)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(SOON_S)
        self._loop.close()

    def left_secrets(self, job: str) -> list[str]:
        assert self.kubelet is not None
        listed = self.kubelet.client.list(api_client.SECRETS, "default", labelSelector=f"{objects.JOB_LABEL}={job}")
        found = asyncio.run_coroutine_threadsafe(listed, self._loop).result(SOON_S)
        return [each["metadata"]["name"] for each in found]

    def leadership(self, job: str) -> dict[str, Any] | None:
        """The latest leadership record of a job, with its round."""
        assert self.kubelet is not None
        listed = self.kubelet.client.list(api_client.CONFIG_MAPS, "default", labelSelector=f"{objects.JOB_LABEL}={job}")
        found = asyncio.run_coroutine_threadsafe(listed, self._loop).result(SOON_S)
        notes = [each["metadata"].get("annotations", {}) for each in found]
        texts = [each[objects.LEADERSHIP_ANNOTATION] for each in notes if objects.LEADERSHIP_ANNOTATION in each]
        return json.loads(texts[0]) if texts else None

    def remove(self, kind: api_client.ResourceKind, name: str) -> None:
        """As somebody does who is not the operator."""
        assert self.kubelet is not None
        removed = self.kubelet.client.delete(kind, "default", name)
        asyncio.run_coroutine_threadsafe(removed, self._loop).result(SOON_S)

    def wait(self, holds: Callable[[], bool], limit_s: float = SOON_S) -> None:
        deadline_s = time.monotonic() + limit_s
        while not holds():
            there = self.service.jobs()
            assert time.monotonic() < deadline_s, str(there)
            assert not any(job.state in BAD for job in there), str(there)
            time.sleep(0.25)  # each look is a connection of its own, which costs more than what it looks at


@pytest.fixture
def place(cluster: FakeCluster, kubeconfig: Path, tmp_path: Path) -> Iterator[Place]:
    port = free_port(random.SystemRandom())
    arguments = ["--namespace", "default", "--lease-namespace", "default", "--image", "example/train:1"]
    arguments += ["--desk", f"https://127.0.0.1:{port}", "--desk-port", str(port), "--lease-s", "600"]
    with (
        Place(cluster, kubeconfig, tmp_path / "pods") as place,
        OperatorProcess(kubeconfig, arguments, tmp_path / "operator.log") as operator,
    ):
        yield place
        assert operator.stop() == 0, operator.log.read_text()
        assert "Traceback" not in operator.log.read_text()
