"""Collectives on virtual time: streams that share links, ranks that follow the executor's programs, and faults."""

from ringweave.sim.faults import Death, Delay, Fault, RateChange, Slowdown
from ringweave.sim.machine import Machine
from ringweave.sim.results import LinkLoad, Simulation, Span
from ringweave.sim.simulation import simulate
from ringweave.sim.tracing import trace

__all__ = [
    "Death",
    "Delay",
    "Fault",
    "LinkLoad",
    "Machine",
    "RateChange",
    "Simulation",
    "Slowdown",
    "Span",
    "simulate",
    "trace",
]
