"""Repartition: decides when blocks of a running pipeline move to other devices; measured windows in, decisions out."""

from ringweave.planning.repartition.controller import (
    LinkProbeScheduler,
    RepartitionController,
    RepartitionEvent,
    RepartitionState,
)
from ringweave.planning.repartition.decisions import MeasurementWindow, RepartitionDecision, RepartitionPolicy
from ringweave.planning.repartition.pipeline_workload import PipelineConditions, PipelineWorkload
from ringweave.planning.repartition.search import (
    BlockMove,
    SimulatedPartition,
    block_moves,
    moved_bytes,
    predicted_pause_s,
    search_partitions,
    stage_of,
)

__all__ = [
    "BlockMove",
    "LinkProbeScheduler",
    "MeasurementWindow",
    "PipelineConditions",
    "PipelineWorkload",
    "RepartitionController",
    "RepartitionDecision",
    "RepartitionEvent",
    "RepartitionPolicy",
    "RepartitionState",
    "SimulatedPartition",
    "block_moves",
    "moved_bytes",
    "predicted_pause_s",
    "search_partitions",
    "stage_of",
]
