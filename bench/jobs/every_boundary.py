"""A supervisor killed by SIGKILL at every boundary of a life on this machine.

    python bench/jobs/every_boundary.py [--life asked|fails] [--out FILE]        (1 to 4 minutes)

`ends`: a node is lost, and the job succeeds, as in the tests. `asked`: suspended, resumed, stopped, kept, deleted.
`fails`: a node is lost more often than it may, tried again, its script fails, one node is kept, deleted.
It ends with 1 if any life ended otherwise than the others (outcome, retries, attempts), or left anything.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CRASHING = ROOT / "tests" / "launch" / "local" / "jobs" / "crashing.py"


def main() -> int:
    """Run all lives, and print how they ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--life", choices=["ends", "asked", "fails"], default="ends")
    parser.add_argument("--out", type=Path, help="where the lives go, as JSON")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(CRASHING), str(Path(folder) / "lives"), asked.life]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    lives = [_told(json.loads(line)) for line in done.stdout.splitlines()]
    ends = Counter(json.dumps({key: life[key] for key in ("left", "outcome", "retries", "begun")}) for life in lives)
    print(f"{sum(life['killed'] for life in lives)} supervisors killed in {len(lives)} lives")
    for end, count in ends.items():
        print(f"{count} lives ended so: {end}")
    if asked.out:
        _write(asked.out, asked.life, lives)
    return 0 if len(ends) == 1 and not any(life["left"] for life in lives) else 1


def _told(life: dict[str, Any]) -> dict[str, Any]:
    """Run one life; return the kill's boundary, everything left, and the starts of each attempt of each node."""
    begun = Counter(".".join(line.split()[1:3]) for line in life["ledger"] if line.startswith("begin"))
    left = [*life["files"], *(["a process"] * life["processes"]), *(["its record"] * (not life["is_forgotten"]))]
    told = {"boundary": life["crash_at"], "killed": life["has_crashed"], "left": left}
    return {**told, "outcome": life["outcome"], "retries": life["retries"], "begun": dict(sorted(begun.items()))}


def _write(path: Path, life: str, lives: list[dict[str, Any]]) -> None:
    head = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(head, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    about = {"date": str(date.today()), "commit": commit, "machine": platform.platform(), "life": life}
    rows = ",\n".join(f"  {json.dumps(each)}" for each in lives)
    text = json.dumps({**about, "load": round(os.getloadavg()[0], 1)})
    path.write_text(f'{text[:-1]},\n "lives": [\n{rows}\n ]}}\n')


if __name__ == "__main__":
    sys.exit(main())
