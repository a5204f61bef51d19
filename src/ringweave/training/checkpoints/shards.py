"""Shards of a checkpoint: tensors that several ranks hold in parts, saved in a file of each rank.

```text
FOLDER/step-00000100.shard-0-of-4.89abcdef-0123456789abcdef.safetensors    rank 0's parts, and all that is whole
FOLDER/step-00000100.shard-3-of-4.89abcdef-0123456789abcdef.safetensors    rank 3's parts, and its random numbers
```

A checkpoint is complete when the files of all its ranks are there that one training wrote, which has a name of eight
digits. It loads on any number of ranks, and into a model that is not sharded: each rank reads the parts of tensors that
it needs, from the files in which they lie.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from ringweave.errors import TrainingError
from ringweave.files import file_io
from ringweave.training.checkpoints import format, store
from ringweave.training.checkpoints.format import DTYPE_BY_NAME, SavedShards, StateEncoder
from ringweave.training.checkpoints.store import CheckpointFile
from ringweave.training.collectives import ControlGroup

_OPTIMIZER_STATE = re.compile(r"state\.(\d+)\.")
_Box = tuple[tuple[int, ...], tuple[int, ...]]
"""First indices and sizes of a part of a tensor, by dimension."""


class ShardEncoder(StateEncoder):
    """Encodes states with sharded tensors, of which each rank has a part; `offsets` has where each part begins."""

    def __init__(self, *, keeps_whole: bool) -> None:
        """`keeps_whole` False leaves out tensors that every rank has whole: another rank saves them."""
        super().__init__()
        self.offsets: dict[str, tuple[int, ...]] = {}
        self._keeps_whole = keeps_whole

    def encode_tensor(self, tensor: Tensor, path: str) -> dict[str, Any]:
        if not isinstance(tensor, DTensor):
            return super().encode_tensor(tensor if self._keeps_whole else tensor.new_empty(0), path)
        local, (offset, size) = tensor.to_local().detach(), _box_of(tensor)
        is_first_replica = all(
            coordinate == 0
            for coordinate, placement in zip(tensor.device_mesh.get_coordinate() or (), tensor.placements, strict=True)
            if isinstance(placement, Replicate)
        )
        name = path
        if local.numel() and is_first_replica:
            assert tuple(local.shape) == size, "as torch lays shards out"
            name = super().encode_tensor(local, path)["tensor"]
            self.offsets[name] = offset
        dtype = str(tensor.dtype).removeprefix("torch.")
        return {"shards": [name, list(tensor.shape), dtype]}


def can_save(part: nn.Module) -> bool:
    """Return True if all that is not whole on each rank lies as FSDP2 lays it."""
    tensors = [each for each in (*part.parameters(), *part.buffers()) if hasattr(each, "__tensor_flatten__")]
    return bool(tensors) and all(
        isinstance(each, DTensor) and all(type(placement) in (Shard, Replicate) for placement in each.placements)
        for each in tensors
    )


def is_sharded(part: object) -> bool:
    """Return True if the part, a model or an optimizer, has sharded tensors."""
    tensors: Iterable[object] = ()
    if isinstance(part, nn.Module):
        tensors = part.parameters()
    elif isinstance(part, Optimizer):
        tensors = _optimizer_parameters(part)
    return any(isinstance(tensor, DTensor) for tensor in tensors)


def agree_on_sets(folder_sets: Sequence[Sequence[CheckpointFile]], messages: ControlGroup | None) -> list[Any]:
    """Return the complete checkpoints, newest first, that all ranks see.

    Raises:
        TrainingError: A rank does not see the newest one of another.
    """
    if messages is None:
        return list(folder_sets)
    own = {_key_of(files): files for files in folder_sets}
    seen = [[tuple(key) for key in said["sets"]] for said in messages.gather_json({"sets": list(own)})]
    newest = max((keys[0] for keys in seen if keys), default=None)
    blind = next((rank for rank, keys in enumerate(seen) if newest is not None and newest not in keys), None)
    if blind is not None:
        assert newest is not None
        raise TrainingError(
            f"sharded checkpoint of step {newest[0]}",
            got=f"not all of its files on rank {blind}",
            expected="a folder that all ranks reach",
            do="Keep checkpoints of a sharded model on a disk of all nodes",
        )
    return [own[key] for key in seen[0] if all(key in keys for keys in seen)]


def find_damage(files: Sequence[CheckpointFile], messages: ControlGroup | None) -> list[str]:
    """Return what is wrong with the files of a checkpoint; each file is read by one rank, and all know of it."""
    rank, step = (0, 1) if messages is None else (messages.rank, len(messages.gather_json({})))
    found = []
    for saved in files[rank::step]:
        try:
            if file_io.file_checksum(saved.path) != saved.checksum:
                found.append(f"{saved.path}: other bytes than were written")
        except OSError as error:
            found.append(f"{saved.path}: {error.strerror}")
    if messages is None:
        return found
    return [text for said in messages.gather_json({"damage": found}) for text in said["damage"]]


class ShardReader:
    """Open files of one checkpoint, from which parts of tensors are read."""

    def __init__(self, files: Sequence[CheckpointFile]) -> None:
        """Open the files, by rank; their bytes have been checked.

        Raises:
            TrainingError: They are of a newer ringweave, or cannot be read.
        """
        self.files = list(files)
        self._handles: list[Any] = []
        self._parts: dict[str, list[tuple[int, _Box]]] = {}
        """Name -> file and place of each part."""
        self.documents = [self._open(index, saved) for index, saved in enumerate(files)]

    def states(self) -> dict[str, Any]:
        """Return the state of each part of the checkpoint, with `SavedShards` where tensors are sharded."""
        first, handle = self.documents[0], self._handles[0]
        names = [name for name in handle.keys() if name not in first["offsets"]]  # noqa: SIM118 - no mapping
        whole = {name: handle.get_tensor(name).clone() for name in names}
        return {name: format.decode_state(tree, whole) for name, tree in first["parts"].items()}

    def rng_state(self, rank: int) -> Any:
        """Return the random numbers that a rank has saved, encoded as others are; None if there are none."""
        document, handle = self.documents[rank], self._handles[rank]
        names = [name for name in handle.keys() if name not in document["offsets"]]  # noqa: SIM118 - no mapping
        whole = {name: handle.get_tensor(name).clone() for name in names}
        return format.decode_state(document["rng"], whole) if document["rng"] is not None else None

    def read(self, shards: SavedShards, box: _Box) -> Tensor:
        """Return a part of a sharded tensor.

        Raises:
            TrainingError: The files do not have all of it.
        """
        (first, size), missing = box, torch.Size(box[1]).numel()
        result = torch.empty(size, dtype=DTYPE_BY_NAME[shards.dtype])
        for index, (offset, shape) in self._parts.get(shards.name, ()):
            begin = [max(a, b) for a, b in zip(first, offset, strict=True)]
            end = [min(a + c, b + d) for a, b, c, d in zip(first, offset, size, shape, strict=True)]
            if all(a < b for a, b in zip(begin, end, strict=True)):
                source = tuple(slice(a - o, b - o) for a, b, o in zip(begin, end, offset, strict=True))
                target = tuple(slice(a - o, b - o) for a, b, o in zip(begin, end, first, strict=True))
                result[target] = self._handles[index].get_slice(shards.name)[source]
                missing -= result[target].numel()
        if missing:
            got = f"{missing} of {result.numel()} elements missing"
            raise self._error(self.files[0], f"{shards.name}: {got}")
        return result

    def _open(self, index: int, saved: CheckpointFile) -> dict[str, Any]:
        try:
            handle: Any = safe_open(saved.path, framework="pt")
            document = file_io.parse_json((handle.metadata() or {})[store.METADATA_KEY], store.MAX_METADATA_BYTES)
            has_format = document["format"] == store.FORMAT
            for name, offset in document["offsets"].items():
                place = tuple(offset), tuple(handle.get_slice(name).get_shape())
                self._parts.setdefault(name, []).append((index, place))
        except (SafetensorError, OSError, LookupError, TypeError, ValueError, AttributeError) as cause:
            raise self._error(saved, f"{type(cause).__name__}: {cause}") from cause
        if not has_format:
            raise self._error(saved, f"format {document['format']!r}")
        self._handles.append(handle)
        return document

    def _error(self, saved: CheckpointFile, got: str) -> TrainingError:
        expected, do = f"a whole file of format {store.FORMAT}", "Remove this checkpoint, and load the one before it"
        return TrainingError("sharded checkpoint", got=got, expected=expected, do=do, where=str(saved.path))


def fit_state(part: Any, state: Any, read: Callable[[SavedShards, _Box], Tensor]) -> Any:
    """Return a part's state with its tensors as the part has them: sharded as they are there, or whole.

    Args:
        part: Model, optimizer or any other part, which is to load the state.
        state: Of the checkpoint, with whole tensors and `SavedShards`.
        read: Reads a part of a sharded tensor.
    """
    known: dict[str, Tensor] = {}
    _collect(part.state_dict(), "", known)
    parameters = _optimizer_parameters(part) if isinstance(part, Optimizer) else []

    def like(path: str, shape: Sequence[int]) -> DTensor | None:
        """Return the sharded tensor that a saved one of this path and shape becomes."""
        found: Tensor | None = known.get(path)
        place = _OPTIMIZER_STATE.match(path) if found is None else None
        if place is not None and int(place[1]) < len(parameters):
            found = parameters[int(place[1])]
        return found if isinstance(found, DTensor) and list(found.shape) == list(shape) else None

    def fit(value: Any, path: str) -> Any:
        if isinstance(value, dict):
            return {key: fit(each, f"{path}{key}.") for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(fit(each, f"{path}{index}.") for index, each in enumerate(value))
        if not isinstance(value, (Tensor, SavedShards)):
            return value
        target = like(path, value.shape)
        if target is None:
            shape = tuple(value.shape)
            return value if isinstance(value, Tensor) else read(value, ((0,) * len(shape), shape))
        box = _box_of(target)
        local = _cut(value, box) if isinstance(value, Tensor) else read(value, box)
        local = local.to(target.to_local().device)
        return DTensor.from_local(
            local, target.device_mesh, target.placements, run_check=False, shape=target.shape, stride=target.stride()
        )

    return fit(state, "")


def _collect(value: Any, path: str, found: dict[str, Tensor]) -> None:
    if isinstance(value, Tensor):
        found[path] = value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            _collect(each, f"{path}{key}.", found)
    elif isinstance(value, (list, tuple)):
        for index, each in enumerate(value):
            _collect(each, f"{path}{index}.", found)


def _cut(tensor: Tensor, box: _Box) -> Tensor:
    """Return a part of a whole tensor, in memory of its own."""
    places = tuple(slice(first, first + size) for first, size in zip(*box, strict=True))
    return tensor[places].clone()


def _box_of(tensor: DTensor) -> _Box:
    """Return the part of a sharded tensor that this rank has."""
    size, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offset), tuple(size)


def _optimizer_parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _key_of(files: Sequence[CheckpointFile]) -> tuple[int, str, int]:
    """Return what distinguishes checkpoints: step, training and number of files."""
    return files[0].train_step, files[0].run, len(files)
