"""Where things of jobs lie on this machine.

```text
STATE/jobs.sqlite                             the registry
STATE/jobs/ID/                                all of one job; ID is its name and a random number
    bell                                      wakes the supervisor
    supervisor.lock, supervisor.log           held while it runs; what it could not tell anybody
    config.json, gate.json                    node names, counts, script; the last opening of the gate
    secrets/round-1/worker-0.json             for a worker that trains with a parameter server; gone when it starts
    secrets/round-1/worker-0.1.json           for the second life of a worker of an elastic job; gone when that starts
    groups/NODE.ATTEMPT/                      a worker group that exists (NODE: index in the request)
        alive                                 locked until nothing of the group can run any more
        orders.json, report.json, bell        what is wanted of it, what it says
        removing                              it is to be removed when it has ended
    runs/NAME/ATTEMPT/agent.log               of the agent; NAME: of the node
    runs/NAME/ATTEMPT/round-1/                run directory of a round: logs, events.jsonl, cluster.yaml, run.json
```
"""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from ringweave.launch.groups import posts
from ringweave.launch.groups.posts import Orders, Report

REGISTRY = "jobs.sqlite"


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupFolder:
    """Paths of a worker group that exists."""

    root: Path
    node: int
    attempt: int

    @property
    def alive(self) -> Path:
        """Locked until nothing of the group can run any more."""
        return self.root / "alive"

    @property
    def orders(self) -> Path:
        """What is wanted of the group."""
        return self.root / "orders.json"

    @property
    def report(self) -> Path:
        """What it says."""
        return self.root / "report.json"

    def read(self) -> tuple[Report | None, Orders | None]:
        """What the group says and what is wanted of it, as far as there is either."""
        report = orders = None
        with contextlib.suppress(FileNotFoundError):
            report = posts.parse_report(self.report.read_bytes())
        with contextlib.suppress(FileNotFoundError):
            orders = posts.parse_orders(self.orders.read_bytes())
        return report, orders

    @property
    def bell(self) -> Path:
        """Wakes its agent."""
        return self.root / "bell"

    @property
    def removing(self) -> Path:
        """There if it is to be removed when it has ended."""
        return self.root / "removing"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFolder:
    """Paths of one job."""

    root: Path

    @property
    def bell(self) -> Path:
        """Wakes the supervisor."""
        return self.root / "bell"

    @property
    def lock(self) -> Path:
        """Held by the supervisor."""
        return self.root / "supervisor.lock"

    @property
    def log(self) -> Path:
        """What the supervisor could not tell anybody."""
        return self.root / "supervisor.log"

    @property
    def config(self) -> Path:
        """Node names, counts, script."""
        return self.root / "config.json"

    @property
    def gate(self) -> Path:
        """The last opening of the gate."""
        return self.root / "gate.json"

    @property
    def secrets(self) -> Path:
        """Credentials of workers that have not started yet, where there is a parameter server or the job is elastic."""
        return self.root / "secrets"

    def group(self, node: int, attempt: int) -> GroupFolder:
        """A worker group's folder."""
        return GroupFolder(root=self.root / "groups" / f"{node}.{attempt}", node=node, attempt=attempt)

    def groups(self) -> list[GroupFolder]:
        """Those that exist, by node and attempt."""
        try:
            names = [entry.name.split(".") for entry in (self.root / "groups").iterdir()]
        except FileNotFoundError:
            return []
        keys = [(int(words[0]), int(words[1])) for words in names if len(words) == 2 and all(map(str.isdigit, words))]
        return [self.group(node, attempt) for node, attempt in sorted(keys)]

    def runs(self, node_name: str, attempt: int) -> Path:
        """Where the run directories of an attempt are."""
        return self.root / "runs" / node_name / str(attempt)


def job_folder(state: Path, job_id: str) -> JobFolder:
    """The folder of a job."""
    return JobFolder(root=state / "jobs" / job_id)


def replace_text(path: Path, text: str) -> None:
    """Write the file in one go: a reader sees the old text or the new one, never half of it."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
