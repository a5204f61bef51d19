"""Deaths in the midst of collectives on simulated devices: streams go on, memory comes back, and the next one is right.

Time is virtual, so a thousand deaths take seconds.
"""

import gc
import random
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ringweave import schedules
from ringweave.comm import bridge
from ringweave.comm.work import PendingWork
from ringweave.schedules.program import Pipelining
from tests import effort
from tests.comm.bridge.simulated_device import NUM_BLOCKS, RANDOM, SimulatedDevice
from tests.comm.bridge.worlds import KINDS, Case, Fault, Member, Wires, WireTransport, random_cases

NUM_RANKS = 3
COUNTED = (
    bridge.StagedMessage,
    bridge.DeviceChannel,
    bridge.StagingBuffer,
    bridge.StreamGate,
    bridge.DeviceBridge,
    PendingWork,
)


class DeathError(Exception):
    """The process is gone."""


class DyingTransport(WireTransport):
    """Of a rank that dies after so many sends and receives."""

    def __init__(self, wires: Wires, rank: int, num_operations: int) -> None:
        super().__init__(wires, rank)
        self.num_left = num_operations

    def wait(self, handle: Any, timeout_s: float) -> None:
        self.num_left -= 1
        if self.num_left < 0:
            raise DeathError
        super().wait(handle, timeout_s)


class CountingDevice(SimulatedDevice):
    """Knows how much of the host's memory is pinned."""

    pinned_bytes = 0

    def pin(self, num_bytes: int) -> torch.Tensor:
        memory = super().pin(num_bytes)
        self.pinned_bytes += num_bytes
        weakref.finalize(memory, self._unpinned, num_bytes)
        return memory

    def _unpinned(self, num_bytes: int) -> None:
        self.pinned_bytes -= num_bytes


def run_until_death(member: Member, case: Case, wires: Wires) -> None:
    """One collective, which the script's stream waits for; as the engine ends it when a peer is gone."""
    _, message, work = member._call(case)
    try:
        member._run_in_channel(case, message)
    except Exception as error:
        wires.cut()
        message.release()
        work.set_finished(error)
    else:
        work.set_finished()
    work.resolve_future()


def in_threads(num: int, run: Callable[[int], object]) -> None:
    errors: list[Exception] = []

    def run_one(rank: int) -> None:
        try:
            run(rank)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run_one, args=(rank,), daemon=True) for rank in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def live_objects() -> Counter[str]:
    gc.collect()
    return Counter(type(each).__name__ for each in gc.get_objects() if type(each) in COUNTED)


def one_death(devices: list[CountingDevice], case: Case, dies_after: int) -> bool:
    """A collective in which the last rank dies, and one of the next generation; whether that one is right."""
    wires = Wires(NUM_RANKS)
    members = [Member(rank, NUM_RANKS, wires, devices[rank], Fault()) for rank in range(NUM_RANKS)]
    members[-1].channel.transport = DyingTransport(wires, NUM_RANKS - 1, dies_after)
    in_threads(NUM_RANKS, lambda rank: run_until_death(members[rank], case, wires))
    for member in members:
        member.device.synchronize()  # it would not end if a stream waited for ever
        member.results.clear()
        member.bridge.close()
    wires = Wires(NUM_RANKS)
    members = [Member(rank, NUM_RANKS, wires, devices[rank], Fault()) for rank in range(NUM_RANKS)]
    in_threads(NUM_RANKS, lambda rank: members[rank].run([case]))
    is_right = all(member.check() for member in members)
    for member in members:
        member.bridge.close()
        del member.device.streams[2:]  # all but the script's
    return is_right


@pytest.mark.slow
def test_memory_is_steady_over_deaths() -> None:
    rng, num_deaths = random.Random(3), effort.share_of(1000)
    devices = [CountingDevice(RANDOM, rank) for rank in range(NUM_RANKS)]
    of_other_tests = live_objects()
    for number in range(num_deaths):
        (case,) = random_cases(rng, 1)
        case = Case(
            kind=KINDS[number % len(KINDS)],
            schedule=rng.choice(schedules.schedule_names(KINDS[number % len(KINDS)])),
            num_elements=64,
            pipelining=case.pipelining,
            dtype=case.dtype,
            op=case.op,
            root=case.root,
            as_list=case.as_list,
            use="ahead",
            seed=number,
        )
        assert one_death(devices, case, dies_after=rng.randrange(6)), (number, case)
        if number % 100 == 9:
            assert live_objects() <= of_other_tests, "of groups that are gone"
            assert [device.pinned_bytes for device in devices] == [0] * NUM_RANKS
            assert [len(device._free) for device in devices] == [NUM_BLOCKS] * NUM_RANKS, "all of the device's memory"
            assert not any(stream.ops for device in devices for stream in device.streams)


def test_a_stream_that_nobody_releases_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridge.StagedMessage, "discard", lambda _self: None)
    devices = [CountingDevice(RANDOM, rank) for rank in range(NUM_RANKS)]
    case = Case(schedule="ring", num_elements=64, pipelining=Pipelining(), use="ahead")
    with pytest.raises(AssertionError, match="a stream waits for a word that nobody writes"):
        one_death(devices, case, dies_after=0)
