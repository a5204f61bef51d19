import pytest

from ringweave import schedules
from ringweave.errors import UsageError
from ringweave.schedules import NATIVE, SCHEDULE_NAMES, Schedule
from ringweave.schedules.generators.ring import ring


def test_the_names_that_users_type() -> None:
    assert SCHEDULE_NAMES == (
        "ring",
        "leader-matrix",
        "hierarchical",
        "ps",
        "direct",
        "multi-level",
        "halving-doubling",
        "native",
    )


def test_every_name_but_the_host_is_generated_and_correct() -> None:
    assert NATIVE in SCHEDULE_NAMES
    for name in SCHEDULE_NAMES:
        assert schedules.check_schedule_name(name) == name
        if name != NATIVE:
            for num_ranks in (1, 2, 3, 5, 8, 13):
                schedule: Schedule = schedules.generate(name, num_ranks)
                assert schedule.num_ranks == num_ranks
                assert schedule.name == name
                schedules.verify(schedule)
    assert schedules.generate("ring", 4) == ring(4)


def test_a_name_that_is_nearly_one() -> None:
    with pytest.raises(UsageError) as caught:
        schedules.check_schedule_name("rings", where="--schedule")
    assert str(caught.value) == (
        f"schedule: 'rings', expected one of {', '.join(SCHEDULE_NAMES)}. Did you mean 'ring'? [--schedule]"
    )


@pytest.mark.parametrize("ask", [schedules.check_schedule_name, lambda name: schedules.generate(name, 4)])
def test_a_name_like_no_other(ask) -> None:
    with pytest.raises(UsageError) as caught:
        ask("butterfly")
    assert str(caught.value) == f"schedule: 'butterfly', expected one of {', '.join(SCHEDULE_NAMES)}. Name one of them."
    assert caught.value.exit_code == 2


def test_the_host_library_has_no_schedule() -> None:
    with pytest.raises(UsageError) as caught:
        schedules.generate("native", 4)
    assert str(caught.value) == (
        "schedule: 'native', expected one that is planned here. 'native' names the native backend, which plans its "
        "messages itself."
    )
