import asyncio
from typing import Any

from ringweave.launch.kubernetes.api import kinds
from ringweave.launch.kubernetes.api.failures import ApiError
from ringweave.testing.kubernetes.kubelet import PlayedKubelet


class Empty:
    """An API server with nothing in it."""

    def __init__(self) -> None:
        self.read: list[kinds.Kind] = []

    async def list(self, kind: kinds.Kind, *_: Any, **__: Any) -> list[Any]:
        self.read.append(kind)
        return []

    async def get(self, kind: kinds.Kind, *_: Any) -> Any:
        self.read.append(kind)
        raise ApiError("none", status=404, reason="NotFound", message="none")


def test_pods_are_read_before_the_config_that_is_made_before_them() -> None:
    """Else both may be made in between: then Pods of an elastic job never say where their coordinators are."""
    client: Any = Empty()
    assert asyncio.run(PlayedKubelet(client, "default").step("job")) == {}
    assert client.read == [kinds.PODS, kinds.CONFIG_MAPS]
