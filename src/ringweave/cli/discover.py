"""`ringweave discover`: describes this machine, a topology file or all machines of a job, and writes a cluster file."""

import importlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ringweave import errors, topology
from ringweave.cli.echo import echo
from ringweave.environment import WorkerEnvironment
from ringweave.errors import RingweaveError, UsageError
from ringweave.files import file_io
from ringweave.topology import Cluster, Node, discovery, placement
from ringweave.topology.discovery import LeaderChoice, Machine


@click.command
@click.option("--from", "path", metavar="FILE", help="A topology file of hwloc or NCCL instead of this machine.")
@click.option("--nic", "nic_name", metavar="NAME", help="The NIC between nodes: name, RDMA device or PCI address.")
@click.option("--write", "target", metavar="CLUSTER", help="Write a cluster file of what was found.")
@click.option("--probe", is_flag=True, help="Among workers of a job: also measure the network between them.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(path: str | None, nic_name: str | None, target: str | None, probe: bool, as_json: bool) -> int:
    """Describe this machine: its devices, their distance from its NICs, and its leader device.

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
        raise UsageError("--probe", got="this machine alone", expected="several workers", do=do)
    if not together or os.environ["RANK"] == "0":
        file_io.check_writable("--write", target)
    whole = discovery.read_file(Path(path)) if path else discovery.observe()
    machine = whole if path else discovery.limit_to_visible_gpus(whole, os.environ.get("CUDA_VISIBLE_DEVICES"))
    leadership = discovery.choose_leader(machine, nic_name)
    if not together:
        cluster = _single_node_cluster(machine, leadership, bool(nic_name)) if target else None
    else:
        cluster = _cluster_of_all_ranks(_host_report(whole, machine, leadership, bool(nic_name)), probe)
        if cluster is None:
            return 0
    if target and cluster:
        _write_cluster_file(target, cluster)
    _print_result(machine, leadership, cluster, as_json)
    return 0


def _print_result(machine: Machine, leadership: LeaderChoice, cluster: Cluster | None, as_json: bool) -> None:
    if as_json:
        text = cluster and topology.dumps(cluster)
        echo(json.dumps(discovery.machine_document(machine, leadership) | {"cluster": text}))
        return
    echo(discovery.describe_machine(machine, leadership))
    if cluster and cluster.num_nodes > 1:
        echo(f"\n{cluster.describe()}")


def _single_node_cluster(machine: Machine, leadership: LeaderChoice, is_given: bool) -> Cluster:
    node = discovery.machine_to_node(machine, leadership, is_given=is_given)
    _write_notes(discovery.assumed_rate_remarks(machine, node))
    return discovery.merge_nodes([node], name=node.name[:63])


def _host_report(whole: Machine, machine: Machine, leadership: LeaderChoice, is_given: bool) -> dict[str, object]:
    """Return a rank's report of its machine, with a cluster file of one node; its reader makes all checks of a file.

    The ranks of a machine may see different GPUs of it, so each reports the whole machine and the index of its own GPU.
    """
    name = WorkerEnvironment.from_environ(os.environ).node
    gpu = None
    if machine.workers[0].kind == "cuda":
        gpu = whole.workers.index(machine.workers[_local_rank(os.environ) % len(machine.workers)])
        machine = whole
    node = discovery.machine_to_node(machine, leadership, name=name, is_given=is_given)
    return {
        "gpu": gpu,
        "cluster": topology.dumps(discovery.merge_nodes([node], name="reported")),
        "assumed": discovery.assumed_rate_remarks(machine, node),
        "host": placement.host_id(),
    }


def _parse_host_report(text: str, rank: int) -> dict[str, Any]:
    """Parse a rank's report of its machine (`_host_report`)."""
    try:
        match file_io.parse_json(text):
            case {"gpu": None | int(), "cluster": str(), "assumed": [*sentences], "host": str()} as said if all(
                isinstance(each, str) for each in sentences
            ):
                return dict(said)
        got = errors.shorten(text)
    except ValueError as cause:
        got = str(cause)
    expected, do = "the report of discover", "Run the same ringweave on all ranks"
    raise RingweaveError("host of a worker", got=got, expected=expected, do=do, where=f"rank {rank}")


def _cluster_of_all_ranks(host_report: Mapping[str, object], probe: bool) -> Cluster | None:
    """Return the cluster of all ranks, on rank 0; None on other ranks."""
    try:
        # By name: an import contract keeps torch out of the command line.
        peer_data = importlib.import_module("ringweave.comm.peer_data")
        lookup = importlib.import_module("ringweave.comm.probing.measure")
    except ImportError as cause:
        raise RingweaveError(
            "discovery by all workers",
            got=f"{cause}",
            expected="torch, through which the workers exchange their reports",
            do="Install ringweave[train], or run discover on each machine alone",
        ) from cause
    store, rank, world_size = peer_data.connect_store(os.environ)
    network = lookup.measure_job_network(store, rank, world_size) if probe else None
    texts = peer_data.exchange_texts(store, json.dumps(host_report), rank, world_size, peer_data.GATHER_TIMEOUT)
    if texts is None:
        return None
    reports = [_parse_host_report(text, rank) for rank, text in enumerate(texts)]
    if network is None:
        _write_notes(list(dict.fromkeys(sentence for each in reports for sentence in each["assumed"])))
        return discovery.merge_nodes(_merge_hosts(reports))
    echo(network.to_text(), err=True)
    nodes, probed = _merge_hosts(reports), network.cluster()
    measured = discovery.with_measured_rates(nodes, _nic_rates(probed), network.link_rates)
    _write_notes(measured.remarks)
    return discovery.merge_nodes(
        measured.nodes,
        switches=probed.switches,
        switch_of_node={node.name: node.switch for node in probed.nodes if node.switch is not None},
        latency_s=probed.latency_s,
    )


def _merge_hosts(reports: Sequence[Mapping[str, Any]]) -> list[Node]:
    """Merge the ranks' nodes: ranks of one machine become one node with as many devices."""
    nodes = [topology.loads(each["cluster"], source="reported by a rank").nodes[0] for each in reports]
    placement.check_one_host_per_node(
        placement.RankPlacement(
            global_rank=rank, node=node.name, host=each["host"], address=node.address or "no address"
        )
        for rank, (node, each) in enumerate(zip(nodes, reports, strict=True))
    )
    first = {node.name: node for node in reversed(nodes)}
    gpus: dict[str, list[Any]] = {}
    for node, each in zip(nodes, reports, strict=True):
        gpus.setdefault(node.name, []).append(each["gpu"])
    return [
        discovery.node_with_workers(first[name], len(own), None if None in own else own) for name, own in gpus.items()
    ]


def _local_rank(environ: Mapping[str, str]) -> int:
    text = environ.get("LOCAL_RANK", "")
    return int(text) if text.isdecimal() else 0


def _nic_rates(network: Cluster) -> dict[str, dict[str, float]]:
    """Return bytes per second of each node's NICs."""
    return {node.name: {nic.name: nic.rate_bytes_per_s for nic in node.nics} for node in network.nodes}


def _is_job(environ: Mapping[str, str]) -> bool:
    """Return whether a launcher started several workers, of which this is one."""
    has_all = all(environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    return has_all and environ["WORLD_SIZE"].isdecimal() and int(environ["WORLD_SIZE"]) > 1


def _write_cluster_file(target: str, cluster: Cluster) -> None:
    file_io.write_output("--write", target, topology.dumps(cluster))
    echo(f"{target}: {cluster.num_nodes} nodes, {cluster.num_devices} devices", err=True)


def _write_notes(sentences: Sequence[str]) -> None:
    for sentence in sentences:
        echo(f"ringweave: {sentence}", err=True)
