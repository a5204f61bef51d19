"""The systems that are measured: how each is started on the same ranks, and which knobs of it are tried."""

from collections.abc import Mapping

from ringweave.benchmarks.systems.mpich import Mpich
from ringweave.benchmarks.systems.open_mpi import OpenMpi
from ringweave.benchmarks.systems.system import Knob, Setup, Shape, Start, System, shape
from ringweave.benchmarks.systems.torch_backends import Gloo, Ringweave

ALL: Mapping[str, System] = {system.name: system for system in (Ringweave(), Gloo(), OpenMpi(), Mpich())}
"""By the names that users type."""

__all__ = ["ALL", "Knob", "Setup", "Shape", "Start", "System", "shape"]
