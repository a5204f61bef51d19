"""Main program of a group agent on this machine.

    python -m ringweave.launch.local.jobs.group JOB_FOLDER NODE ATTEMPT

Started by the supervisor, which hands over the lock of the group; the guard of the workers inherits it, so that it is
given back only when nothing of the group can run any more.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil

from ringweave import lab
from ringweave.launch.groups import config as configs
from ringweave.launch.groups.config import Config
from ringweave.launch.groups.handing import SharedFolder
from ringweave.launch.groups.leading import Assignment, lead
from ringweave.launch.groups.spares import FolderSpares
from ringweave.launch.local.jobs import locks, supervisor
from ringweave.launch.local.jobs.folders import JobFolder
from ringweave.launch.local.jobs.post import FilePost
from ringweave.launch.local.launcher import Around
from ringweave.launch.local.sites import InLab, ThisMachine


def main(root: Path, node: int, attempt: int) -> None:
    """Lead the group to its end."""
    folder = JobFolder(root=root)
    group = folder.group(node, attempt)
    environ = dict(os.environ)
    state, job_id = root.parent.parent, root.name
    post = FilePost(folder, group, lambda: supervisor.ensure(state, job_id, environ))
    config = configs.loads(folder.config.read_text(encoding="utf-8"))
    assignment = Assignment(
        config=config,
        node=node,
        attempt=attempt,
        home=folder.runs(config.node(node).name, attempt),
        cpus_shared_by=config.world_size,
        site=InLab(lab.find(config.lab)) if config.lab else ThisMachine(),
        around=Around(guard_holds=(locks.INHERITED,), is_other=leads_a_job),
        handover=SharedFolder(folder.secrets),
        spares=FolderSpares(folder.secrets),
        shows_output=False,
    )
    os.chdir(config.directory or root)
    lead(assignment, post, environ | gpus_of(config, node, environ))


def leads_a_job(process: psutil.Process) -> bool:
    """A supervisor, or an agent like this one: of their job, not of the workers of whoever started them.

    A supervisor that was killed is started again by an agent, so it comes from that agent, and so do the agents that it
    starts in its turn; they outlive the round, and the agent itself.
    """
    return not {supervisor.MODULE, supervisor.AGENT[-1]}.isdisjoint(process.cmdline())


def gpus_of(config: Config, node: int, environ: Mapping[str, str]) -> dict[str, str]:
    """The GPUs of this machine that are this node's: those after what the nodes before it have."""
    if config.device != "cuda":
        return {}
    given = environ.get("CUDA_VISIBLE_DEVICES", "")
    before = sum(each.workers for each in config.nodes if each.index < node)
    there = given.split(",") if given else [str(index) for index in range(config.world_size)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(there[before : before + config.node(node).workers])}


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
