"""Devices of each pipeline stage: a stage of several devices splits the samples of each microbatch between them.

Two slow devices beside a fast one make two stages of equal speed: each slow device computes its part of a microbatch's
samples through the blocks of the first stage, and sends it to the fast device. Samples keep their order, so each device
takes consecutive ones, and what it sends to a device of the next stage is the common part of both ranges, a *piece*.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ringweave.errors import ScheduleError, UsageError, explain

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
