"""Resume of training in rings: remaining samples of an epoch, and the interface of loaders backed by a server."""

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringweave.errors import TrainingError, explain
from ringweave.param_server.client import RingClient
from ringweave.param_server.data_shards import DataPosition, Spans, remaining_spans
from ringweave.param_server.messages import DataStart, ResumeDecision
from ringweave.planning.balancing.epochs import Indices
from ringweave.training.data.shared_loader import PreparedLoader


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumeStart:
    """Position in the data to resume from."""

    epoch: int
    done: Spans
    """Samples of that epoch, by their positions in its order, that the parameters include already."""
    seed: int
    """Seed of the orders of all epochs."""

    @classmethod
    def of_state(cls, state: Mapping[str, Any], num_samples: int) -> "ResumeStart":
        """Parse the state that `loader_state` returned; a finished epoch is followed by the next one.

        Args:
            state: State from a checkpoint.
            num_samples: Samples of an epoch.

        Raises:
            TrainingError: It belongs to other data.
        """
        if state["num_samples"] != num_samples:
            raise TrainingError(
                explain(
                    "samples of an epoch",
                    got=num_samples,
                    expected=f"{state['num_samples']}, as the checkpoint has them",
                    do="Go on with the data that it was saved with, or begin in another folder",
                )
            )
        done = spans_of_json(state["done"])
        if remaining_spans(done, num_samples):
            return cls(epoch=state["epoch"], done=done, seed=state["seed"])
        return cls(epoch=state["epoch"] + 1, done=(), seed=state["seed"])

    @classmethod
    def of_json(cls, document: Mapping[str, Any]) -> "ResumeStart":
        return cls(epoch=document["epoch"], done=spans_of_json(document["done"]), seed=document["seed"])

    def to_message(self, pass_number: int) -> DataStart:
        """Return the message for the server; `pass_number` is that of the next pass."""
        return DataStart(pass_number=pass_number, epoch=self.epoch, done=list(self.done), seed=self.seed)

    def done_spans_of(self, epoch: int) -> Spans:
        """Return the spans of an epoch that are not drawn again."""
        return self.done if epoch == self.epoch else ()


def loader_state(position: DataPosition, seed: int, num_samples: int) -> dict[str, Any]:
    """Return the loader's state for a checkpoint; `num_samples` are those of an epoch."""
    done = [list(span) for span in position.done]
    return {"epoch": position.epoch, "done": done, "seed": seed, "num_samples": num_samples}


def spans_of_json(pairs: Iterable[Sequence[int]]) -> Spans:
    """Parse spans from JSON."""
    return tuple((first, count) for first, count in pairs)


def remaining_indices(indices: Indices, done: Spans) -> Indices:
    """Return an epoch's order without the finished samples."""
    if not done:
        return indices
    spans = remaining_spans(done, len(indices))
    return np.concatenate([indices[:0], *(indices[first : first + count] for first, count in spans)])


@dataclass(frozen=True, kw_only=True, slots=True)
class OfferedCheckpoint:
    """A checkpoint that this process offers to resume from."""

    train_step: int
    checksum: str
    state: Mapping[str, Any]
    """State of the loader."""
    content: Callable[[], bytes]
    """Returns the server's state."""


class ServerBackedLoader(PreparedLoader):
    """Loader of rings; the parameter server knows the position in the data, together with the parameters."""

    is_elastic: bool
    """The ring may lose members; each member follows the server's decision on its own."""

    @property
    @abc.abstractmethod
    def has_joined_late(self) -> bool:
        """The others are training, and this process has their state."""

    @abc.abstractmethod
    def has_training_begun(self) -> bool:
        """Return whether the others are training; all members of the ring get the same answer."""

    @property
    @abc.abstractmethod
    def may_save(self) -> bool:
        """This process represents a ring that may be the one to write checkpoints."""

    @property
    @abc.abstractmethod
    def num_samples(self) -> int:
        """Samples of an epoch."""

    @property
    @abc.abstractmethod
    def seed(self) -> int:
        """Seed of the orders of all epochs."""

    @abc.abstractmethod
    def connect_server(self) -> RingClient:
        """Return a separate connection of this process for its ring; the caller closes it."""

    @abc.abstractmethod
    def register_final_save(self, save: Callable[[], str]) -> None:
        """Register a function that saves the state if the job ends early and this process saves for its ring.

        `save` returns a text about the outcome. Without `--elastic` it is never called.
        """

    @abc.abstractmethod
    def resume(self, offered: OfferedCheckpoint | None) -> ResumeDecision:
        """Agree with all rings on a checkpoint, and resume from it: parameters and data.

        Raises:
            TrainingError: Training has begun, or the checkpoint belongs to other data or another model.
        """
