"""One of several operators leads; when it dies or cannot renew, another one does, and never both."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from ringweave.errors import LaunchError
from ringweave.platforms.kubernetes import api_client
from ringweave.platforms.kubernetes.action_executor import JobKey
from ringweave.platforms.kubernetes.api_client import ApiError, KubernetesClient
from ringweave.platforms.kubernetes.operator import (
    LEASE_RELEASE_TIMEOUT_S,
    LeaderElection,
    LeaseSettings,
    LostLeaseError,
)
from tests.clock import Clock

NOW_S = 1_000_000.0


def settings(identity: str, namespace: str = "default", renew_s: float = 4.0) -> LeaseSettings:
    return LeaseSettings(namespace=namespace, identity=identity, renew_s=renew_s)


def test_the_second_waits_until_the_first_has_not_renewed_for_the_whole_time(kubeconfig: Path) -> None:
    clock = Clock(NOW_S)

    async def run() -> None:
        async with KubernetesClient(lambda: api_client.connection_info({"KUBECONFIG": str(kubeconfig)})) as client:
            first, second = (LeaderElection(client, settings(name), clock, clock) for name in ("first", "second"))
            await first.wait_acquired()
            assert not await second._try_acquire()
            clock.now_s += 14.0
            assert not await second._try_acquire()
            assert await first._try_acquire()  # renewed: the second begins to count anew
            clock.now_s += 14.0
            assert not await second._try_acquire()
            clock.now_s += 15.1
            assert await second._try_acquire()
            assert not await first._try_acquire()
            again = LeaderElection(client, settings("second"), clock, clock)
            assert await again._try_acquire(), "the same after a restart of its container"
            await again.release()
            assert await first._try_acquire()
            await first.release()

    asyncio.run(run())


def test_one_that_has_lost_it_stops(kubeconfig: Path) -> None:
    clock = Clock(NOW_S)

    async def run() -> None:
        async with KubernetesClient(lambda: api_client.connection_info({"KUBECONFIG": str(kubeconfig)})) as client:
            first = LeaderElection(client, settings("first", renew_s=1.0), clock, clock)
            second = LeaderElection(client, settings("second"), clock, clock)
            await first.wait_acquired()
            assert not await second._try_acquire()
            clock.now_s += 15.1
            assert await second._try_acquire()
            with pytest.raises(LostLeaseError, match="lost, expected to hold it"):
                await first.renew_until_lost()
            await second.release()

    asyncio.run(run())


class Virtual(asyncio.SelectorEventLoop):
    """Time goes to the next timer at once, where nothing else is to be done."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self.now_s = max(self.now_s, self._scheduled[0].when())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


class Failing:
    """An API server that fails some times before it makes the lease."""

    def __init__(self, *errors: Exception) -> None:
        self._errors = list(errors)

    async def find(self, *_: Any) -> None:
        if self._errors:
            raise self._errors.pop(0)

    async def create(self, *_: Any) -> None:
        return


def an_error(status: int) -> ApiError:
    return ApiError(f"it says {status}", status=status, reason="Unknown", message="")


def test_one_that_waits_outlasts_an_api_server_that_is_away() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        server = Failing(LaunchError("connection refused"), an_error(500), an_error(429), TimeoutError())
        leader = LeaderElection(server, settings("patient"), Clock(NOW_S), loop.time)  # type: ignore[arg-type]
        await leader.wait_acquired()
        assert leader.is_leader
        assert loop.time() == 4 * 15.0 / 4

    with asyncio.Runner(loop_factory=Virtual) as runner:
        runner.run(run())


@pytest.mark.parametrize("status", [401, 403])
def test_one_that_may_not_have_the_lease_says_so(status: int) -> None:
    async def run() -> None:
        leader = LeaderElection(Failing(an_error(status)), settings("nobody"), Clock(NOW_S))  # type: ignore[arg-type]
        with pytest.raises(ApiError, match=f"it says {status}"):
            await leader.wait_acquired()

    asyncio.run(run())


class Silent:
    """An API server that makes the lease, and answers nothing after some renewals."""

    def __init__(self, num_answers: int) -> None:
        self._left, self._lease = num_answers, None

    async def find(self, *_: Any) -> Any:
        if self._left == 0:
            await asyncio.Event().wait()
        self._left -= 1
        return self._lease

    async def create(self, _kind: Any, _namespace: Any, lease: Any) -> None:
        self._lease = {**lease, "metadata": {**lease["metadata"], "resourceVersion": "1"}}

    replace = create


@pytest.mark.parametrize("num_answers", [1, 2, 7])
def test_one_that_gets_no_answer_stops_before_another_may_begin(num_answers: int) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        leader = LeaderElection(Silent(num_answers), settings("silent"), Clock(NOW_S), loop.time)  # type: ignore[arg-type]
        await leader.wait_acquired()
        with pytest.raises(LostLeaseError):
            await leader.renew_until_lost()
        renewed_s = (num_answers - 1) * 4.0
        assert loop.time() == renewed_s + 15.0 - 4.0
        assert not leader.is_leader
        await leader.release()
        assert loop.time() == renewed_s + 15.0 - 4.0 + LEASE_RELEASE_TIMEOUT_S

    with asyncio.Runner(loop_factory=Virtual) as runner:
        runner.run(run())


def test_one_that_stood_still_too_long_begins_nothing(kubeconfig: Path) -> None:
    clock = Clock(NOW_S)

    async def run() -> None:
        async with KubernetesClient(lambda: api_client.connection_info({"KUBECONFIG": str(kubeconfig)})) as client:
            leader = LeaderElection(client, settings("still"), clock, clock)
            await leader.wait_acquired()
            looked: list[JobKey] = []

            async def look(key: JobKey) -> None:
                looked.append(key)

            await leader.guard(look)(("default", "a"))
            clock.now_s += 11.0  # a lease of 15 s, less one renewal
            with pytest.raises(LostLeaseError, match="lost, expected to hold it"):
                await leader.guard(look)(("default", "b"))
            assert looked == [("default", "a")]
            await leader.release()

    asyncio.run(run())
