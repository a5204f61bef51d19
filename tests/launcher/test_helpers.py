"""Processes that attend to the workers of a run are the run's to end, also those that were started again."""

import io
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from ringweave import topology
from ringweave.launcher import local_run, processes
from ringweave.launcher.local_run import RunOptions, RunRequest
from ringweave.launcher.node_context import HostContext
from ringweave.launcher.run_dir import RunDir
from ringweave.launcher.workers import WorkerProgram

WAITS = """
import os, pathlib, time
events = pathlib.Path(os.environ["RINGWEAVE_RUN_DIR"], "events.jsonl")
deadline = time.monotonic() + 300
while events.read_text().count('"server_started"') < 3 and time.monotonic() < deadline:
    time.sleep(0.02)
"""
PAIR = "{name: pair, nodes: [{name: a, nic: 1Gbit/s, devices: 1}, {name: b, nic: 1Gbit/s, devices: 1}]}"


class FirstOneFails(HostContext):
    """Has something in the place of parameter servers: the first ends at once, all others stay until they are ended."""

    def __init__(self) -> None:
        super().__init__()
        self._num_asked = 0

    def wrap_node_command(self, node: str, argv: Sequence[str]) -> Sequence[str]:
        self._num_asked += 1
        does = "raise SystemExit(3)" if self._num_asked == 1 else "import signal; signal.pause()"
        return [sys.executable, "-I", "-S", "-c", does]


def test_a_server_that_was_started_again_is_stopped_by_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "adopt_orphans", lambda: None)  # this process has other tests to run
    (tmp_path / "s.py").write_text(WAITS)
    run_dir = RunDir(root=tmp_path / "run")
    request = RunRequest(
        options=RunOptions(program=WorkerProgram(target=str(tmp_path / "s.py")), mode="ps-hra", has_standby=True),
        cluster=topology.loads(PAIR),
        cluster_text=PAIR,
        cluster_path=None,
        run_dir=run_dir,
        node_context=FirstOneFails(),
    )
    said = [io.TextIOWrapper(io.BytesIO()) for _ in range(2)]
    ending = local_run.run_here(request, environ=os.environ, stdout=said[0], stderr=said[1])
    assert ending.outcome == "done"
    events = [json.loads(line) for line in run_dir.events.read_text().splitlines()]
    exits = [
        (event["exit_code"], event["signal"], event["stopped"]) for event in events if event["kind"] == "server_exited"
    ]
    assert exits == [(3, None, False), *[(None, "SIGTERM", True)] * 2]
