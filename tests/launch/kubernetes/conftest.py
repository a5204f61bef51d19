"""A fake API server with the resource defined, for tests of the parts of the operator."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringweave.launch.kubernetes.api import connecting, kinds
from ringweave.launch.kubernetes.api.client import Client
from ringweave.launch.kubernetes.resource.definition import definition
from ringweave.testing.kubernetes.cluster import FakeCluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(bookmark_s=0.5) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def kubeconfig(cluster: FakeCluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = cluster.kubeconfig(tmp_path_factory.mktemp("fake") / "config")

    async def define() -> None:
        async with Client(lambda: connecting.connection({"KUBECONFIG": str(path)})) as client:
            await client.create(kinds.DEFINITIONS, None, definition())

    asyncio.run(define())
    return path
