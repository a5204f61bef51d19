import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringweave.errors import ScheduleError, UsageError
from ringweave.sim import pipelines
from ringweave.sim.pipelines import Action, Kind, parse_action, parse_order

GIVEN = (st.sampled_from(pipelines.NAMES), st.integers(1, 7), st.integers(1, 20))


@given(st.integers(0, 999), st.sampled_from(list(Kind)), st.integers(0, 999))
def test_actions_print_and_parse(stage: int, kind: Kind, microbatch: int) -> None:
    action = Action(stage, kind, microbatch)
    assert parse_action(str(action)) == action


def test_the_text_of_actions() -> None:
    assert str(Action(2, Kind.FORWARD, 0)) == "2F0"
    assert parse_action(" 3SEND_F1 ") == Action(3, Kind.SEND_FORWARD, 1)


@pytest.mark.parametrize("text", ["", "F0", "2X0", "2F", "-1F0", "2F0 2B0", "1UNSHARD", "9" * 5000 + "F0"])
def test_no_action(text: str) -> None:
    with pytest.raises(ScheduleError, match=r"^action of a pipeline: .* Write it like 2F0\.$"):
        parse_action(text)


@given(*GIVEN)
def test_orders_print_and_parse(name: str, num_stages: int, num_microbatches: int) -> None:
    order = pipelines.generate(name, num_stages, num_microbatches)
    assert parse_order(str(order)) == order
    held = [pipelines.warm_up(name, stage, num_stages, num_microbatches) for stage in range(num_stages)]
    assert list(order.peak_in_flight) == held


def test_the_three_orders() -> None:
    assert str(pipelines.generate("gpipe", 2, 2)) == "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1"
    assert str(pipelines.generate("1f1b", 2, 3)) == "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2"
    assert str(pipelines.generate("1f1b-overlap", 2, 4)).startswith("0F0,0F1,0F2,0B0,0F3,0B1,")
    assert pipelines.generate("1f1b-overlap", 4, 32).peak_in_flight == (7, 5, 3, 1)
    assert pipelines.warm_up("1f1b", 0, 4) == 4


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
        parse_order(text)
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
        pipelines.generate(*arguments)
    assert str(raised.value) == error


def test_gpipe_holds_all() -> None:
    with pytest.raises(
        UsageError, match=r"^microbatches: None, expected a number for gpipe\. Give it: gpipe holds all"
    ):
        pipelines.warm_up("gpipe", 0, 2)
