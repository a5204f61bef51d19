"""Repartition: decides when blocks of a running pipeline move to other devices; measured windows in, decisions out."""

from ringweave.planning.repartition.controller import (
    LinkProbeScheduler,
    MeasurementWindow,
    RepartitionController,
    RepartitionDecision,
    RepartitionPolicy,
    RepartitionState,
)
from ringweave.planning.repartition.pipeline_workload import PipelineConditions, PipelineWorkload
from ringweave.planning.repartition.search import BlockMove, block_moves, predicted_pause_s, search_partitions, stage_of
