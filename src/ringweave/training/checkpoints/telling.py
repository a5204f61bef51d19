"""What checkpoints leave in the event log and in the script's own log. Nothing here ends a training."""

import logging
from pathlib import Path

from ringweave.environment import WorkerEnvironment
from ringweave.telemetry import EventLog
from ringweave.training.checkpoints.disk import Saved

_LOGGER = logging.getLogger("ringweave")


class Teller:
    """Says what became of the checkpoints of one rank."""

    def __init__(self, environment: WorkerEnvironment) -> None:
        path = environment.events_path
        self._log = EventLog(path) if path else None

    def saved(self, saved: Saved, *, num_bytes: int, copy_s: float, write_s: float) -> None:
        """One is on the disk."""
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

    def failed(self, rank: int, train_step: int, folder: Path, text: str) -> None:
        """One could not be written. Training goes on."""
        _LOGGER.warning("checkpoint of step %d: not written: %s Training goes on. [%s]", train_step, text, folder)
        self._write("checkpoint_failed", rank=rank, train_step=train_step, folder=str(folder), text=text)

    def not_removed(self, folder: Path, text: str) -> None:
        """Old ones take room."""
        _LOGGER.warning("earlier checkpoints stay: %s. Remove them by hand if they are in the way. [%s]", text, folder)

    def refused(self, rank: int, saved: Saved, text: str) -> None:
        """One is damaged."""
        _LOGGER.warning("%s", text)
        self._write("checkpoint_refused", rank=rank, train_step=saved.train_step, path=str(saved.path), text=text)

    def loaded(self, rank: int, saved: Saved, *, saved_world_size: int, world_size: int) -> None:
        """Training goes on from one."""
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

    def joined(self, num_train_steps: int) -> None:
        """This worker needs none: it has the state of the others."""
        _LOGGER.info(
            "this worker joined after step %d with the state of the others: no checkpoint is read", num_train_steps
        )

    def new_numbers(self, rank: int, train_step: int, why: str) -> None:
        """Random numbers do not go on where they were."""
        _LOGGER.info("random numbers of rank %d begin anew after step %d: %s", rank, train_step, why)

    def _write(self, kind: str, **fields: object) -> None:
        if self._log is not None:
            self._log.write(kind, **fields)
