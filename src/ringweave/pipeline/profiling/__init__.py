"""What blocks, links and a step's actions take on these devices, measured, and what a step then takes, simulated."""

from ringweave.pipeline.profiling.links import Link, measure_links
from ringweave.pipeline.profiling.measuring import BlockCost, Profile, profile
from ringweave.pipeline.profiling.predicting import partition, predict
from ringweave.pipeline.profiling.rehearsing import rehearse

__all__ = ["BlockCost", "Link", "Profile", "measure_links", "partition", "predict", "profile", "rehearse"]
