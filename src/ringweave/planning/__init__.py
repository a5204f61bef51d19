"""Planning: finds the schedule, layout, segmentation, batch shares and training mode of a group."""

from ringweave.planning.group_planner import plan_group
from ringweave.planning.plans import Plan, ScheduleChoice

__all__ = ["Plan", "ScheduleChoice", "plan_group"]
