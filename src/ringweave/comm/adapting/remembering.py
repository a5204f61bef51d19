"""What won in earlier runs, kept in the user's cache folder: no trials where they were made before."""

import hashlib
import importlib.metadata
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ringweave import schedules
from ringweave.planning import Plan
from ringweave.planning.adapting import MAX_AGE_S

_FORMAT = "ringweave-tuning-2"


class TuningCache:
    """One file for each plan and version of the software, replaced in one go.

    The plan's text holds the nodes of all ranks and the rates of all links as they count, so another cluster, another
    placement or another measured rate is another file. What won longer ago than `MAX_AGE_S` counts as not known, so
    that trials that something disturbed do not count for ever.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        """`clock` gives seconds of the epoch."""
        self._folder = folder
        self._clock = clock

    @classmethod
    def of_user(cls, environ: Mapping[str, str]) -> "TuningCache":
        """In `$XDG_CACHE_HOME/ringweave/tuning`, or in `~/.cache`."""
        base = environ.get("XDG_CACHE_HOME", "")
        root = Path(base) if base.startswith("/") else Path(environ.get("HOME", "/nonexistent")) / ".cache"
        return cls(root / "ringweave" / "tuning")

    def load(self, plan: Plan) -> dict[int, str]:
        """Schedule by class of sizes; empty where nothing is known. A file that cannot be read counts as none."""
        return {number: name for number, (name, _) in self._read(plan).items()}

    def save(self, plan: Plan, tuned: Mapping[int, str]) -> None:
        """Keep it for the next run; does nothing where the folder cannot be written.

        What is known already does not become younger by that: it was not tried again.
        """
        path = self._path(plan)
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        known, now = self._read(plan), self._clock()
        since = {number: at for number, (name, at) in known.items() if tuned.get(number) == name}
        rows = {str(number): [name, since.get(number, now)] for number, name in sorted(tuned.items())}
        document = {_FORMAT: rows, "nodes": plan.nodes}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
            beside.replace(path)
        except OSError:
            return

    def _read(self, plan: Plan) -> dict[int, tuple[str, float]]:
        """Schedule by class of sizes, and when it won; without those that are too old."""
        try:
            document = json.loads(self._path(plan).read_text(encoding="utf-8"))
            found = {int(number): (name, float(at)) for number, (name, at) in document[_FORMAT].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return {}
        if not all(name in schedules.NAMES for name, _ in found.values()):
            return {}
        now = self._clock()
        return {number: (name, at) for number, (name, at) in found.items() if 0 <= now - at <= MAX_AGE_S}

    def _path(self, plan: Plan) -> Path:
        versions = [importlib.metadata.version("ringweave"), importlib.metadata.version("torch")]
        digest = hashlib.sha256("\n".join([*versions, str(plan)]).encode()).hexdigest()
        return self._folder / f"{digest[:32]}.json"
