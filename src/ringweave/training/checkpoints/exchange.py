"""Checkpoint exchange: all ranks agree on the newest complete checkpoint, load its parts, and report what happened.

Ranks that cannot read the file get its bytes from a rank that can.
"""

import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringweave.environment import WorkerEnvironment
from ringweave.errors import TrainingError
from ringweave.telemetry import event_writer
from ringweave.training import gradients
from ringweave.training.checkpoints import store
from ringweave.training.checkpoints.store import CheckpointContent, CheckpointFile
from ringweave.training.collectives import ControlGroup
from ringweave.training.data.shared_loader import SharedLoader
from ringweave.training.rings.ring_worker import ParameterServerOptimizer
from ringweave.training.rings.shard_source import ShardSource

_BROADCAST_BYTES = 16 << 20


def rank_messages(environ: Mapping[str, str]) -> ControlGroup | None:
    """Return the messages among the ranks of the process group; None for a single process.

    Raises:
        TrainingError: There are several processes, and no process group yet.
    """
    if dist.is_initialized():
        return ControlGroup() if dist.get_world_size() > 1 else None
    if environ.get("WORLD_SIZE", "1") != "1":
        raise TrainingError(
            "process group",
            got=None,
            expected="one, so that all ranks go on from the same checkpoint",
            do="Call ringweave.prepare or init_process_group before Checkpoints.load",
        )
    return None


def agree_on_run(environ: Mapping[str, str]) -> str:
    """Return a name of this training, of eight hexadecimal digits, the same on all ranks; a collective."""
    own, messages = torch.tensor([secrets.randbits(32)]), rank_messages(environ)
    return f"{int(own if messages is None else messages.broadcast(own)):08x}"


def any_rank(messages: ControlGroup | None, *, is_true: bool) -> bool:
    """Return True if it is true on some rank; a collective."""
    return is_true if messages is None else any(said["is"] for said in messages.gather_json({"is": is_true}))


def agree_on_checkpoint(
    own: tuple[CheckpointFile, CheckpointContent] | None, messages: ControlGroup
) -> tuple[CheckpointFile, CheckpointContent] | None:
    """Agree on the newest checkpoint of all ranks; ranks without it get its bytes from a rank that has it.

    Raises:
        TrainingError: On all ranks, if one rank could not read its file to the end, or received damaged bytes.
    """
    answers = messages.gather_json(
        {"step": own[0].train_step, "check": own[0].checksum} if own else {"step": -1, "check": ""}
    )
    steps = [(said["step"], said["check"]) for said in answers]
    best = max(steps)
    if best[0] < 0:
        return None
    source = steps.index(best)
    if all(each == best for each in steps):
        return own
    held = own if own is not None and steps[messages.rank] == best else None
    return _broadcast_checkpoint(held, best, source, messages)


def _broadcast_checkpoint(
    own_checkpoint: tuple[CheckpointFile, CheckpointContent] | None,
    best: tuple[int, str],
    source: int,
    messages: ControlGroup,
) -> tuple[CheckpointFile, CheckpointContent]:
    """Broadcast the bytes of the source's file; ranks that have it drop them. If one rank fails, all fail."""
    name = f"step {best[0]} from rank {source}"
    descriptor = os.memfd_create("ringweave-checkpoint")
    with (
        os.fdopen(descriptor, "w+b") as memory,
        _FilePieces(own_checkpoint[0].path if own_checkpoint and messages.rank == source else None) as own,
    ):
        num_bytes = int(messages.broadcast(torch.tensor([own.num_bytes]), source))
        for first in range(0, num_bytes, _BROADCAST_BYTES):
            piece = own.read(min(_BROADCAST_BYTES, num_bytes - first))
            messages.broadcast(torch.frombuffer(piece, dtype=torch.uint8), source)
            memory.write(piece if own_checkpoint is None else b"")
        memory.flush()
        found, failure = own_checkpoint, own.failure
        if own_checkpoint is None:
            saved = CheckpointFile(path=Path(name), train_step=best[0], rank=0, checksum=best[1])
            try:
                found = saved, store.read_checkpoint(saved, Path(f"/proc/self/fd/{descriptor}"))
            except TrainingError as error:
                failure = str(error)
    _raise_on_all_ranks([said["failure"] for said in messages.gather_json({"failure": failure})], source, name)
    assert found is not None, "who does not hold it has read it"
    return found


def _raise_on_all_ranks(failures: Sequence[str], source: int, name: str) -> None:
    """Raise one rank's failure on all ranks; the source's failure comes first, since it causes the others'."""
    failed = next((rank for rank in (source, *range(len(failures))) if failures[rank]), None)
    if failed is not None:
        raise TrainingError(
            "checkpoint that all ranks go on from",
            got=f"rank {failed}: {failures[failed]}",
            expected="a file that stays whole until all of them have it",
            do="Leave the folder alone while a job starts, look at that rank's disk, and start again",
            where=name,
        )


class _FilePieces:
    """Reads a file piece by piece; if the disk fails it returns zeros, since the other ranks expect the bytes."""

    def __init__(self, path: Path | None) -> None:
        """Open the file; None stands for another rank's file, whose pieces come from there."""
        self.num_bytes = 0
        self.failure = ""
        """Reason why the pieces differ from the file."""
        self._file: BufferedReader | None = None
        if path is not None:
            try:
                self._file = path.open("rb")
                self.num_bytes = os.fstat(self._file.fileno()).st_size
            except OSError as error:
                self.failure = f"{type(error).__name__}: {error.strerror}"

    def read(self, length: int) -> bytearray:
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


SERVER_PART = "parameter server"
"""Part name of the parameter server's state."""


def is_server_backed(part: object) -> bool:
    """Return whether this is a loader of rings, whose position in the data the parameter server knows."""
    return isinstance(part, SharedLoader) and isinstance(part.source, ShardSource)


def check_parts(keep: int, parts: dict[str, Any]) -> None:
    """Refuse parts that cannot be saved.

    Raises:
        TrainingError: For the first such part, or an invalid number of checkpoints.
    """
    if keep < 1:
        raise TrainingError("checkpoints to keep", got=keep, expected="at least 1", do="Three leave a way back")
    is_served = any(is_server_backed(part) for part in parts.values())
    for name, part in parts.items():
        if is_server_backed(part):
            continue
        if not callable(getattr(part, "state_dict", None)) or not callable(getattr(part, "load_state_dict", None)):
            do = "Leave it out; a loader has them when it comes from ringweave.prepare"
            expected = "an object with state_dict and load_state_dict"
            raise _part_error(name, type(part).__name__, expected, do)
        if isinstance(part, ParameterServerOptimizer) and not is_served:
            do = "Give Checkpoints loader=loader: by it the server's state is saved, and put back"
            raise _part_error(name, "the optimizer of a ring, without its loader", "both of them", do)
        if isinstance(part, nn.Module) and gradients.is_sharded(part) and not _can_save_shards(part):
            do = "Save a model that is sharded in another way with torch.distributed.checkpoint"
            raise _part_error(name, "a sharded model", "one that is whole, or sharded by fully_shard", do)


def check_part_names(saved: CheckpointFile, states: dict[str, Any], parts: dict[str, Any]) -> None:
    """Compare the part names of a checkpoint with the parts to restore.

    Raises:
        TrainingError: The names differ.
    """
    if states.keys() == parts.keys():
        return
    do = "Give Checkpoints the parts that it was saved with"
    if (SERVER_PART in states) != (SERVER_PART in parts):
        do = "Go on in the modes that it was saved in: rings (ps-hra and ps) keep their state in a server"
    names = [", ".join(sorted(each)) or "none" for each in (states, parts)]
    raise TrainingError("parts of a checkpoint", got=names[0], expected=names[1], do=do, where=str(saved.path))


def fit_whole_states(parts: Mapping[str, Any], states: Mapping[str, Any]) -> dict[str, Any]:
    """Return states of whole tensors with this rank's shards, where the parts are sharded."""
    from ringweave.training.checkpoints import shards

    def refuse(*_: object) -> Tensor:
        raise AssertionError("a state of whole tensors has shards")

    return {name: shards.fit_state(part, states[name], refuse) for name, part in parts.items()}


def load_part(saved: CheckpointFile, name: str, part: Any, state: Any) -> None:
    """Restore one part.

    Raises:
        TrainingError: The state does not fit it.
    """
    try:
        part.load_state_dict(state)
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TrainingError(
            f"part {name} of a checkpoint",
            got=str(error)[:300],
            expected="the state of one that is built alike",
            do="Go on with the model and the options that saved it, or into another folder",
            where=str(saved.path),
        ) from error


def _part_error(name: str, got: str, expected: str, do: str) -> TrainingError:
    return TrainingError(f"part {name} of checkpoints", got=got, expected=expected, do=do)


def _can_save_shards(model: nn.Module) -> bool:
    from ringweave.training.checkpoints import shards  # late: torch.distributed.tensor takes a part of a second

    return shards.can_save(model)


_LOGGER = logging.getLogger("ringweave")


class CheckpointReporter:
    """Reports events of this rank's checkpoints."""

    def __init__(self, environment: WorkerEnvironment) -> None:
        self._write = event_writer(environment.events_path)

    def report_saved(self, saved: CheckpointFile, *, num_bytes: int, copy_s: float, write_s: float) -> None:
        text = "checkpoint of step %d written: training waited %.3f s, the disk took %.3f s"
        _LOGGER.info(text, saved.train_step, copy_s, write_s)
        self._write(
            "checkpoint_saved",
            rank=saved.rank,
            train_step=saved.train_step,
            path=str(saved.path),
            bytes=num_bytes,
            copy_s=copy_s,
            write_s=write_s,
        )

    def report_failed(self, rank: int, train_step: int, folder: Path, text: str) -> None:
        """Report a checkpoint that could not be written. Training goes on."""
        _LOGGER.warning("checkpoint of step %d: not written: %s Training goes on. [%s]", train_step, text, folder)
        self._write("checkpoint_failed", rank=rank, train_step=train_step, folder=str(folder), text=text)

    def report_not_removed(self, folder: Path, text: str) -> None:
        """Report old checkpoints that could not be removed."""
        _LOGGER.warning("earlier checkpoints stay: %s. Remove them by hand if they are in the way. [%s]", text, folder)

    def report_damaged(self, rank: int, saved: CheckpointFile, text: str) -> None:
        _LOGGER.warning("%s", text)
        self._write("checkpoint_refused", rank=rank, train_step=saved.train_step, path=str(saved.path), text=text)

    def report_loaded(self, rank: int, saved: CheckpointFile, *, saved_world_size: int, world_size: int) -> None:
        if rank == 0:
            _LOGGER.info("training goes on after step %d, from %s", saved.train_step, saved.path.name)
        self._write(
            "checkpoint_loaded",
            rank=rank,
            train_step=saved.train_step,
            path=str(saved.path),
            saved_world_size=saved_world_size,
            world_size=world_size,
        )

    def report_joined(self, num_train_steps: int) -> None:
        """Report that this worker has the state of the others and needs no checkpoint."""
        _LOGGER.info(
            "this worker joined after step %d with the state of the others: no checkpoint is read", num_train_steps
        )

    def report_new_rng(self, rank: int, train_step: int, reason: str) -> None:
        """Report that random numbers start again."""
        _LOGGER.info("random numbers of rank %d begin anew after step %d: %s", rank, train_step, reason)

    def report_lost_residuals(self, rank: int, train_step: int, reason: str) -> None:
        """Report that what encoding had left of this rank's gradients is lost."""
        _LOGGER.warning("residuals of rank %d are lost after step %d: %s", rank, train_step, reason)
        self._write("residuals_lost", rank=rank, members=[f"rank {rank}"], reason=reason)

    def report_new_site_state(self, rank: int, train_step: int, reason: str) -> None:
        """Report that the optimizers of all sites continue with the state of the first one."""
        if rank == 0:
            text = "after step %d all sites go on with the optimizer state of the first: %s with these sites"
            _LOGGER.warning(text, train_step, reason)
