"""Rank 0's part, without other ranks: two stages, two replicas."""

from dataclasses import replace

import pytest
import torch

from ringweave.pipeline.adapting import RebalanceController, StepAction, StepExchange
from ringweave.pipeline.migration import MigrationOutcome
from ringweave.pipeline.stage_layout import Layout
from ringweave.planning.repartition import (
    PipelineConditions,
    PipelineWorkload,
    RepartitionController,
    RepartitionDecision,
    RepartitionPolicy,
)

EVEN = PipelineConditions(speeds=(1.0, 1.0), rates=(1e9,))
POLICY = RepartitionPolicy(window_steps=3)
USUAL = (0.12, 0.12, 0.11, 0.10)
"""Of ranks 0 to 3; stages 0 and 1 are those of ranks 0 and 2, 1 and 3."""


WORK = PipelineWorkload(
    forward_s=((0.01,) * 4,),
    backward_s=((0.02,) * 4,),
    num_devices=2,
    num_microbatches=2,
    forward_bytes=(1e7,) * 4,
    backward_bytes=(1e7,) * 4,
)


def overseer() -> RebalanceController:
    layout = Layout(num_blocks=4, splits=(2,), num_replicas=2)
    return RebalanceController(RepartitionController(WORK, (2,), EVEN, POLICY), layout, POLICY, None)


def train(
    boss: RebalanceController, first: int, count: int, compute_s: tuple[float, ...] = USUAL, speed: float = 1.0
) -> list[StepAction]:
    """Train steps, and what was asked at the end of the one behind each; the second stage's device has that speed."""
    asked = []
    for step in range(first, first + count):
        boss.step_sent(step, WORK.step_s((2,), replace(EVEN, speeds=(1.0, speed))))
        asked.append(boss.step_received(compute_s))
    return asked


def test_links_are_timed_behind_the_first_window_and_nobody_meets_behind_the_next() -> None:
    boss = overseer()
    assert train(boss, 0, 3) == [StepAction.NOTHING, StepAction.NOTHING, StepAction.PROBE]
    boss.links_probed([(1e9,)], took_s=0.0001)
    assert not RepartitionDecision.parse(boss.decision_text).is_move
    assert train(boss, 3, 2) == [StepAction.NOTHING] * 2
    boss = overseer()
    train(boss, 0, 3)
    boss.links_probed([(1e9,)], took_s=100.0)
    assert train(boss, 3, 9) == [StepAction.NOTHING] * 9


def test_all_are_told_to_listen_when_blocks_move() -> None:
    boss = overseer()
    train(boss, 0, 3)
    boss.links_probed([(1e9,)], took_s=100.0)
    slow = (0.12, 0.48, 0.11, 0.10)
    assert train(boss, 3, 3, slow, speed=0.25) == [
        StepAction.NOTHING,
        StepAction.NOTHING,
        StepAction.RECEIVE_DECISION,
    ], "the slower replica counts"
    ruling = RepartitionDecision.parse(boss.decision_text)
    assert ruling.is_move
    assert ruling.splits == (3,)


def test_steps_that_do_not_count_are_in_no_window() -> None:
    boss = overseer()
    train(boss, 0, 2)
    boss.step_sent(2, None)
    assert boss.step_received(USUAL) is StepAction.NOTHING
    train(boss, 3, 1)
    boss.links_probed([()], took_s=100.0)
    boss.migration_ended(MigrationOutcome(splits=(3,), at_step=5, is_done=False, cause="none"), 5)
    assert boss.step_received(USUAL) is StepAction.NOTHING, "what travelled when blocks moved is forgotten"
    assert train(boss, 5, 3) == [StepAction.NOTHING] * 3
    assert boss.controller.splits == (2,)


def test_numbers_of_all_ranks_add_up_and_are_taken_once() -> None:
    ranks = [StepExchange(rank, 3) for rank in range(3)]
    for rank, numbers in enumerate(ranks):
        numbers.compute_s = 0.1 * (rank + 1)
    ranks[0].action, ranks[1].action = StepAction.RECEIVE_DECISION, StepAction.PROBE
    totals = torch.stack([numbers.outgoing() for numbers in ranks]).sum(0)
    for numbers in ranks:
        assert numbers.take_report() is None
        numbers.receive(totals)
        told = numbers.take_report()
        assert told is not None
        assert told.action is StepAction.RECEIVE_DECISION
        assert told.compute_s == pytest.approx([0.1, 0.2, 0.3])
        assert numbers.take_report() is None
        assert numbers.action is StepAction.NOTHING
