"""Job config: what all nodes of a job need to know of it, made once from the job. Pure; JSON on every platform."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ringweave.errors import JobError, explain
from ringweave.files import file_io
from ringweave.jobs import worker_options
from ringweave.jobs.records import Job, JsonForm
from ringweave.jobs.request import ELASTIC_SERVER_MODES, SERVER_MODES, JobRequest
from ringweave.jobs.worker_options import DEFAULT_OPTIONS, WorkerOptions
from ringweave.launcher.workers import WorkerProgram

MAX_SCRIPT_BYTES = 2**20
"""Upper limit of a script that travels with the job: the capacity of a ConfigMap."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeConfig:
    """A node, and its number of workers by the split."""

    index: int
    """Index in the request; actions and statuses name the node by it."""
    name: str
    workers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class JobConfig:
    """Part of a job that its node agents need."""

    job: str
    """Name of the job."""
    device: str
    """`cuda` or `cpu`."""
    mode: str
    nodes: tuple[NodeConfig, ...]
    """Nodes that have workers, in the order of the request; global ranks follow it."""
    script: str | None = None
    """A path below `directory`, or the name of the file written from `script_text`; None for another program."""
    module: str | None = None
    """A module that the workers run; None for another program."""
    command: str | None = None
    """A program that the workers run without an interpreter; None for another one."""
    worker_options: WorkerOptions = DEFAULT_OPTIONS
    script_text: str | None = None
    """Text of the script if it travels with the job; None if it is in `directory`."""
    directory: str | None = None
    """Working directory of the workers, which contains a script; None if the script travels with the job."""
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    data: str | None = None
    min_workers: int | None = None
    """Minimum number of workers with which the others go on when a node is lost; None for a job that is not elastic."""
    num_spares: int = 0
    """Number of spares on each node of an elastic job."""
    has_standby: bool = False
    """A second parameter server takes over when the first one is lost; only in an elastic job."""
    between_hosts: bool = True
    """The nodes are hosts; False on one machine, where nothing leaves it."""
    lab: str | None = None
    """Name of the lab that contains these nodes; None outside of a lab."""
    cluster: str | None = None
    """Text of the cluster file with these nodes; None if their links are not described."""

    @property
    def has_server(self) -> bool:
        """True if its training mode needs a parameter server."""
        return self.mode in (SERVER_MODES if self.min_workers is None else ELASTIC_SERVER_MODES)

    @property
    def coordinator_nodes(self) -> tuple[str, ...]:
        """Names of the nodes with a coordinator: the first two of an elastic job, the active one first."""
        return () if self.min_workers is None else tuple(node.name for node in self.nodes[:2])

    @property
    def elastic_server_nodes(self) -> tuple[str, ...]:
        """Names of the nodes of `Job.elastic_server_nodes`."""
        is_elastic = self.min_workers is not None
        return tuple(node.name for node in self.nodes[: 1 + self.has_standby]) if is_elastic and self.has_server else ()

    @property
    def num_servers(self) -> int:
        """Number of parameter servers."""
        return len(self.elastic_server_nodes) or int(self.has_server)

    @property
    def encrypts(self) -> bool:
        """True if connections between its nodes are encrypted, for which each worker gets a certificate."""
        between_hosts = self.between_hosts and self.lab is None
        return len(self.nodes) > 1 and self.worker_options.encrypts(between_hosts=between_hosts)

    def credential_holders(self, index: int) -> frozenset[str]:
        """Return the holders of issued credentials on a node: its workers, and the services of an elastic job."""
        name = self.node(index).name
        services = {"coordinator": self.coordinator_nodes, "server": self.elastic_server_nodes}
        holders = {f"{role}-{names.index(name)}" for role, names in services.items() if name in names}
        return frozenset(holders | {f"worker-{rank}" for rank in self.ranks_of_node(index)})

    @property
    def world_size(self) -> int:
        return sum(node.workers for node in self.nodes)

    @property
    def ranks_by_node(self) -> dict[str, list[int]]:
        """Name of each node -> global ranks of its workers, ascending."""
        found = worker_options.ranks_by_node([node.workers for node in self.nodes], self.worker_options.order)
        return {node.name: ranks for node, ranks in zip(self.nodes, found, strict=True)}

    @property
    def master_node(self) -> str:
        """Name of the node of rank 0, whose address is the master address."""
        return next(name for name, ranks in self.ranks_by_node.items() if ranks[0] == 0)

    def ranks_of_node(self, index: int) -> list[int]:
        """Return the global ranks of the workers of a node, given by its index in the request."""
        return self.ranks_by_node[self.node(index).name]

    def node(self, index: int) -> NodeConfig:
        """Return a node by its index in the request."""
        return next(node for node in self.nodes if node.index == index)


def job_config(job: Job, *, directory: str | None, script_text: str | None, cluster: str | None = None) -> JobConfig:
    """Create the config of a job.

    Args:
        job: Admitted job.
        directory: Path of the job's directory on its platform; None if the request has none.
        script_text: Text of the script if it travels with the job; see `read_script`.
        cluster: Text of the cluster file with its nodes.
    """
    request = job.request
    return JobConfig(
        job=request.name,
        device=request.device,
        mode=request.mode,
        nodes=tuple(
            NodeConfig(index=index, name=job.node_name(index), workers=job.counts[index]) for index in job.used_nodes
        ),
        script=Path(request.script).name if request.script and script_text is not None else request.script,
        module=request.module,
        command=request.command,
        worker_options=request.worker_options,
        script_text=script_text,
        directory=directory,
        arguments=request.arguments,
        environment=dict(request.environment),
        data=request.data,
        min_workers=request.elastic.min if request.elastic else None,
        num_spares=request.elastic.spares if request.elastic else 0,
        has_standby=request.standby,
        lab=request.lab,
        cluster=cluster,
    )


def worker_program(work: JobRequest | JobConfig) -> WorkerProgram:
    """Return the program of the workers; a script or path is relative to their directory."""
    return WorkerProgram(
        target=work.script or work.module or work.command or "",
        arguments=work.arguments,
        is_module=work.module is not None,
        is_command=work.command is not None,
    )


def read_script(path: Path) -> str:
    """Read a script that travels with its job.

    Raises:
        JobError: It cannot be read, is no text, or is too long to travel.
    """
    do = "Check the path, or give the folder of the script as directory"
    try:
        text = file_io.read_bounded(path).decode()
    except (OSError, ValueError) as error:
        is_text = not isinstance(error, UnicodeDecodeError)
        got = getattr(error, "strerror", str(error)) if is_text else "bytes that are no UTF-8"
        raise JobError(explain(f"script {path}", got=got, expected="a Python file", do=do, where="script")) from error
    check_script_text(text, str(path))
    return text


def check_script_text(text: str, path: str) -> None:
    """Refuse a script that cannot travel with its job.

    Raises:
        JobError: It is too long, or has characters that no file can have.
    """
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        do, got = "Write it as UTF-8", "characters that are no UTF-8"
        raise JobError(explain(f"script {path}", got=got, expected="a Python file", do=do, where="script")) from error
    if num_bytes > MAX_SCRIPT_BYTES:
        do = "Put the script into a folder with its files, and give that folder as directory"
        expected = f"at most {MAX_SCRIPT_BYTES} (1 MiB), which travel with the job"
        raise JobError(explain(f"bytes of script {path}", got=num_bytes, expected=expected, do=do, where="script"))


JOB_CONFIG_JSON = JsonForm(JobConfig, saved_as="config of the job", indent=2)
