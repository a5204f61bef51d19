"""When blocks of a pipeline move to other devices, and where to: windows of measurements in, rulings out."""

from ringweave.planning.repartitioning.controlling import Controller, Note, State
from ringweave.planning.repartitioning.looking import Lookout
from ringweave.planning.repartitioning.moves import Move, moved_bytes, moves, pause_s, stage_of
from ringweave.planning.repartitioning.policies import Policy
from ringweave.planning.repartitioning.rulings import Ruling, Window
from ringweave.planning.repartitioning.searching import Candidate, search
from ringweave.planning.repartitioning.workloads import Conditions, Workload

__all__ = [
    "Candidate",
    "Conditions",
    "Controller",
    "Lookout",
    "Move",
    "Note",
    "Policy",
    "Ruling",
    "State",
    "Window",
    "Workload",
    "moved_bytes",
    "moves",
    "pause_s",
    "search",
    "stage_of",
]
