"""What a node agent does before the other nodes are ready: the imports of its workers."""

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ringweave.launcher import spares
from ringweave.launcher.node_context import HostContext
from ringweave.launcher.workers import HostPort
from ringweave.platforms.agent import agent
from ringweave.platforms.agent.agent import AgentAssignment, _RoundStarter
from ringweave.platforms.agent.agent_channel import DesiredState
from ringweave.platforms.agent.job_config import JobConfig, NodeConfig, RendezvousResult
from ringweave.platforms.local.file_channel import FileAgentChannel
from ringweave.platforms.local.job_folder import JobFolder
from tests.polling import wait_until

pytestmark = pytest.mark.slow
SCRIPT = """
import os, sys
has_backend = "ringweave.comm.backend" in sys.modules
import torch
print("has it", has_backend, "and meets", os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], flush=True)
"""


def make_starter(folder: Path) -> _RoundStarter:
    (folder / "train.py").write_text(SCRIPT)
    nodes = tuple(NodeConfig(index=index, name=f"n{index}", workers=1) for index in range(2))
    config = JobConfig(
        job="job", device="cpu", mode="auto", nodes=nodes, script="train.py", directory=str(folder), between_hosts=False
    )
    jobs = JobFolder(root=folder / "job")
    assignment = AgentAssignment(
        config=config,
        node=0,
        attempt=1,
        home=folder / "home",
        cpus_shared_by=1,
        node_context=HostContext("127.0.0.1", None),
        echoes_output=False,
    )
    channel = FileAgentChannel(jobs, jobs.group(0, 1), lambda seconds: None)
    return _RoundStarter(assignment, channel, dict(os.environ), lambda: "")


@pytest.fixture
def starter(tmp_path: Path) -> Iterator[_RoundStarter]:
    made = make_starter(tmp_path)
    yield made
    made.close()


def servers(folder: Path) -> list[psutil.Process]:
    """Fork servers of the script in this folder."""
    children = psutil.Process().children(recursive=True)
    lines = {each: each.cmdline() for each in children if each.status() != psutil.STATUS_ZOMBIE}
    return [each for each, line in lines.items() if spares.__file__ in line and str(folder / "train.py") in line]


def only_server(folder: Path) -> psutil.Process:
    """Wait for it: until it begins its program, a process has the command line of this one."""
    wait_until(lambda: len(servers(folder)) == 1)
    return servers(folder)[0]


def test_a_worker_is_forked_from_imports_that_began_before_the_place_to_meet_was_known(
    starter: _RoundStarter, tmp_path: Path
) -> None:
    starter.prepare_round(DesiredState(round=1))
    only_server(tmp_path)
    begun = starter.start_workers(RendezvousResult(round=1, master_address=HostPort(host="127.0.0.9", port=4711)))
    outcomes = []

    def has_ended() -> bool:
        outcomes.append(begun.poll())
        return outcomes[-1] is not None

    wait_until(has_ended)
    assert outcomes[-1].exit_code == 0
    log = agent.round_run_dir(tmp_path / "home", 1).worker_log(0)
    assert log.read_text() == "has it True and meets 127.0.0.9 4711\n"
    assert not servers(tmp_path)


def test_a_round_that_does_not_begin_leaves_no_process(starter: _RoundStarter, tmp_path: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    starter.prepare_round(DesiredState(round=1))
    first = only_server(tmp_path)
    starter.prepare_round(DesiredState(round=2))
    second = only_server(tmp_path)
    assert first != second
    starter.close()
    wait_until(lambda: set(psutil.Process().children(recursive=True)) <= before)
