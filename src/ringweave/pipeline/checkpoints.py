"""Pipeline checkpoints that do not depend on the partition: one file for each block, one for shared state.

```text
DIR/pipeline.json                                  train steps done, number of blocks, settings of the optimizer, the
                                                   script's own state
DIR/block-00003-0123456789abcdef.safetensors       parameters, buffers, extra state and optimizer state of one block
```

A checkpoint can be loaded with other stages, on one device, or block by block by another program. It holds no pickle
except the results of a module's `get_extra_state`, which are read with `weights_only`. A directory is either complete
or absent: it is written beside its destination (`DIR.part`), synced to disk, and renamed. The previous one is kept as
`DIR.old` meanwhile; `load` uses it after a crash between the two renames. Later damage is refused: the name of a
block's file contains the checksum of all its bytes, and `pipeline.json` contains its own.
"""

import functools
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ringweave.errors import RingweaveError, TrainingError, shorten
from ringweave.files import file_io
from ringweave.pipeline import model_blocks
from ringweave.pipeline.migration import first_failure
from ringweave.pipeline.optimizer import load_as_saved
from ringweave.pipeline.pipeline import Pipeline

SHARED_FILE = "pipeline.json"
_FORMAT = 2
_MODEL, _OPTIMIZER, _EXTRA = "model/", "optimizer/", "extra/"


def save(pipeline: Pipeline, directory: Path, extra: Mapping[str, Any] | None = None) -> None:
    """Write everything that training needs to continue; all ranks call it between two steps, on a shared file system.

    Args:
        pipeline: The first replica's ranks write their blocks.
        directory: Replaced if it exists; after a crash at any moment the old or the new one can be loaded.
        extra: Additional state of the script, as JSON: `scheduler.state_dict()`, say.

    Raises:
        TrainingError: A rank's disk failed; raised on all ranks with that reason. The previous checkpoint can still be
            loaded, and training can continue.
    """
    for action in (_make_partial_directory, _write_files, _replace_directory):
        _run_on_all_ranks(pipeline, directory, functools.partial(action, pipeline, directory, extra or {}))


def load(pipeline: Pipeline, directory: Path) -> dict[str, Any]:
    """Restore the state that `save` wrote, with any partition; returns the script's `extra`.

    Raises:
        TrainingError: There is no complete checkpoint, it is damaged (found before anything changes), or it belongs to
            another model.
    """
    directory = _complete_directory(directory)
    shared = _read_shared(directory)
    if shared["num_blocks"] != len(pipeline.blocks):
        expected = f"{len(pipeline.blocks)}, as the pipeline has"
        do = "Build the same blocks as the run that saved it"
        raise TrainingError(
            "blocks of the checkpoint", got=shared["num_blocks"], expected=expected, do=do, where=str(directory)
        )
    paths = {block: _find_block_file(directory, block) for block in pipeline.blocks.held}
    for block, path in paths.items():
        _load_block(pipeline, block, path)
    pipeline.optimizer.load_settings(shared["optimizer"])
    pipeline.train_step_index = shared["train_steps"]
    return shared["extra"]


def _run_on_all_ranks(pipeline: Pipeline, directory: Path, action: Callable[[], None]) -> None:
    """Run an action on this rank and wait for all ranks; a failure on one raises an error on all of them."""
    failure: Exception | None = None
    try:
        action()
    except Exception as cause:
        failure = cause
    own = "" if failure is None else str(failure) if isinstance(failure, RingweaveError) else shorten(failure)
    got = first_failure(own, pipeline.groups.control)
    if got:
        if pipeline.rank == 0:
            shutil.rmtree(_partial_path(directory), ignore_errors=True)
        do = "Make room and save again; the one before can still be loaded"
        expected = "a disk that takes all blocks"
        raise TrainingError("checkpoint", got=got, expected=expected, do=do, where=str(directory)) from failure


def _make_partial_directory(pipeline: Pipeline, directory: Path, _: Mapping[str, Any]) -> None:
    """Rank 0: make an empty directory beside the present one."""
    if pipeline.rank == 0:
        shutil.rmtree(_partial_path(directory), ignore_errors=True)
        _partial_path(directory).mkdir(parents=True)


def _write_files(pipeline: Pipeline, directory: Path, extra: Mapping[str, Any]) -> None:
    """Write blocks on the first replica's ranks; rank 0 also writes the shared state."""
    if pipeline.layout.replica_of_rank(pipeline.rank) == 0:
        for block in pipeline.blocks.held:
            _save_block(pipeline, block, _partial_path(directory))
    if pipeline.rank == 0:
        shared = {
            "format": _FORMAT,
            "num_blocks": len(pipeline.blocks),
            "train_steps": pipeline.train_step_index,
            "optimizer": pipeline.optimizer.settings(),
            "extra": extra,
        }
        as_read = json.loads(json.dumps(shared))
        path = _partial_path(directory) / SHARED_FILE
        path.write_text(json.dumps({**as_read, "check": _shared_checksum(as_read)}, indent=1) + "\n", encoding="utf-8")
        _sync_path(path)


def _replace_directory(pipeline: Pipeline, directory: Path, _: Mapping[str, Any]) -> None:
    """Rename a complete directory into place, on rank 0.

    At every moment a complete one exists, under this name or as the old one.
    """
    if pipeline.rank != 0:
        return
    old, partial = _old_path(directory), _partial_path(directory)
    file_io.fsync_folder(partial)
    if directory.exists():
        _delete_old(old)
        directory.rename(old)
    partial.rename(directory)
    file_io.fsync_folder(directory.parent)
    _delete_old(old)


def _delete_old(old: Path) -> None:
    """Delete the shared file first, so that a partial checkpoint never looks complete."""
    (old / SHARED_FILE).unlink(missing_ok=True)
    shutil.rmtree(old, ignore_errors=True)


def _complete_directory(directory: Path) -> Path:
    """The directory of this checkpoint: the old one if a crash came before the new one was renamed."""
    old = _old_path(directory)
    return old if not directory.exists() and (old / SHARED_FILE).exists() else directory


def _partial_path(directory: Path) -> Path:
    return directory.with_name(directory.name + ".part")


def _old_path(directory: Path) -> Path:
    return directory.with_name(directory.name + ".old")


def _sync_path(path: Path) -> None:
    with path.open("rb") as file:
        file_io.fsync_file(file)


def _read_shared(directory: Path) -> dict[str, Any]:
    try:
        shared = dict(file_io.load_json(directory / SHARED_FILE))
    except (OSError, ValueError, TypeError) as cause:
        do = "Name a directory that checkpoints.save has written"
        expected = f"a file {SHARED_FILE}"
        raise TrainingError("checkpoint", got=str(cause), expected=expected, do=do, where=str(directory)) from cause
    if shared.get("format") != _FORMAT:
        do = "Load it with the version that saved it"
        raise TrainingError(
            "format of the checkpoint", got=shared.get("format"), expected=str(_FORMAT), do=do, where=str(directory)
        )
    check = shared.pop("check", None)
    if check != _shared_checksum(shared):
        raise _damaged_error(directory / SHARED_FILE, "content of another check", f"check {check}")
    return shared


def _save_block(pipeline: Pipeline, block: int, directory: Path) -> None:
    # Two names of one tensor inside of a block are one in the file: safetensors refuses shared memory.
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    module = pipeline.blocks[block]
    for name, tensor in model_blocks.without_extra_state(module.state_dict(keep_vars=True)).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[_MODEL + name] = tensor.detach().contiguous().cpu()
    tensors |= {_EXTRA + name: raw for name, raw in model_blocks.extra_states(module)}
    optimizer = pipeline.optimizer.for_block(block)
    rest: dict[str, Any] = {}
    for place, state in (optimizer.state_dict()["state"] if optimizer else {}).items():
        for name, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"{_OPTIMIZER}{place}/{name}"] = value.detach().contiguous().cpu()
            else:
                rest.setdefault(str(place), {})[name] = value
    path = directory / f"{_stem(block)}.safetensors"
    safetensors.torch.save_file(tensors, path, metadata={"optimizer": json.dumps(rest)})
    _sync_path(path)
    path.rename(directory / f"{_stem(block)}-{file_io.file_checksum(path)}.safetensors")


def _find_block_file(directory: Path, block: int) -> Path:
    """A block's file, after its checksum was verified."""
    paths = list(directory.glob(f"{_stem(block)}-*.safetensors"))
    if len(paths) != 1:
        raise _damaged_error(directory, f"{len(paths)} files of block {block}", "one")
    (path,) = paths
    check = path.stem.removeprefix(f"{_stem(block)}-")
    try:
        got = file_io.file_checksum(path)
    except OSError as cause:
        raise _damaged_error(path, str(cause), "a file that can be read") from cause
    if got != check:
        raise _damaged_error(path, f"check {got}", f"{check}, as its name says")
    return path


def _load_block(pipeline: Pipeline, block: int, path: Path) -> None:
    try:
        model, extra, state = _read_block(path)
    except (SafetensorError, OSError, ValueError, TypeError, AttributeError) as cause:
        raise _damaged_error(path, str(cause), "a block that checkpoints.save has written") from cause
    _fill_block(pipeline, block, model, path)
    for name, raw in extra.items():
        model_blocks.set_extra_state(pipeline.blocks[block], name, raw)
    optimizer = pipeline.optimizer.for_block(block)
    if optimizer is not None:
        load_as_saved(optimizer, {**optimizer.state_dict(), "state": state})


def _read_block(path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[int, dict[str, Any]]]:
    """Read (parameters and buffers, extra state, optimizer state) from a block's file."""
    model: dict[str, Tensor] = {}
    extra: dict[str, Tensor] = {}
    state: dict[int, dict[str, Any]] = {}
    # In CPU memory: optimizer state that belongs there (step counters) stays there.
    with safe_open(path, framework="pt", device="cpu") as file:
        for place, values in file_io.parse_json((file.metadata() or {}).get("optimizer", "{}")).items():
            state.setdefault(int(place), {}).update(values)
        for key in file.keys():  # noqa: SIM118 - not a dict
            if key.startswith(_MODEL):
                model[key.removeprefix(_MODEL)] = file.get_tensor(key)
            elif key.startswith(_EXTRA):
                extra[key.removeprefix(_EXTRA)] = file.get_tensor(key)
            else:
                place, name = key.removeprefix(_OPTIMIZER).split("/", 1)
                state.setdefault(int(place), {})[name] = file.get_tensor(key)
    return model, extra, state


@torch.no_grad()
def _fill_block(pipeline: Pipeline, block: int, model: Mapping[str, Tensor], path: Path) -> None:
    own: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model_blocks.without_extra_state(pipeline.blocks[block].state_dict(keep_vars=True)).items():
        own.setdefault(id(tensor), (name, tensor))
    shapes = {name: tuple(tensor.shape) for name, tensor in own.values()}
    got = {name: tuple(tensor.shape) for name, tensor in model.items()}
    if shapes != got:
        odd = next(iter(sorted(shapes.items() ^ got.items())))
        expected = "the names and shapes of this block"
        do = "Build the same blocks as the run that saved it"
        raise TrainingError(f"block {block} of the checkpoint", got=odd, expected=expected, do=do, where=str(path))
    for name, tensor in own.values():
        tensor.copy_(model[name])


def _stem(block: int) -> str:
    return f"block-{block:05d}"


def _shared_checksum(shared: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(shared).encode())


def _damaged_error(path: Path, got: str, expected: str) -> TrainingError:
    do = "Load one that was saved before, in a directory of another name, or train anew"
    return TrainingError("damaged checkpoint", got=got, expected=expected, do=do, where=str(path))
