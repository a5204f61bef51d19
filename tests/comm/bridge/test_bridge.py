"""The bridge on simulated devices: right whatever runs late or early, and every planted fault is seen."""

import random
from collections.abc import Callable

import pytest
import torch

from ringweave import schedules
from ringweave.comm import bridge
from ringweave.schedules.program import Opcode, Pipelining
from tests.comm.bridge import faults
from tests.comm.bridge.simulated_device import EARLY, LATE, RANDOM, SimulatedDevice
from tests.comm.bridge.worlds import SCHEDULES, Case, Fault, compiled, random_cases, run_world

BY_SEGMENT: dict[str, Callable[[int], Fault]] = {
    "wait dropped": faults.WaitDropped,
    "put early": faults.PutEarly,
}
BY_USE: dict[str, tuple[Callable[[], Fault], str]] = {
    "staging reused": (faults.StagingReused, "wait"),
    "tensor let go": (faults.TensorLetGo, "drop"),
    "put on another stream": (faults.PutOnFetchStream, "wait"),
    "called on another stream": (faults.ReadyOnOtherStream, "wait"),
    "fetched before the script is there": (faults.FetchUnordered, "wait"),
    "wait without order": (faults.WaitUnordered, "wait"),
    "future before done": (faults.FutureBeforeDone, "future"),
    "done before the last copy": (faults.DoneTooEarly, "wait"),
    "done before the last copy, future": (faults.DoneTooEarly, "future"),
}


def case(name: str, num_segments: int, use: str, seed: int, num_elements: int = 60) -> Case:
    pipelining = Pipelining(num_segments=num_segments, lag=seed % 2, window=1 + seed % 4)
    return Case(schedule=name, num_elements=num_elements, pipelining=pipelining, use=use, seed=seed)


@pytest.mark.parametrize("kind", [LATE, EARLY, RANDOM])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_on_every_device(name: str, kind: str) -> None:
    for num_ranks in (1, 2, 3, 5):
        batches = [
            [case(name, segments, use, 10 + segments) for use in ("wait", "future", "drop")] for segments in (1, 4)
        ]
        assert all(run_world(num_ranks, batches, kind))


@pytest.mark.parametrize("name", SCHEDULES)
def test_marks_are_the_first_touch_and_the_last_arrival(name: str) -> None:
    program = compiled(name, 4, 1, 60, Pipelining(num_segments=3, lag=1, window=4))
    marks, instructions = program.segment_marks, program.program.instructions
    for segment in range(3):
        start, stop = marks.bounds[segment : segment + 2]
        own = [index for index, each in enumerate(instructions) if start <= each.start < stop]
        arrivals = [index for index in own if instructions[index].opcode == Opcode.WAIT_RECV]
        assert segment in marks.last_arrival[arrivals[-1]]
        assert segment in marks.last_use[own[-1]]
        (first,) = (index for index, segments in marks.first_touch.items() if segment in segments)
        assert all(instructions[index].opcode == Opcode.POST_RECV for index in own if index < first)


def test_a_piece_may_lie_in_several_segments() -> None:
    program = compiled("ring", 2, 0, 60, Pipelining()).program
    marks = bridge.marks(program, (0, 10, 20, 60))
    assert {segment for segments in marks.first_touch.values() for segment in segments} == {0, 1, 2}
    assert marks.missing_from(marks.last_arrival) == []
    assert bridge.marks(program, (0, 60)).num_segments == 1


def test_staging_memory_grows_and_is_bounded() -> None:
    pinned: list[int] = []

    def pin(num_bytes: int) -> torch.Tensor:
        pinned.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)

    pool = bridge.StagingPool(pin)
    for num_bytes in (10, 20, 30, 2**20, 2**20 + 1, 5, 5, 5):
        assert pool.take(num_bytes).memory.numel() >= num_bytes
    assert pinned == [2**20, 2**20, 2 * 2**20]
    pool.close()


def test_a_message_given_up_keeps_its_memory_until_its_copies_are_done() -> None:
    device = SimulatedDevice(LATE)
    runtime: object = device
    opened = bridge.DeviceBridge(lambda _: runtime)  # type: ignore[arg-type, return-value]
    tensor = device.allocate(100, torch.float32)
    staged = opened.open(tensor)
    staged.discard()
    message = staged.stage(0)
    staged.fetch(0, 0, 100)
    buffer = staged._buffer
    assert buffer is not None
    staged.discard()
    staged.discard()
    fetch_stream = opened._channel(tensor.device, 0).fetch_stream
    assert fetch_stream.ops
    buffer.wait_idle()
    assert not fetch_stream.ops
    assert message.numel() == 100
    assert not staged.is_complete()


@pytest.fixture
def num_collectives(request: pytest.FixtureRequest) -> int:
    """Random collectives of a test; a thousand faults are planted beside ten thousand of them."""
    return int(request.config.getoption("--collectives"))


def plant(num_ranks: int, name: str, num_segments: int, seed: int) -> list[tuple[str, bool]]:
    """Each kind of fault in rank 0 of a world of its own, and whether it is caught."""
    found = []
    for segment in range(num_segments):
        for kind, make in BY_SEGMENT.items():
            fault = make(segment)
            batch = [case(name, num_segments, "wait", seed)]
            found.append((kind, not all(run_world(num_ranks, [batch], fault.kind, fault))))  # type: ignore[attr-defined]
    for kind, (make_fault, use) in BY_USE.items():
        planted = make_fault()
        batch = [case(name, num_segments, use, seed + each) for each in range(4)]
        found.append((kind, not all(run_world(num_ranks, [batch], planted.kind, planted))))  # type: ignore[attr-defined]
    return found


def check_caught(results: list[tuple[str, bool]]) -> None:
    missed = [kind for kind, is_caught in results if not is_caught]
    assert not missed, f"{len(missed)} of {len(results)} missed: {sorted(set(missed))}"


@pytest.mark.parametrize("name", SCHEDULES)
def test_planted_faults_are_caught(name: str) -> None:
    check_caught(plant(3, name, 2, seed=1))


@pytest.mark.slow
def test_many_planted_faults_are_caught(num_collectives: int) -> None:
    is_thorough = num_collectives >= 10_000
    results = []
    for seed, num_ranks in enumerate((2, 3, 2, 4) if is_thorough else (2,)):
        for num_segments in (1, 3, 5):
            for name in SCHEDULES:
                results += plant(num_ranks, name, num_segments, 10 * seed)
    assert len(results) >= (1000 if is_thorough else 250)
    assert len({kind for kind, _ in results}) >= 6
    check_caught(results)


@pytest.mark.slow
def test_random_collectives_are_right(num_collectives: int) -> None:
    rng = random.Random(5)
    num_run = 0
    while num_run < num_collectives:
        batches = [random_cases(rng, rng.randrange(1, 6)) for _ in range(100)]
        kind = rng.choice([LATE, EARLY, RANDOM])
        assert all(run_world(rng.choice([1, 2, 2, 2, 3, 3, 4]), batches, kind, seed=num_run))
        num_run += sum(map(len, batches))


def test_schedules_are_all_there() -> None:
    assert set(SCHEDULES) == set(schedules.SCHEDULE_NAMES) - {schedules.NATIVE}
