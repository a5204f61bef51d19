"""Main program of a node agent on Slurm, a step of the job's allocation, with a file channel in a shared folder.

python -m ringweave.platforms.slurm.agent_main JOB_FOLDER NODE ATTEMPT KEY LEASE_S
"""

import os
import socket
import sys
import threading
import time
from pathlib import Path

from ringweave.files import file_io, rotation
from ringweave.launcher.node_context import HostContext
from ringweave.launcher.processes import ProcessContext
from ringweave.platforms.agent import job_config
from ringweave.platforms.agent.agent import AgentAssignment, run_agent
from ringweave.platforms.local import job_folder
from ringweave.platforms.local.file_channel import FileAgentChannel
from ringweave.platforms.local.job_folder import JobFolder
from ringweave.platforms.slurm.lease import AgentLease

DESIRED_STATE_POLL_S = 0.1
"""Poll interval; other hosts cannot notify this one."""


def main(root: Path, node: int, attempt: int, key: str, lease_s: float) -> None:
    """Run the agent until its group has ended."""
    rotation.rotate_own_output()
    folder = JobFolder(root=root)
    group = folder.group(node, attempt)
    lock = job_folder.try_lock_file(group.alive_lock)
    if lock is None:
        sys.exit(f"node {node}, attempt {attempt} runs already, expected one agent at a time. [{group.root}]")
    lease = AgentLease(root / "controller.lease", key, lease_s)
    threading.Thread(target=lease.kill_when_expired, name="lease", daemon=True).start()
    config = job_config.JOB_CONFIG_JSON.parse(file_io.read_bounded(folder.config))
    assignment = AgentAssignment(
        config=config,
        node=node,
        attempt=attempt,
        home=folder.runs(config.node(node).name, attempt),
        cpus_shared_by=config.node(node).workers,
        node_context=HostContext(address_towards(os.environ.get("SLURM_LAUNCH_NODE_IPADDR", ""))),
        process_context=ProcessContext(guard_descriptors=(lock,)),
        echoes_output=False,
    )
    os.chdir(config.directory or root)
    channel = FileAgentChannel(folder, group, sleep_until_poll, lease.check)
    run_agent(assignment, channel, os.environ)


def sleep_until_poll(timeout_s: float) -> None:
    """Sleep until the next poll, at most for this time."""
    time.sleep(min(timeout_s, DESIRED_STATE_POLL_S))


def address_towards(peer: str) -> str:
    """Return the address of this host towards a peer; loopback if there is no peer."""
    if not peer:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET6 if ":" in peer else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))  # sends nothing: the kernel only chooses a source address
        return str(probe.getsockname()[0])


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], float(sys.argv[5]))
