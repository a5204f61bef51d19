"""Snapshots of the server's whole state in one safetensors file: parameters, optimizer, ledger.

A snapshot is copied between two pushes, written while further pushes are applied, and appears whole or not at all:
a new file is renamed into its place once it is on the disk.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import xxhash
from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from typing_extensions import Buffer

from ringweave.errors import TrainingError
from ringweave.files import file_io
from ringweave.param_server import flat, optimizers
from ringweave.param_server.barrier import RingBarrier
from ringweave.param_server.data_shards import DataPosition, DataShard, ResumePoint
from ringweave.param_server.flat import FlatTensors
from ringweave.param_server.messages import ServerSetup
from ringweave.param_server.model import AccumulatingModel
from ringweave.param_server.versions import PushReceipt, RingGrants, TrainStepProgress

# One file, to show the writing and reading of each part side by side.


_SNAPSHOT_FORMAT = 7
_METADATA_KEY, _CHECKSUM_KEY = "ringweave", "check"


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveRingState:
    """State of the rings, for a server that takes over while they compute."""

    ring_grants: list[RingGrants]
    shards: list[DataShard]
    dispatched: dict[int, int]
    """Epoch -> samples that are dispatched."""
    gone: list[int]
    """Rings that have left for good."""
    barrier: RingBarrier
    ring_progress: dict[int, str] = field(default_factory=dict)
    """Text that came with the last push of each ring."""
    resumed: ResumePoint | None = None
    """Point from which the job resumed."""


_LIVE_STATE = TypeAdapter(LiveRingState | None)
_POSITION, _PROGRESS = TypeAdapter(DataPosition), TypeAdapter(TrainStepProgress)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSnapshot:
    """State of a server at one version."""

    setup: ServerSetup
    version: int
    pushed: dict[int, PushReceipt]
    """Last receipt of each ring, so that an acknowledged push is not applied again."""
    parameters: list[Tensor]
    """Parameters at the start of the present train step."""
    progress: TrainStepProgress
    outer_progress: list[TrainStepProgress]
    """Outer steps of each fragment; empty if there are none."""
    accumulated: list[Tensor]
    """Sum of the gradients of the present train step; empty if there are none."""
    groups: list[dict[str, Any]]
    """Groups of the optimizer, without the parameters."""
    state: dict[str, Tensor]
    """Tensors of the optimizer's state, by `block.name`."""
    scalars: dict[str, float]
    """Numbers of the optimizer's state, by `block.name`."""
    options: list[dict[str, Any]]
    """Options of each group, as they came with the last push; empty before the first."""
    last_updated: list[int]
    """Indices of the parameters that the last train step has updated."""
    live_state: LiveRingState | None = None
    """Not in files: a job that resumes from one has rings that restart."""
    ring_bases: dict[int, list[Tensor]] = field(default_factory=dict)
    """Base parameters of each ring whose next push is to be compensated; not in files."""
    position: DataPosition = field(default_factory=DataPosition)
    """Samples that are in the parameters."""

    @property
    def num_bytes(self) -> int:
        return sum(
            each.nbytes
            for each in [*self.parameters, *self.accumulated, *self.state.values(), *chain(*self.ring_bases.values())]
        )


def take_snapshot(
    model: AccumulatingModel,
    version: int,
    pushed: Mapping[int, PushReceipt],
    live: LiveRingState | None = None,
    position: DataPosition | None = None,
) -> ServerSnapshot:
    """Return a copy of the present state."""
    optimizer_state = model.optimizer.state_dict()
    entries = {
        f"{place}.{name}": value for place, each in optimizer_state["state"].items() for name, value in each.items()
    }
    groups = [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer_state["param_groups"]
    ]
    return ServerSnapshot(
        setup=model.setup,
        version=version,
        pushed=dict(pushed),
        parameters=[view.clone() for view in model.step_start.views],
        progress=replace(model.progress, present=set(model.progress.present)),
        outer_progress=[replace(each, present=set(each.present)) for each in model.outer_progress],
        accumulated=[view.clone() for view in model.accumulated.views] if model.accumulated else [],
        groups=groups,
        state={key: value.clone() for key, value in entries.items() if isinstance(value, Tensor)},
        scalars={key: value for key, value in entries.items() if isinstance(value, (int, float))},
        options=[dict(each) for each in model.options],
        last_updated=sorted(model.last_updated),
        live_state=live,
        ring_bases={ring: [view.clone() for view in base.views] for ring, base in model.ring_bases.items()}
        if live
        else {},
        position=position or DataPosition(),
    )


def save_snapshot(snapshot: ServerSnapshot, path: Path) -> None:
    """Write a file, in place of an earlier one of that name.

    Raises:
        OSError: The disk does not take it; an earlier file is unchanged.
    """
    tensors, metadata = _pack_snapshot(snapshot)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    try:
        save_file(tensors, partial, metadata=metadata)
    except SafetensorError as cause:  # the library wraps errors of the disk
        raise OSError(f"{partial}: {cause}") from cause
    with partial.open("rb") as file:
        file_io.fsync_file(file)
    partial.replace(path)
    file_io.fsync_folder(path.parent)


def snapshot_to_bytes(snapshot: ServerSnapshot) -> bytes:
    """Return the snapshot as bytes, including the state of the rings: for a standby."""
    tensors, metadata = _pack_snapshot(snapshot)
    return safetensors.torch.save(tensors, metadata)


def snapshot_to_buffers(snapshot: ServerSnapshot) -> dict[str, Buffer]:
    """Return the snapshot as buffers without a copy, for a peer; `parts_from_buffers` reads them."""
    text, tensors = snapshot_to_parts(snapshot)
    layout = {name: [str(each.dtype).removeprefix("torch."), list(each.shape)] for name, each in tensors.items()}
    metadata = json.dumps({"layout": layout, "metadata": text}).encode()
    return {
        _METADATA_KEY: metadata,
        **{name: each.flatten().view(torch.uint8).numpy().data for name, each in tensors.items()},
    }


def parts_from_buffers(buffers: Mapping[str, Buffer]) -> tuple[str, dict[str, Tensor]]:
    """Return what `snapshot_to_parts` gave, from these buffers; tensors share their memory.

    Raises:
        TrainingError: The buffers hold something else.
    """
    try:
        document = file_io.parse_json(bytes(buffers[_METADATA_KEY]))
        tensors = {
            name: _tensor_over(buffers[name], getattr(torch, dtype), shape)
            for name, (dtype, shape) in document["layout"].items()
        }
        return document["metadata"], tensors
    except (*_DAMAGE_ERRORS, RuntimeError) as cause:
        raise _snapshot_error(cause, "one of a server of rings", "Run the same ringweave on all nodes", "") from cause


def _tensor_over(memory: Buffer, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    if not memoryview(memory).nbytes:
        return torch.empty(0, dtype=dtype).view(shape)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _pack_snapshot(snapshot: ServerSnapshot) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return tensors and metadata of a file."""
    text, tensors = snapshot_to_parts(snapshot)
    return tensors, {_METADATA_KEY: text, _CHECKSUM_KEY: _snapshot_checksum(text, tensors)}


def snapshot_to_parts(snapshot: ServerSnapshot) -> tuple[str, dict[str, Tensor]]:
    """Return the metadata as JSON, and all tensors by the names used in it."""
    metadata = {
        "format": _SNAPSHOT_FORMAT,
        "version": snapshot.version,
        "setup": snapshot.setup.model_dump(mode="json"),
        "pushed": [asdict(receipt) for receipt in snapshot.pushed.values()],
        "progress": _PROGRESS.dump_python(snapshot.progress, mode="json"),
        "outer_progress": [_PROGRESS.dump_python(each, mode="json") for each in snapshot.outer_progress],
        "groups": snapshot.groups,
        "scalars": snapshot.scalars,
        "options": snapshot.options,
        "last_updated": snapshot.last_updated,
        "live_state": asdict(snapshot.live_state) if snapshot.live_state else None,
        "position": asdict(snapshot.position),
    }
    tensors = {f"parameter.{place}": each.contiguous() for place, each in enumerate(snapshot.parameters)}
    tensors |= {f"accumulated.{place}": each.contiguous() for place, each in enumerate(snapshot.accumulated)}
    tensors |= {f"state.{key}": each for key, each in snapshot.state.items()}
    for ring, base in snapshot.ring_bases.items():
        tensors |= {f"base.{ring}.{place}": each.contiguous() for place, each in enumerate(base)}
    return json.dumps(metadata), tensors


def load_snapshot(path: Path) -> ServerSnapshot:
    """Read a file of `save_snapshot`.

    Raises:
        TrainingError: The file is damaged, or is something else.
    """
    try:
        with safe_open(path, framework="pt") as file:
            # Not a dictionary: it has keys(), but cannot be iterated over.
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            return _unpack_snapshot(file.metadata(), tensors)
    except _DAMAGE_ERRORS as cause:
        do = "Use the one before it"
        raise _snapshot_error(cause, "a whole file that ringweave server wrote", do, str(path)) from cause


def snapshot_from_bytes(content: bytes) -> ServerSnapshot:
    """Parse the bytes of `snapshot_to_bytes`.

    Raises:
        TrainingError: They are something else.
    """
    try:
        # The metadata, which the library does not return: a length, then JSON of that length.
        length = int.from_bytes(content[:8], "little")
        metadata = file_io.parse_json(content[8 : 8 + length])["__metadata__"]
        return _unpack_snapshot(metadata, safetensors.torch.load(content))
    except _DAMAGE_ERRORS as cause:
        raise _snapshot_error(cause, "one of a server that leads", "Run the same ringweave on all nodes", "") from cause


_DAMAGE_ERRORS = (SafetensorError, OSError, LookupError, TypeError, ValueError, AttributeError, RecursionError)


def _snapshot_error(cause: Exception, expected: str, do: str, where: str) -> TrainingError:
    what = "snapshot of the parameter server"
    return TrainingError(what, got=str(cause)[:200], expected=expected, do=do, where=where)


def _unpack_snapshot(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> ServerSnapshot:
    text = metadata[_METADATA_KEY]
    stated, found = metadata[_CHECKSUM_KEY], _snapshot_checksum(text, tensors)
    if stated != found:
        raise ValueError(f"check {found} instead of {stated}")
    return _parse_metadata(text, tensors)


def snapshot_from_parts(text: str, tensors: Mapping[str, Tensor]) -> ServerSnapshot:
    """Return the snapshot of the parts of `snapshot_to_parts`.

    Raises:
        TrainingError: They are something else.
    """
    try:
        return _parse_metadata(text, tensors)
    except _DAMAGE_ERRORS as cause:
        raise _snapshot_error(
            cause, "one of a server of rings", "Go on with the ringweave that wrote it", ""
        ) from cause


def _parse_metadata(text: str, tensors: Mapping[str, Tensor]) -> ServerSnapshot:
    metadata = file_io.parse_json(text)
    if metadata["format"] != _SNAPSHOT_FORMAT:
        do = "Go on with the ringweave that wrote it, or start without it"
        raise TrainingError(
            "format of a snapshot of the parameter server",
            got=metadata["format"],
            expected=str(_SNAPSHOT_FORMAT),
            do=do,
        )
    setup = ServerSetup.model_validate(metadata["setup"])
    return ServerSnapshot(
        setup=setup,
        version=metadata["version"],
        pushed={receipt["ring"]: PushReceipt(**receipt) for receipt in metadata["pushed"]},
        parameters=[tensors[f"parameter.{place}"] for place in range(len(setup.tensors))],
        progress=_PROGRESS.validate_python(metadata["progress"]),
        outer_progress=_parse_outer_progress(metadata["outer_progress"], setup),
        accumulated=[
            tensors[f"accumulated.{place}"] for place in range(sum(key.startswith("accumulated.") for key in tensors))
        ],
        groups=metadata["groups"],
        state={key.removeprefix("state."): each for key, each in tensors.items() if key.startswith("state.")},
        scalars=metadata["scalars"],
        options=metadata["options"],
        last_updated=metadata["last_updated"],
        live_state=_LIVE_STATE.validate_python(metadata["live_state"]),
        ring_bases=_parse_bases(len(setup.tensors), tensors),
        position=_POSITION.validate_python(metadata["position"]),
    )


def _parse_bases(num_places: int, tensors: Mapping[str, Tensor]) -> dict[int, list[Tensor]]:
    rings = sorted({int(key.split(".")[1]) for key in tensors if key.startswith("base.")})
    return {ring: [tensors[f"base.{ring}.{place}"] for place in range(num_places)] for ring in rings}


def restore_model(snapshot: ServerSnapshot) -> AccumulatingModel:
    """Restore the model of a snapshot."""
    model = AccumulatingModel(snapshot.setup, _make_flat(snapshot.setup, snapshot.parameters), snapshot.progress)
    model.options, model.last_updated = snapshot.options, set(snapshot.last_updated)
    model.outer_progress = snapshot.outer_progress
    for ring, base in snapshot.ring_bases.items():
        model.keep_base(ring, _make_flat(snapshot.setup, base))
    if snapshot.accumulated:
        model.accumulated = _make_flat(snapshot.setup, snapshot.accumulated)
    state: dict[int, dict[str, Any]] = {}
    for key, value in [*snapshot.state.items(), *snapshot.scalars.items()]:
        place, _, name = key.partition(".")
        state.setdefault(int(place), {})[name] = value
    places = [group["params"] for group in model.optimizer.state_dict()["param_groups"]]
    groups = [
        {**optimizers.with_tuples(kept), "params": own} for kept, own in zip(snapshot.groups, places, strict=True)
    ]
    model.optimizer.load_state_dict({"state": state, "param_groups": groups})
    return model


def with_fragments_of(snapshot: ServerSnapshot, setup: ServerSetup) -> ServerSnapshot:
    """Return the snapshot for sites that divide the parameters otherwise, or not at all, as a single site.

    Outer steps that are not full end with the parts that they have. Momentum stays where there is an outer optimizer in
    both.
    """
    newest = flat.tensors_of_setup(snapshot.setup)
    restore_model(snapshot).read_parameters(newest)
    model = AccumulatingModel(setup, _make_flat(setup, newest.views), snapshot.progress)
    fitted = take_snapshot(model, snapshot.version, snapshot.pushed, position=snapshot.position)
    has_outer_optimizers = bool(setup.fragments and snapshot.setup.fragments)
    return replace(fitted, state=snapshot.state, scalars=snapshot.scalars) if has_outer_optimizers else fitted


def _make_flat(setup: ServerSetup, tensors: list[Tensor]) -> FlatTensors:
    made = flat.tensors_of_setup(setup)
    for view, tensor in zip(made.views, tensors, strict=True):
        view.copy_(tensor)
    return made


def _parse_outer_progress(books: Sequence[Any], setup: ServerSetup) -> list[TrainStepProgress]:
    if len(books) != len(setup.fragments):
        raise ValueError(f"outer steps of {len(books)} fragments, not of {len(setup.fragments)}")
    return [_PROGRESS.validate_python(each) for each in books]


def _snapshot_checksum(text: str, tensors: Mapping[str, Tensor]) -> str:
    """Return the xxh3 (64 bits) of the metadata and of every tensor's name, dtype, shape and bytes, in hexadecimal."""
    found = xxhash.xxh3_64(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        found.update(tensor.flatten().view(torch.uint8).numpy().data if tensor.numel() else b"")
    return found.hexdigest()
