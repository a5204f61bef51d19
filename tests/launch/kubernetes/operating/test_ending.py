"""An operator that is told to stop is gone soon: also where a part of it does not hear its cancellation."""

import asyncio
import logging
import os
import signal
import subprocess
import sys

import pytest

from ringweave.platforms.kubernetes import operator

SOON_S = 250.0


def run(work) -> None:
    async def inside() -> None:
        async with asyncio.timeout(SOON_S):
            await work()

    asyncio.run(inside())


async def at_once() -> None:
    return


async def forever() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("num_lost", [1, 3])
def test_a_part_that_loses_cancellations_is_ended(num_lost: int) -> None:
    # As a watch of kopf's does that ended just before.
    lost = 0

    async def loses() -> None:
        nonlocal lost
        while lost < num_lost:
            try:
                await forever()
            except asyncio.CancelledError:
                lost += 1
        await forever()

    run(lambda: operator.run_until_one_ends(at_once(), loses(), grace_s=0.01))
    assert lost == num_lost


def test_what_a_part_left_behind_is_ended_and_what_was_there_before_is_not() -> None:
    async def work() -> None:
        before = asyncio.create_task(forever())
        left: list[asyncio.Task[None]] = []

        async def leaves() -> None:
            left.append(asyncio.create_task(forever()))

        await operator.run_until_one_ends(leaves(), forever())
        assert left[0].cancelled()
        assert not before.done()
        before.cancel()

    run(work)


def test_the_error_of_a_part_is_the_error_of_all() -> None:
    async def fails() -> None:
        raise ValueError("of a part")

    with pytest.raises(ValueError, match="of a part"):
        run(lambda: operator.run_until_one_ends(forever(), fails()))


def test_what_does_not_end_is_given_up_and_named(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        over = asyncio.Event()

        async def stays() -> None:
            while not over.is_set():
                try:
                    await over.wait()
                except asyncio.CancelledError:
                    continue

        task = asyncio.create_task(stays(), name="stubborn")
        await asyncio.sleep(0)
        left = await operator.cancel_other_tasks({asyncio.current_task()}, limit_s=0.3)
        assert left == {task}
        over.set()
        await task

    with caplog.at_level(logging.WARNING):
        run(work)
    assert "abandoned after 0.3 s: stubborn" in caplog.text


def test_its_end_begins_once_a_signal_is_heard() -> None:
    async def work() -> None:
        stop, told = asyncio.Event(), []

        async def stopped() -> None:
            await stop.wait()

        with operator.handle_stop_signals(stop) as hear:
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGTERM, lambda: None)  # as kopf does
            hear()
            os.kill(os.getpid(), signal.SIGTERM)
            await operator.run_until_one_ends(stopped(), forever(), on_shutdown=lambda: told.append(1))
        assert told == [1]

    run(work)


@pytest.mark.slow
def test_a_process_that_does_not_end_is_ended_by_force_and_says_where_it_was() -> None:
    program = (
        "import threading\n"
        "from ringweave.platforms.kubernetes import operator\n"
        "operator.kill_process_later(0.1)\n"
        "def stands_still():\n"
        "    threading.Event().wait()\n"
        "stands_still()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=SOON_S, check=False)
    assert done.returncode == 1
    assert "operator: still running 0.1 s after it was told to stop; killed" in done.stderr
    assert "stands_still" in done.stderr
