"""Checkpoints: copied in memory while training waits, written while it goes on, and visible only when complete."""

from ringweave.training.checkpoints.manager import Checkpoints

__all__ = ["Checkpoints"]
