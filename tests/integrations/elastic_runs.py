"""A script under the real `ringweave run --elastic`, with the kill of a worker."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ringweave.telemetry.events import read_events

LIMIT_S = 500


def run_with_a_kill(script: str, folder: Path) -> tuple[str, list[bool], int]:
    """Run the script on two workers, of which it kills one.

    Returns:
        Its output; whether each epoch was exact; samples that the others computed again.
    """
    (folder / "train.py").write_text(script)
    command: Sequence[str] = [sys.executable, "-m", "ringweave", "run", "--elastic", "1:2", "--workers", "2"]
    command = [*command, "--mode", "sync", "--run-dir", str(folder / "run"), str(folder / "train.py")]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    events = list(read_events(folder / "run" / "events.jsonl"))
    exact = [event["exact"] for event in events if event["kind"] == "samples_accounted"]
    missing = sum(event["missing"] for event in events if event["kind"] == "samples_recomputed")
    return done.stdout + done.stderr, exact, missing
