"""The queue: a job is never looked at twice at the same time, no poke is lost, failures wait, timers wake."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from ringweave.errors import LaunchError
from ringweave.platforms.kubernetes.action_executor import JobKey
from ringweave.platforms.kubernetes.api_client import ApiError
from ringweave.platforms.kubernetes.reconciler import ReconcileQueue, ReconcileResult

JOB = ("default", "text")
SOON_S = 250.0


def serve(
    reconcile: Callable[[JobKey], Awaitable[ReconcileResult]],
    test: Callable[[ReconcileQueue], Awaitable[None]],
    clock=lambda: 0.0,
) -> None:
    async def run() -> None:
        queue = ReconcileQueue(reconcile, clock, num_workers=3)
        working = asyncio.create_task(queue.run_workers())
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

    async def reconcile(_: JobKey) -> ReconcileResult:
        nonlocal begun, running
        begun, running = begun + 1, running + 1
        assert running == 1
        await gate.wait()
        running -= 1
        if begun == 2:
            again.set()
        return ReconcileResult()

    async def test(queue: ReconcileQueue) -> None:
        queue.enqueue(JOB)
        while not begun:
            await asyncio.sleep(0)
        for _ in range(5):
            queue.enqueue(JOB)
        gate.set()
        await again.wait()
        await asyncio.sleep(0.05)
        assert begun == 2

    serve(reconcile, test)


def test_what_did_something_is_looked_at_again() -> None:
    passes = iter([ReconcileResult(requeue=True), ReconcileResult(requeue=True), ReconcileResult()])
    done = asyncio.Event()

    async def reconcile(_: JobKey) -> ReconcileResult:
        found = next(passes)
        if not found.requeue:
            done.set()
        return found

    async def test(queue: ReconcileQueue) -> None:
        queue.enqueue(JOB)
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

    async def reconcile(_: JobKey) -> ReconcileResult:
        nonlocal tries, now
        tries += 1
        now += 100.0
        if tries < 3:
            raise error
        done.set()
        return ReconcileResult()

    async def test(queue: ReconcileQueue) -> None:
        queue.enqueue(JOB)
        await done.wait()
        assert tries == 3

    serve(reconcile, test, clock=lambda: asyncio.get_running_loop().time())


def test_a_wake_comes_at_its_time() -> None:
    times: list[float] = []
    done = asyncio.Event()

    async def reconcile(_: JobKey) -> ReconcileResult:
        now = asyncio.get_running_loop().time()
        times.append(now)
        if len(times) == 2:
            done.set()
            return ReconcileResult()
        return ReconcileResult(requeue_at_s=now + 0.2)

    async def test(queue: ReconcileQueue) -> None:
        queue.enqueue(JOB)
        await done.wait()
        assert times[1] - times[0] >= 0.2

    serve(reconcile, test, clock=lambda: asyncio.get_running_loop().time())
