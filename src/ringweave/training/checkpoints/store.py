"""Checkpoint store: one thread writes staged tensors as safetensors files, named with a checksum of all bytes.

```text
FOLDER/step-00000100-0123456789abcdef.safetensors           the state, and rank 0's random numbers
FOLDER/step-00000100.rank-3-0123456789abcdef.safetensors    rank 3's random numbers
FOLDER/step-00000100.shard-3-of-4.RUN-CHECK.safetensors     rank 3's part of a sharded state (`shards`)
FOLDER/.rank-3.step-00000100.89abcdef.partial               being written, or left by a process that died
```

Several processes may write for the same rank: in an elastic job the rank passes from one process to another, and a
stopped process may wake in the middle of a file. So each process writes a file of its own, and renames it only when all
of it is on the disk. A named file is therefore complete unless it was damaged later; the checksum in its name detects
that. Any program that reads safetensors can read it.
"""

import errno
import json
import math
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ringweave.errors import TrainingError, explain
from ringweave.files import file_io
from ringweave.training.checkpoints import format
from ringweave.training.checkpoints.format import SAFETENSORS_DTYPES

NUM_STAGING_BUFFERS = 2
"""Number of buffers: one is being written, one waits or is being filled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StagedTensors:
    """Tensors copied at one moment."""

    entries: Mapping[str, dict[str, Any]]
    """Name -> dtype, shape and data_offsets, as the header of a safetensors file has them."""
    num_bytes: int
    buffer: Tensor
    """Buffer of uint8, at least num_bytes long."""
    wait_copied: Callable[[], None]
    """Blocks until the bytes are there: copies from a GPU still run when training goes on."""

    def content(self) -> memoryview:
        """Return the bytes of all tensors, without a copy."""
        return memoryview(self.buffer.numpy().data)[: self.num_bytes]


class StagingBuffers:
    """Reused memory for staged tensors: the first touch of new memory takes longer than the copy."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def stage(self, tensors: Mapping[str, Tensor]) -> StagedTensors:
        """Copy the tensors as they are now; on a GPU the copy is queued behind earlier work."""
        entries, num_bytes = lay_out_tensors(tensors)
        devices = {tensor.device for tensor in tensors.values() if tensor.device.type == "cuda"}
        buffer = self._get_buffer(num_bytes, is_pinned=bool(devices))
        for name, tensor in tensors.items():
            first, end = entries[name]["data_offsets"]
            place = buffer[first:end].view(tensor.dtype).view(tensor.shape)
            place.copy_(tensor, non_blocking=tensor.device.type == "cuda")
        return StagedTensors(entries=entries, num_bytes=num_bytes, buffer=buffer, wait_copied=_copy_barrier(devices))

    def recycle(self, staged: StagedTensors) -> None:
        """Reuse the memory of these tensors."""
        if len(self._free) < NUM_STAGING_BUFFERS:
            self._free.append(staged.buffer)

    def _get_buffer(self, num_bytes: int, *, is_pinned: bool) -> Tensor:
        while self._free:
            buffer = self._free.pop()
            if len(buffer) >= num_bytes and buffer.is_pinned() == is_pinned:
                return buffer
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)


def lay_out_tensors(tensors: Mapping[str, Tensor]) -> tuple[dict[str, dict[str, Any]], int]:
    """Lay tensors out in a file; large elements first, so that each is aligned to its size.

    Returns:
        Entries of a safetensors header, and the number of bytes.
    """
    entries, first = {}, 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        tensor = tensors[name]
        end = first + math.prod(tensor.shape) * tensor.element_size()
        entries[name] = {
            "dtype": SAFETENSORS_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [first, end],
        }
        first = end
    return entries, first


def _copy_barrier(devices: set[torch.device]) -> Callable[[], None]:
    events = []
    for device in devices:
        events.append(torch.cuda.Event())
        events[-1].record(torch.cuda.current_stream(device))

    def wait() -> None:
        for event in events:
            event.synchronize()

    return wait


FORMAT = 2
MAX_HEADER_BYTES = 100_000_000
"""Limit of safetensors itself."""
MAX_METADATA_BYTES = 100_000_000
"""Largest header of a safetensors file."""
METADATA_KEY = "ringweave"
_PIECE_BYTES = 4 << 20
_PARTIAL = re.compile(r"\.rank-(\d{1,9})\.(?:step-(\d{8,18})\.[0-9a-f]+\.)?partial")
_SHARD_NAME = re.compile(r"step-(\d{8,18})\.shard-(\d{1,9})-of-(\d{1,9})\.([0-9a-f]{8})-([0-9a-f]{16})\.safetensors")
_FILE_NAME = re.compile(r"step-(\d{8,18})(?:\.rank-([1-9]\d{0,8}))?-([0-9a-f]{16})\.safetensors")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointFile:
    """File of a checkpoint, as its name describes it."""

    path: Path
    train_step: int
    rank: int
    """Rank that wrote the file; rank 0's file has the state."""
    checksum: str
    """xxh3 (64 bits) of all its bytes, in hexadecimal."""
    run: str = ""
    """Training that saved it, of a file with shards; empty for a file with a state that is whole."""
    num_files: int = 1
    """Files of a checkpoint with shards, one of each rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointContent:
    """Content of a checkpoint file."""

    train_step: int
    world_size: int
    """World size of the training that saved it."""
    parts: dict[str, Any]
    """Name -> state."""


def list_checkpoints(folder: Path, *, rank: int | None = None) -> list[CheckpointFile]:
    """Return the checkpoint files of a folder, newest train step first; none if there is no folder.

    `rank`: only files of this rank; None means all.
    """
    found = [saved for saved in map(_parse_file_name, _list_paths(folder)) if saved and rank in (None, saved.rank)]
    return sorted(found, key=lambda saved: (saved.train_step, _modified_s(saved.path)), reverse=True)


def list_shards(folder: Path) -> list[CheckpointFile]:
    """Return the files with shards of a folder, in any order."""
    found = [(path, _SHARD_NAME.fullmatch(path.name)) for path in _list_paths(folder)]
    return [
        CheckpointFile(
            path=path,
            train_step=int(name[1]),
            rank=int(name[2]),
            num_files=int(name[3]),
            run=name[4],
            checksum=name[5],
        )
        for path, name in found
        if name
    ]


def complete_sets(folder: Path) -> list[list[CheckpointFile]]:
    """Return the checkpoints with shards whose files are all there, by rank; newest train step first."""
    sets: dict[tuple[int, str, int], dict[int, CheckpointFile]] = {}
    for saved in list_shards(folder):
        sets.setdefault((saved.train_step, saved.run, saved.num_files), {})[saved.rank] = saved
    complete = [key for key, files in sets.items() if set(files) == set(range(key[2]))]
    return [[sets[key][rank] for rank in range(key[2])] for key in sorted(complete, reverse=True)]


def write_checkpoint(
    folder: Path, *, rank: int, train_step: int, document: dict[str, Any], staged: StagedTensors, run: str = ""
) -> CheckpointFile:
    """Write a checkpoint and give it its final name; with the name of a training, as one of several files.

    Then earlier files of the same step and rank are removed, and partial files of this step or an earlier one, which
    are not needed any more. A process that is still writing such a file fails at its end.

    Raises:
        OSError: The disk refuses it, or another process has written this step or a later one meanwhile. Existing files
            are unchanged.
    """
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".rank-{rank}.step-{train_step:08d}.{secrets.token_hex(8)}.partial"
    part, num_files = f".rank-{rank}" if rank else "", document["world_size"] if run else 1
    if run:
        part = f".shard-{rank}-of-{num_files}.{run}"
    try:
        with partial.open("xb", buffering=0) as file:
            checksum = _write_content(file, _safetensors_header(document, staged.entries), staged.content())
            file_io.fsync_file(file)
        path = folder / f"step-{train_step:08d}{part}-{checksum}.safetensors"
        # Listed before this file appears: of two files written at once, neither removes the other.
        known = list_shards(folder) if run else list_checkpoints(folder)
        earlier = [each.path for each in known if (each.rank, each.train_step) == (rank, train_step)]
        _rename_partial(partial, path)
    except BaseException:
        _remove_quietly(partial)
        raise
    file_io.fsync_folder(folder)
    for other in (*earlier, *_list_partials(folder, rank=rank, up_to=train_step)):
        if other != path:
            _remove_quietly(other)
    return CheckpointFile(path=path, train_step=train_step, rank=rank, checksum=checksum, run=run, num_files=num_files)


def remove_partials(folder: Path) -> None:
    """Remove all partial files."""
    for path in _list_partials(folder):
        _remove_quietly(path)


def read_checkpoint(saved: CheckpointFile, source: Path | None = None) -> CheckpointContent:
    """Read a checkpoint into memory of its own.

    `source`: path of its bytes; None means its own file.

    Raises:
        TrainingError: It is damaged, or was written by a newer ringweave.
    """
    path = source or saved.path
    try:
        if file_io.file_checksum(path) != saved.checksum:
            raise _damaged_error(saved, "bytes of another check")
        with safe_open(path, framework="pt") as file:
            document = file_io.parse_json((file.metadata() or {})[METADATA_KEY], MAX_METADATA_BYTES)
            tensors: dict[str, Tensor] = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        if document["format"] != FORMAT:
            do = "Load it with the ringweave that wrote it, or train in another folder"
            raise _damaged_error(saved, f"format {document['format']!r}", do)
        parts = {name: format.decode_state(tree, tensors) for name, tree in document["parts"].items()}
        return CheckpointContent(train_step=document["train_step"], world_size=document["world_size"], parts=parts)
    except (SafetensorError, OSError, LookupError, TypeError, ValueError, AttributeError, RecursionError) as cause:
        raise _damaged_error(saved, f"{type(cause).__name__}: {cause}") from cause


def remove_files(files: Iterator[CheckpointFile]) -> None:
    """Remove files; another process may have removed them already.

    Raises:
        OSError: The disk cannot be written, so a file stays.
    """
    for saved in files:
        saved.path.unlink(missing_ok=True)


def _write_content(file: Any, header: bytes, content: memoryview) -> str:
    """Write header and content; return the checksum of both."""
    found = xxhash.xxh3_64()
    for part in (memoryview(header), content):
        for first in range(0, part.nbytes, _PIECE_BYTES):
            piece = part[first : first + _PIECE_BYTES]
            found.update(piece)
            while piece.nbytes:
                piece = piece[file.write(piece) :]
    return found.hexdigest()


def _rename_partial(partial: Path, path: Path) -> None:
    try:
        partial.replace(path)
    except FileNotFoundError as cause:
        text = "removed before it was whole, as another process does that has saved this step or a later one"
        raise FileNotFoundError(errno.ENOENT, text) from cause


def _safetensors_header(document: dict[str, Any], entries: Any) -> bytes:
    metadata = {METADATA_KEY: json.dumps({"format": FORMAT, **document})}
    text = json.dumps({"__metadata__": metadata, **entries}).encode()
    if len(text) > MAX_HEADER_BYTES:
        do = "Save fewer or larger tensors"
        raise OSError(explain("header of a checkpoint", got=len(text), expected=f"{MAX_HEADER_BYTES} bytes", do=do))
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    return len(text).to_bytes(8, "little") + text


def _list_paths(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _list_partials(folder: Path, *, rank: int | None = None, up_to: int | None = None) -> list[Path]:
    """Return partial files: all, or one rank's up to a train step. Names without a step are from old versions."""
    found = [(path, _PARTIAL.fullmatch(path.name)) for path in _list_paths(folder)]
    return [
        path
        for path, name in found
        if name and rank in (None, int(name[1])) and (up_to is None or int(name[2] or 0) <= up_to)
    ]


def _parse_file_name(path: Path) -> CheckpointFile | None:
    found = _FILE_NAME.fullmatch(path.name)
    if found is None:
        return None
    return CheckpointFile(path=path, train_step=int(found[1]), rank=int(found[2] or 0), checksum=found[3])


def _modified_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _remove_quietly(path: Path) -> None:
    """Remove a file that does no harm if it stays."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return


def _damaged_error(
    saved: CheckpointFile, got: str, do: str = "The one before it is taken; remove this one"
) -> TrainingError:
    expected = f"a whole file of format {FORMAT} with check {saved.checksum}"
    return TrainingError("checkpoint", got=got, expected=expected, do=do, where=str(saved.path))


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteJob:
    """One checkpoint to write."""

    train_step: int
    staged: StagedTensors | None
    """None if a part of it is still at a parameter server."""
    document: dict
    copy_s: float
    """Seconds that training waited for the copy."""
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors copied so far, if they are not staged yet."""


class CheckpointWriter:
    """Runs jobs in a thread. At most one job waits: a slow disk gets fewer checkpoints, and stalls no rank."""

    def __init__(self, run: Callable[[WriteJob], None], on_replaced: Callable[[WriteJob], None]) -> None:
        """Create it; `run` writes a job and reports its failure, `on_replaced` gets a job that a newer one replaced."""
        self._run, self._on_replaced = run, on_replaced
        self._condition = threading.Condition()
        self._waiting: WriteJob | None = None
        self._thread: threading.Thread | None = None

    def submit(self, job: WriteJob) -> None:
        """Submit a job. At the end of the program, Python waits for it."""
        with self._condition:
            replaced, self._waiting = self._waiting, job
            if self._thread is None:
                self._thread = threading.Thread(target=self._run_jobs, name="ringweave-checkpoints", daemon=False)
                self._thread.start()
        if replaced is not None:
            self._on_replaced(replaced)

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Wait until all jobs are done; return False on a timeout."""
        with self._condition:
            return self._condition.wait_for(lambda: self._thread is None, timeout_s)

    def _run_jobs(self) -> None:
        while (job := self._next_job()) is not None:
            self._run(job)

    def _next_job(self) -> WriteJob | None:
        with self._condition:
            job, self._waiting = self._waiting, None
            if job is None:
                self._thread = None
                self._condition.notify_all()
            return job
