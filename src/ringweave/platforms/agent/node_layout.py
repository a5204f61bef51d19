"""Layout of one node: its part of the job's cluster and of the job's worker group. Pure."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ringweave import topology
from ringweave.environment import WorkerEnvironment
from ringweave.files import file_io
from ringweave.launcher import entry
from ringweave.launcher.workers import WorkerGroup, WorkerProgram, build_worker_group
from ringweave.platforms.agent import job_config
from ringweave.platforms.agent.job_config import JobConfig
from ringweave.relayed_address import is_relayed
from ringweave.topology import Cluster, Device, Nic, Node

if TYPE_CHECKING:
    from ringweave.launcher.run_dir import RunDir
    from ringweave.platforms.agent.agent_channel import RendezvousResult

RELAY_NIC = "relay"
"""Name of the link of a host that others cannot call: it opens all connections, and relays lead others to it."""


def build_cluster(config: JobConfig, addresses: Mapping[str, str]) -> Cluster:
    """Build the cluster of the split: its nodes with as many devices as workers.

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
        nodes.append(Node(name=node.name, devices=(device,) * node.workers, nics=nics, address=address))
    return Cluster(name=config.job, nodes=tuple(nodes))


def _restrict_cluster(whole: Cluster, config: JobConfig, addresses: Mapping[str, str]) -> Cluster:
    """Return the job's part of a cluster: its nodes, the devices that it uses, and the switches above them."""
    nodes = []
    for each in config.nodes:
        node = whole.node(each.name)
        address = addresses.get(each.name, node.address)
        nodes.append(replace(node, devices=node.devices[: each.workers], address=address))
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
    rendezvous: "RendezvousResult",
    *,
    run_dir: "RunDir",
    program: WorkerProgram,
    cpus: int,
    node_environ: Callable[[str, int], Mapping[str, str]] = lambda node, local_rank: {},
) -> WorkerGroup:
    """Return the workers of one node, with their ranks in the whole job.

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
        run_dir=run_dir.root,
        mode=None if config.mode == "auto" else config.mode,
        data=config.data,
        encrypts=config.encrypts,
        coordinators=tuple((address.host, address.port) for address in rendezvous.coordinators),
        server=rendezvous.server_text or None,
    )
    cluster = build_cluster(config, rendezvous.addresses)
    argv = program.argv(sys.executable, entry=entry.__file__ if config.min_workers is not None else None)
    group = build_worker_group(
        cluster.nodes,
        argv,
        rendezvous.master_address,
        num_cpus=cpus * config.world_size,
        common_environment=options.apply_to(common),
        node_environ=node_environ,
        order=options.order,
    )
    name = config.node(index).name
    return replace(group, workers=tuple(worker for worker in group.workers if worker.node == name))


def worker_program(config: JobConfig, home: Path) -> WorkerProgram:
    """Return the workers' program; write a script that travelled with its job below `home`."""
    program = job_config.worker_program(config)
    if config.script is None:
        return program
    if config.script_text is None:
        return replace(program, target=str(Path(config.directory or ".") / config.script))
    path = home / "script" / config.script
    path.parent.mkdir(parents=True, exist_ok=True)
    file_io.replace_text(path, config.script_text)
    return replace(program, target=str(path))
