"""Checks and inputs of a submission on any platform: requester, policy, script text, lab, log queries."""

import os
import pwd
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import platformdirs

from ringweave import topology
from ringweave.errors import JobError
from ringweave.files.problems import shorten_names, suggest_closest
from ringweave.jobs import admission
from ringweave.jobs.admission import AccessPolicy
from ringweave.jobs.records import Job
from ringweave.jobs.request import JobRequest
from ringweave.launcher import workers
from ringweave.platforms.agent import job_config
from ringweave.platforms.agent.job_config import JobConfig
from ringweave.platforms.api import LogQuery

POLICY_FILE = "policy.yaml"
MACHINE_CONFIG_DIR = Path("/etc/xdg/ringweave")
"""Folder of the machine's configuration, whatever a user's XDG_CONFIG_DIRS says."""

_SINGLE_PLATFORM_KEYS = {
    "lab": ("local", "Leave lab out, or submit it --on local"),
    "claim": ("kubernetes", "Leave claim out: the nodes share files there; or submit it --on kubernetes"),
}
"""Features of one platform only: key in a request, the platform, and a fix for others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOrigin:
    """Data that a job takes with it from its submission."""

    directory: str
    """Working directory of the workers: the request's directory, or the base of its relative paths."""
    script_text: str | None
    """Text of the script if it travels with the job; None if it is in the directory."""
    environ: dict[str, str]
    """Environment that its workers inherit."""
    cluster: str | None = None
    """Text of the cluster file with its nodes; None for nodes without one."""
    slots: tuple[int, ...] = ()
    """Slots of workers on each used node of an elastic job that may grow; empty: those of the split."""

    def config(self, job: Job) -> JobConfig:
        """Return the config for the node agents of the job."""
        words = {"directory": self.directory, "script_text": self.script_text, "cluster": self.cluster}
        return job_config.job_config(job, slots=self.slots, **words)


def load_policy() -> AccessPolicy:
    """Load the policy of this machine, or else of the user; without one everything is allowed.

    Raises:
        JobError: The file is wrong.
    """
    folders = (MACHINE_CONFIG_DIR, platformdirs.user_config_path("ringweave"))
    found = next((folder / POLICY_FILE for folder in folders if (folder / POLICY_FILE).is_file()), None)
    return admission.load_policy(found) if found else admission.OPEN_POLICY


def os_user() -> str:
    """Return the name of the OS user who runs this process, as Slurm and the file system know it."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a container's user without a name
        return str(os.geteuid())


def read_request_script(request: JobRequest, base: Path, script_text: str | None) -> str | None:
    """Return the text of a script that travels with its job; None if it is in a directory, or no script.

    `base`: base of its relative paths.

    Raises:
        JobError: The script does not exist, or cannot travel.
    """
    if request.script is None or request.directory is not None:
        return None
    if script_text is None:
        return job_config.read_script(base / request.script)
    job_config.check_script_text(script_text, request.script)
    return script_text


def create_origin(
    request: JobRequest, base: Path, environ: Mapping[str, str], script_text: str | None = None
) -> JobOrigin:
    """Create the origin of a job.

    `base`: base of its relative paths.

    Raises:
        JobError: The program or the directory does not exist.
    """
    text = read_request_script(request, base, script_text)
    directory = (base / (request.directory or "")).absolute()
    if text is None:
        check_program(request, directory)
    return JobOrigin(directory=str(directory), script_text=text, environ=dict(environ))


def check_program(request: JobRequest, directory: Path) -> None:
    """Refuse a program that workers would not find in their directory, nor on the PATH or among installed modules.

    Raises:
        JobError: It is not found.
    """
    program = job_config.worker_program(request)
    if directory.is_dir() and workers.is_program_found(program, directory):
        return
    if program.is_module:
        what, expected = "module", f"a module in {directory}, or an installed one"
        do = "Check its name, or give the folder that it is in as directory"
    elif program.is_command:
        what, expected = "command", f"a program on the PATH, or a path below {directory}"
        do = "Check its name, and chmod +x; its arguments belong into arguments"
    else:
        program = replace(program, target=str(directory / program.target))
        what, expected = "script", "the path of a Python file"
        do = "Correct the script or the directory; the script's path is below the directory"
    raise JobError(what, got=program.target, expected=expected, do=do, where=request.name)


def lab_cluster_text(request: JobRequest) -> str | None:
    """Return the text of the cluster file of the request's lab; None if it names no lab.

    Raises:
        JobError: A node is not in the lab, or its capacity exceeds its devices there.
        UsageError: The lab is not up.
    """
    if request.lab is None:
        return None
    from ringweave import lab  # most jobs need none

    cluster = lab.find(request.lab).cluster
    names = [node.name for node in cluster.nodes]
    for node in request.nodes:
        if node.name not in names:
            do = suggest_closest(node.name, names) or "Name nodes of the lab"
            expected = f"a node of lab {request.lab}: {shorten_names(names, len(names))}"
            raise JobError("node", got=node.name, expected=expected, do=do, where=request.name)
        num_devices = cluster.node(node.name).num_devices
        if node.capacity > num_devices:
            expected = f"at most {num_devices}, its devices in lab {request.lab}"
            do = "Give it less, or the node more devices in the lab's cluster file"
            what = f"capacity of node {node.name}"
            raise JobError(what, got=node.capacity, expected=expected, do=do, where=request.name)
    return topology.dumps(cluster)


def check_platform_keys(request: JobRequest, platform: str) -> None:
    """Refuse keys of a request that only another platform has: a lab, a PersistentVolumeClaim.

    Raises:
        JobError: The request has such a key.
    """
    for key, (home, do) in _SINGLE_PLATFORM_KEYS.items():
        got = getattr(request, key)
        if got is not None and platform != home:
            raise JobError(key, got=got, expected=f"none on {platform}", do=do, where=request.name)


def check_log_query(job: Job, which: LogQuery, *, num_ranks: int | None = None) -> None:
    """Refuse a log query for a node or rank that the job does not have.

    `num_ranks`: number of ranks that it has had; None: those of the request.

    Raises:
        JobError: The job has no such node or rank.
    """
    names = [job.node_name(node) for node in job.used_nodes]
    if which.node is not None and which.node not in names:
        do = suggest_closest(which.node, names) or "Leave --node out for all of them"
        raise JobError("node", got=which.node, expected=f"one of {', '.join(names)}", do=do, where="--node")
    num_ranks = job.request.num_workers if num_ranks is None else num_ranks
    if which.rank is not None and not 0 <= which.rank < num_ranks:
        expected = f"0 to {num_ranks - 1}"
        do = "Leave --rank out for all of them"
        raise JobError("rank", got=which.rank, expected=expected, do=do, where="--rank")
