"""Which checkpoint all ranks take: the newest whole one that any of them has, though the others may not have it."""

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import BinaryIO, Protocol

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
        TrainingError: The bytes of a peer arrived damaged.
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
    """Bytes of the source's file to everybody; who has them already drops them."""
    size = torch.tensor([held[0].path.stat().st_size if held else 0])
    num_bytes = int(among.broadcast(size, source))
    descriptor = os.memfd_create("ringweave-checkpoint")
    with os.fdopen(descriptor, "w+b") as memory, _source_file(held, among.rank == source) as file:
        for first in range(0, num_bytes, _PIECE_BYTES):
            length = min(_PIECE_BYTES, num_bytes - first)
            piece = bytearray(length if file is None else file.read(length))
            among.broadcast(torch.frombuffer(piece, dtype=torch.uint8), source)
            memory.write(piece if held is None else b"")
        memory.flush()
        if held is not None:
            return held
        name = f"step {best[0]} from rank {source}"
        saved = Saved(path=Path(name), train_step=best[0], rank=0, check=best[1])
        return saved, disk.read(saved, Path(f"/proc/self/fd/{descriptor}"))


def _source_file(held: tuple[Saved, Content] | None, is_source: bool) -> AbstractContextManager[BinaryIO | None]:
    return held[0].path.open("rb") if held and is_source else nullcontext()
