"""Checkpoints of pipelines that do not know of partitions: a file for each block, and one for what all share.

```text
DIR/pipeline.json                                  train steps done, number of blocks, settings of the optimizer, the
                                                   script's own state
DIR/block-00003-0123456789abcdef.safetensors       parameters, buffers, extra state and optimizer state of one block
```

So they are loaded with other stages, on one device, or block by block by a program of its own. There is no pickle in
them but what a module's `get_extra_state` gives, which is read with `weights_only`. A directory is complete or not
there: it is written beside its place (`DIR.part`), brought to the disk, and renamed. The one before stands aside
(`DIR.old`) meanwhile; `load` takes it after a crash between the two names. What was damaged afterwards is refused: the
name of a block's file holds the check of all its bytes, and `pipeline.json` that of its own content.
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

from ringweave.errors import RingweaveError, TrainingError, explain, shorten
from ringweave.files import checksums, durable, json_text
from ringweave.pipeline.models import extras
from ringweave.pipeline.moving.voting import vote
from ringweave.pipeline.optimizing.optimizer import load_as_saved
from ringweave.pipeline.pipeline import Pipeline

SHARED = "pipeline.json"
_FORMAT = 2
_MODEL, _OPTIMIZER, _EXTRA = "model/", "optimizer/", "extra/"


def save(pipeline: Pipeline, directory: Path, extra: Mapping[str, Any] | None = None) -> None:
    """Write what training needs to go on; all ranks call it between two steps, and all see the same file system.

    Args:
        pipeline: The first replica's ranks write their blocks.
        directory: Replaced if it is there; a crash at any moment leaves the old or the new one to be loaded.
        extra: What else the script wants back, as JSON: `scheduler.state_dict()`, say.

    Raises:
        TrainingError: The disk of a rank does not take it; on all ranks, with that one's reason. What was there before
            can still be loaded, and training can go on.
    """
    for action in (_make_room, _write, _replace):
        _together(pipeline, directory, functools.partial(action, pipeline, directory, extra or {}))


def load(pipeline: Pipeline, directory: Path) -> dict[str, Any]:
    """Go on where `save` was called, with any partition; returns the script's `extra`.

    Raises:
        TrainingError: There is no complete checkpoint, or it is damaged, which is found before anything changes; or it
            is of another model.
    """
    directory = _whole(directory)
    shared = _shared(directory)
    if shared["num_blocks"] != len(pipeline.blocks):
        expected = f"{len(pipeline.blocks)}, as the pipeline has"
        do = "Build the same blocks as the run that saved it"
        raise TrainingError(
            explain(
                "blocks of the checkpoint", got=shared["num_blocks"], expected=expected, do=do, where=str(directory)
            )
        )
    paths = {block: _found(directory, block) for block in pipeline.blocks.held}
    for block, path in paths.items():
        _load_block(pipeline, block, path)
    pipeline.optimizer.load_settings(shared["optimizer"])
    pipeline.train_step_index = shared["train_steps"]
    return shared["extra"]


def _together(pipeline: Pipeline, directory: Path, action: Callable[[], None]) -> None:
    """Do something on this rank, and wait for all; what failed on one is an error on all of them.

    Raises:
        TrainingError: It failed, here or on another rank.
    """
    failure: Exception | None = None
    try:
        action()
    except Exception as cause:
        failure = cause
    own = "" if failure is None else str(failure) if isinstance(failure, RingweaveError) else shorten(failure)
    got = vote(own, pipeline.groups.control)
    if got:
        if pipeline.rank == 0:
            shutil.rmtree(_beside(directory), ignore_errors=True)
        do = "Make room and save again; the one before can still be loaded"
        expected = "a disk that takes all blocks"
        raise TrainingError(explain("checkpoint", got=got, expected=expected, do=do, where=str(directory))) from failure


def _make_room(pipeline: Pipeline, directory: Path, _: Mapping[str, Any]) -> None:
    """Rank 0: an empty directory beside the one that is there."""
    if pipeline.rank == 0:
        shutil.rmtree(_beside(directory), ignore_errors=True)
        _beside(directory).mkdir(parents=True)


def _write(pipeline: Pipeline, directory: Path, extra: Mapping[str, Any]) -> None:
    """The first replica's ranks: their blocks; rank 0: what all share."""
    if pipeline.layout.replica_of(pipeline.rank) == 0:
        for block in pipeline.blocks.held:
            _save_block(pipeline, block, _beside(directory))
    if pipeline.rank == 0:
        shared = {
            "format": _FORMAT,
            "num_blocks": len(pipeline.blocks),
            "train_steps": pipeline.train_step_index,
            "optimizer": pipeline.optimizer.settings(),
            "extra": extra,
        }
        as_read = json.loads(json.dumps(shared))
        path = _beside(directory) / SHARED
        path.write_text(json.dumps({**as_read, "check": _check(as_read)}, indent=1) + "\n", encoding="utf-8")
        _sync(path)


def _replace(pipeline: Pipeline, directory: Path, _: Mapping[str, Any]) -> None:
    """Rank 0: give a complete directory its name; at every moment there is a whole one, of this name or as the old."""
    if pipeline.rank != 0:
        return
    old, beside = _old(directory), _beside(directory)
    durable.sync_folder(beside)
    if directory.exists():
        _delete(old)
        directory.rename(old)
    beside.rename(directory)
    durable.sync_folder(directory.parent)
    _delete(old)


def _delete(old: Path) -> None:
    """The file of what all share goes first: a part of a checkpoint does not look like a whole one."""
    (old / SHARED).unlink(missing_ok=True)
    shutil.rmtree(old, ignore_errors=True)


def _whole(directory: Path) -> Path:
    """Where the checkpoint of this name lies: aside, if a crash came before the new one had its name."""
    old = _old(directory)
    return old if not directory.exists() and (old / SHARED).exists() else directory


def _beside(directory: Path) -> Path:
    return directory.with_name(directory.name + ".part")


def _old(directory: Path) -> Path:
    return directory.with_name(directory.name + ".old")


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        durable.sync(file)


def _shared(directory: Path) -> dict[str, Any]:
    try:
        shared = dict(json_text.load(directory / SHARED))
    except (OSError, ValueError, TypeError) as cause:
        do = "Name a directory that checkpoints.save has written"
        expected = f"a file {SHARED}"
        raise TrainingError(
            explain("checkpoint", got=str(cause), expected=expected, do=do, where=str(directory))
        ) from cause
    if shared.get("format") != _FORMAT:
        do = "Load it with the version that saved it"
        raise TrainingError(
            explain(
                "format of the checkpoint", got=shared.get("format"), expected=str(_FORMAT), do=do, where=str(directory)
            )
        )
    check = shared.pop("check", None)
    if check != _check(shared):
        raise _damaged(directory / SHARED, "content of another check", f"check {check}")
    return shared


def _save_block(pipeline: Pipeline, block: int, directory: Path) -> None:
    # Two names of one tensor inside of a block are one in the file: safetensors refuses shared memory.
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    module = pipeline.blocks[block]
    for name, tensor in extras.without(module.state_dict(keep_vars=True)).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[_MODEL + name] = tensor.detach().contiguous().cpu()
    tensors |= {_EXTRA + name: raw for name, raw in extras.states_of(module)}
    optimizer = pipeline.optimizer.of(block)
    rest: dict[str, Any] = {}
    for place, state in (optimizer.state_dict()["state"] if optimizer else {}).items():
        for name, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"{_OPTIMIZER}{place}/{name}"] = value.detach().contiguous().cpu()
            else:
                rest.setdefault(str(place), {})[name] = value
    path = directory / f"{_stem(block)}.safetensors"
    safetensors.torch.save_file(tensors, path, metadata={"optimizer": json.dumps(rest)})
    _sync(path)
    path.rename(directory / f"{_stem(block)}-{checksums.of_file(path)}.safetensors")


def _found(directory: Path, block: int) -> Path:
    """A block's file, all of whose bytes are what was written."""
    paths = list(directory.glob(f"{_stem(block)}-*.safetensors"))
    if len(paths) != 1:
        raise _damaged(directory, f"{len(paths)} files of block {block}", "one")
    (path,) = paths
    check = path.stem.removeprefix(f"{_stem(block)}-")
    try:
        got = checksums.of_file(path)
    except OSError as cause:
        raise _damaged(path, str(cause), "a file that can be read") from cause
    if got != check:
        raise _damaged(path, f"check {got}", f"{check}, as its name says")
    return path


def _load_block(pipeline: Pipeline, block: int, path: Path) -> None:
    try:
        model, extra, state = _read_block(path)
    except (SafetensorError, OSError, ValueError, TypeError, AttributeError) as cause:
        raise _damaged(path, str(cause), "a block that checkpoints.save has written") from cause
    _fill(pipeline, block, model, path)
    for name, raw in extra.items():
        extras.fill(pipeline.blocks[block], name, raw)
    optimizer = pipeline.optimizer.of(block)
    if optimizer is not None:
        load_as_saved(optimizer, {**optimizer.state_dict(), "state": state})


def _read_block(path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[int, dict[str, Any]]]:
    """(parameters and buffers, extra state, state of the optimizer) in a block's file."""
    model: dict[str, Tensor] = {}
    extra: dict[str, Tensor] = {}
    state: dict[int, dict[str, Any]] = {}
    # In host memory: what an optimizer keeps there (its counters of steps) stays there.
    with safe_open(path, framework="pt", device="cpu") as file:
        for place, values in json_text.loads((file.metadata() or {}).get("optimizer", "{}")).items():
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
def _fill(pipeline: Pipeline, block: int, model: Mapping[str, Tensor], path: Path) -> None:
    own: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in extras.without(pipeline.blocks[block].state_dict(keep_vars=True)).items():
        own.setdefault(id(tensor), (name, tensor))
    shapes = {name: tuple(tensor.shape) for name, tensor in own.values()}
    got = {name: tuple(tensor.shape) for name, tensor in model.items()}
    if shapes != got:
        odd = next(iter(sorted(shapes.items() ^ got.items())))
        expected = "the names and shapes of this block"
        do = "Build the same blocks as the run that saved it"
        raise TrainingError(
            explain(f"block {block} of the checkpoint", got=odd, expected=expected, do=do, where=str(path))
        )
    for name, tensor in own.values():
        tensor.copy_(model[name])


def _stem(block: int) -> str:
    return f"block-{block:05d}"


def _check(shared: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(shared).encode())


def _damaged(path: Path, got: str, expected: str) -> TrainingError:
    do = "Load one that was saved before, in a directory of another name, or train anew"
    return TrainingError(explain("damaged checkpoint", got=got, expected=expected, do=do, where=str(path)))
