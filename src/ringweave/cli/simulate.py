"""`ringweave simulate`: simulates a collective on a cluster in virtual time."""

import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import click

from ringweave import cost, planning, schedules, sim, topology, units
from ringweave.cli import pipeline_stages
from ringweave.cli.echo import echo, format_ms, terminal_progress
from ringweave.cli.plan import (
    RATES_OPTION,
    SIZE_OPTION,
    WIRE_OPTION,
    check_encodable,
    collective_option,
    measured_rates_line,
)
from ringweave.cost import Bound, network
from ringweave.environment import EXACT
from ringweave.errors import UsageError
from ringweave.files import file_io
from ringweave.planning import Plan, ScheduleChoice
from ringweave.schedules import CollectiveKind
from ringweave.sim import Fault, HostModel, NodeSlowdown, SimulationResult, scenario
from ringweave.sim.scenario import FAILURE_FORMS, STRAGGLER_FORMS, parse_failure, parse_straggler
from ringweave.topology import Cluster

_MAX_LISTED = 8
_PROCESSOR_TEXT = {"none": "the network alone", "assumed": "with assumed costs of processors and memory"}


@click.command
@click.argument("cluster_path", metavar="CLUSTER")
@click.option(
    "--schedule", metavar="NAME", help="Simulate this schedule; by default the one that is predicted to be fastest."
)
@collective_option("The collective.")
@WIRE_OPTION
@click.option("--root", type=click.IntRange(min=0), metavar="RANK", help="Rank that broadcasts; by default rank 0.")
@SIZE_OPTION
@click.option(
    "--segments", type=click.IntRange(1, 4096), metavar="N", help="Cut the message so; by default as planned."
)
@click.option(
    "--processors",
    metavar="none|assumed|FILE",
    help="What messages and additions cost the ranks: nothing, what is assumed, or what a file says was measured."
    " Default: none, or assumed if a node straggles.",
)
@RATES_OPTION
@click.option("--straggle", "straggles", multiple=True, metavar="WHAT", help=f"{STRAGGLER_FORMS}.")
@click.option("--fail", "failures", multiple=True, metavar="WHAT", help=f"{FAILURE_FORMS}.")
@click.option("--pipeline", "pipeline_path", metavar="FILE", help="Simulate a pipeline's step, not a collective.")
@click.option("--memory", metavar="SIZE,..", help="With --pipeline: of each device, or one for all.")
@click.option("--devices", "devices_text", metavar="STAGES", help="With --pipeline: these, such as '0:4+1:4 2:8'.")
@click.option("--splits", "splits_text", metavar="s1,..", help="With --devices: last block of all stages but the last.")
@click.option("--trace", "trace_path", metavar="FILE", help="Write a trace for ui.perfetto.dev here.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
# Long: a third is its parameters, one per option; the rest is one sequence, each step of which is made elsewhere.
def command(  # noqa: PLR0913, PLR0917 - one parameter per option
    cluster_path: str,
    schedule: str | None,
    kind: CollectiveKind,
    wire: str,
    root: int | None,
    size: str,
    segments: int | None,
    processors: str | None,
    rates_path: str | None,
    straggles: tuple[str, ...],
    failures: tuple[str, ...],
    pipeline_path: str | None,
    memory: str | None,
    devices_text: str | None,
    splits_text: str | None,
    trace_path: str | None,
    as_json: bool,
) -> int:
    """Simulate a collective on all devices of CLUSTER, event by event: streams that share the links of the file.

    Prints the time of the slowest rank, the bytes on each link and, after a failure, the ranks that never finish and
    the time of detection. By default the network alone takes time: latency and, without --rates, rates of the
    cluster file.

    With --pipeline it simulates a train step of the planned stages, or of --devices; nodes may straggle.
    """
    own = ("memory", "devices_text", "splits_text")
    pipeline_stages.refuse_unfit_options(pipeline_path, cluster_path, own, shared=("straggles", "trace_path", "wire"))
    file_io.check_writable("--trace", trace_path)
    faults = [*map(parse_straggler, straggles), *map(parse_failure, failures)]
    if pipeline_path is not None:
        given = pipeline_stages.SimulationOptions(memory, devices_text, splits_text, faults, trace_path, wire, as_json)
        return pipeline_stages.print_simulation(cluster_path, pipeline_path, given)
    processors = _resolve_processors(processors, faults)
    machine, num_bytes = _resolve_machine(processors), units.parse_bytes(size)
    cluster, progress = topology.load(cluster_path), terminal_progress()
    rates = network.load_measured_rates(rates_path, cluster) if rates_path else {}
    ranks = [node.name for node in cluster.nodes for _ in node.devices]
    _check_options(root, kind, len(ranks), wire)
    plan = planning.plan_group(cluster, ranks, rates=rates, kinds=[kind], on_progress=progress.print_if_due)
    choice = _resolve_choice(plan, num_bytes, kind, schedule, segments, wire)
    bound = cost.bound(cluster, num_bytes, nodes=ranks, rates=rates, kind=kind, root=root or 0)
    found = sim.simulate(
        plan.generate(choice.schedule, kind, root, wire=choice.wire),
        cluster,
        plan.nodes,
        num_bytes,
        pipelining=choice.pipelining,
        rates=rates,
        machine=machine,
        faults=faults,
        keeps_trace=trace_path is not None,
        progress=functools.partial(progress.print_fraction, f"simulating {choice.schedule}"),
    )
    if trace_path is not None:
        title = f"{kind} of {units.format_bytes(num_bytes)} on {cluster.name} by {choice.schedule}"
        trace = sim.trace_document(found, cluster, plan.nodes, title)
        file_io.write_output("--trace", trace_path, json.dumps(trace) + "\n")
    if as_json:
        given = {"collective": kind, "wire": choice.wire, "processors": processors, "measured_rates": rates}
        echo(json.dumps(_simulation_document(found, bound, choice, num_bytes) | given))
    else:
        work = _PROCESSOR_TEXT.get(processors, f"with costs of processors as {processors} says")
        what = _what_text(choice, kind, num_bytes, len(ranks), wire)
        lines = _simulation_lines(found, cluster, plan, bound, what, work, rates)
        echo("\n".join([*lines, *measured_rates_line(rates, cluster, rates_path)]))
    return 0


def _resolve_processors(given: str | None, faults: Sequence[Fault]) -> str:
    """Return the costs of processors; with a slow node they are needed."""
    slow = [fault.node for fault in faults if isinstance(fault, NodeSlowdown)]
    if given == "none" and slow:
        expected, do = (
            "assumed, or a FILE",
            f"Leave --processors out: work that takes no time is not slower on {slow[0]}",
        )
        raise UsageError("--processors with a slow node", got=given, expected=expected, do=do)
    return given or ("assumed" if slow else "none")


def _resolve_machine(processors: str) -> HostModel:
    if processors == "none":
        return HostModel()
    return HostModel.assumed() if processors == "assumed" else scenario.load_host_costs(processors)


def _check_options(root: int | None, kind: CollectiveKind, num_ranks: int, wire: str) -> None:
    check_encodable(wire, kind)
    if root is not None and kind != "broadcast":
        do = "Leave --root out, or add --collective broadcast"
        raise UsageError("--root", got=root, expected=f"none for {kind}", do=do)
    if root is not None and root >= num_ranks:
        raise UsageError("--root", got=root, expected=f"ranks 0..{num_ranks - 1}", do="Name a rank")


def _resolve_choice(
    plan: Plan, num_bytes: int, kind: CollectiveKind, schedule: str | None, segments: int | None, wire: str
) -> ScheduleChoice:
    names = schedules.schedule_names(kind)
    if schedule is not None and schedules.check_schedule_name(schedule) not in (*names, schedules.NATIVE):
        expected = f"one of {', '.join(names)}"
        raise UsageError(f"--schedule of {kind}", got=schedule, expected=expected, do="Name one of these")
    choice = plan.choose(num_bytes, schedule, kind, wire)
    if segments is None:
        return choice
    return dataclasses.replace(choice, num_segments=segments, lag=max(1, choice.lag), predicted_s=math.inf)


def _what_text(choice: ScheduleChoice, kind: CollectiveKind, num_bytes: int, num_ranks: int, wire: str) -> str:
    what = f"{units.format_bytes(num_bytes)} among {num_ranks} ranks by {choice.schedule}"
    what += "" if wire == EXACT else f" in {choice.wire}"
    cut = f"({choice.num_segments} segment{'s' if choice.num_segments > 1 else ''})"
    return f"{'' if kind == 'allreduce' else f'the {kind} of '}{what} {cut}"


def _simulation_document(
    found: SimulationResult, bound: Bound, choice: ScheduleChoice, num_bytes: int
) -> dict[str, Any]:
    return {
        "bytes": num_bytes,
        "schedule": choice.schedule,
        "num_segments": choice.num_segments,
        "lag": choice.lag,
        "window": choice.window,
        "simulated_s": _json_number(found.seconds),
        "bound_s": bound.seconds,
        "binding": bound.binding,
        "bytes_on_link": dict(found.bytes_on_link),
        "finish_s": [_json_number(time_s) for time_s in found.finish_s],
        "died": list(found.died),
        "noticed_s": {str(rank): time_s for rank, time_s in found.noticed_s.items()},
    }


def _json_number(seconds: float) -> float | None:
    """Return the number for JSON, which has no infinity."""
    return seconds if seconds < math.inf else None


def _simulation_lines(
    found: SimulationResult,
    cluster: Cluster,
    plan: Plan,
    bound: Bound,
    what: str,
    work: str,
    measured: Mapping[str, float],
) -> list[str]:
    if found.seconds < math.inf:
        share = f", {bound.seconds / found.seconds:.2f} of that" if found.seconds else ""
        lines = [f"simulated  {format_ms(found.seconds)} for {what}; {work}"]
    else:
        share, lines = "", [f"simulated  never through: {what}; {work}", *_failure_lines(found, plan)]
    lines += [f"bound      {format_ms(bound.seconds)}{share}", f"           {bound.binding}"]
    rates = {**{link.name: link.bandwidth_bytes_per_s for link in cluster.links()}, **measured}
    loaded = sorted(found.bytes_on_link.items(), key=lambda pair: -pair[1] / rates[pair[0]])
    lines += [
        f"  {link} carries {carried / 1e6:.6g} MB, {format_ms(carried / rates[link])} at its rate"
        for link, carried in loaded[:_MAX_LISTED]
    ]
    return [*lines, *([f"  ... and {len(loaded) - _MAX_LISTED} more links"] if len(loaded) > _MAX_LISTED else [])]


def _failure_lines(found: SimulationResult, plan: Plan) -> list[str]:
    dead = [f"  rank {rank} on {plan.nodes[rank]} was killed" for rank in found.died[:_MAX_LISTED]]
    first = sorted(found.noticed_s.items(), key=lambda pair: pair[1])
    noticed = [
        f"  rank {rank} on {plan.nodes[rank]} gives up after {format_ms(at_s)}" for rank, at_s in first[:_MAX_LISTED]
    ]
    return [*dead, *noticed, *([f"  ... and {len(first) - _MAX_LISTED} more"] if len(first) > _MAX_LISTED else [])]
