"""What all groups of a job have to know, made once from the job: the spec's ConfigMap. Pure; JSON in every place."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from ringweave.errors import JobError, explain
from ringweave.jobs.life.records import Job
from ringweave.jobs.requests.request import SERVED

MAX_BYTES = 2**20
"""Of a script that travels with the job: what a ConfigMap can hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigNode:
    """A node and what the split gave it."""

    index: int
    """In the request; actions and reports name the node by it."""
    name: str
    workers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """What a group needs of its job."""

    job: str
    """Name of the job."""
    device: str
    """`cuda` or `cpu`."""
    mode: str
    nodes: tuple[ConfigNode, ...]
    """Those that have workers, in the order of the request; global ranks are counted through them."""
    script: str
    """A path below `directory`, or the name of the file that is made of `script_text`."""
    script_text: str | None = None
    """The script itself, where it is alone; None where it lies in `directory`."""
    directory: str | None = None
    """Where workers start and where the script lies; None where the script is alone."""
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    data: str | None = None
    least: int | None = None
    """With so many workers at least the others go on when a node is lost; None where the job is not elastic."""
    lab: str | None = None
    """Name of the lab whose nodes these are; None where they are in none."""
    cluster: str | None = None
    """Text of the cluster file that the nodes are of; None where nobody described what connects them."""

    @property
    def is_served(self) -> bool:
        """Its way of training needs a parameter server."""
        return self.mode in SERVED

    @property
    def coordinating(self) -> tuple[str, ...]:
        """Names of the nodes that have a coordinator: the first two of an elastic job, the one that decides first."""
        return () if self.least is None else tuple(node.name for node in self.nodes[:2])

    @property
    def world_size(self) -> int:
        """Workers in all."""
        return sum(node.workers for node in self.nodes)

    def ranks(self, index: int) -> range:
        """Global ranks of the workers of the node of this index in the request."""
        first = sum(node.workers for node in self.nodes if node.index < index)
        return range(first, first + self.node(index).workers)

    def node(self, index: int) -> ConfigNode:
        """The node of this index in the request."""
        return next(node for node in self.nodes if node.index == index)


def of_job(job: Job, *, directory: str | None, script_text: str | None, cluster: str | None = None) -> Config:
    """The config of a job.

    Args:
        job: As admitted.
        directory: Where the job's directory is in its place; None if the request has none.
        script_text: The script, where it is alone; see `read_script`.
        cluster: Text of the cluster file that its nodes are of.
    """
    request = job.request
    return Config(
        job=request.name,
        device=request.device,
        mode=request.mode,
        nodes=tuple(
            ConfigNode(index=index, name=job.node_name(index), workers=job.counts[index]) for index in job.used_nodes
        ),
        script=request.script if script_text is None else Path(request.script).name,
        script_text=script_text,
        directory=directory,
        arguments=request.arguments,
        environment=dict(request.environment),
        data=request.data,
        least=request.elastic.min if request.elastic else None,
        lab=request.lab,
        cluster=cluster,
    )


def read_script(path: Path) -> str:
    """The text of a script that is to travel with its job.

    Raises:
        JobError: It cannot be read, is no text, or is too long to travel.
    """
    do = "Check the path, or give the folder that it needs around it as directory"
    try:
        text = path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        got = error.strerror if isinstance(error, OSError) else "bytes that are no UTF-8"
        raise JobError(explain(f"script {path}", got=got, expected="a Python file", do=do, where="script")) from error
    check_script(text, str(path))
    return text


def check_script(text: str, path: str) -> None:
    """Refuse a script that cannot travel with its job.

    Raises:
        JobError: It is too long, or has characters that no file can have.
    """
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        do, got = "Write it as UTF-8", "characters that are no UTF-8"
        raise JobError(explain(f"script {path}", got=got, expected="a Python file", do=do, where="script")) from error
    if num_bytes > MAX_BYTES:
        do = "Put what it needs beside it, and give that folder as directory"
        expected = f"at most {MAX_BYTES} (1 MiB), which travel with the job"
        raise JobError(explain(f"bytes of script {path}", got=num_bytes, expected=expected, do=do, where="script"))


def dumps(config: Config) -> str:
    """The config as JSON; `loads` gives an equal one."""
    return _CONFIG.dump_json(config, indent=2).decode() + "\n"


def loads(text: str) -> Config:
    """The config that a text of `dumps` is."""
    return _CONFIG.validate_json(text)


_CONFIG = TypeAdapter(Config)
