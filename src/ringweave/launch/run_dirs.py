"""The directory of a run: what is where, and how a further attempt keeps the files of the one before.

```text
RUN_DIR/run.json            what ran, and how it ended
RUN_DIR/events.jsonl        what happened, all attempts
RUN_DIR/cluster.yaml        the cluster it ran on
RUN_DIR/logs/rank-0.log     what each worker printed
RUN_DIR/logs/server.log     what the parameter server printed, if there was one
RUN_DIR/logs/server-1.log   what its standby printed, if there was one
RUN_DIR/scale.json          what `ringweave scale` asks of it, until it is taken
RUN_DIR/claims/             which of the two led, claim by claim
RUN_DIR/attempts/1/         run.json, cluster.yaml and logs of the first attempt, once there is a second
```
"""

import fcntl
import itertools
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from ringweave.errors import UsageError, explain

_OF_AN_ATTEMPT = ("run.json", "cluster.yaml", "logs", "claims")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunDir:
    """Paths in a run directory; absolute, as workers may change theirs."""

    root: Path

    @property
    def record(self) -> Path:
        """Path of run.json."""
        return self.root / "run.json"

    @property
    def events(self) -> Path:
        """Path of the event log."""
        return self.root / "events.jsonl"

    @property
    def scale(self) -> Path:
        """Where an elastic run is asked for another number of workers."""
        return self.root / "scale.json"

    @property
    def cluster(self) -> Path:
        """Path of the cluster file."""
        return self.root / "cluster.yaml"

    def log(self, global_rank: int) -> Path:
        """Path of a worker's log."""
        return self.root / "logs" / f"rank-{global_rank}.log"

    def logs_by_rank(self) -> dict[int, Path]:
        """Paths of the workers' logs that are there, in order of their global ranks."""
        paths = (self.root / "logs").glob("rank-*.log")
        by_rank = {int(path.stem.removeprefix("rank-")): path for path in paths}
        return dict(sorted(by_rank.items()))

    def server_log(self, index: int = 0) -> Path:
        """Path of the parameter server's log, or, with 1, of its standby's."""
        return self.root / "logs" / (f"server-{index}.log" if index else "server.log")

    @property
    def claims(self) -> Path:
        """Where a parameter server and its standby register who leads."""
        return self.root / "claims"

    def attempt(self, number: int) -> Path:
        """Where the files of an earlier attempt are kept."""
        return self.root / "attempts" / str(number)


def fresh(parent: Path, target: str, now: datetime) -> RunDir:
    """A new directory `<parent>/<date-time>-<script>`, created; a number is added if it is taken.

    Raises:
        UsageError: None can be created here.
    """
    name = f"{now:%Y%m%d-%H%M%S}-{Path(target).stem}"
    for number in itertools.count(1):
        run_dir = RunDir(root=(parent / (name if number == 1 else f"{name}-{number}")).absolute())
        try:
            run_dir.root.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise UsageError(_refusal(run_dir, "one that can be created", f"({error.strerror}) Give a")) from error
        break
    return run_dir


@contextmanager
def taken(run_dir: RunDir) -> Iterator[None]:
    """Hold the directory for one `ringweave run`, creating it if needed; free again when this process ends.

    Raises:
        UsageError: Another run is using it, or it cannot be written.
    """
    try:
        run_dir.root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(run_dir.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(
            _refusal(run_dir, "a directory that can be written", f"({error.strerror}) Give another")
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise UsageError(
            _refusal(run_dir, "one that no other run is using", "Wait for that run, or give another")
        ) from error
    try:
        yield
    finally:
        os.close(descriptor)


def is_taken(run_dir: RunDir) -> bool:
    """Whether a `ringweave run` holds the directory now."""
    try:
        descriptor = os.open(run_dir.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def begin_attempt(run_dir: RunDir, cluster_text: str) -> int:
    """Make room for a run: move an earlier attempt's files away, write the cluster file.

    Returns:
        The number of the new attempt, 1 for the first.

    Raises:
        UsageError: There is a cluster.yaml that no run has written.
    """
    number = 1 + sum(1 for _ in (run_dir.root / "attempts").glob("[0-9]*"))
    if run_dir.record.exists():
        _move_away(run_dir, number)
        number += 1
    elif run_dir.cluster.exists() and run_dir.cluster.read_text(encoding="utf-8") != cluster_text:
        raise UsageError(_refusal(run_dir, "one without a cluster.yaml that is not of a run", "Give another"))
    run_dir.cluster.write_text(cluster_text, encoding="utf-8")
    (run_dir.root / "logs").mkdir(exist_ok=True)
    return number


def _move_away(run_dir: RunDir, number: int) -> None:
    target = run_dir.attempt(number)
    target.mkdir(parents=True)
    for name in _OF_AN_ATTEMPT:
        if (run_dir.root / name).exists():
            shutil.move(run_dir.root / name, target / name)


def _refusal(run_dir: RunDir, expected: str, do: str) -> str:
    return explain("run directory", got=str(run_dir.root), expected=expected, do=f"{do} --run-dir")
