"""Which processes a group starts when the gate opens: its node's part of the whole job's. Pure."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ringweave import topology
from ringweave.environment import WorkerEnvironment
from ringweave.launch.groups.config import Config
from ringweave.launch.groups.posts import Opening
from ringweave.launch.run_dirs import RunDir
from ringweave.launch.workers import Program, WorkerGroup, lay_out
from ringweave.topology import Cluster, Device, Nic, Node


def cluster_of(config: Config, addresses: Mapping[str, str]) -> Cluster:
    """The cluster that the split makes: its nodes with as many devices as workers.

    What connects them is not known; their rate is assumed as for `ringweave run --workers`, and probing measures it.

    Raises:
        ClusterError: A name cannot be a node's.
    """
    nics = (Nic(name="lo", rate_bytes_per_s=topology.ASSUMED_RATE_BYTES_PER_S),)
    device = Device(kind=config.device)
    nodes = [
        Node(name=node.name, devices=(device,) * node.workers, nics=nics, address=addresses.get(node.name))
        for node in config.nodes
    ]
    return Cluster(name=config.job, nodes=tuple(nodes))


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
    )
    cluster = cluster_of(config, opening.addresses)
    argv = program.argv(python)
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
