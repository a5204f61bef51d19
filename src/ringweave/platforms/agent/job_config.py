"""Job config: what all nodes of a job need to know of it, made once from the job; JSON on every platform.

From it follow the cluster of the job, the worker group of each node and its program.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ringweave import topology
from ringweave.environment import WorkerEnvironment
from ringweave.errors import JobError
from ringweave.files import file_io
from ringweave.jobs import worker_options
from ringweave.jobs.records import Job, JsonForm
from ringweave.jobs.request import ELASTIC_SERVER_MODES, SERVER_MODES, JobRequest
from ringweave.jobs.worker_options import DEFAULT_OPTIONS, WorkerOptions
from ringweave.launcher import entry
from ringweave.launcher.workers import (
    HostPort,
    WorkerGroup,
    WorkerProgram,
    build_worker_group,
    place_later_workers,
    with_later_workers,
)
from ringweave.relayed_address import RELAY_NIC, is_relayed
from ringweave.topology import Cluster, Device, Nic, Node

MAX_SCRIPT_BYTES = 2**20
"""Upper limit of a script that travels with the job: the capacity of a ConfigMap."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeConfig:
    """A node, and its number of workers by the split."""

    index: int
    """Index in the request; actions and statuses name the node by it."""
    name: str
    workers: int
    slots: int = 0
    """Slots of workers, the first ones of which are the initial workers'; 0: none for later workers."""

    @property
    def num_slots(self) -> int:
        return max(self.workers, self.slots)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobConfig:
    """Part of a job that its node agents need."""

    job: str
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
        return frozenset(holders | {f"worker-{rank}" for rank in self.slots_of_node(index)})

    @property
    def world_size(self) -> int:
        return sum(node.workers for node in self.nodes)

    @property
    def num_slots(self) -> int:
        """Number of workers up to which the job may grow."""
        return sum(node.num_slots for node in self.nodes)

    def slots_of_node(self, index: int) -> list[int]:
        """Return the global ranks of the workers of a node, also of those that may come later, ascending."""
        nodes = place_later_workers([each.workers for each in self.nodes], [each.num_slots for each in self.nodes])
        later = [self.world_size + number for number, place in enumerate(nodes) if self.nodes[place].index == index]
        return [*self.ranks_of_node(index), *later]

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
        return next(node for node in self.nodes if node.index == index)


def job_config(
    job: Job,
    *,
    directory: str | None,
    script_text: str | None,
    cluster: str | None = None,
    slots: Sequence[int] = (),
) -> JobConfig:
    """Create the config of a job.

    Args:
        job: Admitted job.
        directory: Path of the job's directory on its platform; None if the request has none.
        script_text: Text of the script if it travels with the job; see `read_script`.
        cluster: Text of the cluster file with its nodes.
        slots: Slots of each used node, where workers may come later.
    """
    request, num_slots = job.request, dict(zip(job.used_nodes, slots, strict=False))
    return JobConfig(
        job=request.name,
        device=request.device,
        mode=request.mode,
        nodes=tuple(
            NodeConfig(index=index, name=job.node_name(index), workers=job.counts[index], slots=num_slots.get(index, 0))
            for index in job.used_nodes
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
        raise JobError(f"script {path}", got=got, expected="a Python file", do=do, where="script") from error
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
        raise JobError(f"script {path}", got=got, expected="a Python file", do=do, where="script") from error
    if num_bytes > MAX_SCRIPT_BYTES:
        do = "Put the script into a folder with its files, and give that folder as directory"
        expected = f"at most {MAX_SCRIPT_BYTES} (1 MiB), which travel with the job"
        raise JobError(f"bytes of script {path}", got=num_bytes, expected=expected, do=do, where="script")


JOB_CONFIG_JSON = JsonForm(JobConfig, saved_as="config of the job", indent=2)


@dataclass(frozen=True, kw_only=True, slots=True)
class RendezvousResult:
    """Result of a round's rendezvous: the start barrier is released, because all nodes were ready."""

    round: int
    master_address: HostPort
    """Master address: the offer of the node of rank 0 for this round."""
    servers: tuple[HostPort, ...] = ()
    """Addresses of the job's parameter servers in this round, the one that leads first; empty if it has none."""
    coordinators: tuple[HostPort, ...] = ()
    """Addresses of an elastic job's coordinators in this round, the active one first; empty for other jobs."""
    addresses: Mapping[str, str] = field(default_factory=dict)
    """Node name -> address, for nodes that cannot be found by their names; empty if all are on one machine."""
    late_nodes: tuple[str, ...] = ()
    """Names of the nodes of an elastic job that were not ready; they may come while the others train."""

    @property
    def server_text(self) -> str:
        """`host:port` of each parameter server, separated by commas."""
        return ",".join(map(str, self.servers))


if TYPE_CHECKING:
    from ringweave.launcher.run_dir import RunDir


def build_cluster(config: JobConfig, addresses: Mapping[str, str]) -> Cluster:
    """Build the cluster of the split: its nodes with as many devices as slots of workers.

    Without a cluster file the rate of the links is assumed, as for `ringweave run --workers`, and probing measures it.

    Raises:
        ClusterError: A name is no valid node name, or not a node of the described cluster.
    """
    if config.cluster is not None:
        return _restrict_cluster(topology.loads(config.cluster), config, addresses)
    device = Device(kind=config.device)
    nodes = []
    for node in config.nodes:
        address = addresses.get(node.name)
        name = RELAY_NIC if is_relayed(address or "") else "lo"
        nics = (Nic(name=name, rate_bytes_per_s=topology.ASSUMED_RATE_BYTES_PER_S),)
        nodes.append(Node(name=node.name, devices=(device,) * node.num_slots, nics=nics, address=address))
    return Cluster(name=config.job, nodes=tuple(nodes))


def _restrict_cluster(whole: Cluster, config: JobConfig, addresses: Mapping[str, str]) -> Cluster:
    """Return the job's part of a cluster: its nodes, the devices that it uses, and the switches above them."""
    nodes = []
    for each in config.nodes:
        node = whole.node(each.name)
        address = addresses.get(each.name, node.address)
        nodes.append(replace(node, devices=node.devices[: each.num_slots], address=address))
    switch_names = {switch for node in nodes for switch in whole.ancestors(node.name)}
    switches = tuple(switch for switch in whole.switches if switch.name in switch_names)
    return replace(whole, nodes=tuple(nodes), switches=switches)


def server_nodes(config: JobConfig) -> tuple[str, ...]:
    """Return the nodes with a parameter server, the one that leads first; empty if the job needs none.

    The server of a job that is not elastic is on the best connected node.
    """
    if not config.has_server or config.elastic_server_nodes:
        return config.elastic_server_nodes
    from ringweave.planning import group_planner  # brings numpy, which most jobs need not wait for

    return (group_planner.find_best_connected(build_cluster(config, {})).node,)


def node_worker_group(
    config: JobConfig,
    index: int,
    rendezvous: RendezvousResult,
    *,
    run_dir: "RunDir",
    program: WorkerProgram,
    cpus: int,
    node_environ: Callable[[str, int], Mapping[str, str]] = lambda node, local_rank: {},
) -> WorkerGroup:
    """Return the slots of one node, with their ranks in the whole job: its initial workers, then those of later ones.

    Args:
        config: Config of the job.
        index: Index of the node in the request.
        rendezvous: Rendezvous result of the round.
        run_dir: Run directory of this round on this node; contains the cluster file.
        program: Program of the workers.
        cpus: CPUs for each worker (OMP_NUM_THREADS).
        node_environ: Name of a node and local rank -> further variables of the worker there.
    """
    options = config.worker_options
    common = WorkerEnvironment(
        cluster_path=run_dir.cluster_file,
        probes_described=config.cluster is None and config.between_hosts,
        run_dir=run_dir.root,
        mode=None if config.mode == "auto" else config.mode,
        data=config.data,
        encrypts=config.encrypts,
        coordinators=tuple((address.host, address.port) for address in rendezvous.coordinators),
        server=rendezvous.server_text or None,
    )
    cluster = build_cluster(config, rendezvous.addresses)
    pairs = zip(cluster.nodes, config.nodes, strict=True)
    argv = program.argv(sys.executable, entry=entry.__file__ if config.min_workers is not None else None)
    initial = [replace(node, devices=node.devices[: each.workers]) for node, each in pairs]
    group = build_worker_group(
        initial,
        argv,
        rendezvous.master_address,
        num_cpus=cpus * config.world_size,
        common_environment=options.apply_to(common),
        node_environ=node_environ,
        order=options.order,
    )
    group = with_later_workers(group, cluster.nodes, num_cpus=cpus * config.world_size)
    name = config.node(index).name
    return replace(group, workers=tuple(worker for worker in group.workers if worker.node == name))


def write_worker_program(config: JobConfig, home: Path) -> WorkerProgram:
    """Return the workers' program; write a script that travelled with its job below `home`."""
    program = worker_program(config)
    if config.script is None:
        return program
    if config.script_text is None:
        return replace(program, target=str(Path(config.directory or ".") / config.script))
    path = home / "script" / config.script
    path.parent.mkdir(parents=True, exist_ok=True)
    file_io.replace_text(path, config.script_text)
    return replace(program, target=str(path))
