"""Main program of a node agent on this machine.

    python -m ringweave.platforms.local.agent_main JOB_FOLDER NODE ATTEMPT

The supervisor starts it and hands over the lock of the group. The guard of the workers inherits the lock, so it is
released only when no process of the group can run any more.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import psutil

from ringweave import lab
from ringweave.errors import LaunchError
from ringweave.files import file_io, rotation
from ringweave.launcher.node_context import HostContext, LabContext
from ringweave.launcher.processes import ProcessContext
from ringweave.platforms.agent import job_config
from ringweave.platforms.agent.agent import AgentAssignment, run_agent
from ringweave.platforms.agent.job_config import JobConfig
from ringweave.platforms.local import job_folder, supervisor
from ringweave.platforms.local.file_channel import FileAgentChannel
from ringweave.platforms.local.job_folder import JobFolder, Wakeup

SUPERVISOR_CHECK_S = 2.0
"""Time between two checks that the job has a supervisor."""


class SupervisedWait:
    """Waits for notifications, and starts a supervisor if none runs: the job goes on after one was killed."""

    def __init__(
        self, wakeup: Path, ensure_supervisor: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`wakeup` is the named pipe of the agent; `ensure_supervisor` starts a supervisor if none runs."""
        self._wakeup, self._ensure_supervisor, self._clock = Wakeup(wakeup), ensure_supervisor, clock
        self._checked_s = clock()

    def wait(self, timeout_s: float) -> None:
        """Wait for a notification, at most for this time."""
        self._wakeup.wait(timeout_s)
        now_s = self._clock()
        if now_s - self._checked_s >= SUPERVISOR_CHECK_S:
            self._checked_s = now_s
            with contextlib.suppress(LaunchError):  # tried again; the workers go on without a supervisor
                self._ensure_supervisor()


def main(root: Path, node: int, attempt: int) -> None:
    """Run the node agent to its end."""
    rotation.rotate_own_output()
    folder = JobFolder(root=root)
    group = folder.group(node, attempt)
    environ = dict(os.environ)
    state, job_id = root.parent.parent, root.name
    supervised = SupervisedWait(group.wakeup, lambda: supervisor.ensure_supervisor(state, job_id, environ))
    config = replace(job_config.JOB_CONFIG_JSON.parse(file_io.read_bounded(folder.config)), between_hosts=False)
    assignment = AgentAssignment(
        config=config,
        node=node,
        attempt=attempt,
        home=folder.runs(config.node(node).name, attempt),
        cpus_shared_by=config.world_size,
        node_context=LabContext(lab.find(config.lab)) if config.lab else HostContext(),
        process_context=ProcessContext(guard_descriptors=(job_folder.INHERITED_LOCK,), is_unrelated=is_job_process),
        echoes_output=False,
    )
    os.chdir(config.directory or root)
    channel = FileAgentChannel(folder, group, supervised.wait)
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
