"""Main program of a node agent on this machine, and its file channel.

    python -m ringweave.platforms.local.agent_main JOB_FOLDER NODE ATTEMPT

The supervisor starts it and hands over the lock of the group. The guard of the workers inherits the lock, so it is
released only when no process of the group can run any more.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Generic, TypeVar

import psutil

from ringweave import lab
from ringweave.errors import LaunchError
from ringweave.launcher.node_context import HostContext, LabContext
from ringweave.launcher.processes import ProcessContext
from ringweave.platforms.agent import agent_channel, job_config
from ringweave.platforms.agent.agent import AgentAssignment, run_agent
from ringweave.platforms.agent.agent_channel import AgentChannel, AgentStatus, DesiredState, RendezvousResult
from ringweave.platforms.agent.credentials import FolderCredentialDistribution, FolderCredentialPool
from ringweave.platforms.agent.job_config import JobConfig
from ringweave.platforms.local import job_folder, supervisor
from ringweave.platforms.local.job_folder import GroupFolder, JobFolder, Wakeup, replace_text

T = TypeVar("T")

SUPERVISOR_CHECK_S = 2.0
"""Time between two checks that the job has a supervisor."""


class FileAgentChannel(AgentChannel):
    """Channel over files: two for the desired state, one for the status."""

    def __init__(
        self,
        job: JobFolder,
        group: GroupFolder,
        ensure_supervisor: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ensure_supervisor` starts a supervisor if none runs: the job goes on after its supervisor was killed."""
        self._job, self._group, self._ensure_supervisor, self._clock = job, group, ensure_supervisor, clock
        self._wakeup = Wakeup(group.wakeup)
        self._desired_state_file = _CachedFile(group.desired_state, agent_channel.parse_desired_state)
        self._rendezvous_file = _CachedFile(job.rendezvous, agent_channel.parse_rendezvous)
        self._checked_supervisor_s = clock()

    def desired_state(self) -> DesiredState:
        """Return the desired state; it says to leave if the group's folder was removed."""
        desired = self._desired_state_file.read()
        if desired is None:
            return DesiredState(round=0, stop=True, reason=f"its folder {self._group.root} was removed")
        rendezvous: RendezvousResult | None = self._rendezvous_file.read()
        return DesiredState(round=desired.round, rendezvous=rendezvous, stop=desired.stop, reason=desired.reason)

    def report_status(self, status: AgentStatus) -> None:
        """Replace the status, and wake the supervisor."""
        if self._group.root.exists():
            replace_text(self._group.status, agent_channel.dump_status(status))
        job_folder.notify(self._job.wakeup)

    def wait_for_change(self, timeout_s: float) -> None:
        """Wait for a notification; start a supervisor if none runs."""
        self._wakeup.wait(timeout_s)
        now_s = self._clock()
        if now_s - self._checked_supervisor_s >= SUPERVISOR_CHECK_S:
            self._checked_supervisor_s = now_s
            with contextlib.suppress(LaunchError):  # tried again; the workers go on without a supervisor
                self._ensure_supervisor()


class _CachedFile(Generic[T]):
    """Parsed content of a file, parsed again only after the file was replaced."""

    def __init__(self, path: Path, parse: Callable[[bytes], T]) -> None:
        self._path, self._parse = path, parse
        self._version: tuple[int, int] | None = None
        self._value: T | None = None

    def read(self) -> T | None:
        """Return the content; None if there is no file."""
        try:
            found = self._path.stat()
            if (found.st_ino, found.st_mtime_ns) != self._version:
                self._value = self._parse(self._path.read_bytes())
                self._version = (found.st_ino, found.st_mtime_ns)
        except FileNotFoundError:
            self._value = self._version = None
        return self._value


def main(root: Path, node: int, attempt: int) -> None:
    """Run the node agent to its end."""
    folder = JobFolder(root=root)
    group = folder.group(node, attempt)
    environ = dict(os.environ)
    state, job_id = root.parent.parent, root.name
    channel = FileAgentChannel(folder, group, lambda: supervisor.ensure_supervisor(state, job_id, environ))
    config = job_config.parse_job_config(folder.config.read_text(encoding="utf-8"))
    assignment = AgentAssignment(
        config=config,
        node=node,
        attempt=attempt,
        home=folder.runs(config.node(node).name, attempt),
        cpus_shared_by=config.world_size,
        node_context=LabContext(lab.find(config.lab)) if config.lab else HostContext(),
        process_context=ProcessContext(guard_descriptors=(job_folder.INHERITED_LOCK,), is_unrelated=is_job_process),
        credential_distribution=FolderCredentialDistribution(folder.secrets),
        credential_pool=FolderCredentialPool(folder.secrets),
        echoes_output=False,
    )
    os.chdir(config.directory or root)
    run_agent(assignment, channel, environ | visible_gpus(config, node, environ))


def is_job_process(process: psutil.Process) -> bool:
    """Return whether a process is a supervisor or a node agent, and so does not belong to the workers.

    A killed supervisor is restarted by an agent, so it is a child of that agent, and so are the agents that it starts
    in turn. They outlive the round, and the agent itself.
    """
    return not {supervisor.SUPERVISOR_MODULE, supervisor.AGENT_COMMAND[-1]}.isdisjoint(process.cmdline())


def visible_gpus(config: JobConfig, node: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the GPUs of this machine that belong to this node: those after the GPUs of earlier nodes."""
    if config.device != "cuda":
        return {}
    given = environ.get("CUDA_VISIBLE_DEVICES", "")
    before = sum(each.workers for each in config.nodes if each.index < node)
    there = given.split(",") if given else [str(index) for index in range(config.world_size)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(there[before : before + config.node(node).workers])}


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
