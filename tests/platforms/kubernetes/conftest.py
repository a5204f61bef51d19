"""A fake API server with the resource defined, for tests of the parts of the operator."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringweave.platforms.kubernetes import api_client
from ringweave.platforms.kubernetes.api_client import KubernetesClient
from tests.fakes.kubernetes.fake_cluster import FakeCluster
from tools.kubernetes_crd import custom_resource_definition


@pytest.fixture(scope="module")
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(bookmark_s=0.5) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def kubeconfig(cluster: FakeCluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = cluster.kubeconfig(tmp_path_factory.mktemp("fake") / "config")

    async def define() -> None:
        async with KubernetesClient(lambda: api_client.connection_info({"KUBECONFIG": str(path)})) as client:
            await client.create(api_client.DEFINITIONS, None, custom_resource_definition())

    asyncio.run(define())
    return path
