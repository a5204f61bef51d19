"""Profiling of a pipeline: measured costs of blocks, links and schedule actions, and the simulated step time.

Blocks of one kind (the same modules, the same shapes) are measured once on each device, on copies with their own
values: no parameter, running mean or random state of the model changes. Links are measured one at a time with the
receive already posted, since a sender's own time may include waiting for a busy receiver, or end when the message is
in a buffer. On an accelerator the hand-shake goes through host memory: NCCL has one stream for a pair of ranks, and an
answer queued there behind a receive that needs the answer would never be sent.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringweave.environment import EXACT
from ringweave.pipeline.model_blocks import BlockStore
from ringweave.pipeline.optimizer import MakeOptimizer, has_parameters
from ringweave.pipeline.pipeline import Pipeline
from ringweave.pipeline.runtime import boundaries
from ringweave.pipeline.runtime.boundaries import Boundary, as_tuple
from ringweave.pipeline.runtime.runner import StageRunner
from ringweave.pipeline.runtime.stopwatch import Stopwatch
from ringweave.pipeline.stage_layout import Layout, PipelineGroups
from ringweave.planning.partition.problem import PartitionMemory, PartitionProblem
from ringweave.planning.partition.solve import Partition, solve_partition
from ringweave.sim import pipeline_simulation
from ringweave.sim.pipeline_schedules import PipelineSchedule
from ringweave.sim.pipeline_simulation import Overheads, PipelineSimulation, StageDevices, StageTimes, one_device_each

_ANSWER_BYTES = 8
_MIN_MESSAGE_BYTES = 65536
"""Smaller messages say nothing about a rate: they take as long as an empty message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageLink:
    """Measured cost of one direction of the link between two neighbouring stages."""

    latency_s: float
    """Seconds of an empty message."""
    s_per_byte: float
    """Additional seconds per byte."""

    def transfer_s(self, num_bytes: int) -> float:
        """Predicted seconds of a message."""
        return self.latency_s + num_bytes * self.s_per_byte


def measure_links(
    layout: Layout,
    groups: PipelineGroups,
    device: torch.device,
    num_bytes: int,
    *,
    rounds: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[tuple[StageLink, ...], tuple[StageLink, ...]]:
    """Measure the links between neighbouring stages; the result is the same on every rank.

    All ranks call it at the same time. Links are measured one after the other, so that none disturbs another. With
    replicas, and between stages of several devices, the slowest link of each stage counts.

    Args:
        layout: Stages and their ranks.
        groups: Process groups of the same layout.
        device: This rank's device.
        num_bytes: Size of the large message, at least 64 KiB; use the size of the activations.
        rounds: Messages of each size; their median counts.
        clock: Clock in seconds.

    Returns:
        (links forward, links backward): from each stage but the last to the next one, and back.
    """
    num_bytes = max(num_bytes, _MIN_MESSAGE_BYTES)
    own = layout.device_of_rank(groups.rank)
    table = torch.zeros(2, layout.num_stages - 1, 2, dtype=torch.float64)
    probe = LinkProbe(groups, device, clock)
    for piece in layout.placed.pieces:
        for direction, (src, dst) in enumerate(((piece.src, piece.dst), (piece.dst, piece.src))):
            for place, size in enumerate((0, num_bytes)):
                took_s = [probe.exchange(own, src, dst, size) for _ in range(rounds + 1)][1:]
                if own == src:
                    before_s = float(table[direction, piece.link, place])
                    table[direction, piece.link, place] = max(before_s, statistics.median(took_s))
    rows = groups.max_over_ranks(table).tolist()
    forward, backward = (tuple(_stage_link(pair, num_bytes) for pair in row) for row in rows)
    return forward, backward


def _stage_link(pair: list[float], num_bytes: int) -> StageLink:
    """Fit a link to the median round trips of an empty and a full message."""
    empty_s, full_s = pair
    return StageLink(latency_s=empty_s / 2, s_per_byte=max(0.0, full_s - empty_s) / num_bytes)


class LinkProbe:
    """Sends one message over a link and waits for the answer."""

    def __init__(self, groups: PipelineGroups, device: torch.device, clock: Callable[[], float]) -> None:
        self._groups, self._device, self._clock = groups, device, clock
        self._answer = torch.zeros(_ANSWER_BYTES, dtype=torch.uint8, device=device)
        self._stopwatch = Stopwatch(device, clock)
        self._stopwatch.is_on = True

    def exchange(self, own: int, src: int, dst: int, num_bytes: int) -> float:
        """Return seconds on the sender, from its start to the receiver's answer; 0 on other devices than `src`.

        On an accelerator they pass between two events of the sender's stream, behind which message and answer lie.
        """
        if own == dst:
            self._receive(src, num_bytes)
        return self._time_send(dst, num_bytes) if own == src else 0.0

    def _receive(self, src: int, num_bytes: int) -> None:
        group, message = self._groups.pipeline, self._new_message(num_bytes)
        arriving = dist.irecv(message, group=group, group_src=src)
        self._send_ready(src)
        assert arriving is not None
        arriving.wait()
        dist.send(self._answer, group=group, group_dst=src)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the message's memory is used until then

    def _time_send(self, dst: int, num_bytes: int) -> float:
        group, message = self._groups.pipeline, self._new_message(num_bytes)

        def exchange() -> None:
            dist.send(message, group=group, group_dst=dst)
            dist.recv(self._answer, group=group, group_src=dst)

        self._wait_ready(dst)
        self._stopwatch.time(exchange, is_forward=False)
        return self._stopwatch.lap().compute_s

    def _new_message(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes + _ANSWER_BYTES, dtype=torch.uint8, device=self._device)

    def _send_ready(self, device: int) -> None:
        """Tell the sender that the receive is posted."""
        group, rank = self._groups.control, self._groups.device_ranks[device]
        dist.send(torch.zeros(1, dtype=torch.uint8), group=group, group_dst=rank)

    def _wait_ready(self, device: int) -> None:
        group, rank = self._groups.control, self._groups.device_ranks[device]
        dist.recv(torch.zeros(1, dtype=torch.uint8), group=group, group_src=rank)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCost:
    """Measured cost of one block for one microbatch."""

    kind: str
    """Key of equal cost: blocks with the same text cost the same."""
    forward_s: tuple[float, ...]
    """Forward time of a whole microbatch on each device of the pipeline; with one device a stage, on each stage's."""
    backward_s: tuple[float, ...]
    """Backward time on each device."""
    update_s: tuple[float, ...]
    """Time of the optimizer's step on each device, once per train step."""
    forward_bytes: int
    """Size of the activations that go to the next block, in the pipeline's wire format."""
    backward_bytes: int
    """Size of their gradients, which come back, in this format."""
    state_bytes: int
    """Size of parameters, their gradients, buffers and optimizer state."""
    stash_bytes: int
    """Size of the tensors kept from forward until backward."""
    coding_s: tuple[float, ...] = ()
    """Time on each device to encode and decode a tensor like the block's output; a cut behind it costs that on both of
    its sides, half in forward and half in backward. Empty: none, as in the exact format."""
    fixed_share: tuple[float, ...] = ()
    """Fraction of forward and backward that each device also takes for fewer samples; empty: not measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Costs of all blocks in model order; the same on every rank."""

    blocks: tuple[BlockCost, ...]

    @property
    def num_devices(self) -> int:
        return len(self.blocks[0].forward_s)


def profile(
    pipeline: Pipeline,
    make_optimizer: MakeOptimizer,
    *,
    rounds: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> Profile:
    """Measure all kinds of blocks on all devices; all ranks call it at the same time.

    Devices measure at the same time, as they compute in training. With replicas the slowest counts.

    Args:
        pipeline: The pipeline to measure; it stays as it is.
        make_optimizer: As given to the pipeline; its state is counted too.
        rounds: Measured forwards and backwards of each kind, after one unmeasured round; their median counts.
        clock: Clock in seconds.

    Cost: (rounds + 1) forwards and backwards of each kind.
    """
    bench = _BlockBenchmark(pipeline, make_optimizer, rounds, clock)
    kinds = [block_kind(block, *bench.boundaries_of(index)) for index, block in enumerate(pipeline.blocks)]
    found = {kind: bench.measure_block(kinds.index(kind)) for kind in dict.fromkeys(kinds)}
    times = _gather_times(pipeline, found)
    blocks = []
    for index, kind in enumerate(kinds):
        leaving = boundaries.boundary_bytes(bench.wire, pipeline.boundaries[index + 1])
        blocks.append(
            BlockCost(
                kind=kind,
                forward_s=times[kind][0],
                backward_s=times[kind][1],
                update_s=times[kind][2],
                forward_bytes=leaving[0],
                backward_bytes=leaving[1],
                state_bytes=found[kind][1].state,
                stash_bytes=found[kind][1].stash,
                coding_s=times[kind][4] if bench.wire != EXACT else (),
                fixed_share=times[kind][3] if pipeline.layout.placed.is_wide else (),
            )
        )
    return Profile(blocks=tuple(blocks))


def block_kind(block: nn.Module, arriving: Boundary, leaving: Boundary) -> str:
    """Return a text that is equal for blocks of equal cost: modules, their settings, and all shapes."""
    tensors = (*block.named_parameters(), *block.named_buffers())
    shapes = [f"{name} {tuple(value.shape)} {value.dtype}" for name, value in tensors]
    return "\n".join([repr(block), *shapes, repr(arriving), repr(leaving)])


@dataclass(frozen=True, slots=True)
class _BlockBytes:
    state: int
    stash: int


def _gather_times(
    pipeline: Pipeline, found: Mapping[str, tuple[tuple[float, ...], _BlockBytes]]
) -> dict[str, list[tuple[float, ...]]]:
    """Return kind -> rows of `measure_block`'s seconds; one number per device, of its slowest rank."""
    own = torch.tensor([seconds for seconds, _ in found.values()], dtype=torch.float64)
    table = torch.zeros(pipeline.layout.num_devices, *own.shape, dtype=torch.float64)
    table[pipeline.layout.device_of_rank(pipeline.rank)] = own
    by_kind = pipeline.groups.max_over_ranks(table).permute(1, 2, 0).tolist()
    return {kind: [tuple(row) for row in rows] for kind, rows in zip(found, by_kind, strict=True)}


class _BlockBenchmark:
    """Measures copies of blocks on this rank's device."""

    def __init__(
        self, pipeline: Pipeline, make_optimizer: MakeOptimizer, rounds: int, clock: Callable[[], float]
    ) -> None:
        self._pipeline, self._make, self._rounds = pipeline, make_optimizer, rounds
        self._device = pipeline.device
        self._stopwatch = Stopwatch(self._device, clock)
        self._stopwatch.is_on = True

    def boundaries_of(self, index: int) -> tuple[Boundary, Boundary]:
        """Return a block's input and output boundaries."""
        return self._pipeline.boundaries[index], self._pipeline.boundaries[index + 1]

    def measure_block(self, index: int) -> tuple[tuple[float, ...], _BlockBytes]:
        """Return (seconds of forward, backward, update, fixed share of the former, seconds of coding; bytes)."""
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            block = boundaries.placeholder_copy(self._pipeline.blocks[index], self._device)
            metas, side_metas = self._pipeline.boundaries[index].meta_tensors(), self._pipeline.side_input_metas
            values = tuple(boundaries.placeholder_like(meta, self._device) for meta in metas)
            side = {name: boundaries.placeholder_like(meta, self._device) for name, meta in side_metas.items()}
            given = boundaries.select_side_inputs(block, side)
            laps = [self._time_pass(block, values, given) for _ in range(self._rounds + 1)]
            whole_s = statistics.median(map(sum, laps[1:]))
            fixed = self._measure_fixed(block, values, given, whole_s) if self._part < 1 else 0.0
            update_s, state = self._measure_update(block)
            num_bytes = _BlockBytes(state=state, stash=self._stash_bytes(block, values, given))
        forward, backward = zip(*laps[1:], strict=True)
        seconds = statistics.median(forward), statistics.median(backward), update_s, fixed, self._coding_s(index)
        return seconds, num_bytes

    @property
    def wire(self) -> str:
        """Format in which tensors pass from stage to stage."""
        return self._pipeline.settings.wire or EXACT

    def _coding_s(self, index: int) -> float:
        """Return the seconds of encoding and decoding a block's output; nothing for what travels exactly."""
        outputs = [
            boundaries.placeholder_like(form, self._device).detach()
            for form in self._pipeline.boundaries[index + 1].meta_tensors()
            if boundaries.format_of(self.wire, form.shape, form.dtype) != EXACT
        ]

        def code() -> None:
            for values in outputs:
                boundaries.decode(self.wire, boundaries.encode(self.wire, values), values)

        laps = []
        for _ in range(self._rounds + 1 if outputs else 0):
            self._stopwatch.time(code, is_forward=False)
            laps.append(self._stopwatch.lap().compute_s)
        return statistics.median(laps[1:]) if outputs else 0.0

    @property
    def _part(self) -> float:
        """Fraction of a microbatch that is timed beside a whole one: this device's own, or a half."""
        layout = self._pipeline.layout
        if not layout.placed.is_wide or layout.placed.num_samples == 1:
            return 1.0
        own = layout.placed.fraction(layout.device_of_rank(self._pipeline.rank))
        return own if own < 1 else (layout.placed.num_samples // 2) / layout.placed.num_samples

    def _measure_fixed(
        self, block: nn.Module, values: tuple[Tensor, ...], side: dict[str, Tensor], whole_s: float
    ) -> float:
        """Return the fraction of a block's time that does not shrink with the samples, 0 to 1."""
        part = self._part

        def rows(value: Tensor) -> Tensor:
            return value.detach()[: round(len(value) * part)].clone().requires_grad_(value.requires_grad)

        few, few_side = tuple(map(rows, values)), {name: rows(value) for name, value in side.items()}
        laps = [self._time_pass(block, few, few_side) for _ in range(self._rounds + 1)]
        ratio = statistics.median(map(sum, laps[1:])) / whole_s if whole_s else part
        return min(1.0, max(0.0, (ratio - part) / (1 - part)))

    def _time_pass(self, block: nn.Module, values: tuple[Tensor, ...], side: dict[str, Tensor]) -> tuple[float, float]:
        outputs: list[Tensor] = []

        def forward() -> None:
            with self._pipeline.precision.autocast_context():
                outputs.extend(value for value in as_tuple(block(*values, **side)) if value.requires_grad)

        forward_s = self._time_action(forward)
        ones = [torch.ones_like(output) for output in outputs]
        return forward_s, self._time_action(lambda: torch.autograd.backward(outputs, ones)) if outputs else 0.0

    def _measure_update(self, block: nn.Module) -> tuple[float, int]:
        """Return (seconds of the optimizer's step, bytes of the block's state between steps)."""
        parameters = [parameter for parameter in block.parameters() if parameter.requires_grad]
        total = sum(tensor.nbytes for tensor in (*block.parameters(), *block.buffers()))
        total += sum(parameter.nbytes for parameter in parameters)
        if not has_parameters(block):
            return 0.0, total
        optimizer = self._make(block)
        laps = [self._time_action(optimizer.step) for _ in range(self._rounds + 1)]
        kept = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
        return statistics.median(laps[1:]), total + sum(tensor.nbytes for tensor in kept)

    def _time_action(self, action: Callable[[], object]) -> float:
        """Return seconds of an action by the clock; on a GPU between two events in its queue."""
        self._stopwatch.time(action, is_forward=False)
        return self._stopwatch.lap().compute_s

    def _stash_bytes(self, block: nn.Module, values: tuple[Tensor, ...], side: dict[str, Tensor]) -> int:
        """Return the bytes that forward saves for backward and that would not exist otherwise."""
        own = {tensor.untyped_storage().data_ptr() for tensor in (*block.parameters(), *block.buffers())}
        kept: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with (
            self._pipeline.precision.autocast_context(),
            torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
        ):
            output = block(*values, **side)
        del output
        return sum(kept.values())


StageLinks = tuple[Sequence[StageLink], Sequence[StageLink]]
"""(links forward, links backward): from each stage but the last to the next one, and back."""


def predict(  # noqa: PLR0913 - measurements, and what may be left out
    profile: Profile,
    links: StageLinks,
    splits: tuple[int, ...],
    order: PipelineSchedule,
    *,
    transfers: str = "asynchronous",
    overheads: Overheads | None = None,
    devices: StageDevices | None = None,
    reduce_s: tuple[float, ...] = (),
) -> PipelineSimulation:
    """Simulate a step of these stages on virtual time.

    Args:
        profile: Measured blocks.
        links: Result of `measure_links`.
        splits: Last blocks, from 1, of all stages but the last.
        order: Actions of each stage, in order.
        transfers: `blocking` for torch's own loops of gpipe and 1f1b, `asynchronous` for schedules given as data;
            `transfer_mode` tells which.
        overheads: Result of `measure_overheads`; None: a step takes no time beside blocks and links.
        devices: Devices of the stages and their samples; None: one each.
        reduce_s: For each stage: result of `measure_reduces`; empty: no time.
    """
    times = replace(stage_times(profile, links, splits, devices), reduce_s=reduce_s)
    times = times.with_overheads(overheads or Overheads())
    return pipeline_simulation.simulate_pipeline(order, times, transfers)


def stage_times(
    profile: Profile, links: StageLinks, splits: tuple[int, ...], devices: StageDevices | None = None
) -> StageTimes:
    """Return the seconds of each device and piece for one microbatch."""
    edges = (0, *splits, len(profile.blocks))
    placed = devices or one_device_each(len(edges) - 1)
    own = [(device, profile.blocks[edges[at] : edges[at + 1]]) for device, at in enumerate(placed.stage_of_device)]
    crossing = [[_crossing_bytes(profile, cut, what) for cut in splits] for what in ("forward_bytes", "backward_bytes")]

    def whole(cost: BlockCost, device: int) -> float:
        """Return the fraction of a block's time that the device's samples take."""
        fixed = cost.fixed_share[device] if cost.fixed_share else 0.0
        return fixed + (1 - fixed) * placed.fraction(device)

    def coding_s(device: int) -> float:
        """Return the seconds of coding in forward, as many as in backward, at both cuts of the device's stage."""
        stage = placed.stage_of_device[device]
        cuts = [profile.blocks[cut - 1] for cut in edges[stage : stage + 2] if 0 < cut < len(profile.blocks)]
        return placed.fraction(device) * sum(cost.coding_s[device] for cost in cuts if cost.coding_s) / 2

    def computing_s(device: int, held: Sequence[BlockCost], what: str) -> float:
        return coding_s(device) + sum(getattr(each, what)[device] * whole(each, device) for each in held)

    return StageTimes(
        forward_s=tuple(computing_s(device, held, "forward_s") for device, held in own),
        backward_s=tuple(computing_s(device, held, "backward_s") for device, held in own),
        before_s=tuple(sum(each.update_s[device] for each in held) for device, held in own),
        forward_transfer_s=_piece_times(links[0], placed, crossing[0]),
        backward_transfer_s=_piece_times(links[1], placed, crossing[1]),
        devices=devices,
    )


def _piece_times(links: Sequence[StageLink], placed: StageDevices, num_bytes: Sequence[int]) -> tuple[float, ...]:
    """Return the seconds of each piece in one direction, by the bytes of a microbatch over each link."""
    parts = ((piece.link, piece.num_samples / placed.num_samples) for piece in placed.pieces)
    return tuple(links[link].transfer_s(round(part * num_bytes[link])) for link, part in parts)


def transfer_mode(schedule: str | PipelineSchedule, devices: StageDevices | None = None) -> str:
    """Return the transfer mode of a schedule, which `predict` needs; with several devices a stage all are data."""
    is_plain = devices is None or devices.is_plain
    return "blocking" if schedule in ("gpipe", "1f1b") and is_plain else "asynchronous"


def partition(
    profile: Profile,
    links: StageLinks,
    *,
    num_microbatches: int | None = None,
    memory_bytes: Sequence[float] | None = None,
    in_flight: Sequence[int] | None = None,
) -> Partition:
    """Find the best splits for these blocks, devices and links; exact.

    Args:
        profile: Measured blocks.
        links: Result of `measure_links`.
        num_microbatches: Minimise the time of a step with so many microbatches; None: minimise the bottleneck.
        memory_bytes: Memory of each device; None: unlimited.
        in_flight: Microbatches that each stage holds at once, as `PipelineSchedule.peak_in_flight` counts them; needs
            `memory_bytes`.

    Raises:
        UsageError: The blocks do not fit into the devices' memory, or there are fewer blocks than devices.
    """
    devices = range(profile.num_devices)
    forward_links, backward_links = links
    bandwidth = tuple(
        2 / (f.s_per_byte + b.s_per_byte + 1e-15) for f, b in zip(forward_links, backward_links, strict=True)
    )
    problem = PartitionProblem(
        work=tuple(
            tuple(cost.forward_s[device] + cost.backward_s[device] for cost in profile.blocks) for device in devices
        ),
        kinds=tuple(devices),
        capability=(1.0,) * profile.num_devices,
        activation=tuple(float(max(cost.forward_bytes, cost.backward_bytes)) for cost in profile.blocks),
        bandwidth=bandwidth,
        memory=_memory_limits(profile, memory_bytes, in_flight),
    )
    return solve_partition(problem, num_microbatches)


def _memory_limits(
    profile: Profile, limit: Sequence[float] | None, in_flight: Sequence[int] | None
) -> PartitionMemory | None:
    if limit is None:
        return None
    return PartitionMemory(
        limit=tuple(limit),
        state=tuple(float(cost.state_bytes) for cost in profile.blocks),
        stash=tuple(float(cost.stash_bytes) for cost in profile.blocks),
        in_flight=tuple(in_flight or (1,) * profile.num_devices),
    )


def _crossing_bytes(profile: Profile, cut: int, what: str) -> int:
    """Return the bytes after the first `cut` blocks; 0 before the first and after the last (inputs are not counted)."""
    return getattr(profile.blocks[cut - 1], what) if 0 < cut < len(profile.blocks) else 0


_MIN_WAIT_S, _WAIT_PER_TRANSFER = 0.002, 1.5
"""Wait of a benchmark's forward or backward: its minimum, and the minimum multiple of the slowest transfer's time."""
_ClockAndSleep = tuple[Callable[[], float], Callable[[float], object]]
"""A clock, and the sleep function that goes with it."""
_MAX_MESSAGE_S = 0.02
_NUM_BISECTIONS = 14
"""Steps of the bisection; they find a message's overhead to within some microseconds."""


def measure_overheads(
    pipeline: Pipeline,
    links: StageLinks,
    *,
    target: Tensor | None = None,
    rounds: int = 5,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], object] = time.sleep,
) -> Overheads:
    """Measure the time that a step takes beside its blocks; the same on every rank. All ranks call it at the same time.

    On an accelerator the result is zero: the CPU runs ahead of the device there, so its overhead is not visible.

    Args:
        pipeline: The pipeline; it stays as it is.
        links: Result of `measure_links`.
        target: Target of a batch, in the form used in training, so that the loss is included; None: it is not.
        rounds: Measured steps, after one unmeasured step; their median counts.
        clock: Clock in seconds.
        sleep: Sleep function that goes with the clock.

    Cost: (rounds + 1) steps of 4 ms for each microbatch, more over slow links.
    """
    if pipeline.device.type != "cpu":
        return Overheads()
    transfers = _transfer_times(pipeline, links)
    with torch.random.fork_rng(devices=[]):
        benchmark = _OverheadBenchmark(pipeline, target, _choose_wait_s(transfers), (clock, sleep))
        laps = [benchmark.step() for _ in range(rounds + 1)][1:]
    own = torch.tensor(laps, dtype=torch.float64).median(0).values
    table = torch.zeros(pipeline.layout.num_devices, len(own), dtype=torch.float64)
    table[pipeline.layout.device_of_rank(pipeline.rank)] = own
    rows = pipeline.groups.max_over_ranks(table).tolist()
    waited, actions, steps, ends = zip(*rows, strict=True)
    found = Overheads(action_s=actions, step_s=max(ends))
    times = replace(transfers, forward_s=waited, backward_s=waited)
    return replace(found, message_s=_fit_message_s(pipeline, times, found, max(steps)))


def _transfer_times(pipeline: Pipeline, links: StageLinks) -> StageTimes:
    """Return the transfer times at the present splits, with devices that take no time."""
    layout = pipeline.layout
    crossing = [pipeline.boundaries[cut] for cut in layout.splits]
    nothing = (0.0,) * layout.num_devices
    return StageTimes(
        forward_s=nothing,
        backward_s=nothing,
        forward_transfer_s=_piece_times(links[0], layout.placed, [each.forward_bytes for each in crossing]),
        backward_transfer_s=_piece_times(links[1], layout.placed, [each.backward_bytes for each in crossing]),
        devices=layout.devices,
    )


def _choose_wait_s(transfers: StageTimes) -> float:
    """Choose a wait so long that no link delays a stage."""
    slowest_s = max((*transfers.forward_transfer_s, *transfers.backward_transfer_s), default=0.0)
    return max(_MIN_WAIT_S, _WAIT_PER_TRANSFER * slowest_s)


def _fit_message_s(pipeline: Pipeline, times: StageTimes, found: Overheads, measured_s: float) -> float:
    """Fit the overhead of a message: with it the simulated benchmark takes as long as the measured one."""
    transfers = transfer_mode(pipeline.settings.schedule, pipeline.layout.devices)
    low_s, high_s = 0.0, _MAX_MESSAGE_S
    for _ in range(_NUM_BISECTIONS):
        middle_s = (low_s + high_s) / 2
        trial = times.with_overheads(replace(found, message_s=middle_s, step_s=0.0))
        is_short = pipeline_simulation.simulate_pipeline(pipeline.order, trial, transfers).step_s < measured_s
        low_s, high_s = (middle_s, high_s) if is_short else (low_s, middle_s)
    return low_s


class _OverheadBenchmark:
    """Runs the pipeline's schedule on stages of one block each, which waits instead of computing."""

    def __init__(self, pipeline: Pipeline, target: Tensor | None, wait_s: float, times: _ClockAndSleep) -> None:
        clock = times[0]
        self._pipeline, self._clock = pipeline, clock
        whole, num = pipeline.layout, pipeline.settings.num_microbatches
        layout = replace(whole, num_blocks=whole.num_stages, splits=tuple(range(1, whole.num_stages)))
        crossing = tuple(pipeline.boundaries[edge] for edge in (0, *whole.splits, whole.num_blocks))
        loss_fn = _sum_loss if target is None else self._timed_loss(pipeline.loss_fn)
        settings = replace(pipeline.settings, wire=EXACT)  # coding is measured by itself
        self._runner = StageRunner(layout, settings, loss_fn, pipeline.groups, pipeline.device)
        self._runner.stopwatch.clock, self._runner.stopwatch.is_on = clock, True
        stages = [_WaitingBlock(self._runner.own_part(each), wait_s, times) for each in crossing[1:]]
        self._own_block = stages[pipeline.stage]
        self._runner.set_blocks(layout, BlockStore(stages, [pipeline.stage], pipeline.device), crossing)
        self._inputs = tuple(_placeholder_batch(value, num) for value in crossing[0].meta_tensors())
        self._side = {name: _placeholder_batch(value, num) for name, value in pipeline.side_input_metas.items()}
        self._target = torch.zeros(num * whole.placed.num_samples) if target is None else target

    def step(self) -> tuple[float, float, float, float]:
        """Return seconds on this rank: one wait, one action's overhead, all actions and transfers, and the end."""
        groups, num_actions = self._pipeline.groups, 2 * self._pipeline.settings.num_microbatches
        groups.barrier()
        self._own_block.waited_s = 0.0
        begun_s = self._clock()
        self._runner.train(0, self._inputs, self._target, 1.0, self._side)
        middle_s = self._clock()
        groups.barrier()
        ending_s = self._clock()
        groups.sum_over_ranks(torch.zeros(len(self._target), dtype=torch.float64))
        ended_s = self._clock()
        waited_s = self._own_block.waited_s / num_actions
        beside_s = max(0.0, self._runner.stopwatch.lap().compute_s / num_actions - waited_s)
        return waited_s, beside_s, middle_s - begun_s, ended_s - ending_s

    def _timed_loss(self, loss_fn: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda output, target: self._runner.stopwatch.time(loss_fn, output, target, is_forward=False)


class _WaitingBlock(nn.Module):
    """Block that waits, then returns tensors in the form that the next stage expects."""

    def __init__(self, leaving: Boundary, wait_s: float, times: _ClockAndSleep) -> None:
        super().__init__()
        self.waited_s = 0.0
        """Seconds waited so far."""
        self.trained = nn.Parameter(torch.zeros(()))
        """A parameter, so that backward has something to reach in the first stage."""
        self._outputs = [boundaries.placeholder_like(form, torch.device("cpu")) for form in leaving.meta_tensors()]
        self._wait_s, (self._clock, self._sleep) = wait_s, times

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Return tensors in the form of the output boundary, for any input."""
        self.wait()
        return _PassThrough.apply(self, self._outputs, self.trained, *values)

    def wait(self) -> None:
        """Wait for the time of one action."""
        begun_s = self._clock()
        self._sleep(self._wait_s)
        self.waited_s += self._clock() - begun_s


class _PassThrough(torch.autograd.Function):
    """Replaces its inputs by given tensors; backward waits and returns zero gradients."""

    @staticmethod
    def forward(ctx: Any, stage: _WaitingBlock, leaving: list[Tensor], *values: Tensor) -> tuple[Tensor, ...]:
        ctx.stage = stage
        ctx.save_for_backward(*values)
        given = tuple(value.detach() for value in leaving)
        ctx.mark_non_differentiable(*(new for new, old in zip(given, leaving, strict=True) if not old.requires_grad))
        return given

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.stage.wait()
        return None, None, *(torch.zeros_like(value) if value.requires_grad else None for value in ctx.saved_tensors)


def _placeholder_batch(form: Tensor, num_microbatches: int) -> Tensor:
    whole = torch.empty((len(form) * num_microbatches, *form.shape[1:]), dtype=form.dtype, device="meta")
    return boundaries.placeholder_like(whole, torch.device("cpu"))


def _sum_loss(output: Tensor | tuple[Tensor, ...], _: Tensor) -> Tensor:
    """Return a scalar to start backward from."""
    first = output if isinstance(output, Tensor) else next(value for value in output if value.requires_grad)
    return first.sum()
