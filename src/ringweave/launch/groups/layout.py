"""Which processes a group starts when the gate opens: its node's part of the whole job's. Pure."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ringweave import topology
from ringweave.environment import WorkerEnvironment
from ringweave.launch.elastic import entry
from ringweave.launch.groups.config import Config
from ringweave.launch.groups.posts import Opening
from ringweave.launch.run_dirs import RunDir
from ringweave.launch.workers import Program, WorkerGroup, lay_out
from ringweave.topology import Cluster, Device, Nic, Node


def cluster_of(config: Config, addresses: Mapping[str, str]) -> Cluster:
    """The cluster that the split makes: its nodes with as many devices as workers.

    Where nobody described what connects them their rate is assumed as for `ringweave run --workers`, and probing
    measures it.

    Raises:
        ClusterError: A name cannot be a node's, or is none of the cluster that was described.
    """
    if config.cluster is not None:
        return _part_of(topology.loads(config.cluster), config, addresses)
    nics = (Nic(name="lo", rate_bytes_per_s=topology.ASSUMED_RATE_BYTES_PER_S),)
    device = Device(kind=config.device)
    nodes = [
        Node(name=node.name, devices=(device,) * node.workers, nics=nics, address=addresses.get(node.name))
        for node in config.nodes
    ]
    return Cluster(name=config.job, nodes=tuple(nodes))


def _part_of(whole: Cluster, config: Config, addresses: Mapping[str, str]) -> Cluster:
    """The nodes that the job has, with the devices that it uses and the switches above them."""
    nodes = []
    for each in config.nodes:
        node = whole.node(each.name)
        address = addresses.get(each.name, node.address)
        nodes.append(replace(node, devices=node.devices[: each.workers], address=address))
    above = {switch for node in nodes for switch in whole.ancestors(node.name)}
    switches = tuple(switch for switch in whole.switches if switch.name in above)
    return replace(whole, nodes=tuple(nodes), switches=switches)


def server_node(config: Config) -> str | None:
    """The node that has the parameter server: the one that is connected best; None where the job needs none."""
    if not config.is_served:
        return None
    from ringweave.planning import central  # brings numpy, which most jobs need not wait for

    return central.best_connected(cluster_of(config, {})).node


def workers_of(
    config: Config, index: int, opening: Opening, *, run_dir: RunDir, program: Program, python: str, cpus: int
) -> WorkerGroup:
    """The workers of one node, with the ranks that they have in the whole job.

    Args:
        config: Of the job.
        index: Of the node in the request.
        opening: Where they meet.
        run_dir: Of this round of this group; holds the cluster file.
        program: What they run.
        python: The interpreter.
        cpus: CPUs for each worker (OMP_NUM_THREADS).
    """
    common = WorkerEnvironment(
        cluster_path=run_dir.cluster,
        run_dir=run_dir.root,
        mode=None if config.mode == "auto" else config.mode,
        data=config.data,
        coordinators=tuple((meeting.host, meeting.port) for meeting in opening.coordinators),
        server=f"{opening.server.host}:{opening.server.port}" if opening.server else None,
    )
    cluster = cluster_of(config, opening.addresses)
    argv = program.argv(python, entry=entry.__file__ if config.least is not None else None)
    group = lay_out(cluster.nodes, argv, opening.meeting, num_cpus=cpus * config.world_size, common=common)
    name = config.node(index).name
    return replace(group, workers=tuple(worker for worker in group.workers if worker.node == name))


def program_of(config: Config, home: Path) -> Program:
    """What the workers run; a script that travelled with its job is written below `home` first."""
    if config.script_text is None:
        return Program(target=str(Path(config.directory or ".") / config.script), arguments=config.arguments)
    path = home / "script" / config.script
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(config.script_text, encoding="utf-8")
    beside.replace(path)
    return Program(target=str(path), arguments=config.arguments)
