"""Keeps a pipeline's partition the best one while it trains: measured, decided on rank 0, moved."""

from ringweave.pipeline.adapting.balancer import Balancer
from ringweave.pipeline.adapting.workloads import adapt, conditions_of, workload_of

__all__ = ["Balancer", "adapt", "conditions_of", "workload_of"]
