"""What torch's schedules are given, without any process."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringweave.errors import ScheduleError, UsageError
from ringweave.pipeline.runtime import torch_schedules
from ringweave.sim import pipeline_schedules
from ringweave.sim.pipeline_schedules import ActionKind, PipelineAction


def test_orders_by_name_and_as_data() -> None:
    order = pipeline_schedules.generate_pipeline_schedule("1f1b-overlap", 3, 5)
    assert torch_schedules.resolve_order("1f1b-overlap", 3, 5) == order
    assert torch_schedules.resolve_order(order, 3, 5) is order
    assert torch_schedules.stage_microbatches(order, 1) == (0, 1, 2, 3, 4)


def test_forwards_may_come_in_any_order() -> None:
    actions = tuple(
        PipelineAction(0, kind, index) for kind in (ActionKind.FORWARD, ActionKind.BACKWARD) for index in (2, 0, 1)
    )
    assert torch_schedules.stage_microbatches(pipeline_schedules.PipelineSchedule((actions,)), 0) == (2, 0, 1)


def test_orders_that_do_not_fit() -> None:
    with pytest.raises(UsageError) as caught:
        torch_schedules.resolve_order(pipeline_schedules.generate_pipeline_schedule("gpipe", 3, 5), 4, 5)
    assert str(caught.value) == (
        "stages of the order: 3, expected 4, as the pipeline has. "
        "Generate it for this number, or start as many workers."
    )
    with pytest.raises(UsageError) as caught:
        torch_schedules.resolve_order("1f1b", 4, 3)
    assert str(caught.value) == (
        "microbatches: 3, expected at least 4, the number of stages, for 1f1b. "
        "Cut the batch finer, or take gpipe or 1f1b-overlap."
    )
    assert torch_schedules.resolve_order("1f1b-overlap", 4, 3).num_microbatches == 3


def test_an_order_whose_stages_wait_for_each_other_is_refused() -> None:
    order = pipeline_schedules.parse_pipeline_schedule("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1")
    with pytest.raises(ScheduleError) as caught:
        torch_schedules.resolve_order(order, 2, 2)
    assert "stage 0 waits for 0RECV_B0; stage 1 waits for 1RECV_F1" in str(caught.value)


def test_receives_stand_ready_from_the_start_and_results_leave_at_once() -> None:
    order = pipeline_schedules.generate_pipeline_schedule("1f1b-overlap", 3, 2)
    lowered = [torch_schedules._add_transfers(stage, order) for stage in range(3)]
    assert [" ".join(map(str, actions)) for actions in lowered] == [
        "0RECV_B0 0RECV_B1 0F0 0SEND_F0 0F1 0SEND_F1 0B0 0B1 0REDUCE_GRAD",
        "1RECV_F0 1RECV_F1 1RECV_B0 1RECV_B1 1F0 1SEND_F0 1F1 1SEND_F1 1B0 1SEND_B0 1B1 1SEND_B1 1REDUCE_GRAD",
        "2RECV_F0 2RECV_F1 2F0 2B0 2SEND_B0 2F1 2B1 2SEND_B1 2REDUCE_GRAD",
    ]


@st.composite
def orders(draw: st.DrawFn) -> pipeline_schedules.PipelineSchedule:
    """Each stage has its own: of a microbatch's two places the first is its forward's."""
    num_stages, num_microbatches = draw(st.integers(2, 4)), draw(st.integers(1, 5))
    stages = []
    for stage in range(num_stages):
        places = draw(st.permutations([*range(num_microbatches)] * 2))
        kinds = [ActionKind.BACKWARD if index in places[:at] else ActionKind.FORWARD for at, index in enumerate(places)]
        stages.append(tuple(PipelineAction(stage, kind, index) for kind, index in zip(kinds, places, strict=True)))
    return pipeline_schedules.PipelineSchedule(tuple(stages))


@given(orders())
def test_receives_come_in_the_order_of_what_the_neighbour_sends(order: pipeline_schedules.PipelineSchedule) -> None:
    """Transfers between two ranks are matched by nothing but their order."""
    lowered = [
        [str(each) for each in torch_schedules._add_transfers(stage, order)] for stage in range(order.num_stages)
    ]

    def microbatches(stage: int, what: str) -> list[str]:
        start = f"{stage}{what}"
        return [text.removeprefix(start) for text in lowered[stage] if text.startswith(start)]

    every = [str(index) for index in range(order.num_microbatches)]
    for stage in range(order.num_stages - 1):
        for sent, received in (
            (microbatches(stage, "SEND_F"), microbatches(stage + 1, "RECV_F")),
            (microbatches(stage + 1, "SEND_B"), microbatches(stage, "RECV_B")),
        ):
            assert sent == received
            assert sorted(sent) == every
    assert not any("RECV_F" in text for text in lowered[0])
    assert not any("RECV_B" in text for text in lowered[-1])


def test_values_of_microbatches_as_the_batch_has_them() -> None:
    assert torch_schedules.sort_by_microbatch((2, 0, 1), ["c", "a", "b"]) == ["a", "b", "c"]
