"""The bridge on simulated devices: right whatever runs late or early, and every planted fault is seen."""

import ctypes
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ringweave import schedules
from ringweave.comm import bridge
from ringweave.comm.device_regions import DeviceRegion
from ringweave.schedules import CollectiveKind
from ringweave.schedules.program import Opcode, Pipelining, segment_marks
from tests.comm.bridge import faults, worlds
from tests.comm.bridge.simulated_device import EARLY, LATE, RANDOM, SimulatedDevice
from tests.comm.bridge.worlds import KINDS, SCHEDULES, Case, Fault, compiled, random_cases, run_world

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
    "word before the last copy": (faults.WordBeforeTheLastCopy, "ahead"),
    "word at the beginning": (faults.WordAtTheBeginning, "ahead"),
    "word of the one before": (faults.WordOfTheOneBefore, "ahead"),
    "ahead on another stream": (faults.AheadOnOtherStream, "ahead"),
    "one number for two": (faults.OneNumberForTwo, "ahead"),
}
PAIRS = [(kind, name) for kind in KINDS for name in schedules.schedule_names(kind)]
"""Each collective with its schedules."""


def case(name: str, num_segments: int, use: str, seed: int, kind: CollectiveKind = "allreduce", root: int = 1) -> Case:
    pipelining = Pipelining(num_segments=num_segments, lag=seed % 2, window=1 + seed % 4)
    return Case(
        kind=kind,
        schedule=name,
        num_elements=60,
        pipelining=pipelining,
        use=use,
        seed=seed,
        root=root,
        as_list=bool(seed % 2),
    )


@pytest.mark.parametrize("kind", [LATE, EARLY, RANDOM])
@pytest.mark.parametrize(("collective", "name"), PAIRS)
def test_every_schedule_on_every_device(collective: CollectiveKind, name: str, kind: str) -> None:
    uses = ("wait", "ahead", "future", "drop")
    for num_ranks in (1, 2, 3, 5):
        batches = [[case(name, segments, use, 10 + segments, collective) for use in uses] for segments in (1, 4)]
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
    marks = segment_marks(program, (0, 10, 20, 60))
    assert {segment for segments in marks.first_touch.values() for segment in segments} == {0, 1, 2}
    assert marks.missing_from(marks.last_arrival) == []
    assert segment_marks(program, (0, 60)).num_segments == 1


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
    staged = opened.open(tensor.device)
    staged.discard()
    region = DeviceRegion(tensor=tensor, start=0, is_input=True, is_output=True)
    message = staged.stage(0, torch.float32, 100, [region])
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


@pytest.fixture(scope="module", autouse=True)
def _memory_is_given_back() -> Iterator[None]:
    """Planted faults leave 240 MB that the allocator keeps, for as long as the process of tests runs."""
    yield
    worlds.compiled.cache_clear()
    ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture
def num_collectives(request: pytest.FixtureRequest) -> int:
    """Random collectives of a test; a thousand faults are planted beside ten thousand of them."""
    return int(request.config.getoption("--collectives"))


def plant(
    num_ranks: int, name: str, num_segments: int, seed: int, collective: CollectiveKind = "allreduce"
) -> list[tuple[str, bool]]:
    """Each kind of fault in rank 0 of a world of its own, and whether it is caught; rank 1 is the root, or rank 0."""
    found = []

    def try_fault(kind: str, fault: Any, batch: list[Case]) -> None:
        found.append((f"{kind}, {collective}", not all(run_world(num_ranks, [batch], fault.kind, fault))))

    for segment in range(num_segments):
        # A wait for a later segment stands for that of an earlier one, so of blocks all later ones are dropped too.
        dropped = [segment]
        if collective == "reduce-scatter":
            dropped = [place for place in range(num_ranks * num_segments) if place % num_segments >= segment]
        batch = [case(name, num_segments, "wait", seed, collective, root=0)]
        try_fault("wait dropped", faults.WaitDropped(*dropped), batch)
        # Rank 0's own block is the first one: others come in an allgather, and it comes in a reduce-scatter.
        arriving = segment + (num_segments if collective == "allgather" else 0)
        batch = [case(name, num_segments, "wait", seed, collective, root=1)]
        try_fault("put early", faults.PutEarly(arriving), batch)
    for kind, (make_fault, use) in BY_USE.items():
        if collective == "broadcast" and make_fault is faults.FetchUnordered:
            continue  # rank 0 fetches nothing
        batch = [case(name, num_segments, use, seed + each, collective) for each in range(4)]
        try_fault(kind, make_fault(), batch)
    return found


def check_caught(results: list[tuple[str, bool]]) -> None:
    missed = [kind for kind, is_caught in results if not is_caught]
    assert not missed, f"{len(missed)} of {len(results)} missed: {sorted(set(missed))}"


@pytest.mark.parametrize(("collective", "name"), PAIRS)
def test_planted_faults_are_caught(collective: CollectiveKind, name: str) -> None:
    check_caught(plant(3, name, 2, seed=1, collective=collective))


@pytest.mark.slow
def test_many_planted_faults_are_caught(num_collectives: int) -> None:
    is_thorough = num_collectives >= 10_000
    results = []
    for seed, num_ranks in enumerate((3, 2) if is_thorough else (2,)):
        for num_segments in (1, 3, 5) if is_thorough else (1, 3):
            for collective, name in PAIRS:
                results += plant(num_ranks, name, num_segments, 10 * seed, collective)
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
