"""The server's whole state in one safetensors file: parameters, optimizer, books.

Copied between two pushes, written beside the pushes that follow, complete or not at all: a new file is renamed into its
place when it is on the disk.
"""

# Longer than a file should be: each part of the file is written and read side by side.

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from typing_extensions import Buffer

from ringweave.errors import TrainingError, explain
from ringweave.files import durable
from ringweave.params.flat import Flat
from ringweave.params.messages import Setup
from ringweave.params.rules import Holding, Position, Progress, Receipt, Resumed, Ticket
from ringweave.params.serving.model import GatheredModel

_FORMAT = 5
_KEY, _CHECK = "ringweave", "check"


@dataclass(frozen=True, kw_only=True, slots=True)
class Live:
    """What rings are about: only of use to a server that takes over while they compute."""

    holdings: list[Holding]
    tickets: list[Ticket]
    taken: dict[int, int]
    """Epoch -> samples that are on tickets."""
    gone: list[int]
    """Rings that have left for good."""
    testaments: dict[int, str] = field(default_factory=dict)
    """What came with the last push of each ring."""
    meetings: dict[str, Any] = field(default_factory=dict)
    """Who has come where rings meet, and what all have heard, as the books of that have it; empty if nobody has."""
    resumed: Resumed | None = None
    """What the job goes on from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The state of a server at one version."""

    setup: Setup
    version: int
    pushed: dict[int, Receipt]
    """The last receipt of each ring, so that a push that was acknowledged is not applied again."""
    parameters: list[Tensor]
    """At the start of the present train step."""
    progress: Progress
    gathered: list[Tensor]
    """The sum of the gradients of the present train step; empty if there are none."""
    groups: list[dict[str, Any]]
    """The optimizer's, without the parameters."""
    state: dict[str, Tensor]
    """The optimizer's, by `block.name`; tensors only."""
    scalars: dict[str, float]
    """Likewise; numbers."""
    options: list[dict[str, Any]]
    """Of each group, as they came with the last push; empty before the first."""
    moved: list[int]
    """Places of the parameters that the last train step has moved."""
    live: Live | None = None
    """Not in files: whoever goes on from one of these begins with rings that begin anew."""
    bases: dict[int, list[Tensor]] = field(default_factory=dict)
    """Likewise: what each ring computes on, where its next push is to be compensated."""
    position: Position = field(default_factory=Position)
    """Which samples are in the parameters."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors in it."""
        return sum(
            each.nbytes
            for each in [*self.parameters, *self.gathered, *self.state.values(), *chain(*self.bases.values())]
        )


def take(
    model: GatheredModel,
    version: int,
    pushed: Mapping[int, Receipt],
    live: Live | None = None,
    position: Position | None = None,
) -> Snapshot:
    """A copy of the state now."""
    found = model.optimizer.state_dict()
    entries = {f"{place}.{name}": value for place, each in found["state"].items() for name, value in each.items()}
    groups = [{key: value for key, value in group.items() if key != "params"} for group in found["param_groups"]]
    return Snapshot(
        setup=model.setup,
        version=version,
        pushed=dict(pushed),
        parameters=[view.clone() for view in model.start.views],
        progress=replace(model.progress, present=set(model.progress.present)),
        gathered=[view.clone() for view in model.gathered.views] if model.gathered else [],
        groups=groups,
        state={key: value.clone() for key, value in entries.items() if isinstance(value, Tensor)},
        scalars={key: value for key, value in entries.items() if isinstance(value, (int, float))},
        options=[dict(each) for each in model.options],
        moved=sorted(model.moved),
        live=live,
        bases={ring: [view.clone() for view in base.views] for ring, base in model.bases.items()} if live else {},
        position=position or Position(),
    )


def save(snapshot: Snapshot, path: Path) -> None:
    """Write it, in place of an earlier one of that name.

    Raises:
        OSError: The disk does not take it; an earlier file is as it was.
    """
    tensors, metadata = _packed(snapshot)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    try:
        save_file(tensors, partial, metadata=metadata)
    except SafetensorError as cause:  # the library's word for what the disk says
        raise OSError(f"{partial}: {cause}") from cause
    with partial.open("rb") as file:
        durable.sync(file)
    partial.replace(path)
    durable.sync_folder(path.parent)


def to_bytes(snapshot: Snapshot) -> bytes:
    """The same as one piece of memory, what rings are about included: for a standby."""
    tensors, metadata = _packed(snapshot)
    return safetensors.torch.save(tensors, metadata)


def to_buffers(snapshot: Snapshot) -> dict[str, Buffer]:
    """All of it where it lies in memory, without a copy: for a peer that reads it in pieces. `of_buffers` reads it."""
    text, tensors = to_parts(snapshot)
    layout = {name: [str(each.dtype).removeprefix("torch."), list(each.shape)] for name, each in tensors.items()}
    books = json.dumps({"layout": layout, "books": text}).encode()
    return {_KEY: books, **{name: each.flatten().view(torch.uint8).numpy().data for name, each in tensors.items()}}


def of_buffers(buffers: Mapping[str, Buffer]) -> tuple[str, dict[str, Tensor]]:
    """What `to_parts` gave, from what `to_buffers` made of it; tensors have the memory of the buffers.

    Raises:
        TrainingError: It is something else.
    """
    try:
        found = json.loads(bytes(buffers[_KEY]))
        tensors = {
            name: _tensor_over(buffers[name], getattr(torch, dtype), shape)
            for name, (dtype, shape) in found["layout"].items()
        }
        return found["books"], tensors
    except (*_DAMAGES, RuntimeError) as cause:
        raise _refusal(cause, "one of a server of rings", "Run the same ringweave on all nodes", "") from cause


def _tensor_over(memory: Buffer, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    if not memoryview(memory).nbytes:
        return torch.empty(0, dtype=dtype).view(shape)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _packed(snapshot: Snapshot) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a file."""
    text, tensors = to_parts(snapshot)
    return tensors, {_KEY: text, _CHECK: _check(text, tensors)}


def to_parts(snapshot: Snapshot) -> tuple[str, dict[str, Tensor]]:
    """The books as JSON, and all tensors by names that these give a meaning."""
    books = {
        "format": _FORMAT,
        "version": snapshot.version,
        "setup": snapshot.setup.model_dump(mode="json"),
        "pushed": [asdict(receipt) for receipt in snapshot.pushed.values()],
        "progress": {**asdict(snapshot.progress), "present": sorted(snapshot.progress.present)},
        "groups": snapshot.groups,
        "scalars": snapshot.scalars,
        "options": snapshot.options,
        "moved": snapshot.moved,
        "live": asdict(snapshot.live) if snapshot.live else None,
        "position": asdict(snapshot.position),
    }
    tensors = {f"parameter.{place}": each.contiguous() for place, each in enumerate(snapshot.parameters)}
    tensors |= {f"gathered.{place}": each.contiguous() for place, each in enumerate(snapshot.gathered)}
    tensors |= {f"state.{key}": each for key, each in snapshot.state.items()}
    for ring, base in snapshot.bases.items():
        tensors |= {f"base.{ring}.{place}": each.contiguous() for place, each in enumerate(base)}
    return json.dumps(books), tensors


def load(path: Path) -> Snapshot:
    """What `save` wrote.

    Raises:
        TrainingError: The file is damaged, or is something else.
    """
    try:
        with safe_open(path, framework="pt") as file:
            # Not a dictionary: it has keys(), but cannot be iterated over.
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            return _unpacked(file.metadata(), tensors)
    except _DAMAGES as cause:
        do = "Use the one before it"
        raise _refusal(cause, "a whole file that ringweave server wrote", do, str(path)) from cause


def from_bytes(content: bytes) -> Snapshot:
    """What `to_bytes` made.

    Raises:
        TrainingError: It is something else.
    """
    try:
        # The metadata, which the library does not give: JSON of a length that stands before it.
        length = int.from_bytes(content[:8], "little")
        metadata = json.loads(content[8 : 8 + length])["__metadata__"]
        return _unpacked(metadata, safetensors.torch.load(content))
    except _DAMAGES as cause:
        raise _refusal(cause, "one of a server that leads", "Run the same ringweave on all nodes", "") from cause


_DAMAGES = (SafetensorError, OSError, LookupError, TypeError, ValueError, AttributeError, RecursionError)


def _refusal(cause: Exception, expected: str, do: str, where: str) -> TrainingError:
    what = "snapshot of the parameter server"
    return TrainingError(explain(what, got=str(cause)[:200], expected=expected, do=do, where=where))


def _unpacked(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> Snapshot:
    text = metadata[_KEY]
    _compare(metadata[_CHECK], _check(text, tensors))
    return _of_books(text, tensors)


def of_parts(text: str, tensors: Mapping[str, Tensor]) -> Snapshot:
    """What `to_parts` gave.

    Raises:
        TrainingError: It is something else.
    """
    try:
        return _of_books(text, tensors)
    except _DAMAGES as cause:
        raise _refusal(cause, "one of a server of rings", "Go on with the ringweave that wrote it", "") from cause


def _of_books(text: str, tensors: Mapping[str, Tensor]) -> Snapshot:
    books = json.loads(text)
    if books["format"] != _FORMAT:
        raise ValueError(f"format {books['format']!r} instead of {_FORMAT}")
    setup = Setup.model_validate(books["setup"])
    return Snapshot(
        setup=setup,
        version=books["version"],
        pushed={receipt["ring"]: Receipt(**receipt) for receipt in books["pushed"]},
        parameters=[tensors[f"parameter.{place}"] for place in range(len(setup.tensors))],
        progress=_progress_of(books["progress"]),
        gathered=[tensors[f"gathered.{place}"] for place in range(sum(key.startswith("gathered.") for key in tensors))],
        groups=books["groups"],
        state={key.removeprefix("state."): each for key, each in tensors.items() if key.startswith("state.")},
        scalars=books["scalars"],
        options=books["options"],
        moved=books["moved"],
        live=_live_of(books["live"]) if books["live"] else None,
        bases=_bases_of(len(setup.tensors), tensors),
        position=_position_of(books["position"]),
    )


def _bases_of(num_places: int, tensors: Mapping[str, Tensor]) -> dict[int, list[Tensor]]:
    rings = sorted({int(key.split(".")[1]) for key in tensors if key.startswith("base.")})
    return {ring: [tensors[f"base.{ring}.{place}"] for place in range(num_places)] for ring in rings}


def _live_of(book: Mapping[str, Any]) -> Live:
    return Live(
        holdings=[
            Holding(grants=tuple(each["grants"]), num_since=each["num_since"], is_paused=each["is_paused"])
            for each in book["holdings"]
        ],
        tickets=[Ticket(**each) for each in book["tickets"]],
        taken={int(epoch): count for epoch, count in book["taken"].items()},
        gone=list(book["gone"]),
        testaments={int(ring): text for ring, text in book["testaments"].items()},
        meetings=book["meetings"],
        resumed=_resumed_of(book["resumed"]) if book["resumed"] else None,
    )


def _position_of(book: Mapping[str, Any]) -> Position:
    done = tuple((first, count) for first, count in book["done"])
    return Position(pass_number=book["pass_number"], epoch=book["epoch"], done=done)


def _resumed_of(book: Mapping[str, Any]) -> Resumed:
    position = _position_of(book["position"])
    return Resumed(train_step=book["train_step"], check=book["check"], seed=book["seed"], position=position)


def restore(snapshot: Snapshot) -> GatheredModel:
    """The model as it was."""
    model = GatheredModel(snapshot.setup, _flat_of(snapshot.setup, snapshot.parameters), snapshot.progress)
    model.options, model.moved = snapshot.options, set(snapshot.moved)
    for ring, base in snapshot.bases.items():
        model.keep(ring, _flat_of(snapshot.setup, base))
    if snapshot.gathered:
        model.gathered = _flat_of(snapshot.setup, snapshot.gathered)
    state: dict[int, dict[str, Any]] = {}
    for key, value in [*snapshot.state.items(), *snapshot.scalars.items()]:
        place, _, name = key.partition(".")
        state.setdefault(int(place), {})[name] = value
    places = [group["params"] for group in model.optimizer.state_dict()["param_groups"]]
    groups = [{**_tupled(kept), "params": own} for kept, own in zip(snapshot.groups, places, strict=True)]
    model.optimizer.load_state_dict({"state": state, "param_groups": groups})
    return model


def _flat_of(setup: Setup, tensors: list[Tensor]) -> Flat:
    flat = Flat(setup.tensors)
    for view, tensor in zip(flat.views, tensors, strict=True):
        view.copy_(tensor)
    return flat


def _progress_of(book: Mapping[str, Any]) -> Progress:
    numbers = {name: value for name, value in book.items() if name != "present"}
    return Progress(present=set(book["present"]), **numbers)


def _check(text: str, tensors: Mapping[str, Tensor]) -> str:
    """xxh3 (64 bits) of the books and of every tensor's name, kind, shape and bytes, in hexadecimal."""
    found = xxhash.xxh3_64(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        found.update(tensor.flatten().view(torch.uint8).numpy().data if tensor.numel() else b"")
    return found.hexdigest()


def _compare(stated: str, found: str) -> None:
    if stated != found:
        raise ValueError(f"check {found} instead of {stated}")


def _tupled(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in group.items()}
