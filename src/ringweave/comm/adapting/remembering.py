"""What won in earlier runs, kept in the user's cache folder: no trials where they were made before."""

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Mapping
from pathlib import Path

from ringweave import schedules
from ringweave.planning import Plan

_FORMAT = "ringweave-tuning-1"


class TuningCache:
    """One file for each plan and version of the software, replaced in one go.

    The plan's text holds the nodes of all ranks and the rates of all links as they count, so another cluster, another
    placement or another measured rate is another file.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def of_user(cls, environ: Mapping[str, str]) -> "TuningCache":
        """In `$XDG_CACHE_HOME/ringweave/tuning`, or in `~/.cache`."""
        base = environ.get("XDG_CACHE_HOME", "")
        root = Path(base) if base.startswith("/") else Path(environ.get("HOME", "/nonexistent")) / ".cache"
        return cls(root / "ringweave" / "tuning")

    def load(self, plan: Plan) -> dict[int, str]:
        """Schedule by class of sizes; empty where nothing is known. A file that cannot be read counts as none."""
        try:
            document = json.loads(self._path(plan).read_text(encoding="utf-8"))
            found = {int(number): name for number, name in document[_FORMAT].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return {}
        return found if all(name in schedules.NAMES for name in found.values()) else {}

    def save(self, plan: Plan, tuned: Mapping[int, str]) -> None:
        """Keep it for the next run; does nothing where the folder cannot be written."""
        path = self._path(plan)
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        document = {_FORMAT: {str(number): name for number, name in sorted(tuned.items())}, "nodes": plan.nodes}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
            beside.replace(path)
        except OSError:
            return

    def _path(self, plan: Plan) -> Path:
        versions = [importlib.metadata.version("ringweave"), importlib.metadata.version("torch")]
        digest = hashlib.sha256("\n".join([*versions, str(plan)]).encode()).hexdigest()
        return self._folder / f"{digest[:32]}.json"
