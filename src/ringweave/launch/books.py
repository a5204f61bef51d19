"""The books of an attempt: its events and its run.json, from the first worker to the end."""

import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from ringweave import telemetry
from ringweave.launch import records
from ringweave.launch.launcher import WorkerState
from ringweave.launch.run_dirs import RunDir
from ringweave.launch.workers import WorkerGroup, WorkerSpec


class Books:
    """The event log and run.json of one attempt, opened when this is made."""

    def __init__(self, run_dir: RunDir, group: WorkerGroup, record: Mapping[str, Any]) -> None:
        """`record` is what run.json begins with: at least `attempt`, `command`, `world_size` and `cluster.name`."""
        self._run_dir = run_dir
        self._nodes = {worker.global_rank: worker for worker in group.workers}
        self._log = telemetry.EventLog(run_dir.events)
        self._started_s = time.monotonic()
        self.training: dict[str, Any] | None = None
        """How workers trained together, when all has ended."""
        self._log.write(
            "run_started",
            attempt=record["attempt"],
            command=record["command"],
            cluster=record["cluster"]["name"],
            world_size=record["world_size"],
        )
        unknown = {"ended": None, "wall_s": None, "exit_code": None, "outcome": "running", "cause": None}
        records.update(run_dir.record, {**record, "started": _now(), **unknown})

    def workers_started(self, pid: Callable[[int], int]) -> None:
        """All workers have been started; `pid` knows the process of a global rank."""
        for worker in list(self._nodes.values()):
            self.worker_started(worker, pid(worker.global_rank))

    def worker_started(self, worker: WorkerSpec, pid: int) -> None:
        """A worker has been started, for the first time or again; it may be one more than there were."""
        self._nodes[worker.global_rank] = worker
        self._log.write(
            "worker_started", rank=worker.global_rank, node=worker.node, local_rank=worker.local_rank, pid=pid
        )

    def worker_exited(self, state: WorkerState) -> None:
        """A worker was seen to have ended."""
        if state.exit is None:
            return
        self._log.write(
            "worker_exited",
            rank=state.global_rank,
            node=self._nodes[state.global_rank].node,
            exit_code=state.exit.exit_code,
            signal=state.exit.signal_name,
            stopped=state.exit.stopped,
        )

    def close(self, *, outcome: str, exit_code: int, cause: str | None) -> float:
        """All has ended; seconds since it began."""
        wall_s = round(time.monotonic() - self._started_s, 3)
        self._log.write("run_ended", outcome=outcome, exit_code=exit_code, wall_s=wall_s, cause=cause)
        ended = {"ended": _now(), "wall_s": wall_s, "exit_code": exit_code, "outcome": outcome, "cause": cause}
        summary = records.summarize(telemetry.read_last_attempt(self._run_dir.events))
        records.update(self._run_dir.record, ended | summary)
        self.training = summary["training"]
        return wall_s


def _now() -> str:
    return datetime.now(tz=UTC).astimezone().isoformat(timespec="seconds")
