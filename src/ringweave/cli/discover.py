"""`ringweave discover`: what this machine, or a file, or all machines of a job are; who leads; a cluster file of it."""

import importlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ringweave import errors, topology
from ringweave.environment import WorkerEnvironment
from ringweave.errors import RingweaveError, UsageError
from ringweave.files import json_text, writing
from ringweave.topology import Cluster, Node, discovery, hosts
from ringweave.topology.discovery import Leadership, Machine


@click.command
@click.option("--from", "path", metavar="FILE", help="A topology file of hwloc or NCCL instead of this machine.")
@click.option("--nic", "nic_name", metavar="NAME", help="The NIC between nodes: name, RDMA device or PCI address.")
@click.option("--write", "target", metavar="CLUSTER", help="Write a cluster file of what was found.")
@click.option("--probe", is_flag=True, help="Among workers of a job: also measure the network between them.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(path: str | None, nic_name: str | None, target: str | None, probe: bool, as_json: bool) -> int:
    """Say what is in this machine, how far its devices are from its NICs, and which device leads.

    Devices are GPUs or, where there is none, the processors of each NUMA node. The leader talks to other nodes: it is
    the one with the fewest hops to the NIC that is used between them, one whose memory the NIC reaches directly
    (GPUDirect RDMA) being preferred.

    Started on all workers of a job, by a launcher that sets RANK and WORLD_SIZE, the machines are merged: rank 0
    prints its own and writes the cluster file of all. With --probe the file has the switches between them and the
    rates that were measured; without it all hang on one switch, with the rates that their NICs state.
    """
    together = _is_job(os.environ) and path is None
    if probe and not together:
        do = "Start it on all workers: ringweave run, lab run or torchrun ... -m ringweave discover --probe"
        raise UsageError(errors.explain("--probe", got="this machine alone", expected="several workers", do=do))
    if not together or os.environ["RANK"] == "0":
        writing.check("--write", target)
    whole = discovery.read_file(Path(path)) if path else discovery.observe()
    machine = whole if path else discovery.limit(whole, os.environ.get("CUDA_VISIBLE_DEVICES"))
    leadership = discovery.choose(machine, nic_name)
    if not together:
        cluster = _alone(machine, leadership, bool(nic_name)) if target else None
    else:
        cluster = _of_all(_told(whole, machine, leadership, bool(nic_name)), probe)
        if cluster is None:
            return 0
    if target and cluster:
        _write(target, cluster)
    _print(machine, leadership, cluster, as_json)
    return 0


def _print(machine: Machine, leadership: Leadership, cluster: Cluster | None, as_json: bool) -> None:
    if as_json:
        text = cluster and topology.dumps(cluster)
        click.echo(json.dumps(discovery.document(machine, leadership) | {"cluster": text}))
        return
    click.echo(discovery.describe(machine, leadership))
    if cluster and cluster.num_nodes > 1:
        click.echo(f"\n{cluster.describe()}")


def _alone(machine: Machine, leadership: Leadership, is_given: bool) -> Cluster:
    """The cluster of this machine alone."""
    node = discovery.to_node(machine, leadership, is_given=is_given)
    _say(discovery.assumptions(machine, node))
    return discovery.merge([node], name=node.name[:63])


def _told(whole: Machine, machine: Machine, leadership: Leadership, is_given: bool) -> dict[str, object]:
    """What a rank says of its host: a cluster file of one node, which is read with all the checks of one.

    The ranks of a host may see different GPUs of it, so each tells of the whole machine, and which GPU is its.
    """
    name = WorkerEnvironment.from_environ(os.environ).node
    gpu = None
    if machine.workers[0].kind == "cuda":
        gpu = whole.workers.index(machine.workers[_local_rank(os.environ) % len(machine.workers)])
        machine = whole
    node = discovery.to_node(machine, leadership, name=name, is_given=is_given)
    return {
        "gpu": gpu,
        "cluster": topology.dumps(discovery.merge([node], name="told")),
        "assumed": discovery.assumptions(machine, node),
        "host": hosts.host_id(),
    }


def _heard(text: str, rank: int) -> dict[str, Any]:
    """What a rank has said of its host (`_told`)."""
    try:
        match json_text.loads(text):
            case {"gpu": None | int(), "cluster": str(), "assumed": [*sentences], "host": str()} as said if all(
                isinstance(each, str) for each in sentences
            ):
                return dict(said)
        got = errors.shorten(text)
    except ValueError as cause:
        got = str(cause)
    expected, do = "what discover says there", "Run the same ringweave on all ranks"
    raise RingweaveError(errors.explain("host of a worker", got=got, expected=expected, do=do, where=f"rank {rank}"))


def _of_all(told: Mapping[str, object], probe: bool) -> Cluster | None:
    """The cluster of all ranks, on rank 0."""
    try:
        # By name, as the command line imports without torch and a contract says so.
        meetings = importlib.import_module("ringweave.comm.meetings")
        knowing = importlib.import_module("ringweave.comm.probing.knowing")
    except ImportError as cause:
        raise RingweaveError(
            errors.explain(
                "discovery by all workers",
                got=f"{cause}",
                expected="torch, by which the workers meet",
                do="Install ringweave[train], or run discover on each machine alone",
            )
        ) from cause
    store, rank, world_size = meetings.meet(os.environ)
    network = knowing.find_for_job(store, rank, world_size) if probe else None
    texts = meetings.exchange(store, json.dumps(told), rank, world_size, meetings.TIMEOUT)
    if texts is None:
        return None
    found = [_heard(text, rank) for rank, text in enumerate(texts)]
    if network is None:
        _say(list(dict.fromkeys(sentence for each in found for sentence in each["assumed"])))
        return discovery.merge(_nodes(found))
    click.echo(network.to_text(), err=True)
    nodes, seen = _nodes(found), network.cluster()
    measured = discovery.measured(nodes, _rates(seen), network.offers)
    _say(measured.remarks)
    return discovery.merge(
        measured.nodes,
        switches=seen.switches,
        hangs_on={node.name: node.switch for node in seen.nodes if node.switch is not None},
        latency_s=seen.latency_s,
    )


def _nodes(found: Sequence[Mapping[str, Any]]) -> list[Node]:
    """Of all ranks: those of one host are one node with as many devices."""
    told = [topology.loads(each["cluster"], source="told by a rank").nodes[0] for each in found]
    hosts.refuse_namesakes(
        hosts.Seat(global_rank=rank, node=node.name, host=each["host"], address=node.address or "no address")
        for rank, (node, each) in enumerate(zip(told, found, strict=True))
    )
    first = {node.name: node for node in reversed(told)}
    gpus: dict[str, list[Any]] = {}
    for node, each in zip(told, found, strict=True):
        gpus.setdefault(node.name, []).append(each["gpu"])
    return [discovery.with_workers(first[name], len(own), None if None in own else own) for name, own in gpus.items()]


def _local_rank(environ: Mapping[str, str]) -> int:
    text = environ.get("LOCAL_RANK", "")
    return int(text) if text.isdecimal() else 0


def _rates(network: Cluster) -> dict[str, dict[str, float]]:
    """Bytes per second of each node's NICs."""
    return {node.name: {nic.name: nic.rate_bytes_per_s for nic in node.nics} for node in network.nodes}


def _is_job(environ: Mapping[str, str]) -> bool:
    """A launcher started several workers, of which this is one."""
    has_all = all(environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    return has_all and environ["WORLD_SIZE"].isdecimal() and int(environ["WORLD_SIZE"]) > 1


def _write(target: str, cluster: Cluster) -> None:
    writing.write("--write", target, topology.dumps(cluster))
    click.echo(f"{target}: {cluster.num_nodes} nodes, {cluster.num_devices} devices", err=True)


def _say(sentences: Sequence[str]) -> None:
    for sentence in sentences:
        click.echo(f"ringweave: {sentence}", err=True)
