"""`ringweave plan`: what a cluster allows at best, and what is chosen for it."""

import json
from collections.abc import Mapping
from pathlib import Path

import click

from ringweave import planning, topology, units
from ringweave.benchmarks.progress import Progress
from ringweave.cli.planning import leading, saying
from ringweave.cost import measured_rates
from ringweave.errors import UsageError, explain
from ringweave.planning import Choice, Plan
from ringweave.topology import Cluster


@click.command
@click.argument("cluster_path", metavar="[CLUSTER]", required=False)
@click.option("--bytes", "size", metavar="SIZE", default="25MB", show_default=True, help="Size of the allreduce.")
@click.option(
    "--simulate",
    "num_simulated",
    type=click.IntRange(0, 7),
    metavar="N",
    help="Simulate the whole message by the N fastest, and choose by that; 0: choose by formula.",
)
@click.option(
    "--rates", "rates_path", metavar="FILE", help="Rates of links as measured: findings of probing, or bench --out."
)
@click.option("--leader-per-nic", is_flag=True, help="A leader for each NIC of a node, not one for all, as in run.")
@click.option("--picture", metavar="FILE", help="Draw machines, links, leaders and their matrix here, as PNG or SVG.")
@click.option("--run", "run_dir", metavar="RUN_DIR", help="Instead of planning: predicted beside measured of a run.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(  # noqa: PLR0913, PLR0917 - one parameter per option
    cluster_path: str | None,
    size: str,
    num_simulated: int | None,
    rates_path: str | None,
    leader_per_nic: bool,
    picture: str | None,
    run_dir: str | None,
    as_json: bool,
) -> int:
    """Say what an allreduce on all devices of CLUSTER takes at least, and which schedule is predicted to take least.

    The bound follows from the rates in the cluster file, or of --rates, and holds for every schedule. Times are
    predicted by formula, not measured; among several nodes, up to about 16 ranks, a few segments by each schedule in
    question are also run on virtual time, with assumed costs of processors and queues, and the fastest there is chosen.
    With --run it says what the collectives of a run were predicted to take, and took.
    """
    _check_asked(cluster_path, run_dir, picture, rates_path)
    if run_dir is not None:
        from ringweave.cli.planning import plan_run

        return plan_run.show(run_dir, as_json=as_json)
    num_bytes = units.parse_bytes(size)
    picture_path = _picture_path(picture)
    cluster = topology.load(str(cluster_path))
    ranks = [node.name for node in cluster.nodes for _ in node.devices]
    rates = measured_rates.load(rates_path, cluster) if rates_path else {}
    progress = saying.progress()
    plan = planning.plan_group(cluster, ranks, rates=rates, leader_per_nic=leader_per_nic, tell=progress.now_and_then)
    simulated = _simulate(plan, cluster, num_bytes, num_simulated, rates, progress)
    if picture_path is not None:
        from ringweave.pictures import plans

        plans.draw_plan(cluster, plan, num_bytes, picture_path, rates, simulated)
    if as_json:
        click.echo(json.dumps(_document(cluster, plan, num_bytes, simulated) | {"measured_rates": rates}))
    else:
        lines = [*saying.of_rates(rates, cluster, rates_path), "", *_lines(cluster, plan, num_bytes), ""]
        click.echo("\n".join([cluster.describe(), *lines, *_table(plan, num_bytes, simulated)]))
    return 0


def _simulate(
    plan: Plan, cluster: Cluster, num_bytes: int, count: int | None, rates: Mapping[str, float], progress: Progress
) -> dict[str, float]:
    """Schedule -> simulated seconds of the best, by default from a few segments; nothing where that is too much."""
    if count == 0 or (count is None and len(set(plan.nodes)) == 1):
        return {}
    from ringweave.planning import simulating  # brings the simulator
    from ringweave.sim import Machine

    def tell(schedule: str, done: int, total: int) -> None:
        progress.share(f"simulating {schedule}", done, total)

    machine = Machine.assumed()  # what agrees with measurements (docs/simulation.md)
    if count is None:
        return simulating.estimate(plan, cluster, num_bytes, rates=rates, machine=machine)
    return simulating.simulate_best(plan, cluster, num_bytes, count=count, rates=rates, machine=machine, tell=tell)


def _chosen(plan: Plan, num_bytes: int, simulated: Mapping[str, float]) -> str:
    """What the simulations say, or the formulas where nothing was simulated."""
    return plan.fastest(simulated) if simulated else plan.choose(num_bytes).schedule


def _check_asked(cluster_path: str | None, run_dir: str | None, picture: str | None, rates: str | None) -> None:
    if (cluster_path is None) == (run_dir is None):
        got = "neither" if run_dir is None else "both"
        expected = "either CLUSTER or --run RUN_DIR"
        raise UsageError(explain("what to plan", got=got, expected=expected, do="Give one of the two"))
    if picture is not None and run_dir is not None:
        do = "Draw the plan of its cluster file: ringweave plan RUN_DIR/cluster.yaml --picture FILE"
        raise UsageError(explain("--picture", got=picture, expected="a CLUSTER to draw", do=do))
    if rates is not None and run_dir is not None:
        do = "Leave it out: what the run was planned with is in its events"
        raise UsageError(explain("--rates", got=rates, expected="a CLUSTER to plan for", do=do))


def _picture_path(picture: str | None) -> Path | None:
    if picture is None:
        return None
    from ringweave.pictures import plotting

    return plotting.check_path(picture)


def _document(cluster: Cluster, plan: Plan, num_bytes: int, simulated: Mapping[str, float]) -> dict[str, object]:
    bound_s = plan.bound_s(num_bytes)
    return {
        "bytes": num_bytes,
        "bound_s": bound_s,
        "binding": plan.binding,
        "chosen": _chosen(plan, num_bytes, simulated),
        "choices": [
            {
                "schedule": choice.schedule,
                "predicted_s": choice.predicted_s,
                "simulated_s": simulated.get(choice.schedule),
                "fraction_of_bound": _fraction(bound_s, choice),
                "num_segments": choice.num_segments,
                "lag": choice.lag,
                "window": choice.window,
                "most_loaded": plan.demand(choice.schedule).busiest,
            }
            for choice in plan.choices(num_bytes)
        ],
        "left_out": dict(plan.left_out),
        "leaders": list(plan.leaders),
        "leader_reasons": leading.reasons(cluster, plan),
        "matrix": [list(row) for row in plan.matrix],
        "ring": list(plan.ring_order),
        "root": plan.root,
        "nodes": list(plan.nodes),
        "rdma": _rdma(cluster, plan),
    }


def _fraction(bound_s: float, choice: Choice) -> float | None:
    """How much of the time is the bound; None where nothing takes time."""
    return bound_s / choice.predicted_s if choice.predicted_s else None


def _lines(cluster: Cluster, plan: Plan, num_bytes: int) -> list[str]:
    def who(rank: int) -> str:
        return plan.nodes[rank] if cluster.node(plan.nodes[rank]).num_devices == 1 else f"{plan.nodes[rank]}/{rank}"

    return [
        f"bound    {_time(plan.bound_s(num_bytes))} for {units.format_bytes(num_bytes)} among {len(plan.nodes)} ranks",
        f"         {plan.binding}",
        f"ring     {leading.listed(map(who, plan.ring_order))}",
        *leading.lines(cluster, plan, who),
        f"RDMA     {_rdma_text(cluster, plan)}",
        *_cuda_lines(cluster, plan),
    ]


def _rdma(cluster: Cluster, plan: Plan) -> list[str]:
    """`a0/ib0`: the NICs of the plan's nodes that can do it."""
    nodes = [cluster.node(name) for name in dict.fromkeys(plan.nodes)]
    return [f"{node.name}/{nic.name}" for node in nodes for nic in node.nics if nic.rdma]


def _rdma_text(cluster: Cluster, plan: Plan) -> str:
    """Whether there is RDMA between nodes, and who takes it."""
    names = _rdma(cluster, plan)
    if names:
        return f"on {leading.listed(names)}: CUDA tensors take it, by NCCL; CPU tensors go by TCP"
    return "absent (no NIC has rdma: true): between nodes all goes by TCP"


def _cuda_lines(cluster: Cluster, plan: Plan) -> list[str]:
    """What becomes of tensors of accelerators, where nodes of the plan have some."""
    nodes = [cluster.node(name) for name in dict.fromkeys(plan.nodes)]
    if not any(device.kind == "cuda" for node in nodes for device in node.devices):
        return []
    return ["CUDA     tensors of GPUs take NCCL, unless run --schedule forces one of these; CPU tensors what follows"]


def _table(plan: Plan, num_bytes: int, simulated: Mapping[str, float]) -> list[str]:
    chosen = _chosen(plan, num_bytes, simulated)
    second = ["simulated"] if simulated else []
    rows = [("schedule", "predicted", *second, "bound/predicted", "segments", "most loaded")]
    for choice in plan.choices(num_bytes):
        fraction = _fraction(plan.bound_s(num_bytes), choice)
        demand = plan.demand(choice.schedule)
        rows.append(
            (
                choice.schedule,
                _time(choice.predicted_s),
                *([_simulated(simulated.get(choice.schedule))] if simulated else []),
                f"{fraction:.2f}" if fraction else "-",
                f"{choice.num_segments}" + (", overlapping" if choice.lag else ""),
                f"{demand.busiest}, {_time(demand.busiest_s_per_byte * num_bytes)}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    lines = [
        ("* " if row[0] == chosen else "  ")
        + "  ".join([*(text.ljust(width) for text, width in zip(row, widths, strict=False)), row[-1]])
        for row in rows
    ]
    why = _why(plan, num_bytes, plan.choose(num_bytes, chosen), simulated)
    return [*lines, *(f"  {name}: left out, {reason}" for name, reason in plan.left_out), "", why]


def _why(plan: Plan, num_bytes: int, chosen: Choice, simulated: Mapping[str, float]) -> str:
    """Why the winner wins, in a sentence or two."""
    demand = plan.demand(chosen.schedule)
    if demand.busiest_s_per_byte * num_bytes < chosen.predicted_s / 2:
        reason = (
            f"waits for {demand.num_latencies} messages one after the other and handles {demand.num_messages} per rank"
        )
    else:
        reason = f"needs its most loaded link for {_time(demand.busiest_s_per_byte * num_bytes)} only"
    by_formula = plan.choose(num_bytes).schedule
    if not simulated:
        others = {choice.schedule: choice.predicted_s for choice in plan.choices(num_bytes)}
        return f"* {chosen.schedule} {reason}; {_rival(chosen.schedule, others, 'predicted')}."
    differs = f" By formula it would be {by_formula}." if by_formula != chosen.schedule else ""
    return f"* {chosen.schedule} {reason}; {_rival(chosen.schedule, simulated, 'simulated')}.{differs}"


def _rival(chosen: str, seconds: Mapping[str, float], how: str) -> str:
    """The next one that is no equal of the one that is chosen."""
    if len(seconds) == 1:
        return f"nothing else was {how}"
    slower = {name: each_s for name, each_s in seconds.items() if each_s > seconds[chosen] * 1.02}
    if not slower:
        return f"the others are {how} to be as fast"
    rival = min(slower, key=slower.__getitem__)
    return f"next is {rival}, {how} to take {slower[rival] / seconds[chosen]:.2f} times as long"


def _simulated(seconds: float | None) -> str:
    return "-" if seconds is None else _time(seconds)


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"
