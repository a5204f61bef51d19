"""A supervisor killed by SIGKILL at every boundary of a longer life: suspended, resumed, stopped, kept, deleted.

    python bench/jobs/every_boundary.py

The tests do the same with a job that succeeds; this takes 4 minutes. It ends with 1 if any life ended otherwise.
"""

import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

CRASHING = Path(__file__).parents[2] / "tests" / "launch" / "local" / "jobs" / "crashing.py"


def main() -> int:
    """Live all lives, and say how they ended."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(CRASHING), str(Path(folder) / "lives"), "asked"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    lives = [json.loads(line) for line in done.stdout.splitlines()]
    ends = Counter((life["processes"], len(life["files"]), life["outcome"], _begun(life["ledger"])) for life in lives)
    print(f"{sum(life['has_crashed'] for life in lives)} supervisors killed in {len(lives)} lives")
    for (processes, files, outcome, begun), count in ends.items():
        print(
            f"{count} lives ended with {processes} processes, {files} files, outcome {outcome}; attempts begun: {begun}"
        )
    return 0 if len(ends) == 1 and next(iter(ends))[:3] == (0, 0, None) else 1


def _begun(ledger: list[str]) -> str:
    """`0.1x1 0.2x1`: each attempt of each node, and how often it began."""
    begun = Counter(".".join(line.split()[1:3]) for line in ledger if line.startswith("begin"))
    return " ".join(f"{attempt}x{count}" for attempt, count in sorted(begun.items()))


if __name__ == "__main__":
    sys.exit(main())
