"""Simulation of collectives and pipelines in virtual time: shared links, rank programs, faults."""

from ringweave.sim.scenario import (
    Fault,
    HostModel,
    LinkLoad,
    LinkRateChange,
    NodeSlowdown,
    RankFailure,
    RankSpan,
    SimulationResult,
    StartDelay,
)
from ringweave.sim.simulation import simulate, trace_document

__all__ = [
    "Fault",
    "HostModel",
    "LinkLoad",
    "LinkRateChange",
    "NodeSlowdown",
    "RankFailure",
    "RankSpan",
    "SimulationResult",
    "StartDelay",
    "simulate",
    "trace_document",
]
