"""Parts of the operator end together, and a signal ends all."""

import asyncio
import os
import signal
import threading

import pytest

from ringweave.platforms.kubernetes import operator

SOON_S = 250.0


def run(work) -> None:
    async def inside() -> None:
        async with asyncio.timeout(SOON_S):
            await work()

    asyncio.run(inside())


async def forever() -> None:
    await asyncio.Event().wait()


def test_when_one_part_ends_the_others_are_over_too() -> None:
    ended: list[str] = []

    async def tidies_up() -> None:
        try:
            await forever()
        finally:
            await asyncio.sleep(0)
            ended.append("tidy")

    async def work() -> None:
        await operator.run_until_one_ends(asyncio.sleep(0), tidies_up())
        assert ended == ["tidy"]
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(work)


def test_the_error_of_a_part_is_the_error_of_all() -> None:
    async def fails() -> None:
        raise ValueError("of a part")

    with pytest.raises(ValueError, match="of a part"):
        run(lambda: operator.run_until_one_ends(forever(), fails()))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it(number: signal.Signals) -> None:
    before = signal.getsignal(number)

    async def work() -> None:
        with operator.stop_signals() as stop:
            os.kill(os.getpid(), number)
            await operator.run_until_one_ends(stop.wait(), forever())

    run(work)
    assert signal.getsignal(number) is before


def test_beside_the_main_thread_nothing_hears_signals() -> None:
    heard: list[bool] = []

    async def work() -> None:
        with operator.stop_signals() as stop:
            heard.append(stop.is_set())

    thread = threading.Thread(target=run, args=(work,))
    thread.start()
    thread.join(SOON_S)
    assert heard == [False]
