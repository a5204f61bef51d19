"""Main program of a node agent on a host, with its channel in the host's job folder.

python -m ringweave.platforms.hosts.agent_main JOB_FOLDER NODE ATTEMPT

The host service starts it. If that service dies, the agent starts another one.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ringweave.environment import ports_of_environ
from ringweave.files import file_io, rotation
from ringweave.launcher.node_context import HostContext
from ringweave.launcher.processes import ProcessContext
from ringweave.param_server.leadership import LeadershipLog
from ringweave.platforms.agent import job_config
from ringweave.platforms.agent.agent import AgentAssignment, run_agent
from ringweave.platforms.agent.agent_channel import DesiredState
from ringweave.platforms.hosts import host_runtime
from ringweave.platforms.hosts.host_runtime import HostLeadershipLog
from ringweave.platforms.hosts.run_entry import WANTED_JSON, HostFolder
from ringweave.platforms.local import job_folder
from ringweave.platforms.local.agent_main import SupervisedWait
from ringweave.platforms.local.file_channel import FileAgentChannel, ParsedFile
from ringweave.platforms.local.job_folder import GroupFolder, JobFolder
from ringweave.relayed_address import is_relayed


class HostAgentChannel(FileAgentChannel):
    """Channel over the files of this host; other hosts do not see them, so the run's entry has what all share."""

    def __init__(self, job: JobFolder, group: GroupFolder, wait: Callable[[float], object]) -> None:
        super().__init__(job, group, wait)
        self._wanted_file = ParsedFile(HostFolder(root=job.root.parent).wanted, WANTED_JSON.parse)

    def desired_state(self) -> DesiredState:
        """Return the desired state, with the number of workers that the host service has heard of."""
        return replace(super().desired_state(), wanted=self._wanted_file.read())

    def leadership_log(self, round_: int) -> LeadershipLog:
        return HostLeadershipLog(HostFolder(root=self._job.root.parent), round_)


def main(root: Path, node: int, attempt: int) -> None:
    """Run the node agent to its end."""
    rotation.rotate_own_output()
    folder, host = JobFolder(root=root), HostFolder(root=root.parent)
    environ, host_config = dict(os.environ), host.load_config()
    group = folder.group(node, attempt)
    supervised = SupervisedWait(group.wakeup, lambda: host_runtime.ensure_service(host, environ))
    config = job_config.JOB_CONFIG_JSON.parse(file_io.read_bounded(folder.config))
    assignment = AgentAssignment(
        config=config,
        node=node,
        attempt=attempt,
        home=folder.runs(config.node(node).name, attempt),
        cpus_shared_by=config.node(node).workers,
        node_context=HostContext(
            host_config.address, None if is_relayed(host_config.address) else ports_of_environ(environ)
        ),
        process_context=ProcessContext(
            guard_descriptors=(job_folder.INHERITED_LOCK,), is_unrelated=host_runtime.is_run_process
        ),
        echoes_output=False,
    )
    os.chdir(config.directory or root)
    run_agent(assignment, HostAgentChannel(folder, group, supervised.wait), environ)
    host_runtime.ensure_service(host, environ)  # somebody has to report the end


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
