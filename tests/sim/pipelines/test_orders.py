import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringweave.errors import ScheduleError, UsageError
from ringweave.sim import pipeline_schedules
from ringweave.sim.pipeline_schedules import ActionKind, PipelineAction, parse_action, parse_pipeline_schedule

GIVEN = (st.sampled_from(pipeline_schedules.PIPELINE_SCHEDULES), st.integers(1, 7), st.integers(1, 20))


@given(st.integers(0, 999), st.sampled_from(list(ActionKind)), st.integers(0, 999))
def test_actions_print_and_parse(stage: int, kind: ActionKind, microbatch: int) -> None:
    action = PipelineAction(stage, kind, microbatch)
    assert parse_action(str(action)) == action


def test_the_text_of_actions() -> None:
    assert str(PipelineAction(2, ActionKind.FORWARD, 0)) == "2F0"
    assert parse_action(" 3SEND_F1 ") == PipelineAction(3, ActionKind.SEND_FORWARD, 1)


@pytest.mark.parametrize("text", ["", "F0", "2X0", "2F", "-1F0", "2F0 2B0", "1UNSHARD", "9" * 5000 + "F0"])
def test_no_action(text: str) -> None:
    with pytest.raises(ScheduleError, match=r"^action of a pipeline: .* Write it like 2F0\.$"):
        parse_action(text)


@given(*GIVEN)
def test_orders_print_and_parse(name: str, num_stages: int, num_microbatches: int) -> None:
    order = pipeline_schedules.generate_pipeline_schedule(name, num_stages, num_microbatches)
    assert parse_pipeline_schedule(str(order)) == order
    held = [
        pipeline_schedules.num_warmup_forwards(name, stage, num_stages, num_microbatches) for stage in range(num_stages)
    ]
    assert list(order.peak_in_flight) == held


def test_the_three_orders() -> None:
    assert str(pipeline_schedules.generate_pipeline_schedule("gpipe", 2, 2)) == "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1"
    assert (
        str(pipeline_schedules.generate_pipeline_schedule("1f1b", 2, 3))
        == "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2"
    )
    assert str(pipeline_schedules.generate_pipeline_schedule("1f1b-overlap", 2, 4)).startswith(
        "0F0,0F1,0F2,0B0,0F3,0B1,"
    )
    assert pipeline_schedules.generate_pipeline_schedule("1f1b-overlap", 4, 32).peak_in_flight == (7, 5, 3, 1)
    assert pipeline_schedules.num_warmup_forwards("1f1b", 0, 4) == 4


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("0F0,0B1", "order of stage 0: ['0F0', '0B1'], expected 0F0 and, later, 0B0. Give each microbatch a forward"),
        ("0B0,0F0", "order of stage 0: ['0B0', '0F0'], expected 0F0 and, later, 0B0."),
        ("0F0,0B0\n1F0,1B0,1F1,1B1", "order of stage 1: 4, expected 2 actions, as many as stage 0 has."),
        ("0F0,0B0\n0F0,0B0", "order of stage 1: ['0F0', '0B0'], expected 1F0 and, later, 1B0."),
    ],
)
def test_wrong_orders(text: str, error: str) -> None:
    with pytest.raises(ScheduleError) as raised:
        parse_pipeline_schedule(text)
    assert str(raised.value).startswith(error)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            ("1fb1", 2, 2),
            "pipeline schedule: '1fb1', expected one of gpipe, 1f1b, 1f1b-overlap. Did you mean \"1f1b\"?",
        ),
        (("gpipe", 0, 2), "stages: 0, expected 1 or more. Give how many there are."),
        (("gpipe", 2, 0), "microbatches: 0, expected 1 or more. Give how many there are."),
    ],
)
def test_wrong_questions(arguments: tuple, error: str) -> None:
    with pytest.raises(UsageError) as raised:
        pipeline_schedules.generate_pipeline_schedule(*arguments)
    assert str(raised.value) == error


def test_gpipe_holds_all() -> None:
    with pytest.raises(
        UsageError, match=r"^microbatches: None, expected a number for gpipe\. Give it: gpipe holds all"
    ):
        pipeline_schedules.num_warmup_forwards("gpipe", 0, 2)
