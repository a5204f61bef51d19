"""`ringweave plan`: prints the bound, the predicted times and the chosen schedule of a cluster, or of a run."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from ringweave import cost, planning, topology, units
from ringweave.cli import pipeline_stages
from ringweave.cli.echo import ProgressPrinter, align_columns, echo, format_ms, terminal_progress
from ringweave.cost import network
from ringweave.environment import EXACT, WIRES
from ringweave.errors import RingweaveError, UsageError
from ringweave.files import rotation
from ringweave.launcher.run_dir import RunDir, compare_measured, list_probed_networks
from ringweave.planning import Plan, ScheduleChoice
from ringweave.planning.plans import PLANNED_KINDS
from ringweave.relayed_address import RELAY_NIC
from ringweave.schedules import CollectiveKind
from ringweave.telemetry import events
from ringweave.topology import Cluster, placement

MAX_NAMED_RANKS = 16
_MAX_LEADER_LINES = 8


def measured_rates_line(rates: Mapping[str, float], cluster: Cluster, path: str | None) -> list[str]:
    """Return one line about rates that were read from a file; none without a file."""
    if path is None:
        return []
    return [f"rates    of {len(rates)} of {len(cluster.links())} links as measured: {path}"]


def leader_reasons(cluster: Cluster, plan: Plan) -> list[str]:
    """Return the reason of each leader, in the order of `plan.leaders`; the plan has all devices of the cluster."""
    places: dict[str, list[int]] = {}
    for rank, name in enumerate(plan.nodes):
        places.setdefault(name, []).append(rank)
    taken: dict[str, set[str]] = {}
    words = []
    for rank in plan.leaders:
        node = cluster.node(plan.nodes[rank])
        index = places[node.name].index(rank)
        used = taken.setdefault(node.name, set())
        free = [nic for nic in placement.preferred_nics(node.nics) if nic.name not in used]
        led = len([leader for leader in plan.leaders if plan.nodes[leader] == node.name])
        nic = free[0] if led == 1 else min(free, key=lambda each: placement.device_distance(node, each, index))
        used.add(nic.name)
        words.append(placement.leader_reason(node, nic, index))
    return words


def leader_lines(cluster: Cluster, plan: Plan, name_rank: Callable[[int], str]) -> list[str]:
    """Return lines with leaders, reasons, and the rows and columns of their matrix; `name_rank` names a rank."""
    by_reason: dict[str, list[int]] = {}
    for rank, words in zip(plan.leaders, leader_reasons(cluster, plan), strict=True):
        by_reason.setdefault(words, []).append(rank)
    reason_lines = [f"  {join_names(map(name_rank, ranks))}: {words}" for words, ranks in by_reason.items()]
    columns = list(zip(*plan.matrix, strict=True))
    return [
        f"leaders  {len(plan.leaders)}, one for each {'node' if _has_leader_per_node(plan) else 'NIC'}",
        *_first_lines(reason_lines, "reasons"),
        f"matrix   {len(plan.matrix)} x {plan.num_columns}{', rings of rings' if plan.nests_rings else ''}",
        *_first_lines(
            [f"  row {index}:  {join_names(map(name_rank, row))}" for index, row in enumerate(plan.matrix)], "rows"
        ),
        *_first_lines(
            [f"  column {index}:  {join_names(map(name_rank, column))}" for index, column in enumerate(columns)],
            "columns",
        ),
    ]


def join_names(names: Iterable[str]) -> str:
    """Join the first names with commas, and count the rest."""
    names = list(names)
    more = f" ... and {len(names) - MAX_NAMED_RANKS} more" if len(names) > MAX_NAMED_RANKS else ""
    return ", ".join(names[:MAX_NAMED_RANKS]) + more


def _has_leader_per_node(plan: Plan) -> bool:
    return len({plan.nodes[rank] for rank in plan.leaders}) == len(plan.leaders)


def _first_lines(each: Sequence[str], what: str) -> list[str]:
    more = [f"  ... and {len(each) - _MAX_LEADER_LINES} more {what}"] if len(each) > _MAX_LEADER_LINES else []
    return [*each[:_MAX_LEADER_LINES], *more]


SIZE_OPTION = click.option(
    "--bytes",
    "size",
    metavar="SIZE",
    default="25MB",
    show_default=True,
    help="Size of the message; of all blocks together.",
)
WIRE_OPTION = click.option(
    "--wire",
    type=click.Choice(WIRES),
    default=EXACT,
    show_default=True,
    help="Format of what passes the links that bind, as in run: of an allreduce, or between stages.",
)
RATES_OPTION = click.option(
    "--rates", "rates_path", metavar="FILE", help="Rates of links as measured: findings of probing, or bench --out."
)


def collective_option(help_text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the option `--collective`, as `kind`."""
    kinds = click.Choice(PLANNED_KINDS)
    return click.option("--collective", "kind", type=kinds, default="allreduce", show_default=True, help=help_text)


@click.command
@click.argument("cluster_path", metavar="[CLUSTER]", required=False)
@collective_option("The collective; a broadcast starts at rank 0.")
@SIZE_OPTION
@WIRE_OPTION
@click.option(
    "--simulate",
    "num_simulated",
    type=click.IntRange(0, 7),
    metavar="N",
    help="Simulate the whole message by the N fastest, and choose by that; 0: choose by formula.",
)
@RATES_OPTION
@click.option("--leader-per-nic", is_flag=True, help="A leader for each NIC of a node, not one for all, as in run.")
@click.option("--picture", metavar="FILE", help="Draw machines, links, leaders and their matrix here, as PNG or SVG.")
@click.option("--pipeline", "pipeline_path", metavar="FILE", help="Plan a pipeline's stages, not a collective.")
@click.option("--memory", metavar="SIZE,..", help="With --pipeline: of each device, or one for all.")
@click.option("--run", "run_dir", metavar="RUN_DIR", help="Instead of planning: predicted beside measured of a run.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(  # noqa: PLR0913, PLR0917 - one parameter per option
    cluster_path: str | None,
    kind: CollectiveKind,
    size: str,
    wire: str,
    num_simulated: int | None,
    rates_path: str | None,
    leader_per_nic: bool,
    picture: str | None,
    pipeline_path: str | None,
    memory: str | None,
    run_dir: str | None,
    as_json: bool,
) -> int:
    """Print the least time of a collective on all devices of CLUSTER, and the schedule that is predicted fastest.

    The bound follows from the rates in the cluster file, or of --rates, and holds for every schedule. Times are
    predicted by formula, not measured; among several nodes, up to about 16 ranks, a few segments by each schedule in
    question are also run on virtual time, with assumed costs of processors and queues, and the fastest there is chosen.
    With --run it prints predicted and measured times of a run's collectives.

    With --pipeline it prints the stages of a pipeline instead: slow devices may form a stage together and share the
    samples of each microbatch.
    """
    pipeline_stages.refuse_unfit_options(pipeline_path, cluster_path, ("memory",), shared=("wire",))
    if pipeline_path is not None:
        return pipeline_stages.print_plan(str(cluster_path), pipeline_path, memory, wire, as_json=as_json)
    _check_arguments(cluster_path, run_dir, picture, rates_path)
    check_encodable(wire, kind)
    if run_dir is not None:
        return print_measured(run_dir, as_json=as_json)
    num_bytes = units.parse_bytes(size)
    picture_path = pipeline_stages.check_picture_path(picture)
    cluster = topology.load(str(cluster_path))
    ranks = [node.name for node in cluster.nodes for _ in node.devices]
    rates = network.load_measured_rates(rates_path, cluster) if rates_path else {}
    progress = terminal_progress()
    plan = planning.plan_group(
        cluster, ranks, rates=rates, leader_per_nic=leader_per_nic, kinds=[kind], on_progress=progress.print_if_due
    )
    message = _Message(kind, num_bytes, plan.choose(num_bytes, kind=kind, wire=wire).wire)
    simulated = _simulate_schedules(plan, cluster, message, num_simulated, rates, progress)
    if picture_path is not None:
        from ringweave.plots import plan_plot

        plan_plot.draw_plan(cluster, plan, num_bytes, picture_path, rates, simulated, kind)
    if as_json:
        echo(json.dumps(_plan_document(cluster, plan, message, simulated) | {"measured_rates": rates}))
    else:
        lines = [
            *measured_rates_line(rates, cluster, rates_path),
            "",
            *_plan_lines(cluster, plan, message),
            *_wire_lines(cluster, plan, message, wire, rates),
            "",
        ]
        echo("\n".join([cluster.describe(), *lines, *_choice_table(plan, message, simulated)]))
    return 0


class _Message(NamedTuple):
    """A collective, its size, and the format of what passes the links that bind."""

    kind: CollectiveKind
    num_bytes: int
    wire: str


def check_encodable(wire: str, kind: CollectiveKind) -> None:
    """Raise unless the collective may travel so.

    Raises:
        UsageError: A format other than exact, of another collective than an allreduce.
    """
    if wire != EXACT and kind != "allreduce":
        do = "Leave --wire out: other collectives travel exactly"
        raise UsageError(f"--wire of {kind}", got=wire, expected=EXACT, do=do)


def _bytes_on_link(cluster: Cluster, plan: Plan, message: _Message) -> dict[str, float]:
    """Return the bytes on each link by formula, of the schedule that is predicted fastest."""
    kind, num_bytes, wire = message
    name = plan.choose(num_bytes, kind=kind, wire=wire).schedule
    return cost.bytes_on_links(plan.generate(name, kind, wire=wire), cluster, plan.nodes, num_bytes)


def _wire_lines(cluster: Cluster, plan: Plan, message: _Message, asked: str, rates: Mapping[str, float]) -> list[str]:
    """Return the effect of a format other than exact: zones, time, and bytes on the most loaded links."""
    if asked == EXACT:
        return []
    exact = message._replace(wire=EXACT)
    now, before = (plan.choose(each.num_bytes, wire=each.wire) for each in (message, exact))
    exact_text = f"exact {format_ms(before.predicted_s)} by {before.schedule} (predicted)"
    if message.wire == EXACT:
        why = "a format would gain less than 10 %" if plan.wires else "no links between nodes, or too many ranks"
        return [f"wire     {exact_text}: {why}"]
    num_zones = len(set(next(each.zones for each in plan.wires if each.format == message.wire)))
    what = f"{message.wire} between {num_zones} zones of ranks"
    carried, carried_before = (_bytes_on_link(cluster, plan, each) for each in (message, exact))
    speeds = {**{link.name: link.bandwidth_bytes_per_s for link in cluster.links()}, **rates}
    loaded = sorted(carried, key=lambda link: -carried[link] / speeds[link])
    links = [
        f"  {link} carries {carried[link] / 1e6:.4g} MB, exact {carried_before[link] / 1e6:.4g} MB (predicted)"
        for link in loaded
    ]
    coding_s = plan.demand(now.schedule, wire=message.wire).coding_s_per_byte * message.num_bytes
    return [
        f"wire     {what}: {format_ms(now.predicted_s)} by {now.schedule}, {exact_text}",
        f"         coding takes {format_ms(coding_s)} of a rank's processor (predicted)",
        *_first_lines(links, "links"),
    ]


def _simulate_schedules(
    plan: Plan,
    cluster: Cluster,
    message: _Message,
    count: int | None,
    rates: Mapping[str, float],
    progress: ProgressPrinter,
) -> dict[str, float]:
    """Return schedule -> simulated seconds of the best candidates; empty where simulation would take too long."""
    if count == 0 or (count is None and len(set(plan.nodes)) == 1):
        return {}
    from ringweave.planning import simulated  # brings the simulator
    from ringweave.sim import HostModel

    def tell(schedule: str, done: int, total: int) -> None:
        progress.print_fraction(f"simulating {schedule}", done, total)

    machine = HostModel.assumed()  # these costs agree with measurements (docs/explanation/cost-and-simulation.md)
    if count is None:
        return simulated.estimate_candidates(
            plan, cluster, message.num_bytes, kind=message.kind, wire=message.wire, rates=rates, machine=machine
        )
    return simulated.simulate_best(
        plan,
        cluster,
        message.num_bytes,
        count=count,
        kind=message.kind,
        wire=message.wire,
        rates=rates,
        machine=machine,
        on_progress=tell,
    )


def _chosen_schedule(plan: Plan, message: _Message, simulated: Mapping[str, float]) -> str:
    """Return the schedule chosen by simulation, or by formula where nothing was simulated."""
    kind, num_bytes, wire = message
    return plan.fastest(simulated) if simulated else plan.choose(num_bytes, kind=kind, wire=wire).schedule


def _check_arguments(cluster_path: str | None, run_dir: str | None, picture: str | None, rates: str | None) -> None:
    if (cluster_path is None) == (run_dir is None):
        got = "neither" if run_dir is None else "both"
        expected = "either CLUSTER or --run RUN_DIR"
        raise UsageError("what to plan", got=got, expected=expected, do="Give one of the two")
    if picture is not None and run_dir is not None:
        do = "Draw the plan of its cluster file: ringweave plan RUN_DIR/cluster.yaml --picture FILE"
        raise UsageError("--picture", got=picture, expected="a CLUSTER to draw", do=do)
    if rates is not None and run_dir is not None:
        do = "Leave it out: what the run was planned with is in its events"
        raise UsageError("--rates", got=rates, expected="a CLUSTER to plan for", do=do)


def _plan_document(
    cluster: Cluster, plan: Plan, message: _Message, simulated: Mapping[str, float]
) -> dict[str, object]:
    kind, num_bytes, wire = message
    planned, bound_s = plan.collective(kind), plan.bound_s(num_bytes, kind)
    assert planned is not None
    return {
        "collective": kind,
        "bytes": num_bytes,
        "wire": wire,
        "bytes_on_link": _bytes_on_link(cluster, plan, message),
        "bound_s": bound_s,
        "binding": planned.binding,
        "chosen": _chosen_schedule(plan, message, simulated),
        "choices": [
            {
                "schedule": choice.schedule,
                "predicted_s": choice.predicted_s,
                "simulated_s": simulated.get(choice.schedule),
                "fraction_of_bound": _bound_fraction(bound_s, choice),
                "num_segments": choice.num_segments,
                "lag": choice.lag,
                "window": choice.window,
                "most_loaded": plan.demand(choice.schedule, kind, wire).busiest,
            }
            for choice in plan.choices(num_bytes, kind, wire)
        ],
        "left_out": dict(planned.left_out),
        "leaders": list(plan.leaders),
        "leader_reasons": leader_reasons(cluster, plan),
        "matrix": [list(row) for row in plan.matrix],
        "nests_rings": plan.nests_rings,
        "ring": list(plan.ring_order),
        "root": plan.root,
        "nodes": list(plan.nodes),
        "rdma": _rdma_nics(cluster, plan),
    }


def _bound_fraction(bound_s: float, choice: ScheduleChoice) -> float | None:
    """Return bound / predicted time; None if nothing takes time."""
    return bound_s / choice.predicted_s if choice.predicted_s else None


def _plan_lines(cluster: Cluster, plan: Plan, message: _Message) -> list[str]:
    """Return the bound and its reason, the ring, the leaders of an allreduce, and the ways of tensors."""
    kind, num_bytes, wire = message
    planned = plan.collective(kind)
    assert planned is not None

    def who(rank: int) -> str:
        return plan.nodes[rank] if cluster.node(plan.nodes[rank]).num_devices == 1 else f"{plan.nodes[rank]}/{rank}"

    what = f"{units.format_bytes(num_bytes)} among {len(plan.nodes)} ranks" + (", all exact" if wire != EXACT else "")
    return [
        f"bound    {format_ms(plan.bound_s(num_bytes, kind))} for {_of_kind(kind)}{what}",
        f"         {planned.binding}",
        f"ring     {join_names(map(who, plan.ring_order))}",
        *(leader_lines(cluster, plan, who) if kind == "allreduce" else ()),
        f"RDMA     {_rdma_line(cluster, plan)}",
        *_cuda_lines(cluster, plan),
    ]


def _of_kind(kind: CollectiveKind) -> str:
    return "" if kind == "allreduce" else f"the {kind} of "


def _rdma_nics(cluster: Cluster, plan: Plan) -> list[str]:
    """Return the plan's NICs with RDMA, `a0/ib0`."""
    nodes = [cluster.node(name) for name in dict.fromkeys(plan.nodes)]
    return [f"{node.name}/{nic.name}" for node in nodes for nic in node.nics if nic.rdma]


def _rdma_line(cluster: Cluster, plan: Plan) -> str:
    """Return a line about RDMA between nodes, and the tensors that use it."""
    names = _rdma_nics(cluster, plan)
    if names:
        return f"on {join_names(names)}: what NCCL runs takes it (RINGWEAVE_DEVICE_PATH); all else goes by TCP"
    return "absent (no NIC has rdma: true): between nodes all goes by TCP"


def _cuda_lines(cluster: Cluster, plan: Plan) -> list[str]:
    """Return a line about tensors of accelerators, if nodes of the plan have some."""
    nodes = [cluster.node(name) for name in dict.fromkeys(plan.nodes)]
    if not any(device.kind == "cuda" for node in nodes for device in node.devices):
        return []
    if len(nodes) > 1:
        return ["CUDA     tensors of GPUs take what follows too, through host memory (RINGWEAVE_DEVICE_PATH)"]
    return ["CUDA     tensors of GPUs take NCCL, unless run --schedule forces one of these; CPU tensors what follows"]


def _choice_table(plan: Plan, message: _Message, simulated: Mapping[str, float]) -> list[str]:
    chosen, (kind, num_bytes, wire) = _chosen_schedule(plan, message, simulated), message
    planned = plan.collective(kind)
    assert planned is not None
    second = ["simulated"] if simulated else []
    rows = [("schedule", "predicted", *second, "bound/predicted", "segments", "most loaded")]
    for choice in plan.choices(num_bytes, kind, wire):
        fraction = _bound_fraction(plan.bound_s(num_bytes, kind), choice)
        demand = plan.demand(choice.schedule, kind, wire)
        rows.append(
            (
                choice.schedule,
                format_ms(choice.predicted_s),
                *([format_ms(simulated.get(choice.schedule))] if simulated else []),
                f"{fraction:.2f}" if fraction else "-",
                f"{choice.num_segments}" + (", overlapping" if choice.lag else ""),
                f"{demand.busiest}, {format_ms(demand.busiest_s_per_byte * num_bytes)}",
            )
        )
    lines = [("* " if row[0] == chosen else "  ") + line for row, line in zip(rows, align_columns(rows), strict=True)]
    why = _choice_reason(plan, message, plan.choose(num_bytes, chosen, kind, wire), simulated)
    return [*lines, *(f"  {name}: left out, {reason}" for name, reason in planned.left_out), "", why]


def _choice_reason(plan: Plan, message: _Message, chosen: ScheduleChoice, simulated: Mapping[str, float]) -> str:
    """Return the reason of the choice, in a sentence or two."""
    kind, num_bytes, wire = message
    demand = plan.demand(chosen.schedule, kind, wire)
    if demand.busiest_s_per_byte * num_bytes < chosen.predicted_s / 2:
        reason = (
            f"waits for {demand.num_latencies} messages one after the other and handles {demand.num_messages} per rank"
        )
    else:
        reason = f"needs its most loaded link for {format_ms(demand.busiest_s_per_byte * num_bytes)} only"
    by_formula = plan.choose(num_bytes, kind=kind, wire=wire).schedule
    if not simulated:
        others = {choice.schedule: choice.predicted_s for choice in plan.choices(num_bytes, kind, wire)}
        return f"* {chosen.schedule} {reason}; {_runner_up_text(chosen.schedule, others, 'predicted')}."
    differs = f" By formula it would be {by_formula}." if by_formula != chosen.schedule else ""
    return f"* {chosen.schedule} {reason}; {_runner_up_text(chosen.schedule, simulated, 'simulated')}.{differs}"


def _runner_up_text(chosen: str, seconds: Mapping[str, float], how: str) -> str:
    """Return a text about the fastest schedule that is slower than the chosen one."""
    if len(seconds) == 1:
        return f"nothing else was {how}"
    slower = {name: each_s for name, each_s in seconds.items() if each_s > seconds[chosen] * 1.02}
    if not slower:
        return f"the others are {how} to be as fast"
    rival = min(slower, key=slower.__getitem__)
    return f"next is {rival}, {how} to take {slower[rival] / seconds[chosen]:.2f} times as long"


def print_measured(run_dir: str, *, as_json: bool) -> int:
    """Print predicted and measured times of a run directory, also of a run on hosts, and the links that were measured.

    Raises:
        UsageError: It is no run directory, or nothing was measured in it.
    """
    root = Path(run_dir).absolute()
    first = events.find_event_files(root)[1][0]
    if not rotation.exists(first):
        do = "Name the directory of a run, as `ringweave run --run-dir` does"
        raise UsageError("--run", got=run_dir, expected=f"a directory with {first.name}", do=do)
    found = events.read_run(root)
    cluster = _load_cluster(RunDir(root=first.parent))
    rows, networks = compare_measured(found, cluster), list_probed_networks(found)
    if not rows and not networks:
        do = "Let it run longer, or train with more than the small messages that the native backend takes"
        expected = "at least one schedule_measured event"
        raise UsageError("measured collectives", got="none", expected=expected, do=do, where=str(first))
    lines = [*_network_lines(networks, cluster), *(_measured_table(rows) if rows else ())]
    echo(json.dumps({"run": run_dir, "measured": rows, "networks": networks}) if as_json else "\n".join(lines))
    return 0


def _network_lines(networks: Sequence[Mapping[str, Any]], cluster: Cluster | None) -> list[str]:
    """Return the measured links of each group, the slowest first; `cluster` says which hosts others reach by relays."""
    nodes = cluster.nodes if cluster is not None else ()
    relayed = {node.name for node in nodes if any(nic.name == RELAY_NIC for nic in node.nics)}
    lines = []
    for each in networks:
        rates = sorted(each["rates"].items(), key=lambda link: link[1])
        ways = {name: " by relay" if relayed.intersection(name.split("->")) else "" for name, _ in rates}
        shown = ", ".join(f"{name}{ways[name]} {units.show_rate(rate)}" for name, rate in rates[:MAX_NAMED_RANKS])
        more = f" and {len(rates) - MAX_NAMED_RANKS} faster ones" if len(rates) > MAX_NAMED_RANKS else ""
        lines += [f"links    of group {each['group']}, measured by probing: {shown}{more}", ""]
    return lines


def _load_cluster(directory: RunDir) -> Cluster | None:
    """Return the cluster of a run; None if its file is gone or has changed."""
    try:
        return topology.load(str(directory.cluster_file))
    except (OSError, RingweaveError):
        return None


def _measured_table(rows: list[dict[str, Any]]) -> list[str]:
    titles = (
        "group",
        "plan",
        "collective",
        "schedule",
        "bytes",
        "segments",
        "bound",
        "predicted",
        "measured",
        "measured/predicted",
        "rounds",
    )
    lines = align_columns([titles, *map(_measured_cells, rows)])
    notes = [
        "measured: median on the group's first rank, waiting for late ranks included; predicted: by formula;",
        "plan: its version, one more each time that it was changed; bound: at the rates that this plan was made with,",
        "or of the run's cluster file where nothing was tried; a dash where no link is passed or nobody knows rates",
    ]
    return [*lines, "", *notes]


def _measured_cells(row: dict[str, Any]) -> tuple[str, ...]:
    ratio = row["measured_over_predicted"]
    return (
        row["group"],
        str(row["version"]),
        row["collective"],
        row["schedule"],
        units.format_bytes(row["bytes"]),
        str(row["num_segments"]),
        format_ms(row["bound_s"]),
        format_ms(row["predicted_s"]),
        format_ms(row["measured_s"]),
        "-" if ratio is None else f"{ratio:.2f}",
        str(row["rounds"]),
    )
