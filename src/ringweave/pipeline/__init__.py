"""Pipelines over unequal devices: blocks of a model in stages, trained on stock torch.distributed.pipelining."""

from ringweave.pipeline import checkpoints
from ringweave.pipeline.layouts import Layout, even_splits
from ringweave.pipeline.models.finding import blocks
from ringweave.pipeline.models.grouping import merge
from ringweave.pipeline.pipeline import Pipeline
from ringweave.pipeline.settings import Settings

__all__ = ["Layout", "Pipeline", "Settings", "blocks", "checkpoints", "even_splits", "merge"]
