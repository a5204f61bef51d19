"""ringweave: distributed training on unequal machines and unequal networks, on PyTorch."""

__version__ = "0.1.0"
