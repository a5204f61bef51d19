"""What blocks and links take on these devices, measured, and what a step then takes, simulated."""

from ringweave.pipeline.profiling.links import Link, measure_links
from ringweave.pipeline.profiling.measuring import BlockCost, Profile, profile
from ringweave.pipeline.profiling.predicting import partition, predict

__all__ = ["BlockCost", "Link", "Profile", "measure_links", "partition", "predict", "profile"]
