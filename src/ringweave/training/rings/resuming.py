"""Training in rings that goes on from a checkpoint: which samples are left of an epoch, and where the server stands."""

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringweave.errors import TrainingError, explain
from ringweave.params.resuming import Ruled, StartWords
from ringweave.params.ring.client import RingClient
from ringweave.params.rules import Position, Spans
from ringweave.params.rules.positions import left
from ringweave.planning.balancing.epochs import Indices
from ringweave.training.loading.prepared import PreparedLoader


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Where the data go on."""

    epoch: int
    done: Spans
    """Samples of that epoch, by their places in its order, that are in the parameters already."""
    seed: int
    """Of the orders of all epochs."""

    @classmethod
    def of_state(cls, state: Mapping[str, Any], num_samples: int) -> "Start":
        """What `state_of` gave; where nothing is left of the epoch it is the next one.

        Args:
            state: From a checkpoint.
            num_samples: Of an epoch.

        Raises:
            TrainingError: It is of other data.
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
        done = spans_of(state["done"])
        if left(done, num_samples):
            return cls(epoch=state["epoch"], done=done, seed=state["seed"])
        return cls(epoch=state["epoch"] + 1, done=(), seed=state["seed"])

    @classmethod
    def of_words(cls, words: Mapping[str, Any]) -> "Start":
        """From JSON."""
        return cls(epoch=words["epoch"], done=spans_of(words["done"]), seed=words["seed"])

    def to_message(self, pass_number: int) -> StartWords:
        """For the server; `pass_number` is that of the first pass that follows."""
        return StartWords(pass_number=pass_number, epoch=self.epoch, done=list(self.done), seed=self.seed)

    def done_of(self, epoch: int) -> Spans:
        """Samples of an epoch that are not drawn again."""
        return self.done if epoch == self.epoch else ()


def state_of(position: Position, seed: int, num_samples: int) -> dict[str, Any]:
    """What a checkpoint says of the data; `num_samples` are those of an epoch."""
    done = [list(span) for span in position.done]
    return {"epoch": position.epoch, "done": done, "seed": seed, "num_samples": num_samples}


def spans_of(words: Iterable[Sequence[int]]) -> Spans:
    """Spans from JSON."""
    return tuple((first, count) for first, count in words)


def rest_of(indices: Indices, done: Spans) -> Indices:
    """An epoch's order without the samples that are done."""
    if not done:
        return indices
    spans = left(done, len(indices))
    return np.concatenate([indices[:0], *(indices[first : first + count] for first, count in spans)])


@dataclass(frozen=True, kw_only=True, slots=True)
class Offered:
    """A checkpoint that this process could go on from."""

    train_step: int
    check: str
    state: Mapping[str, Any]
    """Of the loader."""
    content: Callable[[], bytes]
    """The server's state."""


class ServedLoader(PreparedLoader):
    """A loader of rings: where the data stand the parameter server knows, with the parameters."""

    is_elastic: bool
    """Its ring may lose members: each of them does by itself what follows from the server's word."""

    @property
    @abc.abstractmethod
    def is_latecomer(self) -> bool:
        """The others are training, and this process has what they have."""

    @abc.abstractmethod
    def has_begun(self) -> bool:
        """The others are training, for all that the ring's members have agreed on: each hears the same."""

    @property
    @abc.abstractmethod
    def may_save(self) -> bool:
        """This process speaks for a ring that may be the one to write checkpoints."""

    @property
    @abc.abstractmethod
    def num_samples(self) -> int:
        """Of an epoch."""

    @property
    @abc.abstractmethod
    def seed(self) -> int:
        """Of the orders of all epochs."""

    @abc.abstractmethod
    def connect(self) -> RingClient:
        """A connection of its own, of this process for its ring; the caller closes it."""

    @abc.abstractmethod
    def save_at_end(self, save: Callable[[], str]) -> None:
        """Have the state saved when the job ends before its time and this process is the one to do it for its ring.

        `save` says in words what came of it. Without `--elastic` nobody is there to do it.
        """

    @abc.abstractmethod
    def resume(self, offered: Offered | None) -> Ruled:
        """Agree with all rings on what to go on from, and stand there: parameters and data.

        Raises:
            TrainingError: Training has begun, or the checkpoint is of other data or another model.
        """
