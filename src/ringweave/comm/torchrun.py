"""Record of a run under torchrun: the first rank begins it in a run directory, and torchrun's own process ends it.

No launcher of ringweave is there, so a worker makes the run directory, tells the others in the store, and writes the
first run.json. torchrun alone knows how the workers end: the backend is loaded in its process too, and completes
run.json when that process exits.
"""

import atexit
import os
import signal
import socket
import sys
import textwrap
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist
from torch.distributed import Store

from ringweave import topology
from ringweave.comm.group_info import GroupInfo
from ringweave.environment import RUN_DIR, TORCHRUN_ID, WorkerEnvironment
from ringweave.errors import UsageError
from ringweave.files import file_io
from ringweave.launcher import outcome, run_dir
from ringweave.launcher.outcome import RunRecorder, WorkerFailure
from ringweave.launcher.run_dir import RunDir
from ringweave.launcher.workers import WorkerExit, WorkerGroup
from ringweave.telemetry import EventLog, read_last_attempt
from ringweave.telemetry.events import print_line

UNAVAILABLE = (
    "under torchrun there is no --elastic, --standby or ringweave scale, and no mode ps-hra or ps, which auto may "
    "choose elsewhere: they need processes that ringweave starts. Use ringweave run or ringweave submit for them"
)
_STORE_KEY = "run_dir"
_RUNS = Path("runs")


def join_run(store: Store, info: GroupInfo, environment: WorkerEnvironment) -> WorkerEnvironment:
    """Return the environment of a worker of torchrun with the run directory of this run.

    The directory is that of RINGWEAVE_RUN_DIR, or else one that the first rank makes under
    RINGWEAVE_REPLACE_BACKEND=1. The process keeps it in RINGWEAVE_RUN_DIR, where all other parts of ringweave look for
    it. Without a directory that can be written the run goes on unrecorded.
    """
    if dist.is_initialized():  # the default group alone: it has all ranks
        return environment
    own, node = info.own_info, info.own_info.location.node
    if info.group_rank == 0:
        store.set(_STORE_KEY, _begin_record(info, environment))
    shared = store.get(_STORE_KEY).decode()
    if not shared:
        return environment
    root = (environment.run_dir or Path(shared)).absolute()
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print_line(f"ringweave: rank {own.global_rank} on node {node} writes no events: {error}", is_error=True)
        return environment
    os.environ[RUN_DIR] = str(root)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    EventLog(RunDir(root=root).events).write(
        "worker_started", rank=own.global_rank, node=node, local_rank=local_rank, pid=os.getpid()
    )
    return replace(environment, run_dir=root)


def end_record() -> None:
    """Complete the record of the run whose workers this process has started: for torchrun, at its exit."""
    try:
        agent = _describe_agent(psutil.Process())
        found = _find_record(agent, WorkerEnvironment.from_environ(os.environ).run_dir)
        if found is not None and found[1]["outcome"] == "running":
            _end_record(found[0], found[1], getattr(sys, "last_value", None))
    except (OSError, UsageError, psutil.Error) as error:
        print_line(f"ringweave: run.json lacks the end of this run: {error}", is_error=True)


def _begin_record(info: GroupInfo, environment: WorkerEnvironment) -> str:
    """Begin the record; return the path of the run directory, empty if this run is not recorded."""
    if environment.run_dir is None and not environment.replace_backend:
        return ""
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    try:
        agent = _describe_agent(_find_agent())
        found = _find_record(agent, environment.run_dir)
        if found is not None and found[1]["launcher"]["restarts"] == restarts:
            return str(found[0].root)  # the script makes its process group again
        started = datetime.fromtimestamp(agent["started"])
        directory = found[0] if found else _choose_run_dir(environment, started)
        if found is not None:
            _end_attempt(directory, "failed", 1, "torchrun has restarted the workers; its own output has the cause")
        holding = ExitStack()
        holding.enter_context(run_dir.hold_run_dir(directory))
        atexit.register(holding.close)
        text = environment.cluster_path.read_text(encoding="utf-8") if environment.cluster_path else None
        attempt = run_dir.begin_attempt(directory, text)
        record = _first_record(info, environment, attempt) | {"launcher": {**agent, "restarts": restarts}}
        RunRecorder(directory, WorkerGroup(argv=(), workers=()), record)
    except (OSError, UsageError, psutil.Error) as error:
        print_line(f"ringweave: this run is not recorded: {error}", is_error=True)
        return ""
    _announce(record, directory)
    return str(directory.root)


def _choose_run_dir(environment: WorkerEnvironment, started: datetime) -> RunDir:
    if environment.run_dir is not None:
        return RunDir(root=environment.run_dir.absolute())
    return run_dir.create_run_dir(_RUNS, sys.argv[0] or "python", started)


def _announce(record: Mapping[str, Any], directory: RunDir) -> None:
    nodes = record["cluster"]["nodes"]
    shown = ", ".join(f"{node['name']} ({len(node['workers'])})" for node in nodes[:8])
    more = ", ..." if len(nodes) > 8 else ""
    workers = "1 worker" if record["world_size"] == 1 else f"{record['world_size']} workers"
    print_line(f"ringweave: {workers} on {shown}{more}, by torchrun; files in {directory.root}", is_error=True)
    print_line(f"ringweave: {UNAVAILABLE}.", is_error=True)


def _first_record(info: GroupInfo, environment: WorkerEnvironment, attempt: int) -> dict[str, Any]:
    """Return the first content of run.json, with the keys that `ringweave run` writes."""
    nodes: dict[str, list[int]] = {}
    for rank in info.ranks:
        nodes.setdefault(rank.location.node, []).append(rank.global_rank)
    path = environment.cluster_path
    return {
        **run_dir.software_versions(),
        "command": list(sys.argv),
        "attempt": attempt,
        "cluster": {
            "name": topology.load(path).name if path else None,
            "path": str(path) if path else None,
            "nodes": [{"name": name, "workers": ranks} for name, ranks in nodes.items()],
        },
        "world_size": info.group_size,
        "schedule": environment.schedule,
        "tuning": environment.tuning,
        "mode": environment.mode,
        "elastic": None,
        "leader_per_nic": environment.leader_per_nic,
        "order": None,
        "lab": None,
        "lab_quotas": None,
        "server": None,
        "unavailable": UNAVAILABLE,
    }


def _find_agent() -> psutil.Process:
    """Return torchrun's own process: the nearest above this one without the variables of its workers."""
    own = psutil.Process()
    return next((process for process in own.parents() if TORCHRUN_ID not in process.environ()), own)


def _describe_agent(process: psutil.Process) -> dict[str, Any]:
    """Return what identifies a process among all that may have used a run directory."""
    started = process.create_time()
    return {"name": "torchrun", "host": socket.gethostname(), "pid": process.pid, "started": started}


def _find_record(agent: Mapping[str, Any], given: Path | None) -> tuple[RunDir, dict[str, Any]] | None:
    """Return the run directory and run.json of a run of this agent's, if it has begun one."""
    begun = f"{datetime.fromtimestamp(agent['started']):%Y%m%d-%H%M%S}"
    for root in [given] if given else sorted(_RUNS.glob(f"{begun}-*")):
        directory = RunDir(root=root.absolute())
        try:
            record = file_io.load_json(directory.run_json, run_dir.MAX_RUN_JSON_BYTES)
        except (OSError, ValueError):
            continue
        launcher = record.get("launcher") if isinstance(record, dict) else None
        if isinstance(launcher, dict) and {key: launcher.get(key) for key in agent} == dict(agent):
            return directory, record
    return None


def _end_record(directory: RunDir, record: Mapping[str, Any], error: BaseException | None) -> None:
    """Write the end of a run; `error` is the exception that ended torchrun, None if it ended well."""
    events = read_last_attempt(directory.events)
    nodes = {event["rank"]: event["node"] for event in events if event["kind"] == "worker_started"}
    failures = _worker_failures(error, nodes)
    for each in failures:
        EventLog(directory.events).write(
            "worker_exited",
            rank=each.global_rank,
            node=each.node,
            exit_code=each.exit.exit_code,
            signal=each.exit.signal_name,
            stopped=each.exit.was_stopped,
        )
    result = outcome.conclude_run(failures, _interrupts(error))
    end, exit_code, cause = result.outcome, result.exit_code, result.cause
    if error is not None and end == "done":  # of torchrun itself, such as a rendezvous that failed
        text = textwrap.shorten(f"{type(error).__name__}: {error}", 160, placeholder=" ...")
        end, exit_code, cause = "failed", 1, f"torchrun raised {text}"
    _end_attempt(directory, end, exit_code, cause)


def _end_attempt(directory: RunDir, end: str, exit_code: int, cause: str | None) -> None:
    events = read_last_attempt(directory.events)
    begun_s = next((event["time"] for event in events if event["kind"] == "run_started"), time.time())
    wall_s = round(time.time() - begun_s, 3)
    outcome.end_attempt(directory, wall_s=wall_s, outcome=end, exit_code=exit_code, cause=cause)


def _worker_failures(error: BaseException | None, nodes: Mapping[int, str]) -> list[WorkerFailure]:
    """Return the workers that torchrun's ChildFailedError reports; none for other exceptions."""
    found: Mapping[int, Any] = getattr(error, "failures", {})
    ends = {failure.exitcode for failure in found.values()}  # torchrun sends SIGTERM to the workers that are left
    return [
        WorkerFailure(
            global_rank=rank,
            node=nodes.get(rank, "unknown"),
            exit=WorkerExit(
                exit_code=None if failure.exitcode < 0 else failure.exitcode,
                signal_name=signal.Signals(-failure.exitcode).name if failure.exitcode < 0 else None,
                time_s=failure.timestamp,
                was_stopped=failure.exitcode == -signal.SIGTERM and len(ends) > 1,
            ),
        )
        for rank, failure in sorted(found.items())
    ]


def _interrupts(error: BaseException | None) -> list[signal.Signals]:
    """Return the signal that ended torchrun, if one did."""
    if isinstance(error, KeyboardInterrupt):
        return [signal.SIGINT]
    received = getattr(error, "sigval", None)
    return [signal.Signals(received)] if received is not None else []
