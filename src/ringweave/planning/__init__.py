"""Searches: which schedule a group of ranks runs for a message, on which layout, how finely pipelined."""

from ringweave.planning.choices import Choice
from ringweave.planning.groups import plan_group
from ringweave.planning.plans import Plan

__all__ = ["Choice", "Plan", "plan_group"]
