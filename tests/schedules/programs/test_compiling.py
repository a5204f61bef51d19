"""Programs are safe, end, and give the same sum everywhere, in whatever order ranks and wires take."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringweave import schedules
from ringweave.schedules import Schedule
from ringweave.schedules.generators.direct import direct, direct_allgather, direct_reduce_scatter
from ringweave.schedules.generators.ring import ring, ring_allgather, ring_reduce_scatter
from ringweave.schedules.program import Instruction, Opcode, Pipelining, RankProgram, compile_program
from tests import effort
from tests.schedules import samples
from tests.schedules.programs.worlds import ViolationError, World, check_exposure

PIPELINING = st.builds(
    Pipelining,
    num_segments=st.integers(1, 8),
    lag=st.integers(0, 4),
    window=st.integers(1, 6),
    ahead=st.none() | st.integers(0, 5),
)
PACE = st.sampled_from(["even", "one slow", "wires slow", "ranks slow"])
RANDOM = st.randoms(use_true_random=False)
GENERATOR = st.sampled_from(sorted(samples.ALL))


def compile_all(
    schedule: Schedule, num_elements: int, pipelining: Pipelining, nodes: Sequence[int] | None = None
) -> list[RankProgram]:
    """`nodes` is the node of each rank; None puts each on a node of its own."""
    ranks = range(schedule.num_ranks)
    parts = [schedules.project_rank(schedule, rank) for rank in ranks]
    alike = [{other for other in ranks if nodes and nodes[other] == nodes[rank] and other != rank} for rank in ranks]
    return [
        compile_program(schedule, part, num_elements, pipelining, neighbours)
        for part, neighbours in zip(parts, alike, strict=True)
    ]


def summands(expression: Any) -> list[int]:
    """The ranks in a sum of sums."""
    return [expression] if isinstance(expression, int) else [r for side in expression for r in summands(side)]


def check_sums(memories: Sequence[list[Any]]) -> None:
    for number, values in enumerate(zip(*memories, strict=True)):
        if sorted(summands(values[0])) != list(range(len(memories))):
            raise ViolationError(f"element {number} is {values[0]}")
        if len(set(values)) > 1:
            raise ViolationError(f"element {number} was combined in several orders: {set(values)}")


@pytest.mark.slow
@settings(max_examples=effort.share_of(800))
@given(GENERATOR, st.integers(1, 5), st.integers(0, 20), PIPELINING, PACE, st.booleans(), RANDOM)
def test_every_rank_ends_with_the_same_sum(
    name: str, num_ranks: int, num_elements: int, pipelining: Pipelining, pace: str, eager: bool, random: Random
) -> None:
    schedule = samples.ALL[name](num_ranks, random)
    schedules.verify(schedule)
    programs = compile_all(schedule, num_elements, pipelining)
    for program in programs:
        check_exposure(program, pipelining.window)
    memories = World(programs, num_elements, random, eager=eager, pace=pace).run()
    check_sums(memories)
    again = World(programs, num_elements, Random(0), eager=not eager, pace="even").run()
    assert again == memories


@pytest.mark.slow
@settings(max_examples=effort.share_of(800))
@given(GENERATOR, st.integers(2, 6), st.integers(0, 30), PIPELINING, PACE, st.sampled_from([0.0, 0.5, 1.0]), RANDOM)
def test_ranks_that_share_memory_end_with_the_same_sum(
    name: str, num_ranks: int, num_elements: int, pipelining: Pipelining, pace: str, lent: float, random: Random
) -> None:
    schedule = samples.ALL[name](num_ranks, random)
    nodes = [random.randrange(3) if random.random() < 0.5 else 0 for _ in range(num_ranks)]
    programs = compile_all(schedule, num_elements, pipelining, nodes)
    for program in programs:
        check_exposure(program, pipelining.window)
    memories = World(programs, num_elements, random, eager=True, pace=pace, lent=lent).run()
    check_sums(memories)
    apart = compile_all(schedule, num_elements, pipelining)
    assert World(apart, num_elements, Random(0), eager=True, pace="even").run() == memories


@pytest.mark.slow
@settings(max_examples=effort.share_of(400))
@given(
    st.sampled_from(["ring", "direct"]), st.integers(1, 5), st.integers(0, 9), PIPELINING, PACE, st.booleans(), RANDOM
)
def test_chunks_with_owners_stay_in_the_blocks_of_their_owners(
    name: str, num_ranks: int, block: int, pipelining: Pipelining, pace: str, eager: bool, random: Random
) -> None:
    num_elements, nodes = num_ranks * block, [random.randrange(2) for _ in range(num_ranks)]
    scatter, gather = {
        "ring": (ring_reduce_scatter(num_ranks, first=-1), ring_allgather(num_ranks, first=0)),
        "direct": (direct_reduce_scatter(num_ranks), direct_allgather(num_ranks)),
    }[name]
    summed = World(compile_all(scatter, num_elements, pipelining, nodes), num_elements, random, eager=eager, pace=pace)
    gathered = World(compile_all(gather, num_elements, pipelining, nodes), num_elements, random, eager=eager, pace=pace)
    sums, copies = summed.run(), gathered.run()
    for element in range(num_elements):
        owner = element // block
        assert sorted(summands(sums[owner][element])) == list(range(num_ranks))
        assert [memory[element] for memory in copies] == [owner] * num_ranks


def test_content_for_several_neighbours_is_shown_once_in_memory_that_is_used_again() -> None:
    schedule = direct(4)
    (program, *_) = compile_all(schedule, 4 * 64 * 20, Pipelining(num_segments=20, lag=1), [0] * 4)
    stages = program.layout.slots
    assert len(stages) == 20 * 4  # of each segment: three parts for their owners, one result for everybody
    assert sorted({stage.num_readers for stage in stages}) == [1, 3]
    assert program.layout.num_elements == 3 * 4 * 64  # the result is read in three rounds, so three segments overlap
    (apart, *_) = compile_all(schedule, 4 * 64 * 20, Pipelining(num_segments=20, lag=1), [0, 1, 2, 3])
    assert apart.layout.slots == ()


def test_the_world_shows_what_comes_of_places_that_are_used_too_early() -> None:
    programs = compile_all(direct(3), 3 * 64 * 6, Pipelining(num_segments=6, lag=1), [0] * 3)
    assert not breaks(programs, 3 * 64 * 6)
    hasty = [
        replace(p, layout=replace(p.layout, slots=tuple(replace(s, previous_slot=-1) for s in p.layout.slots)))
        for p in programs
    ]
    assert breaks(hasty, 3 * 64 * 6)


@given(GENERATOR, st.integers(1, 6), st.integers(0, 40), PIPELINING, RANDOM)
def test_what_a_program_says_of_itself(
    name: str, num_ranks: int, num_elements: int, pipelining: Pipelining, random: Random
) -> None:
    schedule = samples.ALL[name](num_ranks, random)
    programs = compile_all(schedule, num_elements, pipelining)
    sent = 0
    for program in programs:
        by_do = {do: [i for i in program.instructions if i.opcode == do] for do in Opcode}
        assert program.num_sends == len(by_do[Opcode.SEND]) == len(by_do[Opcode.WAIT_SEND])
        assert len(by_do[Opcode.POST_RECV]) == len(by_do[Opcode.WAIT_RECV]) == program.num_pieces - program.num_sends
        assert program.peers == {i.peer for i in program.instructions}
        assert {i.piece for i in program.instructions} == set(range(program.num_pieces))
        scratch = [i for i in by_do[Opcode.POST_RECV] if i.buffer >= 0]
        assert program.buffer_elements == max((i.stop - i.start for i in scratch), default=0)
        assert {i.buffer for i in scratch} == set(range(program.num_buffers))
        assert program.num_buffers <= pipelining.window
        assert all(i.start < i.stop for i in program.instructions)
        sent += sum(i.stop - i.start for i in by_do[Opcode.SEND])
    assert sent == sum(elements_of(schedule, num_elements, pipelining.num_segments))


def elements_of(schedule: Schedule, num_elements: int, num_segments: int):
    """How many elements each operation moves, over all segments."""
    cuts = [num_elements * s // num_segments for s in range(num_segments + 1)]
    for begin, end in itertools.pairwise(cuts):
        borders = schedule.offsets(end - begin)
        for round_ in schedule.rounds:
            yield from (borders[first + count] - borders[first] for _, _, first, count, _ in round_.rows())


def test_segments_without_lag_are_on_the_wire_together() -> None:
    (program, *_) = compile_all(ring(4), 64, Pipelining(num_segments=4, lag=0, window=6))
    first_wait = next(n for n, i in enumerate(program.instructions) if i.opcode in (Opcode.WAIT_RECV, Opcode.WAIT_SEND))
    before = [i.opcode for i in program.instructions[:first_wait]]
    assert before.count(Opcode.SEND) == 4
    assert before.count(Opcode.POST_RECV) == 6


def test_one_rank_or_no_elements_is_nothing_to_do() -> None:
    for schedule, num_elements in ((ring(1), 7), (ring(3), 0)):
        for program in compile_all(schedule, num_elements, Pipelining()):
            assert program.instructions == ()
            assert (program.num_pieces, program.num_sends, program.num_buffers, program.buffer_elements) == (0,) * 4


@pytest.mark.parametrize("wrong", [{"num_segments": 0}, {"lag": -1}, {"window": 0}, {"ahead": -1}])
def test_pipelining_that_is_none(wrong: dict[str, int]) -> None:
    with pytest.raises(
        ValueError, match=r"^pipelining: .*, expected num_segments >= 1, lag >= 0, window >= 1, ahead >= 0$"
    ):
        Pipelining(**wrong)


def without(program: RankProgram, number: int) -> RankProgram:
    instructions = program.instructions
    return replace(program, instructions=(*instructions[:number], *instructions[number + 1 :]))


def waits_of(programs: Sequence[RankProgram], do: Opcode) -> list[tuple[int, int]]:
    return [(r, n) for r, program in enumerate(programs) for n, i in enumerate(program.instructions) if i.opcode == do]


SAMPLES = {name: samples.ALL[name](4, Random(3)) for name in samples.ALL}


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("do", [Opcode.WAIT_SEND, Opcode.WAIT_RECV])
def test_no_wait_of_a_program_can_be_left_out(name: str, do: Opcode) -> None:
    pipelining = Pipelining(num_segments=2, window=3)
    programs = compile_all(SAMPLES[name], 12, pipelining)
    for rank, number in waits_of(programs, do):
        with pytest.raises(ViolationError):
            check_exposure(without(programs[rank], number), pipelining.window)


def breaks(programs: Sequence[RankProgram], num_elements: int) -> bool:
    """Whether some order of events shows that these programs are wrong."""
    paces = ("wires slow", "ranks slow", "one slow", "even")
    for seed, pace, eager in itertools.product(range(5), paces, (False, True)):
        try:
            check_sums(World(programs, num_elements, Random(seed), eager=eager, pace=pace).run())
        except ViolationError:
            return True
    return False


@pytest.mark.parametrize("name", SAMPLES)
def test_the_world_shows_what_comes_of_not_waiting_for_an_arrival(name: str) -> None:
    programs = compile_all(SAMPLES[name], 12, Pipelining(window=3))
    assert not breaks(programs, 12)
    for rank, number in waits_of(programs, Opcode.WAIT_RECV):
        if programs[rank].instructions[number].buffer >= 0 or is_sent_on(programs[rank], number):
            broken = [*programs]
            broken[rank] = without(programs[rank], number)
            assert breaks(broken, 12), programs[rank].instructions[number]


def is_sent_on(program: RankProgram, number: int) -> bool:
    """Whether what arrives here is sent later by this rank."""
    here = program.instructions[number]
    return any(_meet(i, here) for i in program.instructions[number:] if i.opcode == Opcode.SEND)


def _meet(one: Instruction, other: Instruction) -> bool:
    return one.start < other.stop and other.start < one.stop


def test_the_world_shows_what_comes_of_not_waiting_for_a_departure() -> None:
    """Rank 1 lends its partial sum to a slow rank 2, and is overwritten by the result, which does not wait for that."""
    text = "schedule x\ncollective allreduce\nranks 3\nshares 1\nround 0: 2>1:+0\nround 1: 1>0:+0 1>2:=0\n"
    schedule = schedules.parse(text + "round 2: 0>1:=0 0>2:=0\n")
    schedules.verify(schedule)
    programs = compile_all(schedule, 2, Pipelining())
    assert not breaks(programs, 2)
    (number,) = (n for n, i in enumerate(programs[1].instructions) if i.opcode == Opcode.WAIT_SEND and i.peer == 2)
    assert breaks([programs[0], without(programs[1], number), programs[2]], 2)


def test_the_world_shows_messages_that_do_not_fit_and_ranks_that_wait_for_ever() -> None:
    whole, short = compile_all(ring(2), 4, Pipelining()), compile_all(ring(2), 6, Pipelining())
    with pytest.raises(ViolationError, match=r"expects 3 elements, 2 come"):
        World([whole[0], short[1]], 6, Random(0), eager=False, pace="wires slow").run()
    idle = replace(whole[1], instructions=())
    with pytest.raises(ViolationError, match=r"rank 0 waits for ever in .*WAIT_RECV"):
        World([whole[0], idle], 4, Random(0), eager=True, pace="even").run()
    for do in (Opcode.SEND, Opcode.POST_RECV):
        number = next(n for n, i in enumerate(whole[0].instructions) if i.opcode == do)
        with pytest.raises(ViolationError, match=r"never begun"):
            check_exposure(without(whole[0], number), 4)
