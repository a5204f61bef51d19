"""Pipeline training on unequal devices: blocks of a model in stages, on stock torch.distributed.pipelining."""

from ringweave.pipeline import checkpoints
from ringweave.pipeline.model_blocks import blocks, merge
from ringweave.pipeline.pipeline import Pipeline
from ringweave.pipeline.stage_layout import Layout, Settings, even_splits

__all__ = ["Layout", "Pipeline", "Settings", "blocks", "checkpoints", "even_splits", "merge"]
