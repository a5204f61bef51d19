"""`ringweave plan`: what a cluster allows at best, and what is chosen for it."""

import json

import click

from ringweave import planning, topology, units
from ringweave.planning import Choice, Plan
from ringweave.topology import Cluster

_MAX_NAMED = 16
_MAX_ROWS = 8


@click.command
@click.argument("cluster_path", metavar="CLUSTER")
@click.option("--bytes", "size", metavar="SIZE", default="25MB", show_default=True, help="Size of the allreduce.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(cluster_path: str, size: str, as_json: bool) -> int:
    """Say what an allreduce on all devices of CLUSTER takes at least, and which schedule is predicted to take least.

    The bound follows from the rates in the cluster file and holds for every schedule. Times are predicted by formula,
    not simulated or measured.
    """
    num_bytes = units.parse_bytes(size)
    cluster = topology.load(cluster_path)
    plan = planning.plan_group(cluster, [node.name for node in cluster.nodes for _ in node.devices])
    choices, chosen = plan.choices(num_bytes), plan.choose(num_bytes)
    if as_json:
        click.echo(json.dumps(_document(plan, num_bytes, choices, chosen)))
    else:
        click.echo("\n".join([cluster.describe(), "", *_lines(cluster, plan, num_bytes), "", *_table(plan, num_bytes)]))
    return 0


def _document(plan: Plan, num_bytes: int, choices: list[Choice], chosen: Choice) -> dict[str, object]:
    bound_s = plan.bound_s(num_bytes)
    return {
        "bytes": num_bytes,
        "bound_s": bound_s,
        "binding": plan.binding,
        "chosen": chosen.schedule,
        "choices": [
            {
                "schedule": choice.schedule,
                "predicted_s": choice.predicted_s,
                "fraction_of_bound": _fraction(bound_s, choice),
                "num_segments": choice.num_segments,
                "lag": choice.lag,
                "window": choice.window,
                "most_loaded": plan.demand(choice.schedule).busiest,
            }
            for choice in choices
        ],
        "left_out": dict(plan.left_out),
        "leaders": list(plan.leaders),
        "matrix": [list(row) for row in plan.matrix],
        "ring": list(plan.ring_order),
        "root": plan.root,
        "nodes": list(plan.nodes),
    }


def _fraction(bound_s: float, choice: Choice) -> float | None:
    """How much of the time is the bound; None where nothing takes time."""
    return bound_s / choice.predicted_s if choice.predicted_s else None


def _lines(cluster: Cluster, plan: Plan, num_bytes: int) -> list[str]:
    def who(rank: int) -> str:
        return plan.nodes[rank] if cluster.node(plan.nodes[rank]).num_devices == 1 else f"{plan.nodes[rank]}/{rank}"

    rows = [f"  row {index}:  {_listed(map(who, row))}" for index, row in enumerate(plan.matrix[:_MAX_ROWS])]
    more = [f"  ... and {len(plan.matrix) - _MAX_ROWS} more rows"] if len(plan.matrix) > _MAX_ROWS else []
    return [
        f"bound    {_time(plan.bound_s(num_bytes))} for {units.format_bytes(num_bytes)} among {len(plan.nodes)} ranks",
        f"         {plan.binding}",
        f"ring     {_listed(map(who, plan.ring_order))}",
        f"leaders  {_listed(map(who, plan.leaders))}; in a matrix of {len(plan.matrix)} x {plan.num_columns}:",
        *rows,
        *more,
    ]


def _table(plan: Plan, num_bytes: int) -> list[str]:
    chosen = plan.choose(num_bytes).schedule
    rows = [("schedule", "predicted", "bound/predicted", "segments", "most loaded")]
    for choice in plan.choices(num_bytes):
        fraction = _fraction(plan.bound_s(num_bytes), choice)
        demand = plan.demand(choice.schedule)
        rows.append(
            (
                choice.schedule,
                _time(choice.predicted_s),
                f"{fraction:.2f}" if fraction else "-",
                f"{choice.num_segments}" + (", overlapping" if choice.lag else ""),
                f"{demand.busiest}, {_time(demand.busiest_s_per_byte * num_bytes)}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        ("* " if row[0] == chosen else "  ")
        + "  ".join([*(text.ljust(width) for text, width in zip(row, widths, strict=False)), row[-1]])
        for row in rows
    ]
    return [*lines, *(f"  {name}: left out, {reason}" for name, reason in plan.left_out), "", _why(plan, num_bytes)]


def _why(plan: Plan, num_bytes: int) -> str:
    """Why the winner wins, in a sentence."""
    choices = plan.choices(num_bytes)
    chosen = plan.choose(num_bytes)
    demand = plan.demand(chosen.schedule)
    if demand.busiest_s_per_byte * num_bytes < chosen.predicted_s / 2:
        reason = (
            f"waits for {demand.num_latencies} messages one after the other and handles {demand.num_messages} per rank"
        )
    else:
        reason = f"needs its most loaded link for {_time(demand.busiest_s_per_byte * num_bytes)} only"
    others = [choice for choice in choices if choice.schedule != chosen.schedule]
    rival = next((choice for choice in others if choice.predicted_s > chosen.predicted_s * 1.02), None)
    if rival is None:
        return f"* {chosen.schedule} {reason}; the others are predicted to be as fast."
    times = rival.predicted_s / chosen.predicted_s
    return f"* {chosen.schedule} {reason}; next is {rival.schedule}, predicted to take {times:.2f} times as long."


def _listed(names) -> str:
    names = list(names)
    more = f" ... and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"
