"""Pipelines for `ringweave plan` and `ringweave simulate`: the pipeline file, and the stages on a cluster's devices.

A pipeline file describes a model's blocks and schedule; speeds and NICs come from the cluster file. Stages may have
several devices, which share the samples of each microbatch unequally and reduce their gradients once a train step.
"""

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import click
from click.core import ParameterSource
from pydantic import Field

from ringweave import topology, units
from ringweave.cli.echo import echo, format_ms
from ringweave.errors import UsageError
from ringweave.files import file_io, yaml_files
from ringweave.files.problems import InputProblem, raise_problems
from ringweave.files.yaml_files import FileKind
from ringweave.planning import stage_planner
from ringweave.planning.partition.problem import PartitionMemory
from ringweave.planning.partition.solve import solve_partition
from ringweave.planning.repartition import PipelineWorkload
from ringweave.planning.stage_planner import DeviceConditions, StagePlan
from ringweave.sim import Fault, NodeSlowdown, pipeline_schedules
from ringweave.sim.pipeline_simulation import PipelineSimulation, StageDevices, simulate_pipeline
from ringweave.topology import Cluster

MAX_BLOCKS = 1000
WIRE_RATIOS = {"exact": 1.0, "bf16": 0.5, "int8": 0.25}
"""Bytes of a value between stages beside those of float32; int8 has 8 more for each channel."""
_TIME, _SIZE = "a time such as 5ms", "a size such as 1MB"
_US_PER_S = 1e6


class BlockEntry(yaml_files.FileEntry):
    """One item of `blocks`: a block, or `count` equal blocks."""

    forward: str = Field(description=f"{_TIME}: a microbatch on a device of speed 1", examples=["5ms"])
    backward: str | None = Field(default=None, description=f"{_TIME}; left out: twice forward", examples=["10ms"])
    output: str = Field(default="0B", description=f"{_SIZE}, of a microbatch between two blocks", examples=["1MB"])
    gradients: str = Field(default="0B", description=f"{_SIZE}, of all parameters", examples=["4MB"])
    state: str = Field(
        default="0B", description=f"{_SIZE}: parameters, gradients and optimizer state", examples=["16MB"]
    )
    activations: str = Field(default="0B", description=f"{_SIZE}, held for each microbatch in flight", examples=["8MB"])
    count: int = Field(default=1, description=f"a whole number from 1 to {MAX_BLOCKS}", examples=["4"])


class PipelineEntry(yaml_files.FileEntry):
    """The whole file."""

    samples: int = Field(description="samples of a microbatch, 1 or more", examples=["8"])
    microbatches: int = Field(description="microbatches of a train step, 1 or more", examples=["16"])
    schedule: str = Field(
        default="1f1b", description=f"one of {', '.join(pipeline_schedules.PIPELINE_SCHEDULES)}", examples=["1f1b"]
    )
    blocks: list[BlockEntry] = Field(description="a list of blocks", examples=["[{forward: 5ms, output: 1MB}]"])


class _Block(NamedTuple):
    """Seconds of a microbatch at speed 1, and bytes."""

    forward_s: float
    backward_s: float
    output: float
    gradients: float
    state: float
    activations: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineModel:
    """Blocks of a model and its schedule, as a pipeline file has them."""

    blocks: tuple[_Block, ...]
    num_samples: int
    num_microbatches: int
    schedule: str
    wire: str = "exact"
    """Format in which outputs and their gradients pass from stage to stage."""

    def encoded(self, wire: str) -> "PipelineModel":
        """Return the model with outputs of so many bytes as this format makes of float32; coding takes no time.

        Raises:
            UsageError: Stages have no such format.
        """
        if wire not in WIRE_RATIOS:
            expected, do = f"one of {', '.join(WIRE_RATIOS)}", "Name one of these"
            raise UsageError("--wire of a pipeline", got=wire, expected=expected, do=do)
        blocks = tuple(block._replace(output=block.output * WIRE_RATIOS[wire]) for block in self.blocks)
        return replace(self, blocks=blocks, wire=wire)

    def on_devices(self, num_devices: int, latency_s: float, memory: Sequence[float] | None) -> PipelineWorkload:
        """Return the workload of the planner; `memory` has the bytes of each device, None: no limit."""
        forward_s, backward_s, output, gradients, state, activations = zip(*self.blocks, strict=True)
        limits = None
        if memory is not None:
            limits = PartitionMemory(limit=tuple(memory), state=state, stash=activations, in_flight=(1,) * num_devices)
        return PipelineWorkload(
            forward_s=(forward_s,),
            backward_s=(backward_s,),
            num_devices=num_devices,
            num_microbatches=self.num_microbatches,
            schedule=self.schedule,
            forward_bytes=output,
            backward_bytes=output,
            gradient_bytes=gradients,
            latency_s=(latency_s,) * (num_devices - 1),
            memory=limits,
        )


PIPELINE_FILE_KIND = FileKind(
    noun="pipeline file",
    error=UsageError,
    expected_keys="a map with the keys samples, microbatches and blocks",
    fix_empty='Begin with "samples: 8", then list the blocks',
    fix_too_large="Use count for like blocks",
)


def load_pipeline(path: str | Path) -> PipelineModel:
    """Read a pipeline file.

    Raises:
        UsageError: It cannot be read or is wrong; the text has the line, the key and the fix.
    """
    return yaml_files.load_yaml_file(path, PIPELINE_FILE_KIND, _build_pipeline)


def _build_pipeline(value: Any) -> PipelineModel:
    entry = yaml_files.validate_entries(PipelineEntry, value, PIPELINE_FILE_KIND.noun)
    problems: list[InputProblem] = []

    def check(path: tuple[str | int, ...], got: object, holds: bool, expected: str) -> None:
        if not holds:
            do = "Correct it"
            problems.append(InputProblem(path=path, what=str(path[-1]), got=got, expected=expected, do=do))

    def parse(path: tuple[str | int, ...], text: str, parser: Callable[[str], float], expected: str) -> float:
        try:
            return float(parser(text))
        except UsageError:
            check(path, text, False, expected)
            return 0.0

    check(("samples",), entry.samples, entry.samples >= 1, "1 or more")
    check(("microbatches",), entry.microbatches, entry.microbatches >= 1, "1 or more")
    known = pipeline_schedules.PIPELINE_SCHEDULES
    check(("schedule",), entry.schedule, entry.schedule in known, f"one of {', '.join(known)}")
    blocks: list[_Block] = []
    for index, item in enumerate(entry.blocks):
        at = ("blocks", index)
        check((*at, "count"), item.count, 1 <= item.count <= MAX_BLOCKS - len(blocks), f"1 to {MAX_BLOCKS} blocks")
        forward_s = parse((*at, "forward"), item.forward, units.parse_seconds, _TIME)
        given = item.backward
        backward_s = 2 * forward_s if given is None else parse((*at, "backward"), given, units.parse_seconds, _TIME)
        sizes = [
            parse((*at, name), getattr(item, name), units.parse_bytes, _SIZE)
            for name in ("output", "gradients", "state", "activations")
        ]
        blocks += [_Block(forward_s, backward_s, *sizes)] * min(item.count, MAX_BLOCKS)
    check(("blocks",), entry.blocks, bool(entry.blocks), "at least one block")
    raise_problems(problems)
    return PipelineModel(
        blocks=tuple(blocks),
        num_samples=entry.samples,
        num_microbatches=entry.microbatches,
        schedule=entry.schedule,
    )


def refuse_unfit_options(
    pipeline_path: str | None, cluster_path: str | None, own: Collection[str], *, shared: Collection[str] = ()
) -> None:
    """Check that options of pipelines and of collectives are not mixed.

    `shared`: names of the parameters that go with both, besides --json; all others are of collectives.

    Raises:
        UsageError: An option of the other kind was given, or CLUSTER is missing.
    """
    context = click.get_current_context()
    both = {"cluster_path", "pipeline_path", "as_json", *shared}
    given = [
        parameter.opts[0]
        for parameter in context.command.params
        if context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
        and parameter.name not in both
        and (parameter.name in own) == (pipeline_path is None)
    ]
    if given and pipeline_path is None:
        do = "Add --pipeline FILE, or leave them out"
        raise UsageError("options of a pipeline", got=given, expected="none without --pipeline", do=do)
    if given:
        expected, do = "none beside --pipeline", "Leave them out: they are of collectives"
        raise UsageError("options", got=given, expected=expected, do=do)
    if pipeline_path is not None and cluster_path is None:
        do = "Name a cluster file before --pipeline"
        raise UsageError("CLUSTER", got=None, expected="a cluster file beside --pipeline", do=do)


def check_picture_path(picture: str | None) -> Path | None:
    """Return the path of --picture, checked before the work begins; None without."""
    if picture is None:
        return None
    from ringweave.plots import figures

    return figures.check_picture_path(picture)


class _Devices(NamedTuple):
    """Devices of a cluster in its order, that of the workers."""

    names: list[str]
    nodes: list[str]
    conditions: DeviceConditions


def _devices_of(cluster: Cluster, slower: dict[str, float]) -> _Devices:
    """Return the devices; those of a node share its NICs. `slower` has factors on the time of nodes."""
    places = [(node, index) for node in cluster.nodes for index in range(node.num_devices)]
    return _Devices(
        [node.name if node.num_devices == 1 else f"{node.name}/{index}" for node, index in places],
        [node.name for node, _ in places],
        DeviceConditions(
            speeds=tuple(node.devices[index].speed / slower.get(node.name, 1.0) for node, index in places),
            rates=tuple(node.rate_bytes_per_s / node.num_devices for node, _ in places),
        ),
    )


def _parse_memory(text: str | None, num_devices: int) -> list[float] | None:
    """Parse the memory of each device, or one for all."""
    if text is None:
        return None
    found = [float(units.parse_bytes(part)) for part in text.split(",")]
    if len(found) not in (1, num_devices):
        expected = f"1 or {num_devices}, as devices"
        raise UsageError("--memory: how many", got=len(found), expected=expected, do="Give one for each")
    return found * (num_devices // len(found))


def print_plan(cluster_path: str, pipeline_path: str, memory: str | None, wire: str, *, as_json: bool) -> int:
    """Print the best stages of a pipeline on all devices of a cluster, and the best with one device a stage."""
    cluster, model = topology.load(cluster_path), load_pipeline(pipeline_path).encoded(wire)
    devices = _devices_of(cluster, {})
    load = _workload(model, cluster, devices, memory)
    plan = stage_planner.plan_stages(load, devices.conditions, model.num_samples)
    try:
        alone: StagePlan | None = stage_planner.plan_stages(load, devices.conditions, model.num_samples, max_width=1)
    except UsageError:
        alone = None
    if as_json:
        other = None if alone is None else _document(model, alone, devices)
        echo(json.dumps(_document(model, plan, devices) | {"one_device_a_stage": other}))
        return 0
    lines = _lines(cluster, model, plan, devices)
    lines.insert(
        lines.index(""),
        "alone     no order of one device a stage fits"
        if alone is None
        else f"alone     one device a stage: {alone.step_s / plan.step_s:.3g} times as long at best (simulated); "
        f"{_placement_text(alone)}",
    )
    echo("\n".join([cluster.describe(), "", *lines]))
    return 0


class SimulationOptions(NamedTuple):
    """Options of `ringweave simulate` beside --pipeline, as they were typed."""

    memory: str | None
    devices: str | None
    splits: str | None
    faults: Sequence[Fault]
    trace_path: str | None
    wire: str
    as_json: bool


def print_simulation(cluster_path: str, pipeline_path: str, given: SimulationOptions) -> int:
    """Print a simulated train step of a pipeline: of the best stages, or of those that are given."""
    cluster, model = topology.load(cluster_path), load_pipeline(pipeline_path).encoded(given.wire)
    devices = _devices_of(cluster, {})
    load = _workload(model, cluster, devices, given.memory)
    plan = _given_plan(load, devices.conditions, given.devices, given.splits) or stage_planner.plan_stages(
        load, devices.conditions, model.num_samples
    )
    if given.faults:
        slower = _devices_of(cluster, _slow_nodes(given.faults, devices.nodes)).conditions.of_stages(plan.devices)
        plan = replace(plan, conditions=slower, step_s=plan.workload.step_s(plan.splits, slower))
    order = pipeline_schedules.generate_pipeline_schedule(
        model.schedule, plan.devices.num_stages, model.num_microbatches
    )
    found = simulate_pipeline(order, plan.workload.times(plan.splits, plan.conditions))
    if given.trace_path is not None:
        trace = _trace_document(found, devices, f"{Path(pipeline_path).name} on {cluster.name}: {plan.devices}")
        file_io.write_output("--trace", given.trace_path, json.dumps(trace) + "\n")
    more = {"bound_s": found.bound_s, "bubble_fraction": found.bubble_fraction}
    if given.as_json:
        echo(json.dumps(_document(model, plan, devices) | more))
        return 0
    lines = _lines(cluster, model, plan, devices)
    lines.insert(
        lines.index(""),
        f"bound     {format_ms(found.bound_s)} for any schedule, {found.bound_s / found.step_s:.2f} of that; devices "
        f"idle {found.bubble_fraction:.0%} (simulated)",
    )
    echo("\n".join(lines))
    return 0


def _workload(model: PipelineModel, cluster: Cluster, devices: _Devices, memory: str | None) -> PipelineWorkload:
    num_devices = len(devices.names)
    return model.on_devices(num_devices, cluster.latency_s, _parse_memory(memory, num_devices))


def _given_plan(
    load: PipelineWorkload, conditions: DeviceConditions, devices_text: str | None, splits_text: str | None
) -> StagePlan | None:
    """Return the plan of --devices and --splits; without --splits the best cuts by formula. None if none is given."""
    if devices_text is None:
        if splits_text is not None:
            do = "Add --devices, such as 0:4+1:4 2:8"
            raise UsageError("--splits", got=splits_text, expected="--devices beside it", do=do)
        return None
    devices = StageDevices.parse(devices_text)
    if devices.num_devices != load.num_devices:
        expected = f"{load.num_devices}, as in the cluster file"
        raise UsageError("--devices: how many", got=devices.num_devices, expected=expected, do="Name each once")
    placed, at = stage_planner.place_devices(load, devices), conditions.of_stages(devices)
    if splits_text is None:
        splits = solve_partition(placed.problem(at), load.num_microbatches).splits
    else:
        splits = _parse_splits(splits_text, devices.num_stages - 1)
    if not placed.fits(splits):
        expected = "a block in each stage, within the memory of its devices"
        got = ",".join(map(str, splits))
        raise UsageError("splits", got=got, expected=expected, do="Move the cuts, or give more --memory")
    return StagePlan(splits=splits, devices=devices, step_s=placed.step_s(splits, at), workload=placed, conditions=at)


def _parse_splits(text: str, count: int) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    if len(parts) != count or not all(part.isdecimal() and len(part) < 6 for part in parts):
        expected, do = f"{count} block numbers, last of each stage but the last", "Write them like 2,5"
        raise UsageError("--splits", got=text, expected=expected, do=do)
    return tuple(map(int, parts))


def _slow_nodes(faults: Sequence[Fault], nodes: Collection[str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for fault in faults:
        if not isinstance(fault, NodeSlowdown) or fault.node not in nodes:
            expected, do = "NODE=2 with a node of the cluster, beside --pipeline", "Name a node that gets slower"
            raise UsageError("--straggle", got=str(fault), expected=expected, do=do)
        found[fault.node] = found.get(fault.node, 1.0) * fault.times
    return found


def _edges(plan: StagePlan) -> list[tuple[int, int]]:
    """Return (first, last) block of each stage, from 1."""
    ends = (*plan.splits, plan.workload.num_blocks)
    return [(before + 1, end) for before, end in zip((0, *ends), ends, strict=False)]


def _document(model: PipelineModel, plan: StagePlan, devices: _Devices) -> dict[str, Any]:
    times = plan.workload.times(plan.splits, plan.conditions)
    compute_s = [f + b for f, b in zip(times.forward_s, times.backward_s, strict=True)]
    placed = plan.devices
    return {
        "devices": str(placed),
        "splits": list(plan.splits),
        "microbatches": model.num_microbatches,
        "samples": model.num_samples,
        "wire": model.wire,
        "simulated_step_s": plan.step_s,
        "simulated_samples_per_s": model.num_samples * model.num_microbatches / plan.step_s,
        "stages": [
            {
                "blocks": [first, last],
                "devices": [
                    {
                        "device": device,
                        "name": devices.names[device],
                        "samples": samples,
                        "share": placed.fraction(device),
                        "predicted_compute_s": compute_s[device],
                    }
                    for device, samples in placed.stages[stage]
                ],
                "reduced_bytes": _reduced_bytes(model, plan, stage),
                "predicted_reduce_s": times.reduce_s[stage] if times.reduce_s else 0.0,
            }
            for stage, (first, last) in enumerate(_edges(plan))
        ],
        "links": [
            {
                "pieces": [piece._asdict() for piece in placed.pieces if piece.link == link],
                "bytes": model.blocks[plan.splits[link] - 1].output,
                "predicted_transfer_s": max(times.transfer_s(link)),
            }
            for link in range(placed.num_stages - 1)
        ],
    }


def _reduced_bytes(model: PipelineModel, plan: StagePlan, stage: int) -> int:
    """Return the bytes of gradients that the devices of a stage reduce; none on one device."""
    first, last = _edges(plan)[stage]
    wide = len(plan.devices.stages[stage]) > 1
    return round(sum(block.gradients for block in model.blocks[first - 1 : last])) if wide else 0


def _placement_text(plan: StagePlan) -> str:
    return f"devices {plan.devices}, splits {', '.join(map(str, plan.splits)) or 'none'}"


def _lines(cluster: Cluster, model: PipelineModel, plan: StagePlan, devices: _Devices) -> list[str]:
    """Return the plan's lines; an empty one stands before the table of stages."""
    document = _document(model, plan, devices)
    lines = [
        f"pipeline  {len(model.blocks)} blocks, {model.num_microbatches} microbatches of {model.num_samples} samples, "
        f"{model.schedule}" + (f", {model.wire} between stages" if model.wire != "exact" else ""),
        f"stages    {_placement_text(plan)}",
        f"step      {format_ms(plan.step_s)}, {document['simulated_samples_per_s']:.4g} samples/s (simulated)",
    ]
    if cluster.switches:
        lines.append("links     rates of NICs; uplinks of switches are not counted")
    width = max(6, *map(len, devices.names))
    lines += ["", f"stage  blocks  {'device':{width}}  samples  share  compute (predicted)  busy (simulated)"]
    for stage, each in enumerate(document["stages"]):
        blocks = "-".join(map(str, each["blocks"]))
        for device in each["devices"]:
            busy = device["predicted_compute_s"] * model.num_microbatches / plan.step_s
            lines.append(
                f"{stage:>5}  {blocks:<6}  {device['name']:{width}}  {device['samples']:>7}  {device['share']:>5.2f}"
                f"  {format_ms(device['predicted_compute_s']):>19}  {busy:>16.0%}"
            )
    return [*lines, "", *_exchange_lines(document)]


def _exchange_lines(document: dict[str, Any]) -> list[str]:
    """Return a line for each exchange inside a stage and for each link between two."""
    lines = []
    for stage, each in enumerate(document["stages"]):
        names = ", ".join(device["name"] for device in each["devices"])
        if len(each["devices"]) > 1:
            size = units.format_bytes(each["reduced_bytes"])
            took = format_ms(each["predicted_reduce_s"])
            lines.append(f"inside stage {stage}: {size} of gradients reduced among {names}, {took} a step (predicted)")
    for link, each in enumerate(document["links"]):
        count = len(each["pieces"])
        lines.append(
            f"stage {link} to {link + 1}: {units.format_bytes(round(each['bytes']))} a microbatch each way in {count} "
            f"piece{'s' if count > 1 else ''}, {format_ms(each['predicted_transfer_s'])} (predicted)"
        )
    return lines


def _trace_document(found: PipelineSimulation, devices: _Devices, title: str) -> dict[str, Any]:
    """Return the spans of all devices for Perfetto: a process for each node, a thread for each device."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(devices.nodes), start=1)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": name}}
        for name, number in numbers.items()
    ]
    for device, (node, name) in enumerate(zip(devices.nodes, devices.names, strict=True)):
        at = {"pid": numbers[node], "tid": device + 1}
        events.append({"ph": "M", "name": "thread_name", **at, "args": {"name": name}})
    events += [
        {
            "ph": "X",
            "name": str(span.action),
            "cat": span.action.kind.name.lower(),
            "pid": numbers[devices.nodes[span.device]],
            "tid": span.device + 1,
            "ts": span.begin_s * _US_PER_S,
            "dur": (span.end_s - span.begin_s) * _US_PER_S,
        }
        for span in found.spans
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"title": title, "times": "simulated"}}
