"""Kills the controller of a Slurm job at one boundary, and records how its job ended; nothing else changes.

`LIFE=FOLDER:NAME#2` names the folder in which it records the boundaries that it reaches; it kills the controller when
it reaches NAME for the second time. `LIFE=FOLDER:` kills nothing. The process that removes a job after its TTL also
records how it ended.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONTROLLER = "ringweave.platforms.slurm.controller"
SWEEPER = "ringweave.platforms.slurm.allocation"


def _die_in(home: Path, dies_at: str) -> None:
    from ringweave.platforms.slurm.job_runtime import SlurmJobRuntime
    from ringweave.platforms.slurm.registry import SlurmJobRegistry

    def reached(name: str) -> None:
        with (home / "boundaries").open("a+") as log:
            log.write(f"{name}\n")
            log.flush()
            log.seek(0)
            times = log.read().splitlines().count(name)
        if f"{name}#{times}" == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def bounded(kind: type, method: str, name: Callable[[tuple[Any, ...]], str]) -> None:
        inner = getattr(kind, method)

        def call(self: object, *given: Any, **named: Any) -> Any:
            reached(f"before {name(given)}")
            result = inner(self, *given, **named)
            reached(f"after {name(given)}")
            return result

        setattr(kind, method, call)

    bounded(SlurmJobRuntime, "do", lambda given: type(given[0]).__name__)
    for method in ("save_record", "add_events", "delete"):
        bounded(SlurmJobRegistry, method, lambda given, method=method: method)
    make = SlurmJobRuntime.__init__

    def making(self: SlurmJobRuntime, *given: Any, **named: Any) -> None:
        make(self, *given, **named)
        self._on_boundary = reached

    SlurmJobRuntime.__init__ = making


def _note_end_in(home: Path) -> None:
    """Record how the job ended, from the record with which it is forgotten."""
    from ringweave.platforms.slurm.registry import SlurmJobRegistry, SlurmRegistryEntry

    forget = SlurmJobRegistry.delete

    def noting(self: SlurmJobRegistry, entry: SlurmRegistryEntry) -> None:
        record = entry.job.record
        told = {"outcome": record.outcome, "retries": [node.retries for node in record.nodes]}
        (home / "end.json").write_text(json.dumps(told))
        forget(self, entry)

    SlurmJobRegistry.delete = noting


if os.environ.get("LIFE"):
    folder, _, boundary = os.environ["LIFE"].rpartition(":")
    if CONTROLLER in sys.orig_argv or SWEEPER in sys.orig_argv:
        _note_end_in(Path(folder))
    if CONTROLLER in sys.orig_argv:
        _die_in(Path(folder), boundary)
