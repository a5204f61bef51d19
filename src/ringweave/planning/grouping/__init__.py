"""Which workers form a ring: those that are equally fast, by the order of a speed test or by a search for borders."""

from ringweave.planning.grouping.boundaries import MIN_GAIN, Grouping, Model, split, throughput
from ringweave.planning.grouping.queueing import CompletionQueue

__all__ = ["MIN_GAIN", "CompletionQueue", "Grouping", "Model", "split", "throughput"]
