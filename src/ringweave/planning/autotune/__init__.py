"""Autotuning of a running job: finds the schedule that measures fastest, and whether link rates have drifted.

Pure: observations in, decisions out. `comm/tuning` exchanges them between the ranks.
"""

from ringweave.planning.autotune.tuner import MAX_AGE_S, Autotuner, GroupPlacement, size_class
from ringweave.planning.autotune.tuning_messages import SurveyStream, TuningDecision, TuningReport

__all__ = ["MAX_AGE_S", "Autotuner", "GroupPlacement", "SurveyStream", "TuningDecision", "TuningReport", "size_class"]
