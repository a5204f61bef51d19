"""Which consecutive blocks of a model each device of a pipeline gets."""

from ringweave.planning.partitioning.costs import Stage
from ringweave.planning.partitioning.problem import Memory, Problem
from ringweave.planning.partitioning.recurrence import recurrence
from ringweave.planning.partitioning.solving import Partition, assessed, solve

__all__ = ["Memory", "Partition", "Problem", "Stage", "assessed", "recurrence", "solve"]
