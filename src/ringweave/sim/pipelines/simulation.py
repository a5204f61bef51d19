"""A step of a pipeline on virtual time, with all that is to be known of it."""

from dataclasses import dataclass

from ringweave.sim.pipelines.courses import ComputeSpan, Course
from ringweave.sim.pipelines.orders import Order
from ringweave.sim.pipelines.times import StageTimes


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineSimulation:
    """A simulated step."""

    step_s: float
    """Until the last stage has done everything."""
    bound_s: float
    """A time that no order beats for these stages and links."""
    busy_s: tuple[float, ...]
    """Of each stage: computing."""
    peak_in_flight: tuple[int, ...]
    """Of each stage: the most microbatches whose activations it holds."""
    spans: tuple[ComputeSpan, ...]
    """By stage, then by time."""

    @property
    def bubble_fraction(self) -> float:
        """The part of all stages' time in which they do not compute."""
        whole = self.step_s * len(self.busy_s)
        return 1 - sum(self.busy_s) / whole if whole else 0.0


def simulate(order: Order, times: StageTimes, transfers: str = "asynchronous") -> PipelineSimulation:
    """What a step of an order takes.

    Args:
        order: What each stage computes.
        times: Of its stages and links.
        transfers: One of `programs.TRANSFERS`.

    Raises:
        ScheduleError: The stages wait for each other for ever, or their number is not that of the times.
        UsageError: An unknown way of transferring.

    Cost: O(stages x microbatches).
    """
    step_s, spans = Course(order, transfers).followed(times)
    return PipelineSimulation(
        step_s=step_s,
        bound_s=times.bound_s(order.num_microbatches),
        busy_s=tuple(order.num_microbatches * (f + b) for f, b in zip(times.forward_s, times.backward_s, strict=True)),
        peak_in_flight=order.peak_in_flight,
        spans=tuple(sorted(spans, key=lambda span: (span.action.stage_index, span.begin_s))),
    )
