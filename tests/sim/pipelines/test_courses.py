import pytest

from ringweave.errors import ScheduleError
from ringweave.sim import pipeline_schedules, pipeline_simulation
from ringweave.sim.pipeline_simulation import PipelineTimeline, StageTimes


def unequal(factor: float) -> StageTimes:
    return StageTimes(
        forward_s=(1.0, 3.0 * factor, 0.5),
        backward_s=(2.0, 5.0, 1.0 / factor),
        forward_transfer_s=(0.25 * factor, 4.0),
        backward_transfer_s=(2.5, 0.125),
        before_s=(0.0, 0.75, 0.0),
        message_s=0.0625,
        after_s=0.5,
    )


@pytest.mark.parametrize("name", pipeline_schedules.PIPELINE_SCHEDULES)
@pytest.mark.parametrize("transfers", ["blocking", "asynchronous"])
def test_one_course_serves_all_times(name: str, transfers: str) -> None:
    order = pipeline_schedules.generate_pipeline_schedule(name, 3, 5)
    course = PipelineTimeline(order, transfers)
    for factor in (1.0, 4.0, 1.0):
        found = pipeline_simulation.simulate_pipeline(order, unequal(factor), transfers)
        assert course.step_s(unequal(factor)) == found.step_s
        assert found.step_s >= max(span.end_s for span in found.spans) + 0.5


def test_times_of_another_number_of_stages_are_refused() -> None:
    course = PipelineTimeline(pipeline_schedules.generate_pipeline_schedule("gpipe", 2, 1))
    with pytest.raises(ScheduleError) as error:
        course.step_s(unequal(1.0))
    assert str(error.value) == (
        "number of stages in times: 3, expected 2, as in the order. Give times for these stages."
    )
