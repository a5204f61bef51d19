"""Main program of a node agent on Slurm, a step of the job's allocation, with its channel in a shared folder.

python -m ringweave.platforms.slurm.agent_main JOB_FOLDER NODE ATTEMPT KEY LEASE_S
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ringweave.launcher.node_context import HostContext
from ringweave.launcher.processes import ProcessContext
from ringweave.platforms.agent import agent_channel, job_config
from ringweave.platforms.agent.agent import AgentAssignment, run_agent
from ringweave.platforms.agent.agent_channel import AgentChannel, AgentStatus, DesiredState, RendezvousResult
from ringweave.platforms.agent.credentials import FolderCredentialDistribution, FolderCredentialPool
from ringweave.platforms.local import job_folder
from ringweave.platforms.local.job_folder import GroupFolder, JobFolder, replace_text
from ringweave.platforms.slurm.lease import AgentLease

DESIRED_STATE_POLL_S = 0.1
"""Poll interval; other hosts cannot notify this one."""


class SharedFolderChannel(AgentChannel):
    """Agent channel over files: two files hold the desired state and are replaced whole, a third the status."""

    def __init__(
        self, job: JobFolder, group: GroupFolder, lease: AgentLease, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._job, self._group, self._lease, self._sleep = job, group, lease, sleep
        self._last = DesiredState(round=0)

    def desired_state(self) -> DesiredState:
        """Return the desired state. An unreadable file counts as unchanged; the lease limits how long."""
        why = self._lease.check()
        if why:
            return DesiredState(round=self._last.round, stop=True, reason=why)
        try:
            desired = agent_channel.parse_desired_state(self._group.desired_state.read_bytes())
            self._last = DesiredState(
                round=desired.round, rendezvous=self._read_rendezvous(), stop=desired.stop, reason=desired.reason
            )
        except OSError:
            pass
        return self._last

    def report_status(self, status: AgentStatus) -> None:
        replace_text(self._group.status, agent_channel.dump_status(status))

    def wait_for_change(self, timeout_s: float) -> None:
        self._sleep(min(timeout_s, DESIRED_STATE_POLL_S))

    def _read_rendezvous(self) -> RendezvousResult | None:
        try:
            return agent_channel.parse_rendezvous(self._job.rendezvous.read_bytes())
        except FileNotFoundError:
            return None


def main(root: Path, node: int, attempt: int, key: str, lease_s: float) -> None:
    """Run the agent until its group has ended."""
    folder = JobFolder(root=root)
    group = folder.group(node, attempt)
    lock = job_folder.try_lock_file(group.alive_lock)
    if lock is None:
        sys.exit(f"node {node}, attempt {attempt} runs already, expected one agent at a time. [{group.root}]")
    lease = AgentLease(root / "controller.lease", key, lease_s)
    threading.Thread(target=lease.kill_when_expired, name="lease", daemon=True).start()
    config = job_config.parse_job_config(folder.config.read_text(encoding="utf-8"))
    assignment = AgentAssignment(
        config=config,
        node=node,
        attempt=attempt,
        home=folder.runs(config.node(node).name, attempt),
        cpus_shared_by=config.node(node).workers,
        node_context=HostContext(address_towards(os.environ.get("SLURM_LAUNCH_NODE_IPADDR", ""))),
        process_context=ProcessContext(guard_descriptors=(lock,)),
        credential_distribution=FolderCredentialDistribution(folder.secrets),
        credential_pool=FolderCredentialPool(folder.secrets),
        echoes_output=False,
    )
    os.chdir(config.directory or root)
    run_agent(assignment, SharedFolderChannel(folder, group, lease), os.environ)


def address_towards(peer: str) -> str:
    """Return the address of this host towards a peer; loopback if there is no peer."""
    if not peer:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET6 if ":" in peer else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))  # sends nothing: the kernel only chooses a source address
        return str(probe.getsockname()[0])


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], float(sys.argv[5]))
