"""Who leads which part of a message on which level: fractions by a linear program, then whole-number shares."""

from ringweave.planning.sharing.cutting import Cut, cut
from ringweave.planning.sharing.fractions import Fractions, fractions
from ringweave.planning.sharing.hierarchy import Hierarchy, hierarchy
from ringweave.planning.sharing.levelling import level_stripes

__all__ = ["Cut", "Fractions", "Hierarchy", "cut", "fractions", "hierarchy", "level_stripes"]
