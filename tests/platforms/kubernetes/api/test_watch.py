"""A watch that goes on: where it ended, or from a new list where the server has forgotten that."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from ringweave.platforms.kubernetes import api_client
from ringweave.platforms.kubernetes.api_client import KubernetesClient
from tests.fakes.kubernetes.fake_cluster import FakeCluster

SOON_S = 250.0
LABEL = "of-a-test-of-watches"
LISTS, WATCHES = "lists", "watches"


class Seen:
    """Names that a watch has yielded, and the requests that it made."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.requests: list[tuple[str, str | None]] = []
        self._changed = asyncio.Condition()

    async def follow(self, client: KubernetesClient) -> None:
        async for found in client.watch(api_client.CONFIG_MAPS, "default", labelSelector=LABEL):
            self.names.append(found["metadata"]["name"])

    async def wait(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await asyncio.sleep(0.01)

    def note(self, http: web.Request) -> None:
        if http.path == api_client.CONFIG_MAPS.path("default") and http.method == "GET":
            kind = WATCHES if "watch" in http.query else LISTS
            self.requests.append((kind, http.query.get("resourceVersion")))

    def count(self, kind: str) -> int:
        return sum(each == kind for each, _ in self.requests)


def play(
    cluster: FakeCluster, kubeconfig: Path, test: Callable[[KubernetesClient, Seen], Coroutine[Any, Any, None]]
) -> None:
    """A watch while the test lasts."""

    async def run() -> None:
        seen = Seen()

        async def note(http: web.Request) -> None:
            seen.note(http)

        async with (
            asyncio.timeout(SOON_S),
            KubernetesClient(lambda: api_client.connection_info({"KUBECONFIG": str(kubeconfig)})) as client,
            labelled(client, "first"),
        ):
            cluster.handler.before_request = note
            following = asyncio.create_task(seen.follow(client))
            try:
                await seen.wait(lambda: seen.names == ["first"] and seen.count(WATCHES) == 1)
                await test(client, seen)
            finally:
                cluster.handler.before_request = None
                following.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await following

    asyncio.run(run())


@contextlib.asynccontextmanager
async def labelled(client: KubernetesClient, name: str) -> AsyncIterator[None]:
    body = {"metadata": {"name": name, "labels": {LABEL: "yes"}}}
    await client.create(api_client.CONFIG_MAPS, "default", body)
    try:
        yield
    finally:
        await client.delete(api_client.CONFIG_MAPS, "default", name)


def cut_without_forgetting(cluster: FakeCluster) -> None:
    cluster.handler.watches_cut.set()
    cluster.handler.watches_cut = asyncio.Event()


def test_one_that_ends_goes_on_where_it_ended(cluster: FakeCluster, kubeconfig: Path) -> None:
    async def test(client: KubernetesClient, seen: Seen) -> None:
        async with labelled(client, "second"):
            await seen.wait(lambda: seen.names == ["first", "second"])
            cluster.call(cut_without_forgetting, cluster)
            await seen.wait(lambda: seen.count(WATCHES) == 2)
            async with labelled(client, "third"):
                await seen.wait(lambda: len(seen.names) == 3)
        await seen.wait(lambda: len(seen.names) == 5)
        assert seen.names == ["first", "second", "third", "third", "second"]
        assert seen.count(LISTS) == 1

    play(cluster, kubeconfig, test)


def test_where_the_server_has_forgotten_all_are_listed_again(cluster: FakeCluster, kubeconfig: Path) -> None:
    async def test(client: KubernetesClient, seen: Seen) -> None:
        async with labelled(client, "second"):
            await seen.wait(lambda: seen.names == ["first", "second"])

            async def change_and_forget(http: web.Request) -> None:
                seen.note(http)
                if "watch" in http.query and cluster.handler.before_request is change_and_forget:
                    cluster.handler.before_request = only_note
                    cluster.api.store.version += 1
                    cluster.api.store.compact()

            async def only_note(http: web.Request) -> None:
                seen.note(http)

            cluster.handler.before_request = change_and_forget
            cluster.call(cut_without_forgetting, cluster)
            await seen.wait(lambda: seen.count(LISTS) == 2)
            await seen.wait(lambda: seen.names == ["first", "second", "first", "second"])
            kinds = [kind for kind, _ in seen.requests]
            assert kinds == [LISTS, WATCHES, WATCHES, LISTS, WATCHES][: len(kinds)]

    play(cluster, kubeconfig, test)


def test_one_that_says_nothing_is_dead(
    cluster: FakeCluster, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(api_client, "WATCH_SILENCE_S", 0.05)
    monkeypatch.setattr(cluster.handler, "_bookmark_s", 1e3)

    async def test(client: KubernetesClient, seen: Seen) -> None:
        await seen.wait(lambda: seen.count(LISTS) > 1 and seen.names[:2] == ["first", "first"])

    play(cluster, kubeconfig, test)
    assert "watch of configmaps: Kubernetes API server: 'Timeout on reading data from socket'" in caplog.text


def test_bookmarks_keep_it_alive(
    cluster: FakeCluster, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(api_client, "WATCH_SILENCE_S", 20.0)
    monkeypatch.setattr(cluster.handler, "_bookmark_s", 0.01)
    monkeypatch.setattr(api_client, "_WATCH_TIMEOUT_S", 1)

    async def test(client: KubernetesClient, seen: Seen) -> None:
        await seen.wait(lambda: seen.count(WATCHES) == 2)
        assert seen.count(LISTS) == 1

    play(cluster, kubeconfig, test)
    assert caplog.text == ""


def test_it_outlasts_a_server_that_fails(
    cluster: FakeCluster, kubeconfig: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(client: KubernetesClient, seen: Seen) -> None:
        async def fail(http: web.Request) -> None:
            if http.path == api_client.CONFIG_MAPS.path("default") and http.method == "GET":
                seen.note(http)
                raise web.HTTPServiceUnavailable(text="not now")

        cluster.handler.before_request = fail
        cluster.call(cut_without_forgetting, cluster)
        await seen.wait(lambda: seen.count(LISTS) >= 3)
        cluster.handler.before_request = None
        await seen.wait(lambda: seen.names == ["first", "first"])

    play(cluster, kubeconfig, test)
    assert "watch of configmaps: GET /api/v1/namespaces/default/configmaps: '503 NotJson'" in caplog.text


def test_a_list_comes_page_by_page(cluster: FakeCluster, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_client, "_PAGE_SIZE", 2)

    async def test(client: KubernetesClient, seen: Seen) -> None:
        async with labelled(client, "second"), labelled(client, "third"):
            before = seen.count(LISTS)
            found = await client.list(api_client.CONFIG_MAPS, "default", labelSelector=LABEL)
            assert [each["metadata"]["name"] for each in found] == ["first", "second", "third"]
            assert seen.count(LISTS) - before == 2

    play(cluster, kubeconfig, test)
