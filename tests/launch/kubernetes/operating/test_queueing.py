"""The queue: a job is never looked at twice at the same time, no poke is lost, failures wait, timers wake."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from ringweave.errors import LaunchError
from ringweave.launch.kubernetes.api.failures import ApiError
from ringweave.launch.kubernetes.operating.controller import Pass
from ringweave.launch.kubernetes.operating.looking import Key
from ringweave.launch.kubernetes.operating.queueing import Queue

JOB = ("default", "text")
SOON_S = 250.0


def serve(
    reconcile: Callable[[Key], Awaitable[Pass]], test: Callable[[Queue], Awaitable[None]], clock=lambda: 0.0
) -> None:
    async def run() -> None:
        queue = Queue(reconcile, clock, num_workers=3)
        working = asyncio.create_task(queue.serve())
        try:
            async with asyncio.timeout(SOON_S):
                await test(queue)
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    asyncio.run(run())


def test_a_poke_during_a_pass_leads_to_one_more_and_never_to_two_at_once() -> None:
    begun, running = 0, 0
    gate, again = asyncio.Event(), asyncio.Event()

    async def reconcile(_: Key) -> Pass:
        nonlocal begun, running
        begun, running = begun + 1, running + 1
        assert running == 1
        await gate.wait()
        running -= 1
        if begun == 2:
            again.set()
        return Pass()

    async def test(queue: Queue) -> None:
        queue.poke(JOB)
        while not begun:
            await asyncio.sleep(0)
        for _ in range(5):
            queue.poke(JOB)
        gate.set()
        await again.wait()
        await asyncio.sleep(0.05)
        assert begun == 2

    serve(reconcile, test)


def test_what_did_something_is_looked_at_again() -> None:
    passes = iter([Pass(again=True), Pass(again=True), Pass()])
    done = asyncio.Event()

    async def reconcile(_: Key) -> Pass:
        found = next(passes)
        if not found.again:
            done.set()
        return found

    async def test(queue: Queue) -> None:
        queue.poke(JOB)
        await done.wait()

    serve(reconcile, test)


@pytest.mark.parametrize(
    "error",
    [
        LaunchError("nobody answers"),
        ApiError("changed", status=409, reason="Conflict", message=""),
        RuntimeError("a bug"),
    ],
)
def test_what_failed_is_tried_again(error: Exception) -> None:
    tries = 0
    done = asyncio.Event()
    now = 0.0

    async def reconcile(_: Key) -> Pass:
        nonlocal tries, now
        tries += 1
        now += 100.0
        if tries < 3:
            raise error
        done.set()
        return Pass()

    async def test(queue: Queue) -> None:
        queue.poke(JOB)
        await done.wait()
        assert tries == 3

    serve(reconcile, test, clock=lambda: asyncio.get_running_loop().time())


def test_a_wake_comes_at_its_time() -> None:
    times: list[float] = []
    done = asyncio.Event()

    async def reconcile(_: Key) -> Pass:
        now = asyncio.get_running_loop().time()
        times.append(now)
        if len(times) == 2:
            done.set()
            return Pass()
        return Pass(wake_s=now + 0.2)

    async def test(queue: Queue) -> None:
        queue.poke(JOB)
        await done.wait()
        assert times[1] - times[0] >= 0.2

    serve(reconcile, test, clock=lambda: asyncio.get_running_loop().time())
