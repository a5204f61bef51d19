"""What all places do with a request before it is theirs: who asks, by which rules, and what travels with the job."""

import os
import pwd
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from ringweave import lab, topology
from ringweave.errors import JobError, explain
from ringweave.files.problems import closest, listed
from ringweave.jobs.admission import policy
from ringweave.jobs.admission.policy import Policy
from ringweave.jobs.life.records import Job
from ringweave.jobs.requests.request import Request
from ringweave.launch.groups import config as configs
from ringweave.launch.groups.config import Config
from ringweave.launch.services.service import LogQuery

POLICY = "policy.yaml"
MACHINE = Path("/etc/xdg/ringweave")
"""Where the machine's own is, whatever a user's XDG_CONFIG_DIRS says."""

_AT_HOME = {
    "lab": ("local", "Leave lab out, or submit it --on local"),
    "claim": ("kubernetes", "Leave claim out: the nodes share files there; or submit it --on kubernetes"),
}
"""What only one place has: its key in a request, the place, and what to do elsewhere."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """What a job takes with it from where it was submitted."""

    directory: str
    """Where its workers start: the request's directory, or the folder that its paths are relative to."""
    script_text: str | None
    """The script, where it is alone; None where it lies in the directory."""
    environ: dict[str, str]
    """What its workers inherit."""
    cluster: str | None = None
    """Text of the cluster file that its nodes are of; None where they are worker groups only."""

    def config(self, job: Job) -> Config:
        """What the groups of the job have to know."""
        words = {"directory": self.directory, "script_text": self.script_text, "cluster": self.cluster}
        return configs.of_job(job, **words)


def rules_here() -> Policy:
    """The policy of this machine, or else of the user; everybody may do everything where there is none.

    Raises:
        JobError: The file is wrong.
    """
    folders = (MACHINE, platformdirs.user_config_path("ringweave"))
    found = next((folder / POLICY for folder in folders if (folder / POLICY).is_file()), None)
    return policy.load(found) if found else policy.OPEN


def os_user() -> str:
    """The OS user who runs this process, as Slurm and the file system know them."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a container's user without a name
        return str(os.geteuid())


def script_of(request: Request, base: Path, script_text: str | None) -> str:
    """The text of a script that is alone.

    Args:
        request: What is asked for.
        base: Folder that its relative paths start from.
        script_text: What was handed over with the request; no file is looked at then, whatever its path says.

    Raises:
        JobError: It is not there, or cannot travel.
    """
    if script_text is None:
        return configs.read_script(base / request.script)
    configs.check_script(script_text, request.script)
    return script_text


def origin_of(request: Request, base: Path, environ: Mapping[str, str], script_text: str | None = None) -> Origin:
    """What the job takes with it.

    Args:
        request: What is asked for.
        base: Folder that its relative paths start from.
        environ: What workers inherit.
        script_text: The script, where it is alone and was handed over with the request.

    Raises:
        JobError: Script or directory is not there.
    """
    if request.directory is None:
        text = script_of(request, base, script_text)
        return Origin(directory=str(base.absolute()), script_text=text, environ=dict(environ))
    directory = (base / request.directory).absolute()
    if not (directory / request.script).is_file():
        do = "Correct the script or the directory; the script's path is below the directory"
        expected = "the path of a Python file"
        text = explain("script", got=str(directory / request.script), expected=expected, do=do, where=request.name)
        raise JobError(text)
    return Origin(directory=str(directory), script_text=None, environ=dict(environ))


def lab_cluster(request: Request) -> str | None:
    """Text of the cluster file of the lab that the request names; None if it names none.

    Raises:
        JobError: A node is none of the lab's, or may run more than it has devices.
        UsageError: The lab is not up.
    """
    if request.lab is None:
        return None
    cluster = lab.find(request.lab).cluster
    names = [node.name for node in cluster.nodes]
    for node in request.nodes:
        if node.name not in names:
            do = closest(node.name, names) or "Name nodes of the lab"
            expected = f"a node of lab {request.lab}: {listed(names, len(names))}"
            raise JobError(explain("node", got=node.name, expected=expected, do=do, where=request.name))
        num_devices = cluster.node(node.name).num_devices
        if node.capacity > num_devices:
            expected = f"at most {num_devices}, its devices in lab {request.lab}"
            do = "Give it less, or the node more devices in the lab's cluster file"
            what = f"capacity of node {node.name}"
            raise JobError(explain(what, got=node.capacity, expected=expected, do=do, where=request.name))
    return topology.dumps(cluster)


def refuse_elsewhere(request: Request, place: str) -> None:
    """Refuse what the request asks for and this place does not have: a lab, a PersistentVolumeClaim.

    Raises:
        JobError: The request names one that only another place has.
    """
    for key, (home, do) in _AT_HOME.items():
        got = getattr(request, key)
        if got is not None and place != home:
            raise JobError(explain(key, got=got, expected=f"none on {place}", do=do, where=request.name))


def check_query(job: Job, which: LogQuery) -> None:
    """Refuse to look for logs that there cannot be.

    Raises:
        JobError: The job has no such node or rank.
    """
    names = [job.node_name(node) for node in job.used_nodes]
    if which.node is not None and which.node not in names:
        do = closest(which.node, names) or "Leave --node out for all of them"
        raise JobError(explain("node", got=which.node, expected=f"one of {', '.join(names)}", do=do, where="--node"))
    if which.rank is not None and not 0 <= which.rank < job.request.num_workers:
        expected = f"0 to {job.request.num_workers - 1}"
        do = "Leave --rank out for all of them"
        raise JobError(explain("rank", got=which.rank, expected=expected, do=do, where="--rank"))
