import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringweave.errors import ScheduleError, UsageError
from ringweave.sim import pipeline_schedules, pipeline_simulation
from ringweave.sim.pipeline_schedules import PipelineSchedule, parse_action
from ringweave.sim.pipeline_simulation import StageTimes


def alike(num_stages: int, transfer_s: float) -> StageTimes:
    """Forward 1, backward 2."""
    return StageTimes(
        forward_s=(1.0,) * num_stages,
        backward_s=(2.0,) * num_stages,
        forward_transfer_s=(transfer_s,) * (num_stages - 1),
        backward_transfer_s=(transfer_s,) * (num_stages - 1),
    )


@pytest.mark.parametrize(
    ("name", "transfers", "step_s", "held"),
    [
        ("1f1b", "blocking", 172.0, (4, 3, 2, 1)),
        ("1f1b", "asynchronous", 157.0, (4, 3, 2, 1)),
        ("1f1b-overlap", "asynchronous", 111.0, (7, 5, 3, 1)),
        ("gpipe", "asynchronous", 111.0, (32, 32, 32, 32)),
    ],
)
def test_transfers_as_long_as_forward(name: str, transfers: str, step_s: float, held: tuple[int, ...]) -> None:
    found = pipeline_simulation.simulate_pipeline(
        pipeline_schedules.generate_pipeline_schedule(name, 4, 32), alike(4, 1.0), transfers
    )
    assert (found.step_s, found.bound_s, found.peak_in_flight) == (step_s, 111.0, held)
    assert found.bubble_fraction == pytest.approx(1 - 96 / step_s)
    assert len(found.spans) == 4 * 64


def test_spans_by_hand() -> None:
    found = pipeline_simulation.simulate_pipeline(
        pipeline_schedules.generate_pipeline_schedule("1f1b", 2, 1), alike(2, 0.5)
    )
    spans = [(str(span.action), span.begin_s, span.end_s) for span in found.spans]
    assert spans == [("0F0", 0.0, 1.0), ("0B0", 5.0, 7.0), ("1F0", 1.5, 2.5), ("1B0", 2.5, 4.5)]


def test_a_link_carries_one_transfer_at_a_time() -> None:
    """Five forwards leave stage 0 at 1, 2, 3 .. but cross in 4 s each, so that the last arrives at 21."""
    times = StageTimes(forward_s=(1, 1), backward_s=(0, 0), forward_transfer_s=(4,), backward_transfer_s=(0,))
    found = pipeline_simulation.simulate_pipeline(pipeline_schedules.generate_pipeline_schedule("gpipe", 2, 5), times)
    assert (found.step_s, found.bound_s) == (22.0, 22.0)


@given(
    st.sampled_from(pipeline_schedules.PIPELINE_SCHEDULES),
    st.sampled_from(["blocking", "asynchronous"]),
    st.lists(st.tuples(*[st.floats(0, 10)] * 4), min_size=1, max_size=6),
    st.integers(1, 12),
)
def test_no_order_deadlocks_or_beats_the_bound(name: str, transfers: str, rows: list, num_microbatches: int) -> None:
    columns = list(zip(*rows, strict=True))
    links = {"forward_transfer_s": columns[2][1:], "backward_transfer_s": columns[3][1:]}
    times = StageTimes(forward_s=columns[0], backward_s=columns[1], **links)
    order = pipeline_schedules.generate_pipeline_schedule(name, len(rows), num_microbatches)
    found = pipeline_simulation.simulate_pipeline(order, times, transfers)
    assert found.step_s >= found.bound_s * (1 - 1e-9)
    if transfers == "blocking":
        assert found.step_s >= pipeline_simulation.simulate_pipeline(order, times).step_s * (1 - 1e-9)


def test_without_transfers_1f1b_meets_the_bound() -> None:
    found = pipeline_simulation.simulate_pipeline(
        pipeline_schedules.generate_pipeline_schedule("1f1b", 4, 8), StageTimes(forward_s=(1,) * 4, backward_s=(2,) * 4)
    )
    assert found.step_s == found.bound_s == 33.0


def test_stages_that_wait_for_ever() -> None:
    """Stage 1 wants the second microbatch back before it forwards the first one."""
    stages = ("0F0,0B0,0F1,0B1", "1F1,1B1,1F0,1B0")
    order = PipelineSchedule(tuple(tuple(parse_action(part) for part in line.split(",")) for line in stages))
    with pytest.raises(ScheduleError) as error:
        pipeline_simulation.simulate_pipeline(order, alike(2, 1.0))
    assert str(error.value) == (
        "pipeline: 'stage 0 waits for 0RECV_B0; stage 1 waits for 1RECV_F1', expected a stage that can go on. Begin "
        "transfers in the same order at both of their ends."
    )


@pytest.mark.parametrize(
    ("times", "text"),
    [
        ({"backward_s": (1,)}, "backward_s: how many: 1, expected 2. Give one for each stage"),
        ({"forward_s": (1, -1)}, "forward_s[1]: -1, expected a finite time, 0 or more. Correct it."),
        ({"forward_transfer_s": (1, 1)}, "forward_transfer_s: how many: 2, expected 1."),
    ],
)
def test_wrong_times(times: dict, text: str) -> None:
    with pytest.raises(UsageError) as error:
        StageTimes(**{"forward_s": (1, 1), "backward_s": (1, 1)} | times)
    assert str(error.value).startswith(text)


def test_wrong_questions() -> None:
    order = pipeline_schedules.generate_pipeline_schedule("1f1b", 2, 2)
    with pytest.raises(UsageError, match=r"^transfers: 'free', expected one of blocking, asynchronous\. Take one"):
        pipeline_simulation.simulate_pipeline(order, alike(2, 1.0), "free")
    with pytest.raises(ScheduleError, match=r"^number of stages in times: 3, expected 2, as in the order\."):
        pipeline_simulation.simulate_pipeline(order, alike(3, 1.0))
