"""Checkpoints: copied in memory while training waits, written while it goes on, whole or not there at all."""

from ringweave.training.checkpoints.keeping import Checkpoints

__all__ = ["Checkpoints"]
