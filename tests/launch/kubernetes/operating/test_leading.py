"""One of several operators leads; when it dies or cannot renew, another one does, and never both."""

import asyncio
from pathlib import Path

import pytest

from ringweave.launch.kubernetes.api import connecting
from ringweave.launch.kubernetes.api.client import Client
from ringweave.launch.kubernetes.operating.leading import Leader, LeaseSettings, LostLeaseError


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def settings(identity: str, namespace: str = "default", renew_s: float = 4.0) -> LeaseSettings:
    return LeaseSettings(namespace=namespace, identity=identity, renew_s=renew_s)


def test_the_second_waits_until_the_first_has_not_renewed_for_the_whole_time(kubeconfig: Path) -> None:
    clock = Clock()

    async def run() -> None:
        async with Client(lambda: connecting.connection({"KUBECONFIG": str(kubeconfig)})) as client:
            first, second = (Leader(client, settings(name), clock) for name in ("first", "second"))
            await first.acquire()
            assert not await second._try()
            clock.now += 14.0
            assert not await second._try()
            assert await first._try()  # renewed: the second begins to count anew
            clock.now += 14.0
            assert not await second._try()
            clock.now += 15.1
            assert await second._try()
            assert not await first._try()
            again = Leader(client, settings("second"), clock)
            assert await again._try(), "the same after a restart of its container"
            await again.release()
            assert await first._try()
            await first.release()

    asyncio.run(run())


def test_one_that_has_lost_it_stops(kubeconfig: Path) -> None:
    clock = Clock()

    async def run() -> None:
        async with Client(lambda: connecting.connection({"KUBECONFIG": str(kubeconfig)})) as client:
            first = Leader(client, settings("first", renew_s=1.0), clock)
            second = Leader(client, settings("second"), clock)
            await first.acquire()
            assert not await second._try()
            clock.now += 15.1
            assert await second._try()
            with pytest.raises(LostLeaseError, match="lost, expected to hold it"):
                await first.keep()
            await second.release()

    asyncio.run(run())
