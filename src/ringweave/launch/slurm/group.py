"""Main program of a group agent on Slurm; a step of the job's allocation.

python -m ringweave.launch.slurm.group JOB_FOLDER NODE ATTEMPT KEY LEASE_S
"""

import os
import socket
import sys
import threading
from pathlib import Path

from ringweave.launch.groups import config as configs
from ringweave.launch.groups.handing import SharedFolder
from ringweave.launch.groups.leading import Assignment, lead
from ringweave.launch.groups.spares import FolderSpares
from ringweave.launch.local.jobs import locks
from ringweave.launch.local.jobs.folders import JobFolder
from ringweave.launch.local.launcher import Around
from ringweave.launch.local.sites import ThisMachine
from ringweave.launch.slurm.leases import Lease
from ringweave.launch.slurm.post import SharedPost


def main(root: Path, node: int, attempt: int, key: str, lease_s: float) -> None:
    """Lead the group to its end."""
    folder = JobFolder(root=root)
    group = folder.group(node, attempt)
    lock = locks.try_lock(group.alive)
    if lock is None:
        sys.exit(f"node {node}, attempt {attempt} runs already, expected one agent at a time. [{group.root}]")
    lease = Lease(root / "beat.json", key, lease_s)
    threading.Thread(target=lease.watch, name="lease", daemon=True).start()
    config = configs.loads(folder.config.read_text(encoding="utf-8"))
    assignment = Assignment(
        config=config,
        node=node,
        attempt=attempt,
        home=folder.runs(config.node(node).name, attempt),
        cpus_shared_by=config.node(node).workers,
        site=ThisMachine(address_towards(os.environ.get("SLURM_LAUNCH_NODE_IPADDR", ""))),
        around=Around(guard_holds=(lock,)),
        handover=SharedFolder(folder.secrets),
        spares=FolderSpares(folder.secrets),
        shows_output=False,
    )
    os.chdir(config.directory or root)
    lead(assignment, SharedPost(folder, group, lease), os.environ)


def address_towards(other: str) -> str:
    """The address by which this machine is reached from where another one is; loopback if there is no other."""
    if not other:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET6 if ":" in other else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))  # nothing is sent: the kernel chooses the address that it would send from
        return str(probe.getsockname()[0])


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], float(sys.argv[5]))
