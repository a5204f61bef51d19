"""Files that survive a kill: curves of JSON lines, and documents that are replaced in one move."""

import json
from collections.abc import Mapping
from pathlib import Path


def append(path: Path, **values: float) -> None:
    """Adds one line to a curve; floats are written so that they read back as the same bits."""
    with path.open("a") as lines:
        lines.write(json.dumps(values) + "\n")


def read_curve(path: Path) -> tuple[list[int], list[float]]:
    """Returns the train steps and the losses noted in a curve."""
    points = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [point["train_step"] for point in points], [point["loss"] for point in points]


def keep_until(path: Path, last_step: int) -> None:
    """Drops from a curve what comes after `last_step`, and a last line that was cut short."""
    if not path.exists():
        return
    whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    replace_text(path, "".join(line for line in whole if json.loads(line)["train_step"] <= last_step))


def merge_into_json(path: Path, values: Mapping[str, object]) -> None:
    """Sets `values` in a JSON document and keeps its other keys, which belong to other programs."""
    known = json.loads(path.read_text()) if path.exists() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps({**known, **values}, indent=2) + "\n")


def replace_text(path: Path, content: str) -> None:
    """Writes `path` in one move: a reader sees the old content or the new, never half of it."""
    aside = path.with_name(path.name + ".writing")
    aside.write_text(content)
    aside.replace(path)
