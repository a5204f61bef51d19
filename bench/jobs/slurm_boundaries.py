"""The controller of a job on a real Slurm killed by SIGKILL at every boundary of a life; its batch script restarts it.

    PYTHONPATH=. python bench/jobs/slurm_boundaries.py [--life ends] [--together 3] [--within 800] [--out FILE]  (root)

Lives without a kill find the boundaries: every action before and after, every change of what is saved, and inside of
actions of several steps. Then one life for each boundary, in which the real process of the controller kills itself
there; what a life comes to that no other did is a boundary too. With --out it goes on where it was interrupted: each
life is in the file as soon as it has ended. Ends with 1 if a life ended otherwise (something is left: files, processes,
jobs of Slurm; a worker began twice or never; another outcome), if lives are left to be lived, or if no life came again
to more than a tenth of the boundaries.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from datetime import date
from pathlib import Path
from typing import Any

from slurm_lives import KINDS, Life

from tests.fakes.slurm import FakeGpuSlurmCluster

ROOT = Path(__file__).parents[2]
TRIES = 12
"""Tries of a boundary that not every life reaches: the number of polls depends on time."""
MOST_MISSED = 0.1
"""Largest fraction of boundaries that no life reaches again."""


class Book:
    """Record of the lives so far, on disk."""

    def __init__(self, path: Path | None, kind: str) -> None:
        self._path, self._kind = path, kind
        whole = json.loads(path.read_text()) if path is not None and path.exists() else {}
        self._whole: dict[str, Any] = whole
        told = whole.setdefault("lives", {}).setdefault(kind, {})
        self.known: list[str] = told.setdefault("boundaries", [])
        self.lives: list[dict[str, Any]] = told.setdefault("lived", [])
        self.missed: dict[str, int] = told.setdefault("not_come_to", {})

    def add(self, life: Life, told: dict[str, Any]) -> None:
        self.known += [name for name in life.on_boundary() if name not in self.known]
        if life.dies_at and told["killed_at"] is None:
            self.missed[life.dies_at] = self.missed.get(life.dies_at, 0) + 1
        else:
            self.missed.pop(life.dies_at, None)
        self.lives.append({**told, "commit": commit(), "load": round(os.getloadavg()[0], 1)})
        self._save()

    def todo(self) -> list[str]:
        """Return boundaries without a kill so far; of those that were not reached, the least tried ones first."""
        done = {life["killed_at"] for life in self.lives}
        left = [name for name in self.known if name not in done and self.missed.get(name, 0) < TRIES]
        return sorted(left, key=lambda name: self.missed.get(name, 0))

    def summary(self) -> str:
        """Summarise all lives of this kind, from all runs."""
        killed = {life["killed_at"] for life in self.lives if life["killed_at"]}
        same = sum(life["is_same"] for life in self.lives)
        return (
            f"{self._kind}: {len(killed)} of {len(self.known)} boundaries killed at, {self._never()} not come to again "
            f"in {TRIES} lives, {len(self.todo())} left; {same} of {len(self.lives)} lives with one and the same end"
        )

    def is_good(self) -> bool:
        """True if every boundary had its kill, except a few that are reached by chance, and all ends are the same."""
        is_whole = not self.todo() and self._never() <= MOST_MISSED * len(self.known)
        return is_whole and all(life["is_same"] for life in self.lives)

    def _never(self) -> int:
        return sum(count >= TRIES for count in self.missed.values())

    def _save(self) -> None:
        if self._path is None:
            return
        self._whole.update(date=str(date.today()), commit=commit(), machine=platform.platform())
        beside = self._path.with_suffix(".new")
        beside.write_text(json.dumps(self._whole, indent=1) + "\n")
        beside.replace(self._path)


class Bench:
    """Runs lives, several at a time, in one cluster."""

    def __init__(self, book: Book, kind: str, cluster: FakeGpuSlurmCluster, folder: Path) -> None:
        self._book, self._kind, self._cluster, self._folder = book, kind, cluster, folder
        self._under_way: dict[Future[dict[str, Any]], Life] = {}
        self._count = 0

    def lead(self, together: int, within_s: float) -> None:
        """Run all remaining lives, or as many as begin in time."""
        deadline = time.monotonic() + within_s
        with ThreadPoolExecutor(together) as pool:
            if not self._book.lives:
                self._begin(pool, "")
                self._hear()
            while True:
                at_work = {life.dies_at for life in self._under_way.values()}
                todo = [name for name in self._book.todo() if name not in at_work]
                if todo and time.monotonic() < deadline and len(self._under_way) < together:
                    self._begin(pool, todo[0])
                elif self._under_way:
                    self._hear()
                else:
                    return

    def _begin(self, pool: ThreadPoolExecutor, dies_at: str) -> None:
        self._count += 1
        life = Life(self._cluster, self._folder / f"{self._kind}-{os.getpid()}-{self._count}", self._kind, dies_at)
        self._under_way[pool.submit(life.live)] = life

    def _hear(self) -> None:
        ended, _ = wait(self._under_way, return_when=FIRST_COMPLETED)
        for future in ended:
            life, told = self._under_way.pop(future), future.result()
            self._book.add(life, told)
            where = f"killed at {told['killed_at']}" if told["killed_at"] else f"not killed {life.dies_at}"
            print(
                f"{told['took_s']:6.1f} s  {where}: {'same end' if told['is_same'] else json.dumps(told)}", flush=True
            )
            if not told["is_same"]:
                print(life.story(), flush=True)


def _cluster() -> FakeGpuSlurmCluster:
    """Return a cluster that does not take a busy machine for a lost one, which would be another life."""
    return FakeGpuSlurmCluster({"big": 10, "small": 5}, name=f"b-{os.getpid()}", timeout_s=300)


def commit() -> str:
    """Return the environment with the sources' paths."""
    head = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(head, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def main() -> int:
    """Run all lives, and print how they ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--life", choices=list(KINDS), default="ends", help="what happens to the job")
    parser.add_argument("--together", type=int, default=3, help="so many lives at a time; most of each is waiting")
    parser.add_argument("--within", type=float, default=float("inf"), help="begin no life after so many seconds")
    parser.add_argument("--again", action="append", default=[], help="a boundary to be killed at once more")
    parser.add_argument("--out", type=Path, help="where the lives are and go, as JSON")
    asked = parser.parse_args()
    book = Book(asked.out, asked.life)
    for name in asked.again:
        book.lives[:] = [life for life in book.lives if life["killed_at"] != name]
    with tempfile.TemporaryDirectory() as folder, _cluster() as up:
        Bench(book, asked.life, up, Path(folder)).lead(asked.together, asked.within)
    print(book.summary())
    return 0 if book.is_good() else 1


if __name__ == "__main__":
    sys.exit(main())
