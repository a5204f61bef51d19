"""Steps of pipelines on virtual time: what a schedule of stages takes, with its waits, and what it holds."""

from ringweave.sim.pipelines.actions import Action, Kind, parse_action
from ringweave.sim.pipelines.courses import ComputeSpan, Course
from ringweave.sim.pipelines.orders import NAMES, Order, generate, parse_order, warm_up
from ringweave.sim.pipelines.simulation import PipelineSimulation, simulate
from ringweave.sim.pipelines.times import Overheads, StageTimes

__all__ = [
    "NAMES",
    "Action",
    "ComputeSpan",
    "Course",
    "Kind",
    "Order",
    "Overheads",
    "PipelineSimulation",
    "StageTimes",
    "generate",
    "parse_action",
    "parse_order",
    "simulate",
    "warm_up",
]
