"""Simulation of one pipeline step: time of the step, idle time of the stages, activations held.

A transfer starts when both its ends have begun it and the link's direction is free, and takes the link's time. Stages
of several devices send pieces of a microbatch (`StageDevices`): a device's pieces of one link and direction go one
after the other, as they share its NIC, and so do those that a device receives.

The order in which instructions can run does not depend on times. So it is computed once, for any times of devices and
links; the end times are then the longest paths through the dependencies, and no event queue is needed.

A stage of several devices splits the samples of each microbatch between them. Two slow devices beside a fast one make
two stages of equal speed: each slow device computes its part of a microbatch's samples through the blocks of the first
stage, and sends it to the fast device. Samples keep their order, so each device takes consecutive ones, and what it
sends to a device of the next stage is the common part of both ranges, a *piece*.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import add
from typing import NamedTuple

from ringweave.errors import ScheduleError, UsageError, explain
from ringweave.sim.pipeline_schedules import (
    ActionKind,
    PipelineAction,
    PipelineSchedule,
    StageInstruction,
    stage_programs,
)

_SHARE_TEXT = re.compile(r"(\d{1,6}):(\d{1,6})")


class DeviceShare(NamedTuple):
    """A device of a stage, and the samples of each microbatch that it computes."""

    device: int
    num_samples: int


class Piece(NamedTuple):
    """Consecutive samples of a microbatch that go from a device to one of the next stage; gradients come back."""

    link: int
    """Stage of the source."""
    src: int
    dst: int
    first: int
    """First sample, counted in the microbatch."""
    num_samples: int


@dataclass(frozen=True)  # without slots, for the cached properties
class StageDevices:
    """Devices of each stage, from the first stage to the last. Prints as `0:2+1:2 2:4` (device:samples), parses back.

    Raises:
        UsageError: A device without a place or with two, one without samples, or stages with unequal microbatches.
    """

    stages: tuple[tuple[DeviceShare, ...], ...]

    def __post_init__(self) -> None:
        devices = sorted(share.device for stage in self.stages for share in stage)
        if devices != list(range(len(devices))) or not all(self.stages):
            expected, do = "each device from 0 on in one stage, and one or more in each", "Give each device a stage"
            raise UsageError("devices of stages", got=str(self), expected=expected, do=do)
        sizes = {sum(share.num_samples for share in stage) for stage in self.stages}
        if len(sizes) != 1 or any(share.num_samples < 1 for stage in self.stages for share in stage):
            expected = "1 or more on each device, and as many in each stage as a microbatch has"
            do = "Give slow devices fewer samples, or cut the batch into fewer microbatches"
            raise UsageError("samples of devices", got=str(self), expected=expected, do=do)

    def __str__(self) -> str:
        return " ".join("+".join(f"{device}:{samples}" for device, samples in stage) for stage in self.stages)

    @classmethod
    def parse(cls, text: str) -> "StageDevices":
        """Parse a text such as `0:2+1:2 2:4`.

        Raises:
            UsageError: It is none.
        """
        stages = []
        for stage in text.split():
            parts = [_SHARE_TEXT.fullmatch(part) for part in stage.split("+")]
            if not all(parts):
                expected, do = "device:samples, with + inside a stage and spaces between stages", "Write 0:2+1:2 2:4"
                raise UsageError("devices of a stage", got=stage, expected=expected, do=do)
            stages.append(tuple(DeviceShare(int(part[1]), int(part[2])) for part in parts if part))
        return cls(tuple(stages))

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def num_devices(self) -> int:
        return sum(map(len, self.stages))

    @property
    def num_samples(self) -> int:
        return sum(share.num_samples for share in self.stages[0])

    @property
    def is_wide(self) -> bool:
        """True if a stage has several devices."""
        return self.num_devices > self.num_stages

    @property
    def is_plain(self) -> bool:
        """True if device i is stage i alone, as torch's stages expect."""
        return all(shares[0].device == stage and len(shares) == 1 for stage, shares in enumerate(self.stages))

    @cached_property
    def stage_of_device(self) -> tuple[int, ...]:
        found = {share.device: stage for stage, shares in enumerate(self.stages) for share in shares}
        return tuple(found[device] for device in range(len(found)))

    @cached_property
    def ranges(self) -> tuple[range, ...]:
        """Samples of each device, counted in the microbatch."""
        found: dict[int, range] = {}
        for shares in self.stages:
            first = 0
            for device, num_samples in shares:
                found[device] = range(first, first + num_samples)
                first += num_samples
        return tuple(found[device] for device in range(len(found)))

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """Pieces over all links, by link, then by first sample."""
        found = []
        for link in range(self.num_stages - 1):
            for src, _ in self.stages[link]:
                for dst, _ in self.stages[link + 1]:
                    first = max(self.ranges[src].start, self.ranges[dst].start)
                    end = min(self.ranges[src].stop, self.ranges[dst].stop)
                    if first < end:
                        found.append(Piece(link, src, dst, first, end - first))
        return tuple(found)

    def members(self, stage: int) -> tuple[int, ...]:
        """Return the devices of a stage, in the order of their samples."""
        return tuple(share.device for share in self.stages[stage])

    def fraction(self, device: int) -> float:
        """Return the fraction of a microbatch that a device computes."""
        return len(self.ranges[device]) / self.num_samples


def one_device_each(num_stages: int, num_samples: int = 1) -> StageDevices:
    """Return stages of one device each, in order."""
    return StageDevices(tuple((DeviceShare(stage, num_samples),) for stage in range(num_stages)))


def even_samples(groups: Sequence[Sequence[int]], num_samples: int) -> StageDevices:
    """Return stages of these devices, with equal numbers of samples as far as they divide; earlier ones get more."""
    stages = []
    for members in groups:
        each, more = divmod(num_samples, len(members))
        stages.append(tuple(DeviceShare(device, each + (place < more)) for place, device in enumerate(members)))
    return StageDevices(tuple(stages))


def verify_pieces(devices: StageDevices, pieces: Iterable[Piece] | None = None) -> None:
    """Prove on symbolic samples that each device gets what it computes, and every sample's gradient comes back.

    Each sample of a microbatch is followed as a symbol, forward through the stages and back. A device computes when it
    has exactly its samples, each once; it may send only what it has computed.

    `pieces`: what is sent; None: `devices.pieces`.

    Raises:
        ScheduleError: A device lacks a sample, gets one twice, gets one of another device, or sends one it has not.
    """
    by_link: dict[int, list[Piece]] = {}
    for piece in devices.pieces if pieces is None else pieces:
        by_link.setdefault(piece.link, []).append(piece)
    for direction, links in (
        ("activations", range(devices.num_stages - 1)),
        ("gradients", range(devices.num_stages - 2, -1, -1)),
    ):
        for link in links:
            _verify_link(devices, link, by_link.get(link, []), is_back=direction == "gradients")


def _verify_link(devices: StageDevices, link: int, pieces: Sequence[Piece], *, is_back: bool) -> None:
    """Follow the samples over a link in one direction."""
    src_stage, dst_stage = (link + 1, link) if is_back else (link, link + 1)
    noun = "gradient" if is_back else "activation"
    arrived: dict[int, list[int]] = {device: [] for device in devices.members(dst_stage)}
    for piece in pieces:
        src, dst = (piece.dst, piece.src) if is_back else (piece.src, piece.dst)
        samples = range(piece.first, piece.first + piece.num_samples)
        if src not in devices.members(src_stage) or not set(samples) <= set(devices.ranges[src]):
            raise ScheduleError(_piece_error(link, f"device {src} sends the {noun} of samples {samples}", "its own"))
        if dst not in arrived:
            raise ScheduleError(_piece_error(link, f"device {dst} gets a piece", f"devices of stage {dst_stage}"))
        arrived[dst] += samples
    for device, samples in arrived.items():
        if sorted(samples) != list(devices.ranges[device]):
            got = f"device {device} gets the {noun} of samples {sorted(samples)}"
            raise ScheduleError(_piece_error(link, got, f"each of {list(devices.ranges[device])} once"))


def _piece_error(link: int, got: str, expected: str) -> str:
    do = "Send the common samples of each two devices, once"
    return explain(f"pieces between stages {link} and {link + 1}", got=got, expected=expected, do=do)


@dataclass(frozen=True, kw_only=True, slots=True)
class Overheads:
    """Seconds of a step for the host's work, beyond computing blocks and moving bytes."""

    action_s: tuple[float, ...] = ()
    """For each device: added to a forward or a backward; empty: none."""
    message_s: float = 0.0
    """For each transfer that a stage begins."""
    step_s: float = 0.0
    """For a step, after all stages are done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTimes:
    """Seconds for one microbatch. Links are full duplex; in one direction a transfer waits for the one before it.

    Raises:
        UsageError: Lengths that do not fit each other, or a time below zero.
    """

    forward_s: tuple[float, ...]
    """For each device, of its part of the samples; with one device a stage, for each stage."""
    backward_s: tuple[float, ...]
    """For each device."""
    forward_transfer_s: tuple[float, ...] = ()
    """Activations, of each piece, by `StageDevices.pieces`; with one device a stage, from each stage except the last
    to the next one. Empty: no time."""
    backward_transfer_s: tuple[float, ...] = ()
    """Gradients, of each piece in the other direction; empty: no time."""
    before_s: tuple[float, ...] = ()
    """For each device, before its first action: the optimizer step of the train step before; empty: none."""
    reduce_s: tuple[float, ...] = ()
    """For each stage, once its devices have ended: the allreduce of their gradients; empty: none."""
    devices: StageDevices | None = None
    """Devices of the stages; None: one each."""
    message_s: float = 0.0
    """Time of a stage for each transfer that it begins, sending or receiving."""
    after_s: float = 0.0
    """After all stages are done: until all know the loss."""

    def __post_init__(self) -> None:
        num_devices = len(self.forward_s) if self.devices is None else self.devices.num_devices
        num_links = num_devices - 1 if self.devices is None else len(self.devices.pieces)
        _check_times("backward_s", self.backward_s, num_devices)
        _check_times("forward_s", self.forward_s, max(1, num_devices))
        if self.before_s:
            _check_times("before_s", self.before_s, num_devices)
        if self.reduce_s:
            _check_times("reduce_s", self.reduce_s, self.num_stages)
        _check_times("message_s and after_s", (self.message_s, self.after_s), 2)
        for what in ("forward_transfer_s", "backward_transfer_s"):
            if getattr(self, what):
                _check_times(what, getattr(self, what), num_links)

    @property
    def num_stages(self) -> int:
        return len(self.forward_s) if self.devices is None else self.devices.num_stages

    @property
    def placed(self) -> StageDevices:
        return self.devices or one_device_each(len(self.forward_s))

    @property
    def slowest_s(self) -> float:
        """Forward and backward time of the slowest device."""
        return max(map(add, self.forward_s, self.backward_s))

    def with_overheads(self, overheads: Overheads) -> "StageTimes":
        """Return the times with the overheads of the host added.

        Raises:
            UsageError: Overheads for another number of devices.
        """
        actions = overheads.action_s or (0.0,) * len(self.forward_s)
        _check_times("action_s", actions, len(self.forward_s))
        return replace(
            self,
            forward_s=tuple(map(add, self.forward_s, actions)),
            backward_s=tuple(map(add, self.backward_s, actions)),
            message_s=self.message_s + overheads.message_s,
            after_s=self.after_s + overheads.step_s,
        )

    def transfer_s(self, link: int) -> tuple[float, float]:
        """Return forward and backward transfer time between stages `link` and `link + 1`: of the busiest device."""
        if self.devices is None:
            forward, backward = self.forward_transfer_s, self.backward_transfer_s
            return forward[link] if forward else 0.0, backward[link] if backward else 0.0
        loads: dict[tuple[int, int], float] = {}
        for number, piece in enumerate(self.devices.pieces):
            for direction, times in enumerate((self.forward_transfer_s, self.backward_transfer_s)):
                for device in (piece.src, piece.dst) if piece.link == link and times else ():
                    loads[device, direction] = loads.get((device, direction), 0.0) + times[number]
        there, back = ([load for key, load in loads.items() if key[1] == direction] for direction in (0, 1))
        return max(there, default=0.0), max(back, default=0.0)

    def bound_s(self, num_microbatches: int) -> float:
        """Return a lower bound for any schedule: the first microbatch arrives, all are computed, the last one returns.

        It is the maximum over the devices, and in the same way over the directions of the links. In a stage of several
        devices the way of a microbatch is at least that of the fastest part.
        """
        placed = self.placed
        there, back = [0.0], [0.0]
        for stage in range(placed.num_stages):
            members = placed.members(stage)
            there.append(there[-1] + min(self.forward_s[device] for device in members))
            back.append(back[-1] + min(self.backward_s[device] for device in members))
            if stage + 1 < placed.num_stages:
                forward_s, backward_s = self._fastest_pieces_s(stage)
                there[-1] += forward_s
                back[-1] += backward_s
        whole = there[-1] + back[-1]
        own = map(add, self.forward_s, self.backward_s)
        stages = [
            there[placed.stage_of_device[device]] + num_microbatches * each + back[placed.stage_of_device[device]]
            for device, each in enumerate(own)
        ]
        more = num_microbatches - 1
        links = [self.transfer_s(link) for link in range(placed.num_stages - 1)]
        return max([*stages, *(whole + more * max(pair) for pair in links if self.devices is None)])

    def _fastest_pieces_s(self, link: int) -> tuple[float, float]:
        """Return the least time of a piece over a link, forward and backward."""
        if self.devices is None:
            return self.transfer_s(link)
        numbers = [number for number, piece in enumerate(self.devices.pieces) if piece.link == link]
        forward, backward = self.forward_transfer_s, self.backward_transfer_s
        return (
            min(forward[number] for number in numbers) if forward else 0.0,
            min(backward[number] for number in numbers) if backward else 0.0,
        )


def _check_times(what: str, values: tuple[float, ...], count: int) -> None:
    if len(values) != count:
        do = "Give one for each stage, or for each link between two"
        raise UsageError(f"{what}: how many", got=len(values), expected=str(count), do=do)
    for index, value in enumerate(values):
        if not 0 <= value < float("inf"):
            raise UsageError(f"{what}[{index}]", got=value, expected="a finite time, 0 or more", do="Correct it")


_SENDS = {ActionKind.SEND_FORWARD: 0, ActionKind.SEND_BACKWARD: 1}
_RECEIVES = {ActionKind.RECEIVE_FORWARD: 0, ActionKind.RECEIVE_BACKWARD: 1}
_COMPUTE, _FIRST, _SECOND, _WAIT = range(4)
_TransferKey = tuple[int, int, int]
"""(piece, direction, microbatch)."""
_Op = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class ComputeSpan:
    """An action and its time span, in simulated seconds."""

    action: PipelineAction
    begin_s: float
    end_s: float
    device: int


class PipelineTimeline:
    """The instructions of a pipeline schedule in one sequence that respects all dependencies.

    Raises:
        ScheduleError: The stages deadlock.
        UsageError: Unknown transfer mode.
    """

    def __init__(
        self, order: PipelineSchedule, transfers: str = "asynchronous", devices: StageDevices | None = None
    ) -> None:
        self.devices = devices or one_device_each(order.num_stages)
        if self.devices.num_stages != order.num_stages:
            expected, do = f"{order.num_stages}, as in the order", "Give devices for these stages"
            got = self.devices.num_stages
            raise ScheduleError("number of stages with devices", got=got, expected=expected, do=do)
        verify_pieces(self.devices)
        self._actions: list[tuple[PipelineAction, int]] = []
        self._numbers: dict[_TransferKey, int] = {}
        self._ports = _number_ports(self.devices)
        self._pieces = [
            [
                (number, piece.link)
                for number, piece in enumerate(self.devices.pieces)
                if device in (piece.src, piece.dst)
            ]
            for device in range(self.devices.num_devices)
        ]
        self._ops = list(self._linearize(stage_programs(order, transfers)))

    def step_s(self, times: StageTimes) -> float:
        """Return the time until the last stage is done.

        Raises:
            ScheduleError: Times for other stages or devices.

        Cost: O(devices x microbatches), a microsecond for some instructions.
        """
        return self._end_s(self._run(times)[0], times)

    def step_and_spans(self, times: StageTimes) -> tuple[float, list[ComputeSpan]]:
        """Return the same, and the time span of each action; it raises the same errors as `step_s`."""
        now_s, begun_s = self._run(times)
        durations = {ActionKind.FORWARD: times.forward_s, ActionKind.BACKWARD: times.backward_s}
        pairs = zip(self._actions, begun_s, strict=True)
        spans = [ComputeSpan(each, at_s, at_s + durations[each.kind][device], device) for (each, device), at_s in pairs]
        return self._end_s(now_s, times), spans

    def _end_s(self, now_s: list[float], times: StageTimes) -> float:
        """Return the end of the step: devices of a stage reduce their gradients together."""
        if not times.reduce_s:
            return max(now_s) + times.after_s
        stages = range(self.devices.num_stages)
        ends = [max(now_s[device] for device in self.devices.members(stage)) for stage in stages]
        return max(map(add, ends, times.reduce_s)) + times.after_s

    def _run(self, times: StageTimes) -> tuple[list[float], list[float]]:
        """Return (end of each device, begin of each action)."""
        if self.devices.num_stages != times.num_stages:
            expected, do = f"{self.devices.num_stages}, as in the order", "Give times for these stages"
            raise ScheduleError("number of stages in times", got=times.num_stages, expected=expected, do=do)
        if times.placed.pieces != self.devices.pieces and times.devices is not None:
            do = "Simulate with the devices of the times"
            raise ScheduleError("devices of times", got=str(times.placed), expected=str(self.devices), do=do)
        now_s = list(times.before_s or (0.0,) * self.devices.num_devices)
        durations, message_s = (times.forward_s, times.backward_s), times.message_s
        nothing = (0.0,) * len(self.devices.pieces)
        crossing = [
            each
            for pair in zip(times.forward_transfer_s or nothing, times.backward_transfer_s or nothing, strict=True)
            for each in pair
        ]
        known_s, free_s = [0.0] * len(self._numbers), [0.0] * (1 + max(map(max, self._ports), default=0))
        begun_s: list[float] = []
        for what, device, number, way in self._ops:
            if what == _COMPUTE:
                begun_s.append(now_s[device])
                now_s[device] += durations[number][device]
            elif what == _WAIT:
                now_s[device] = max(now_s[device], known_s[number])
            else:
                now_s[device] += message_s
                if what == _FIRST:
                    known_s[number] = now_s[device]
                    continue
                out, into = self._ports[way]
                start_s = max(known_s[number], now_s[device], free_s[out], free_s[into])
                known_s[number] = free_s[out] = free_s[into] = start_s + crossing[way]
        return now_s, begun_s

    def _linearize(self, programs: list[list[StageInstruction]]) -> Iterator[_Op]:
        """Yield operations by running every stage as far as it can, until all are done.

        Devices of a stage run each instruction one after the other. They have the same program, so that pieces pass a
        port in its order: those of a microbatch before those of the next.
        """
        at = [0] * len(programs)
        ends: dict[_TransferKey, int] = {}
        while any(done < len(program) for done, program in zip(at, programs, strict=True)):
            before = list(at)
            for stage, program in enumerate(programs):
                members = self.devices.members(stage)
                while at[stage] < len(program) and self._can_run(members, program[at[stage]], ends):
                    for device in members:
                        yield from self._ops_of_instruction(device, program[at[stage]], ends)
                    at[stage] += 1
            if before == at:
                raise ScheduleError(_deadlock_text(programs, at))

    def _ops_of_instruction(
        self, device: int, instruction: StageInstruction, ends: dict[_TransferKey, int]
    ) -> Iterator[_Op]:
        for action in instruction.actions:
            if instruction.what == "compute":
                self._actions.append((action, device))
                yield _COMPUTE, device, int(action.kind == ActionKind.BACKWARD), 0
                continue
            for key in self._transfer_keys(device, action):
                number = self._numbers.setdefault(key, len(self._numbers))
                if instruction.what == "wait":
                    yield _WAIT, device, number, 0
                else:
                    ends[key] = ends.get(key, 0) + 1
                    yield _FIRST if ends[key] == 1 else _SECOND, device, number, 2 * key[0] + key[1]

    def _can_run(self, members: Sequence[int], instruction: StageInstruction, ends: dict[_TransferKey, int]) -> bool:
        """Return whether both ends of each awaited transfer have begun."""
        return instruction.what != "wait" or all(
            ends.get(key, 0) > 1
            for device in members
            for action in instruction.actions
            for key in self._transfer_keys(device, action)
        )

    def _transfer_keys(self, device: int, action: PipelineAction) -> list[_TransferKey]:
        """Return piece, direction and microbatch of each of a device's transfers: equal at both ends."""
        is_send = action.kind in _SENDS
        direction = _SENDS[action.kind] if is_send else _RECEIVES[action.kind]
        link = action.stage_index - direction if is_send else action.stage_index - 1 + direction
        return [
            (number, direction, action.microbatch_index) for number, of_link in self._pieces[device] if of_link == link
        ]


def _number_ports(devices: StageDevices) -> list[tuple[int, int]]:
    """Return for each piece and direction the numbers of its ports: where it leaves, and where it arrives.

    A port carries one piece at a time. A device has one for each link, direction and side.
    """
    numbers: dict[tuple[int, int, int], int] = {}
    found = []
    for piece in devices.pieces:
        for direction in (0, 1):
            keys = [(device, piece.link, direction) for device in (piece.src, piece.dst)]
            first, second = (numbers.setdefault(key, len(numbers)) for key in keys)
            found.append((first, second))
    return found


def _deadlock_text(stages: list[list[StageInstruction]], at: list[int]) -> str:
    waiting = [
        f"stage {stage} waits for {', '.join(map(str, program[done].actions))}"
        for stage, (program, done) in enumerate(zip(stages, at, strict=True))
        if done < len(program)
    ]
    do = "Begin transfers in the same order at both of their ends"
    return explain("pipeline", got="; ".join(waiting), expected="a stage that can go on", do=do)


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineSimulation:
    """Result of a simulated pipeline step."""

    step_s: float
    """Time until the last stage is done."""
    bound_s: float
    """Lower bound on the time of any schedule for these stages and links."""
    busy_s: tuple[float, ...]
    """Compute time of each device."""
    peak_in_flight: tuple[int, ...]
    """Largest number of microbatches whose activations each stage holds."""
    spans: tuple[ComputeSpan, ...]
    """By stage, then by time."""

    @property
    def bubble_fraction(self) -> float:
        """Fraction of all devices' time in which they do not compute."""
        whole = self.step_s * len(self.busy_s)
        return 1 - sum(self.busy_s) / whole if whole else 0.0


def simulate_pipeline(
    schedule: PipelineSchedule, times: StageTimes, transfers: str = "asynchronous"
) -> PipelineSimulation:
    """Simulate one step of a pipeline schedule.

    `transfers`: one of `TRANSFER_MODES`.

    Raises:
        ScheduleError: The stages deadlock, or their number is not that of the times.
        UsageError: Unknown transfer mode.

    Cost: O(stages x microbatches).
    """
    step_s, spans = PipelineTimeline(schedule, transfers, times.devices).step_and_spans(times)
    return PipelineSimulation(
        step_s=step_s,
        bound_s=times.bound_s(schedule.num_microbatches),
        busy_s=tuple(
            schedule.num_microbatches * (f + b) for f, b in zip(times.forward_s, times.backward_s, strict=True)
        ),
        peak_in_flight=schedule.peak_in_flight,
        spans=tuple(sorted(spans, key=lambda span: (span.action.stage_index, span.device, span.begin_s))),
    )
