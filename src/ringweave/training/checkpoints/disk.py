"""Files of checkpoints: safetensors whose name holds the check of all their bytes.

```text
FOLDER/step-00000100-0123456789abcdef.safetensors           the state, and rank 0's random numbers
FOLDER/step-00000100.rank-3-0123456789abcdef.safetensors    rank 3's random numbers
FOLDER/.rank-3.step-00000100.89abcdef.partial               being written, or left by a process that died
```

Several processes may write for the same rank: in an elastic job it passes from one to another, and one that was stopped
wakes in the midst of a file. So each has a file of its own until all of it is on the disk, and only then gives it its
name. A name that is there names a whole file, unless the disk, or somebody, changed it afterwards: then the check in
the name says so. Any program that reads safetensors reads it.
"""

import errno
import json
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ringweave.errors import TrainingError, explain
from ringweave.files import checksums, durable
from ringweave.training.checkpoints import encoding
from ringweave.training.checkpoints.staging import Staged

FORMAT = 1
MAX_HEADER_BYTES = 100_000_000
"""What safetensors itself allows."""
_KEY = "ringweave"
_PIECE_BYTES = 4 << 20
_PARTIAL = re.compile(r"\.rank-(\d{1,9})\.(?:step-(\d{8,18})\.[0-9a-f]+\.)?partial")
_NAME = re.compile(r"step-(\d{8,18})(?:\.rank-([1-9]\d{0,8}))?-([0-9a-f]{16})\.safetensors")


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A checkpoint's file, as its name tells."""

    path: Path
    train_step: int
    rank: int
    """Whose it is; rank 0's has the state."""
    check: str
    """xxh3 (64 bits) of all its bytes, in hexadecimal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """What is in a file."""

    train_step: int
    world_size: int
    """Of the training that saved it."""
    parts: dict[str, Any]
    """Name -> state."""


def list_saved(folder: Path, *, rank: int | None = None) -> list[Saved]:
    """The files of checkpoints in a folder, those of the newest train step first; none where there is no folder.

    Args:
        folder: Where to look.
        rank: Only that rank's; None means all.
    """
    found = [saved for saved in map(_parse, _paths(folder)) if saved and rank in (None, saved.rank)]
    return sorted(found, key=lambda saved: (saved.train_step, _written_s(saved.path)), reverse=True)


def write(folder: Path, *, rank: int, train_step: int, document: dict[str, Any], staged: Staged) -> Saved:
    """Write a checkpoint and give it its name.

    When it has it, earlier ones of the same step and rank go, and what is half-written of this step or an earlier one:
    nobody needs it. A process that is still writing such a one hears so when it is through.

    Raises:
        OSError: The disk does not take it, or another process has written this step or a later one meanwhile. All that
            was there before is as it was.
    """
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".rank-{rank}.step-{train_step:08d}.{secrets.token_hex(8)}.partial"
    part = f".rank-{rank}" if rank else ""
    try:
        with partial.open("xb", buffering=0) as file:
            check = _write(file, _header(document, staged.entries), staged.content())
            durable.sync(file)
        path = folder / f"step-{train_step:08d}{part}-{check}.safetensors"
        # Listed before this one is there: of two that are written at once neither removes the other.
        earlier = [each.path for each in list_saved(folder, rank=rank) if each.train_step == train_step]
        _give_name(partial, path)
    except BaseException:
        _remove(partial)
        raise
    durable.sync_folder(folder)
    for other in (*earlier, *_partials(folder, rank=rank, up_to=train_step)):
        if other != path:
            _remove(other)
    return Saved(path=path, train_step=train_step, rank=rank, check=check)


def remove_partials(folder: Path) -> None:
    """Remove whatever is half-written."""
    for path in _partials(folder):
        _remove(path)


def read(saved: Saved, source: Path | None = None) -> Content:
    """What a checkpoint holds, in memory of its own.

    Args:
        saved: Which one.
        source: Where its bytes are; None means in its file.

    Raises:
        TrainingError: It is damaged, or was written by a ringweave that knew more.
    """
    path = source or saved.path
    try:
        if checksums.of_file(path) != saved.check:
            raise _damaged(saved, "bytes of another check")
        with safe_open(path, framework="pt") as file:
            document = json.loads((file.metadata() or {})[_KEY])
            tensors: dict[str, Tensor] = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        if document["format"] != FORMAT:
            raise _damaged(saved, f"format {document['format']!r}")
        parts = {name: encoding.decode(tree, tensors) for name, tree in document["parts"].items()}
        return Content(train_step=document["train_step"], world_size=document["world_size"], parts=parts)
    except (SafetensorError, OSError, LookupError, TypeError, ValueError, AttributeError, RecursionError) as cause:
        raise _damaged(saved, f"{type(cause).__name__}: {cause}") from cause


def remove(files: Iterator[Saved]) -> None:
    """Remove files that somebody else may have removed already.

    Raises:
        OSError: One stays, since the disk cannot be written.
    """
    for saved in files:
        saved.path.unlink(missing_ok=True)


def _write(file: Any, header: bytes, content: memoryview) -> str:
    """Write both; the check of all of it."""
    found = xxhash.xxh3_64()
    for part in (memoryview(header), content):
        for first in range(0, part.nbytes, _PIECE_BYTES):
            piece = part[first : first + _PIECE_BYTES]
            found.update(piece)
            while piece.nbytes:
                piece = piece[file.write(piece) :]
    return found.hexdigest()


def _give_name(partial: Path, path: Path) -> None:
    try:
        partial.replace(path)
    except FileNotFoundError as cause:
        text = "removed before it was whole, as another process does that has saved this step or a later one"
        raise FileNotFoundError(errno.ENOENT, text) from cause


def _header(document: dict[str, Any], entries: Any) -> bytes:
    metadata = {_KEY: json.dumps({"format": FORMAT, **document})}
    text = json.dumps({"__metadata__": metadata, **entries}).encode()
    if len(text) > MAX_HEADER_BYTES:
        do = "Save fewer or larger tensors"
        raise OSError(explain("header of a checkpoint", got=len(text), expected=f"{MAX_HEADER_BYTES} bytes", do=do))
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    return len(text).to_bytes(8, "little") + text


def _paths(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _partials(folder: Path, *, rank: int | None = None, up_to: int | None = None) -> list[Path]:
    """Files that are half-written: all, or one rank's up to a train step. Those that name none are of long ago."""
    found = [(path, _PARTIAL.fullmatch(path.name)) for path in _paths(folder)]
    return [
        path
        for path, name in found
        if name and rank in (None, int(name[1])) and (up_to is None or int(name[2] or 0) <= up_to)
    ]


def _parse(path: Path) -> Saved | None:
    found = _NAME.fullmatch(path.name)
    if found is None:
        return None
    return Saved(path=path, train_step=int(found[1]), rank=int(found[2] or 0), check=found[3])


def _written_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _remove(path: Path) -> None:
    """A file that is in nobody's way if it stays."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return


def _damaged(saved: Saved, got: str) -> TrainingError:
    expected = f"a whole file of format {FORMAT} with check {saved.check}"
    do = "The one before it is taken; remove this one"
    return TrainingError(explain("checkpoint", got=got, expected=expected, do=do, where=str(saved.path)))
