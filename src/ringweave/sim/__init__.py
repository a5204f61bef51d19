"""Simulation of collectives and pipelines in virtual time: shared links, rank programs, faults."""

from ringweave.sim.scenario import (
    Fault,
    HostModel,
    LinkRateChange,
    NodeSlowdown,
    RankFailure,
    SimulationResult,
    StartDelay,
)
from ringweave.sim.simulation import simulate, trace_document
