"""A crew of real processes: what is in the books when it ends."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from ringweave.jobs.records import EndCause, GroupPhase
from ringweave.launcher import processes
from ringweave.launcher.node_context import HostContext
from ringweave.launcher.outcome import RunRecorder, WorkerFailure
from ringweave.launcher.output import OutputConsole
from ringweave.launcher.processes import LocalLauncher, ProcessContext
from ringweave.launcher.run_dir import RunDir
from ringweave.launcher.services import JobServer, ServiceSetup, SidecarEndpoint
from ringweave.launcher.supervise import NodePlan, NodeWorkers
from ringweave.launcher.workers import HostPort, WorkerExit, WorkerProgram
from ringweave.membership.client import COORDINATOR_SEARCH_S
from ringweave.membership.membership_records import StopTraining
from ringweave.platforms.agent import job_config
from ringweave.platforms.agent.job_config import JobConfig, NodeConfig, RendezvousResult
from ringweave.platforms.agent.node_round import NodeOutcome, NodeRound, ProgressReader, conclude_elastic_node
from ringweave.rpc import CertificateAuthority
from ringweave.training.elastic import member_details
from tests.polling import wait_until

CONFIG = JobConfig(
    job="job", device="cpu", mode="ps-hra", nodes=(NodeConfig(index=0, name="a", workers=1),), script="s.py"
)


class StaysForEver(HostContext):
    """Has something in the place of a parameter server that only a signal ends."""

    def wrap_node_command(self, node: str, argv: Sequence[str]) -> Sequence[str]:
        return [sys.executable, "-I", "-S", "-c", "import signal; signal.pause()"]


def test_a_server_that_outlives_a_round_that_failed_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "adopt_orphans", lambda: None)  # this process has other tests to run
    run_dir = RunDir(root=tmp_path / "round-1")
    (run_dir.root / "logs").mkdir(parents=True)
    (tmp_path / "s.py").write_text("raise SystemExit(3)")
    meeting = HostPort(host="127.0.0.1", port=9)
    program = WorkerProgram(target=str(tmp_path / "s.py"))
    opening = RendezvousResult(round=1, master_address=meeting, servers=(meeting,))
    group = job_config.node_worker_group(CONFIG, 0, opening, run_dir=run_dir, program=program, cpus=1)
    record = {"attempt": 1, "command": ["s.py"], "world_size": 1, "cluster": {"name": "job"}}
    setup = ServiceSetup(
        node_context=StaysForEver(),
        run_dir=run_dir,
        issue=lambda role, index: CertificateAuthority("job").issue(role, str(index)),
    )
    server = JobServer([SidecarEndpoint(node="a", advertised=meeting)], setup)
    context = ProcessContext(is_unrelated=lambda process: process.pid in server.pids)
    launcher = LocalLauncher(run_dir.worker_log, OutputConsole({}, os.environ), os.environ, process_context=context)
    recorder = RunRecorder(run_dir, group, record)
    plan = NodePlan(group=group, environ=os.environ, services=[server], is_node_of_job=True)
    crew = NodeRound(NodeWorkers(plan, launcher, recorder), recorder, ProgressReader(run_dir.events))
    found: list[NodeOutcome | None] = []

    def is_over() -> bool:
        found.append(crew.poll())
        return found[-1] is not None

    wait_until(is_over, "the end of the round")
    assert found[-1] == NodeOutcome(
        phase=GroupPhase.FAILED, cause=EndCause.PROGRAM, exit_code=3, text="rank 0 ended with exit code 3"
    )
    events = [json.loads(line) for line in run_dir.events.read_text().splitlines()]
    (ended,) = [event for event in events if event["kind"] == "server_exited"]
    assert (ended["exit_code"], ended["signal"], ended["stopped"]) == (None, "SIGTERM", True)


def death(said: str, *, signal_name: str | None = None, time_s: float = 1.0, rank: int = 2) -> WorkerFailure:
    ended = WorkerExit(exit_code=None if signal_name else 1, signal_name=signal_name, time_s=time_s, was_stopped=False)
    return WorkerFailure(
        global_rank=rank, node="a", exit=ended, last_lines=("Traceback (most recent call last):", said)
    )


def error(reason: str, *, is_end: bool, final_checkpoint_owner: str = "") -> str:
    """As the log of a worker has it."""
    found = member_details.stop_error(
        StopTraining(reason=reason, is_end=is_end, final_checkpoint_owner=final_checkpoint_owner)
    )
    return f"ringweave.errors.{type(found).__name__}: {found}"


@pytest.mark.parametrize(
    ("said", "phase", "cause"),
    [
        (error("all workers are done", is_end=True), GroupPhase.SUCCEEDED, None),
        (error("no worker is left that has the parameters", is_end=True), GroupPhase.INTERRUPTED, EndCause.PEER),
        (error("workers left: 2", is_end=True, final_checkpoint_owner="0.0"), GroupPhase.INTERRUPTED, EndCause.PEER),
        (
            error(f"no coordinator within {COORDINATOR_SEARCH_S:g} s: refused", is_end=False),
            GroupPhase.INTERRUPTED,
            EndCause.PEER,
        ),
        (error("no heartbeat came in time", is_end=False), GroupPhase.FAILED, EndCause.PLATFORM),
        ("ValueError: no", GroupPhase.FAILED, EndCause.PROGRAM),
        ("ConnectionResetError: peer", GroupPhase.INTERRUPTED, EndCause.PEER),
    ],
)
def test_what_a_member_was_told_says_whose_doing_its_end_is(
    said: str, phase: GroupPhase, cause: EndCause | None
) -> None:
    outcome = conclude_elastic_node([death(said)])
    assert (outcome.phase, outcome.cause) == (phase, cause)


def test_an_exception_of_the_script_counts_before_what_the_others_were_told() -> None:
    lost = death(error("no worker is left that has the parameters", is_end=True), time_s=0.5, rank=0)
    outcome = conclude_elastic_node([lost, death("TypeError: no", time_s=0.7)])
    assert (outcome.phase, outcome.cause, outcome.text) == (
        GroupPhase.FAILED,
        EndCause.PROGRAM,
        "rank 2 raised TypeError: no",
    )


def test_a_member_that_was_killed_is_the_places_doing_whatever_the_others_say() -> None:
    over = death(error("all workers are done", is_end=True), time_s=0.5, rank=3)
    outcome = conclude_elastic_node([over, death("", signal_name="SIGKILL")])
    assert (outcome.phase, outcome.cause) == (GroupPhase.FAILED, EndCause.PLATFORM)
    assert conclude_elastic_node([]).phase is GroupPhase.SUCCEEDED
