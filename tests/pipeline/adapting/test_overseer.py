"""Rank 0's part, without other ranks: two stages, two replicas."""

from dataclasses import replace

import pytest
import torch

from ringweave.pipeline.adapting.numbers import Ask, Numbers
from ringweave.pipeline.adapting.overseer import Overseer
from ringweave.pipeline.layouts import Layout
from ringweave.pipeline.moving import Outcome
from ringweave.planning.repartitioning import Conditions, Controller, Policy, Ruling, Workload

EVEN = Conditions(speeds=(1.0, 1.0), rates=(1e9,))
POLICY = Policy(window_steps=3)
USUAL = (0.12, 0.12, 0.11, 0.10)
"""Of ranks 0 to 3; stages 0 and 1 are those of ranks 0 and 2, 1 and 3."""


WORK = Workload(
    forward_s=((0.01,) * 4,),
    backward_s=((0.02,) * 4,),
    num_devices=2,
    num_microbatches=2,
    forward_bytes=(1e7,) * 4,
    backward_bytes=(1e7,) * 4,
)


def overseer() -> Overseer:
    layout = Layout(num_blocks=4, splits=(2,), num_replicas=2)
    return Overseer(Controller(WORK, (2,), EVEN, POLICY), layout, POLICY, None)


def train(
    boss: Overseer, first: int, count: int, compute_s: tuple[float, ...] = USUAL, speed: float = 1.0
) -> list[Ask]:
    """Train steps, and what was asked at the end of the one behind each; the second stage's device has that speed."""
    asked = []
    for step in range(first, first + count):
        boss.begin(step, WORK.step_s((2,), replace(EVEN, speeds=(1.0, speed))))
        asked.append(boss.end(compute_s))
    return asked


def test_links_are_timed_behind_the_first_window_and_nobody_meets_behind_the_next() -> None:
    boss = overseer()
    assert train(boss, 0, 3) == [Ask.NOTHING, Ask.NOTHING, Ask.PROBE]
    boss.probed([(1e9,)], took_s=0.0001)
    assert not Ruling.parse(boss.ruling).is_move
    assert train(boss, 3, 2) == [Ask.NOTHING] * 2
    boss = overseer()
    train(boss, 0, 3)
    boss.probed([(1e9,)], took_s=100.0)
    assert train(boss, 3, 9) == [Ask.NOTHING] * 9


def test_all_are_told_to_listen_when_blocks_move() -> None:
    boss = overseer()
    train(boss, 0, 3)
    boss.probed([(1e9,)], took_s=100.0)
    slow = (0.12, 0.48, 0.11, 0.10)
    assert train(boss, 3, 3, slow, speed=0.25) == [Ask.NOTHING, Ask.NOTHING, Ask.LISTEN], "the slower replica counts"
    ruling = Ruling.parse(boss.ruling)
    assert ruling.is_move
    assert ruling.splits == (3,)


def test_steps_that_do_not_count_are_in_no_window() -> None:
    boss = overseer()
    train(boss, 0, 2)
    boss.begin(2, None)
    assert boss.end(USUAL) is Ask.NOTHING
    train(boss, 3, 1)
    boss.probed([()], took_s=100.0)
    boss.moved(Outcome(splits=(3,), at_step=5, is_done=False, cause="none"), 5)
    assert boss.end(USUAL) is Ask.NOTHING, "what travelled when blocks moved is forgotten"
    assert train(boss, 5, 3) == [Ask.NOTHING] * 3
    assert boss.controller.splits == (2,)


def test_numbers_of_all_ranks_add_up_and_are_taken_once() -> None:
    ranks = [Numbers(rank, 3) for rank in range(3)]
    for rank, numbers in enumerate(ranks):
        numbers.compute_s = 0.1 * (rank + 1)
    ranks[0].ask, ranks[1].ask = Ask.LISTEN, Ask.PROBE
    totals = torch.stack([numbers.leaving() for numbers in ranks]).sum(0)
    for numbers in ranks:
        assert numbers.take() is None
        numbers.arrived(totals)
        told = numbers.take()
        assert told is not None
        assert told.ask is Ask.LISTEN
        assert told.compute_s == pytest.approx([0.1, 0.2, 0.3])
        assert numbers.take() is None
        assert numbers.ask is Ask.NOTHING
