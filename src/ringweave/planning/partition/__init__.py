"""Partition: the consecutive blocks of a model that each device of a pipeline gets."""

from ringweave.planning.partition.problem import PartitionMemory, PartitionProblem, PartitionStage
from ringweave.planning.partition.solve import Partition, evaluate_partition, solve_by_recurrence, solve_partition

__all__ = [
    "Partition",
    "PartitionMemory",
    "PartitionProblem",
    "PartitionStage",
    "evaluate_partition",
    "solve_by_recurrence",
    "solve_partition",
]
