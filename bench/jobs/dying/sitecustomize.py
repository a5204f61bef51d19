"""Makes the controller of a job of Slurm die at one boundary, and notes how its job ended; nothing else changes.

`LIFE=FOLDER:NAME#2` says where it notes the boundaries that it comes to, and that it dies when it comes to NAME for the
second time; `LIFE=FOLDER:` dies nowhere. What removes a job when its TTL is over notes how it ended, too.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONTROLLER = "ringweave.launch.slurm.controller"
SWEEPER = "ringweave.launch.slurm.sweeping"


def _die_in(home: Path, dies_at: str) -> None:
    from ringweave.launch.slurm.place import SlurmPlace
    from ringweave.launch.slurm.registry import Registry

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

    bounded(SlurmPlace, "do", lambda given: type(given[0]).__name__)
    for method in ("save", "tell", "forget"):
        bounded(Registry, method, lambda given, method=method: method)
    make = SlurmPlace.__init__

    def making(self: SlurmPlace, *given: Any, **named: Any) -> None:
        make(self, *given, **named)
        self._reached = reached

    SlurmPlace.__init__ = making


def _note_end_in(home: Path) -> None:
    """How the job ended, by the record with which it is forgotten."""
    from ringweave.launch.slurm.registry import Entry, Registry

    forget = Registry.forget

    def noting(self: Registry, entry: Entry) -> None:
        record = entry.job.record
        told = {"outcome": record.outcome, "retries": [node.retries for node in record.nodes]}
        (home / "end.json").write_text(json.dumps(told))
        forget(self, entry)

    Registry.forget = noting


if os.environ.get("LIFE"):
    folder, _, boundary = os.environ["LIFE"].rpartition(":")
    if CONTROLLER in sys.orig_argv or SWEEPER in sys.orig_argv:
        _note_end_in(Path(folder))
    if CONTROLLER in sys.orig_argv:
        _die_in(Path(folder), boundary)
