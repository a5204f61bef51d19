import asyncio
from typing import Any

from ringweave.platforms.kubernetes import api_client
from ringweave.platforms.kubernetes.api_client import ApiError
from tests.fakes.kubernetes.simulated_kubelet import SimulatedKubelet


class Empty:
    """An API server with nothing in it."""

    def __init__(self) -> None:
        self.read: list[api_client.ResourceKind] = []

    async def list(self, kind: api_client.ResourceKind, *_: Any, **__: Any) -> "list[Any]":
        self.read.append(kind)
        return []

    async def get(self, kind: api_client.ResourceKind, *_: Any) -> Any:
        self.read.append(kind)
        raise ApiError("none", status=404, reason="NotFound", message="none")


def test_pods_are_read_before_the_config_that_is_made_before_them() -> None:
    """Else both may be made in between: then Pods of an elastic job never say where their coordinators are."""
    client: Any = Empty()
    assert asyncio.run(SimulatedKubelet(client, "default").advance_pods("job")) == {}
    assert client.read == [api_client.PODS, api_client.CONFIG_MAPS]
