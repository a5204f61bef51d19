"""Which checkpoint all ranks take: the newest whole one that any of them has, though the others may not have it."""

import os
from collections.abc import Mapping, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor

from ringweave.errors import TrainingError, explain
from ringweave.training.checkpoints import disk
from ringweave.training.checkpoints.disk import Content, Saved
from ringweave.training.control import Control

_PIECE_BYTES = 16 << 20


class Messages(Protocol):
    """What is needed of the messages among all ranks."""

    rank: int

    def gather_json(self, document: Mapping[str, object]) -> list[dict]:
        """What each rank says."""
        ...

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """One rank's tensor, for all."""
        ...


def messages(environ: Mapping[str, str]) -> Messages | None:
    """The messages among the ranks of the process group; None where there is one process alone.

    Raises:
        TrainingError: There are several, and no process group yet.
    """
    if dist.is_initialized():
        return Control() if dist.get_world_size() > 1 else None
    if environ.get("WORLD_SIZE", "1") != "1":
        raise TrainingError(
            explain(
                "process group",
                got=None,
                expected="one, so that all ranks go on from the same checkpoint",
                do="Call ringweave.prepare or init_process_group before Checkpoints.load",
            )
        )
    return None


def agree(own: tuple[Saved, Content] | None, among: Messages) -> tuple[Saved, Content] | None:
    """The newest checkpoint of all ranks; those that lack it get its bytes from one that has it.

    Args:
        own: The newest whole one that this rank has found, if any.
        among: The messages of all ranks; each calls this.

    Raises:
        TrainingError: On all ranks: one of them could not read its file to the end, or got damaged bytes.
    """
    told = among.gather_json({"step": own[0].train_step, "check": own[0].check} if own else {"step": -1, "check": ""})
    steps = [(said["step"], said["check"]) for said in told]
    best = max(steps)
    if best[0] < 0:
        return None
    source = steps.index(best)
    if all(each == best for each in steps):
        return own
    held = own if own is not None and steps[among.rank] == best else None
    return _share(held, best, source, among)


def _share(
    held: tuple[Saved, Content] | None, best: tuple[int, str], source: int, among: Messages
) -> tuple[Saved, Content]:
    """Bytes of the source's file to everybody; who has them already drops them. If one rank fails, all do."""
    name = f"step {best[0]} from rank {source}"
    descriptor = os.memfd_create("ringweave-checkpoint")
    with (
        os.fdopen(descriptor, "w+b") as memory,
        _Pieces(held[0].path if held and among.rank == source else None) as own,
    ):
        num_bytes = int(among.broadcast(torch.tensor([own.num_bytes]), source))
        for first in range(0, num_bytes, _PIECE_BYTES):
            piece = own.read(min(_PIECE_BYTES, num_bytes - first))
            among.broadcast(torch.frombuffer(piece, dtype=torch.uint8), source)
            memory.write(piece if held is None else b"")
        memory.flush()
        found, failure = held, own.failure
        if held is None:
            saved = Saved(path=Path(name), train_step=best[0], rank=0, check=best[1])
            try:
                found = saved, disk.read(saved, Path(f"/proc/self/fd/{descriptor}"))
            except TrainingError as error:
                failure = str(error)
    _check_all([said["failure"] for said in among.gather_json({"failure": failure})], source, name)
    assert found is not None, "who does not hold it has read it"
    return found


def _check_all(failures: Sequence[str], source: int, name: str) -> None:
    """Refuse on all ranks what failed on one; where it was the source, the others' failures follow from that."""
    failed = next((rank for rank in (source, *range(len(failures))) if failures[rank]), None)
    if failed is not None:
        raise TrainingError(
            explain(
                "checkpoint that all ranks go on from",
                got=f"rank {failed}: {failures[failed]}",
                expected="a file that stays whole until all of them have it",
                do="Leave the folder alone while a job starts, look at that rank's disk, and start again",
                where=name,
            )
        )


class _Pieces:
    """A file piece by piece. Where the disk fails it gives zeros, since the other ranks wait for so many bytes."""

    def __init__(self, path: Path | None) -> None:
        """None is the file of another rank: its pieces come from there."""
        self.num_bytes = 0
        self.failure = ""
        """Why what was read is not what is in the file."""
        self._file: BufferedReader | None = None
        if path is not None:
            try:
                self._file = path.open("rb")
                self.num_bytes = os.fstat(self._file.fileno()).st_size
            except OSError as error:
                self.failure = f"{type(error).__name__}: {error.strerror}"

    def read(self, length: int) -> bytearray:
        """The next bytes."""
        piece = bytearray(length)
        if self._file is not None and not self.failure:
            try:
                if self._file.readinto(piece) < length:
                    self.failure = "the file ends before it should"
            except OSError as error:
                self.failure = f"{type(error).__name__}: {error.strerror}"
        return piece

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
