"""Blocks move to other stages while training goes on: with all that belongs to them, or not at all."""

from ringweave.pipeline.moving.mover import Mover, Outcome

__all__ = ["Mover", "Outcome"]
