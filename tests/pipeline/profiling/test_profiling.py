"""Measured blocks and links of two virtual devices, and what follows from them."""

from dataclasses import replace

import pytest
import torch

from ringweave.errors import UsageError
from ringweave.pipeline.profiling import BlockCost, Profile, StageLink, partition, predict, transfer_mode
from ringweave.pipeline.runtime import boundaries
from ringweave.sim import pipeline_schedules
from ringweave.sim.pipeline_simulation import Overheads
from ringweave.testing.ranks import run_ranks
from tests.pipeline.profiling import profiling_functions
from tests.pipeline.profiling.profiling_functions import WORK_S


@pytest.mark.slow
@pytest.mark.distributed
def test_kinds_are_measured_once_on_each_device_and_nothing_moves() -> None:
    first, second = run_ranks(profiling_functions.measure, 2)
    profile = first["profile"]
    assert second["profile"] == profile
    assert second["links"] == first["links"]
    assert first["is_untouched"]
    assert second["is_untouched"]
    timed, other = profile.blocks[0], profile.blocks[3]
    assert profile.blocks[2] == profile.blocks[1], "of one kind"
    assert timed.kind != profile.blocks[1].kind, "no gradient goes back to the inputs"
    assert other.kind != timed.kind
    for device, speed in enumerate(profiling_functions.SPEEDS):
        assert timed.forward_s[device] == pytest.approx(WORK_S / speed)
        assert timed.backward_s[device] == pytest.approx(2 * WORK_S / speed)
    samples, parameters = 4, 8 * 8 + 8
    assert timed.forward_bytes == timed.backward_bytes == samples * 8 * 4
    assert timed.state_bytes == 4 * (2 * parameters + 2 * parameters + 2), "values, gradients, two moments, two steps"
    assert other.stash_bytes >= samples * 32 * 4
    assert first["step_s"] > 3 * WORK_S * 3
    assert first["best"] == second["best"]


@pytest.mark.slow
@pytest.mark.distributed
def test_blocks_are_measured_under_autocast() -> None:
    """In the precision in which they train: bfloat16 crosses, and inputs and weights are kept as bfloat16."""
    first, second = run_ranks(profiling_functions.measure_under_autocast, 2)
    assert first == second
    samples, two_bytes = 4, 2
    assert first.blocks[0].forward_bytes == samples * 8 * two_bytes
    assert first.blocks[1].stash_bytes == (samples * 8 + 8 * 8) * two_bytes


@pytest.mark.slow
@pytest.mark.distributed
def test_bytes_and_coding_are_those_of_the_format() -> None:
    first, second = run_ranks(profiling_functions.measure_encoded, 2)
    assert first == second
    profile, num_bytes, coding_s = first
    assert profile.blocks[0].forward_bytes == profile.blocks[0].backward_bytes == num_bytes
    assert all(0 < seconds < 1 for seconds in profile.blocks[0].coding_s)
    assert coding_s == tuple(zip(*(block.coding_s for block in profile.blocks), strict=True))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "1f1b-overlap"])
def test_a_rehearsal_finds_what_actions_take_beside_their_blocks(schedule: str) -> None:
    found = run_ranks(profiling_functions.rehearse, 2, schedule)
    assert found[0] == found[1]
    assert found[0]["is_untouched"]
    assert found[0]["ideal"] == Overheads(action_s=(0.0, 0.0)), "by a clock on which nothing but waits takes time"
    assert found[0]["slept_s"] == {0.015}, "stages wait longer than a slow link takes"
    real = found[0]["real"]
    assert min(real.action_s) > 0
    assert real.step_s > 0
    assert 0 <= real.message_s <= 0.02


def a_profile(forward_s: tuple[tuple[float, ...], ...]) -> Profile:
    return Profile(
        blocks=tuple(
            BlockCost(
                kind="",
                forward_s=each,
                backward_s=tuple(2 * one for one in each),
                update_s=tuple(0.0 for _ in each),
                forward_bytes=100,
                backward_bytes=50,
                state_bytes=10,
                stash_bytes=1,
            )
            for each in forward_s
        )
    )


FREE = StageLink(latency_s=0.0, s_per_byte=0.0)


def test_a_step_is_that_of_the_simulated_order() -> None:
    """The spec's figures: transfer as long as a forward, 4 stages, 32 microbatches."""
    profile = a_profile(((1.0,) * 4,) * 4)
    slow = StageLink(latency_s=0.5, s_per_byte=0.005), StageLink(latency_s=0.0, s_per_byte=0.02)
    links = (slow[0],) * 3, (slow[1],) * 3
    for name, step_s in (("1f1b", 172), ("1f1b-overlap", 111)):
        order = pipeline_schedules.generate_pipeline_schedule(name, 4, 32)
        found = predict(profile, links, (1, 2, 3), order, transfers=transfer_mode(name))
        assert found.step_s == pytest.approx(step_s)
        assert found.bound_s == pytest.approx(111)


def test_updates_and_overheads_are_part_of_a_predicted_step() -> None:
    """One microbatch through two stages, there and back: 9 s of blocks, 4 actions, 4 ends of messages on the way."""
    profile = a_profile(((1.0, 1.0), (2.0, 2.0)))
    links, order = ((FREE,), (FREE,)), pipeline_schedules.generate_pipeline_schedule("gpipe", 2, 1)
    assert predict(profile, links, (1,), order, transfers="blocking").step_s == pytest.approx(9)
    slow = Profile(blocks=tuple(replace(cost, update_s=(5.0, 5.0)) for cost in profile.blocks))
    assert predict(slow, links, (1,), order, transfers="blocking").step_s == pytest.approx(14)
    overheads = Overheads(action_s=(0.5, 0.25), message_s=0.125, step_s=1.0)
    found = predict(profile, links, (1,), order, transfers="blocking", overheads=overheads)
    assert found.step_s == pytest.approx(9 + 2 * (0.5 + 0.25) + 2 * 0.125 + 1)


def test_the_partition_of_the_spec() -> None:
    """Ten equal blocks, devices 2 : 3 : 2 : 3."""
    profile = a_profile(tuple(tuple(6 / speed for speed in (2, 3, 2, 3)) for _ in range(10)))
    assert partition(profile, ((FREE,) * 3, (FREE,) * 3)).splits == (2, 5, 7)


def test_a_format_moves_the_cut_over_a_thin_link_and_its_coding_is_part_of_the_step() -> None:
    """The second of four blocks has few features: the exact cut goes there, though the first device is half as fast."""
    slow, found = StageLink(latency_s=0.0, s_per_byte=1e-6), {}
    order = pipeline_schedules.generate_pipeline_schedule("1f1b-overlap", 2, 16)
    for wire, coding_s in (("exact", 0.0), ("bf16", 0.002), ("int8", 0.004)):
        costs = a_profile(((0.02, 0.01),) * 4).blocks
        sizes = [boundaries.message_bytes(wire, (64, features), torch.float32) for features in (512, 32, 512, 1)]
        coded = Profile(
            blocks=tuple(
                replace(cost, forward_bytes=size, backward_bytes=size, coding_s=(coding_s, coding_s))
                for cost, size in zip(costs, sizes, strict=True)
            )
        )
        splits = partition(coded, ((slow,), (slow,)), num_microbatches=16).splits
        found[wire] = splits, predict(coded, ((slow,), (slow,)), (1,), order).step_s
    assert {wire: splits for wire, (splits, _) in found.items()} == {"exact": (2,), "bf16": (1,), "int8": (1,)}
    assert found["int8"][1] < found["bf16"][1] < found["exact"][1]
    free = Profile(blocks=tuple(replace(cost, coding_s=()) for cost in coded.blocks))
    coding_s = found["int8"][1] - predict(free, ((slow,), (slow,)), (1,), order).step_s
    assert 16 * 0.004 <= coding_s <= 18 * 0.004, "on the slower device, in each microbatch once in full"


def test_memory_limits_a_device() -> None:
    profile = a_profile(((1.0, 1.0),) * 4)
    links = (FREE,), (FREE,)
    assert partition(profile, links).splits == (2,)
    assert partition(profile, links, memory_bytes=(100, 15), in_flight=(2, 1)).splits == (3,)
    with pytest.raises(UsageError, match="memory of devices: 'full after block 3 of 4'"):
        partition(profile, links, memory_bytes=(25, 15), in_flight=(2, 1))


def test_nothing_crosses_an_empty_end() -> None:
    profile = a_profile(((1.0, 1.0),) * 2)
    slow = StageLink(latency_s=7.0, s_per_byte=1.0)
    order = pipeline_schedules.generate_pipeline_schedule("gpipe", 2, 1)
    assert predict(profile, ((slow,), (slow,)), (0,), order).step_s == pytest.approx(6 + 14)
