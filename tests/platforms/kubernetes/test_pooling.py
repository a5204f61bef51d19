"""A client that is closed leaves no socket open, also where it was in the midst of an answer."""

import asyncio
import gc
import threading
import warnings
from pathlib import Path

import pytest

from ringweave.platforms.kubernetes import api_client
from ringweave.platforms.kubernetes.api_client import KubernetesClient
from tests.fakes.kubernetes.fake_cluster import FakeCluster

BUSY_S = 0.5
"""How long the server is busy, where it comes back at all before the event loop has ended."""

LONGEST_S = 60.0


def left_open(cluster: FakeCluster, kubeconfig: Path, *, comes_back: bool) -> list[str]:
    """What an event loop leaves open in which watches were cut off before it ended, while the server was busy."""
    is_busy, may_go_on = threading.Event(), threading.Event()

    def be_busy() -> None:
        is_busy.set()
        may_go_on.wait(BUSY_S if comes_back else LONGEST_S)

    async def watch() -> None:
        async with KubernetesClient(lambda: api_client.connection_info({"KUBECONFIG": str(kubeconfig)})) as client:

            async def follow() -> None:
                parameters = {"watch": "true", "allowWatchBookmarks": "true"}
                async for _ in client.stream_lines(api_client.PODS.path("default"), parameters):
                    begun.release()

            begun = asyncio.Semaphore(0)
            tasks = [asyncio.create_task(follow()) for _ in range(3)]
            for _ in tasks:
                await begun.acquire()
            cluster.loop.call_soon_threadsafe(be_busy)
            while not is_busy.is_set():
                await asyncio.sleep(0.001)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            asyncio.run(watch())
        finally:
            may_go_on.set()
        gc.collect()
    return [str(each.message) for each in caught if "unclosed" in str(each.message)]


def test_nothing_is_left_open(cluster: FakeCluster, kubeconfig: Path) -> None:
    assert left_open(cluster, kubeconfig, comes_back=True) == []


def test_it_would_show(cluster: FakeCluster, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_client, "_CLOSE_TIMEOUT_S", 0.0)
    assert left_open(cluster, kubeconfig, comes_back=False)
