import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringweave.errors import UsageError
from ringweave.planning.partition.problem import PartitionMemory, PartitionProblem
from ringweave.planning.partition.solve import evaluate_partition, solve_partition
from tests import effort
from tests.planning.partitioning.brute_force import least, partitions, random_problem, solve_by_recurrence

LIGHT = (1.0,) * 10


def plain(work: tuple[float, ...], capability: tuple[float, ...], **more) -> PartitionProblem:
    return PartitionProblem(work=(work,), capability=capability, **more)


def test_the_example_of_the_patent() -> None:
    found = solve_partition(plain(LIGHT, (2, 3, 2, 3)))
    assert found.splits == (2, 5, 7)
    assert (found.bottleneck_s, found.predicted_step_s) == (1.0, 1.0)
    assert [(stage.first, stage.last) for stage in found.stages] == [(1, 2), (3, 5), (6, 7), (8, 10)]
    assert solve_by_recurrence(plain(LIGHT, (2, 3, 2, 3))) == ((2, 5, 7), 1.0)
    tied = [
        s for s in partitions(plain(LIGHT, (2, 3, 2, 3))) if evaluate_partition(plain(LIGHT, (2, 3, 2, 3)), s) == found
    ]
    assert tied == [(2, 5, 7)]


@pytest.mark.slow
def test_equal_to_brute_force() -> None:
    """Of the 100,000 cases of bench/partition_exactness.py, others."""
    rng, num_without, num_cases = random.Random(20), 0, effort.share_of(5000)
    for _ in range(num_cases):
        problem, num_microbatches = random_problem(rng), rng.randint(1, 40)
        expected, shortest = least(problem, num_microbatches)
        if expected is None:
            num_without += 1
            assert solve_by_recurrence(problem) == ((), float("inf"))
            with pytest.raises(UsageError, match=r"^memory of (block|device)"):
                solve_partition(problem, num_microbatches)
            continue
        found, quickest = solve_partition(problem), solve_partition(problem, num_microbatches)
        assert (found.bottleneck_s, found.splits) == expected
        assert solve_by_recurrence(problem)[1] == expected[0]
        assert (quickest.predicted_step_s, quickest.splits) == shortest
    assert 0.1 < num_without / num_cases < 0.5


@given(st.lists(st.floats(0, 1e6), min_size=3, max_size=9), st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=3))
def test_numbers_that_round(work: list[float], capability: list[float]) -> None:
    """Both solvers add up alike, so that even the last bit agrees."""
    problem = plain(tuple(work), tuple(capability), activation=tuple(reversed(work)), bandwidth=tuple(capability[1:]))
    assert solve_partition(problem).bottleneck_s == solve_by_recurrence(problem)[1]


def test_the_cut_that_a_greedy_takes_is_dear() -> None:
    """The furthest cut within the bottleneck is the one behind block 2, across which 100 would go."""
    problem = plain((1, 1, 1, 1), (1, 1), activation=(1, 100, 1, 0), bandwidth=(1,))
    assert solve_partition(problem).splits == (1,)
    assert solve_partition(problem).bottleneck_s == 3.0


def test_ties_fill_the_later_stages() -> None:
    assert solve_partition(plain(LIGHT, (1, 1, 1, 1))).splits == (1, 4, 7)


def test_few_microbatches_trade_the_bottleneck_for_the_sum() -> None:
    problem = plain((1.0,) * 12, (4, 1), allow_empty=True)
    assert solve_partition(problem).splits == (10,)
    assert solve_partition(problem).bottleneck_s == 2.5
    alone = solve_partition(problem, num_microbatches=1)
    assert (alone.splits, alone.predicted_step_s) == ((12,), 3.0)
    many = solve_partition(problem, num_microbatches=100)
    assert (many.splits, many.predicted_step_s) == ((10,), 99 * 2.5 + 4.5)


def test_empty_stages_pass_data_on_and_nothing_crosses_at_the_ends() -> None:
    problem = plain((8, 1, 8), (1, 0.01, 1), activation=(2, 2, 2), bandwidth=(1, 1), allow_empty=True)
    found = solve_partition(problem)
    assert found.splits == (1, 1)
    assert [stage.num_blocks for stage in found.stages] == [1, 0, 2]
    assert [stage.transfer_s for stage in found.stages] == [0.0, 2.0, 2.0]
    far = dataclasses.replace(problem, bandwidth=(0.001, 0.001))
    assert [stage.transfer_s for stage in solve_partition(far).stages] == [0.0, 0.0, 0.0]


def test_kinds_of_devices() -> None:
    """The second kind is slow at the last block only."""
    problem = PartitionProblem(work=((1, 1, 1, 1), (1, 1, 1, 9)), kinds=(0, 1), capability=(1, 1))
    assert solve_partition(problem).bottleneck_s == 9.0
    assert solve_partition(dataclasses.replace(problem, kinds=(1, 0))).splits == (2,)


def test_memory_counts_activations_in_flight() -> None:
    memory = PartitionMemory(limit=(8, 12), state=(2,) * 4, stash=(2,) * 4, in_flight=(2, 1))
    found = solve_partition(plain((1, 1, 1, 1), (1, 1), memory=memory))
    assert (found.splits, [stage.memory for stage in found.stages]) == ((1,), [6.0, 12.0])


def full(limit: tuple[float, ...], state: tuple[float, ...]) -> PartitionMemory:
    return PartitionMemory(limit=limit, state=state, stash=(0,) * len(state), in_flight=(1,) * len(limit))


@pytest.mark.parametrize(
    ("memory", "text"),
    [
        (
            full((3, 3), (1, 4, 1, 1)),
            "memory of block 2: 4.0, expected at most 3, what device 1 has, the one with most to spare. Cut block 2 "
            "finer, give the devices more memory, or hold fewer microbatches in flight.",
        ),
        (
            full((9, 0.5), (1, 1, 1, 1)),
            "memory of device 2: 0.5, expected at least 1 for block 1. Leave the device out, allow empty stages "
            "(--allow-empty), or hold fewer microbatches in flight.",
        ),
        (
            full((2, 1), (1, 1, 1, 1)),
            "memory of devices: 'full after block 3 of 4', expected room for block 4 (1 on device 2) and what "
            "follows it. Add a device, give the devices more memory, hold fewer microbatches in flight, or "
            "recompute activations.",
        ),
        (
            full((4, 1), (1, 1, 1, 2)),
            "memory of devices: 'full after block 3 of 4', expected room for block 4",
        ),
        (
            full((6, 1), (1, 1, 1, 2)),
            "memory of devices: 'no way to give each device a block', expected blocks that fit devices 1 to 2 in this "
            "order. Allow empty stages (--allow-empty), give the devices more memory, hold fewer microbatches in "
            "flight, or put the devices in another order.",
        ),
    ],
)
def test_no_room(memory: PartitionMemory, text: str) -> None:
    with pytest.raises(UsageError) as error:
        solve_partition(plain((1, 1, 1, 1), (1, 1), memory=memory))
    assert str(error.value).startswith(text)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"work": ((),)}, "work: ((),), expected a number for each block. Give one or more."),
        ({"capability": ()}, "capability: (), expected a number for each device. Give one or more."),
        ({"capability": (1, 0)}, "capability of device 2: 0, expected a finite number above 0. Correct it."),
        ({"work": ((1, -1),)}, "work of block 2: -1, expected a finite number, 0 or more. Correct it."),
        ({"work": ((1,),)}, "number of blocks: 1, expected at least one for each of the 2 devices. Leave devices out"),
        (
            {"work": ((1, 1), (1, 1))},
            "kinds: (), expected 2 indices. Say for each device which row of work is its own.",
        ),
        ({"kinds": (0, 1)}, "kinds: (0, 1), expected indices below 1. Name rows that there are."),
        ({"activation": (1,)}, "activation: how many: 1, expected 2. Give one for each block."),
        ({"bandwidth": (1, 1)}, "bandwidth: how many: 2, expected 1. Give one for each link (device 2 to the last)."),
        ({"bandwidth": (float("nan"),)}, "bandwidth of link 1: nan, expected a finite number above 0. Correct it."),
    ],
)
def test_wrong_problems(asked: dict, text: str) -> None:
    with pytest.raises(UsageError) as error:
        PartitionProblem(**{"work": ((1, 1),), "capability": (1, 1)} | asked)
    assert str(error.value).startswith(text)


def test_wrong_microbatches() -> None:
    with pytest.raises(UsageError, match=r"^microbatches: 0, expected 1 or more\. Give how many a step is cut into\.$"):
        solve_partition(plain((1,), (1,)), num_microbatches=0)


def test_a_large_one_takes_few_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speed is measured by bench/partition_speed.py; here only that its reason stays true."""
    from ringweave.planning.partition.solve import PartitionProber

    seen: list[float] = []
    original = PartitionProber.probe
    monkeypatch.setattr(PartitionProber, "probe", lambda self, limit_s: seen.append(limit_s) or original(self, limit_s))
    rng = random.Random(3)
    work = tuple(rng.uniform(1, 10) for _ in range(300))
    solve_partition(plain(work, tuple(rng.uniform(1, 4) for _ in range(24))))
    assert len(seen) < 40
