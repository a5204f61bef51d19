"""Devices of stages: text form, pieces, their proof, and the simulated step."""

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringweave.errors import ScheduleError, UsageError
from ringweave.sim import pipeline_simulation
from ringweave.sim.pipeline_schedules import PIPELINE_SCHEDULES, TRANSFER_MODES, generate_pipeline_schedule
from ringweave.sim.pipeline_simulation import PipelineTimeline, StageDevices, StageTimes, simulate_pipeline


@st.composite
def placed(draw):
    """Stages of one to three devices, in any order."""
    widths = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    order = draw(st.permutations(range(sum(widths))))
    samples = draw(st.integers(max(widths), 8))
    stages, first = [], 0
    for width in widths:
        cuts = (
            sorted(draw(st.sets(st.integers(1, samples - 1), min_size=width - 1, max_size=width - 1)))
            if width > 1
            else []
        )
        counts = [b - a for a, b in itertools.pairwise((0, *cuts, samples))]
        pairs = zip(order[first : first + width], counts, strict=True)
        stages.append(tuple(pipeline_simulation.DeviceShare(*pair) for pair in pairs))
        first += width
    return StageDevices(tuple(stages))


@given(placed())
def test_devices_print_and_parse_back(devices):
    assert StageDevices.parse(str(devices)) == devices


@given(placed())
def test_every_sample_arrives_once(devices):
    pipeline_simulation.verify_pieces(devices)
    for link in range(devices.num_stages - 1):
        pieces = [piece for piece in devices.pieces if piece.link == link]
        assert sum(piece.num_samples for piece in pieces) == devices.num_samples
        assert len(pieces) < len(devices.stages[link]) + len(devices.stages[link + 1])


@given(placed(), st.randoms(use_true_random=False), st.sampled_from(["drop", "twice", "shift", "shorter", "redirect"]))
def test_a_changed_piece_fails_the_proof(devices, rng: random.Random, change):
    if devices.num_stages == 1:
        return
    pieces = list(devices.pieces)
    at = rng.randrange(len(pieces))
    piece = pieces[at]
    if change == "drop":
        del pieces[at]
    elif change == "twice":
        pieces.append(piece)
    elif change == "shift":
        pieces[at] = piece._replace(first=piece.first + 1)
    elif change == "shorter":
        pieces[at] = piece._replace(num_samples=piece.num_samples - 1)
    else:
        pieces[at] = piece._replace(dst=piece.src)
    with pytest.raises(ScheduleError, match="pieces between stages"):
        pipeline_simulation.verify_pieces(devices, pieces)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("0:2 0:2", "devices of stages: '0:2 0:2', expected each device from 0 on in one stage"),
        ("0:2 2:2", "devices of stages: '0:2 2:2', expected each device"),
        ("0:2+1:1 2:2", "samples of devices: '0:2+1:1 2:2', expected 1 or more on each device"),
        ("0:0 1:0", "samples of devices: '0:0 1:0', expected 1 or more"),
        ("0:2+x 1:2", "devices of a stage: '0:2+x', expected device:samples"),
    ],
)
def test_devices_that_make_no_sense(text, error):
    with pytest.raises(UsageError) as raised:
        StageDevices.parse(text)
    assert str(raised.value).startswith(error)


@pytest.mark.parametrize("transfers", TRANSFER_MODES)
@pytest.mark.parametrize("name", PIPELINE_SCHEDULES)
def test_equal_halves_of_a_stage_are_one_device_of_twice_the_speed(name, transfers):
    """Without transfers; the slow devices take their half in the time in which the fast one takes all."""
    order = generate_pipeline_schedule(name, 2, 6)
    alone = simulate_pipeline(order, StageTimes(forward_s=(1.0, 1.5), backward_s=(2.0, 2.5)), transfers)
    times = StageTimes(forward_s=(1.0, 1.0, 1.5), backward_s=(2.0, 2.0, 2.5), devices=StageDevices.parse("0:2+1:2 2:4"))
    wide = simulate_pipeline(order, times, transfers)
    assert wide.step_s == alone.step_s
    assert wide.bound_s == alone.bound_s
    assert wide.busy_s == (18.0, 18.0, 24.0)
    assert {(span.device, span.action.stage_index) for span in wide.spans} == {(0, 0), (1, 0), (2, 1)}
    assert simulate_pipeline(order, replace(times, reduce_s=(5.0, 0.0)), transfers).step_s == alone.step_s + 5.0


def test_pieces_share_the_port_of_the_device_where_they_meet():
    """Two halves of 1 s each arrive one after the other, as a whole one of 2 s would."""
    order = generate_pipeline_schedule("gpipe", 2, 4)
    whole = StageTimes(
        forward_s=(1.0, 1.0), backward_s=(1.0, 1.0), forward_transfer_s=(2.0,), backward_transfer_s=(2.0,)
    )
    halves = StageTimes(
        forward_s=(1.0,) * 3,
        backward_s=(1.0,) * 3,
        forward_transfer_s=(1.0,) * 2,
        backward_transfer_s=(1.0,) * 2,
        devices=StageDevices.parse("0:1+1:1 2:2"),
    )
    assert simulate_pipeline(order, halves).step_s == simulate_pipeline(order, whole).step_s
    assert halves.transfer_s(0) == whole.transfer_s(0) == (2.0, 2.0)


@given(placed(), st.sampled_from(PIPELINE_SCHEDULES), st.integers(4, 6), st.randoms(use_true_random=False))
def test_no_step_is_shorter_than_its_bound(devices, name, num_microbatches, rng: random.Random):
    order = generate_pipeline_schedule(name, devices.num_stages, num_microbatches)
    num, pieces = devices.num_devices, len(devices.pieces)
    times = StageTimes(
        forward_s=tuple(rng.random() for _ in range(num)),
        backward_s=tuple(rng.random() for _ in range(num)),
        forward_transfer_s=tuple(rng.random() for _ in range(pieces)),
        backward_transfer_s=tuple(rng.random() for _ in range(pieces)),
        devices=devices,
    )
    found = simulate_pipeline(order, times)
    assert found.step_s >= found.bound_s * (1 - 1e-9)


def test_times_of_other_devices_are_refused():
    order = generate_pipeline_schedule("gpipe", 2, 2)
    times = StageTimes(forward_s=(1.0,) * 3, backward_s=(1.0,) * 3, devices=StageDevices.parse("0:1+1:1 2:2"))
    with pytest.raises(ScheduleError, match=r"devices of times: .*expected 0:2 1:1\+2:1"):
        PipelineTimeline(order, devices=StageDevices.parse("0:2 1:1+2:1")).step_s(times)
    with pytest.raises(ScheduleError, match="number of stages with devices: 3, expected 2, as in the order"):
        PipelineTimeline(order, devices=StageDevices.parse("0:2 1:2 2:2"))
    with pytest.raises(UsageError, match="reduce_s: how many: 1, expected 2"):
        replace(times, reduce_s=(1.0,))
