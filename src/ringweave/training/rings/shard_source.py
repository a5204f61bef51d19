"""Shard source: samples of an epoch that the parameter server hands out to rings, and the resume of such training."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from ringweave.errors import TrainingError
from ringweave.param_server.data_shards import DataPosition, Spans, remaining_spans
from ringweave.param_server.messages import ResumeDecision
from ringweave.planning import balancing
from ringweave.planning.balancing import SampleAccount
from ringweave.planning.balancing.epochs import Indices
from ringweave.training.data import order, sources
from ringweave.training.data.order import LoaderSpec, Portion, min_batch_samples
from ringweave.training.data.sources import DrawnBatch, EpochPass, SampleSource
from ringweave.training.rings.elastic_ring import ElasticRing
from ringweave.training.rings.ring_progress import OfferedCheckpoint
from ringweave.training.rings.static_ring import StaticRing


def loader_state(position: DataPosition, seed: int, num_samples: int) -> dict[str, Any]:
    """Return the loader's state for a checkpoint; `num_samples` are those of an epoch."""
    done = [list(span) for span in position.done]
    return {"epoch": position.epoch, "done": done, "seed": seed, "num_samples": num_samples}


def remaining_indices(indices: Indices, done: Spans) -> Indices:
    """Return an epoch's order without the finished samples."""
    if not done:
        return indices
    spans = remaining_spans(done, len(indices))
    return np.concatenate([indices[:0], *(indices[first : first + count] for first, count in spans)])


DrawnShard = tuple[int, Portion, float]
"""Position of the first sample in the remaining order, portion of this rank, and the train steps that they make."""


_END_OF_PASS = object()


class ShardSource(SampleSource[StaticRing | ElasticRing]):
    """Shards that the ring takes from the parameter server; a pass is an epoch of all rings together.

    A pass ends when the samples of the epoch are used up, so rings have different numbers of batches. At the end of
    each epoch, all rings pass a barrier, check that every sample was taken once, and take the same parameters.
    """

    def __init__(self, loader: DataLoader, spec: LoaderSpec, seed: int, membership: StaticRing | ElasticRing) -> None:
        """Create it; an elastic ring loads in the training process, since its members agree on each shard first.

        Raises:
            TrainingError: The data are a stream.
        """
        if spec.num_samples is None:
            do = "Use mode balanced, or a data set with an index"
            raise TrainingError("data of mode ps-hra", got="a stream", expected="a data set with an index", do=do)
        super().__init__(loader, spec, seed, membership)
        self._shards = _ShardSampler(self._draw_shard)
        self._reader = (
            DataLoader(
                loader.dataset,
                batch_sampler=self._shards,
                collate_fn=loader.collate_fn,
                pin_memory=loader.pin_memory,
            )
            if membership.is_elastic
            else sources.with_batch_sampler(loader, self._shards)
        )
        self._indices = np.empty(0, np.int64)

    @property
    def shares(self) -> tuple[int, ...]:
        return self.membership.shares

    @property
    def seed(self) -> int:
        """Seed of the orders of all epochs."""
        start = self.membership.start
        return self._seed if start is None else start.seed

    def resume(self, offered: OfferedCheckpoint | None) -> ResumeDecision:
        """Resume all rings from a checkpoint; the offer of the ring's first member counts for the ring."""
        decision, epoch = self.membership.resume(offered, self.spec.epoch_samples)
        self._pass_epoch = self._pass_epoch if epoch is None else epoch
        self._seed = self.seed
        return decision

    def begin_pass(self) -> EpochPass | None:
        number = self._pass_epoch
        self.membership.finish_aborted_pass(self.spec.epoch_samples)
        self._pass_epoch = number + 1
        begun = self.membership.begin_epoch(number)
        if begun is None:
            return None
        pass_number, done = begun
        indices = order.epoch_indices(self._loader, self.spec, self.seed, number, self.membership.broadcast)
        self._indices = remaining_indices(indices[: self.spec.epoch_samples], done)
        self._shards.begin(pass_number, self._indices)
        return EpochPass(epoch=number, number=pass_number)

    def batches(self, begun: EpochPass) -> Iterator[DrawnBatch]:
        batches = iter(self._reader)
        while True:
            self.membership.begin_batch()
            batch = next(batches, _END_OF_PASS)
            if batch is _END_OF_PASS:
                return
            first, own, batch_part = self._shards.handed_out.popleft()
            self.membership.record_batch(first, own, batch_part)
            yield batch, own, batch_part

    def abort_pass(self, begun: EpochPass) -> None:
        self.membership.abort_pass(begun, self.spec.epoch_samples)

    def end_pass(self, begun: EpochPass) -> None:
        found = self.membership.end_epoch(begun.epoch, SampleAccount.from_indices(self._indices))
        self.account = found or self.account

    def _draw_shard(self, pass_number: int, indices: Indices) -> DrawnShard | None:
        """Take the ring's next shard; return this rank's portion, or None at the end of the epoch."""
        ring = self.membership
        if (missing := ring.pass_shard_boundary()) is not None:
            return 0, *missing
        shares = ring.shares
        first, count = ring.take_shard(pass_number, sum(shares), len(indices), min_batch_samples(shares))
        if count == 0:
            return None
        num_samples, num_done = self.spec.epoch_samples, self.spec.epoch_samples - len(indices)
        batch_part = balancing.batch_fraction(
            first + num_done, count, batch_samples=self.spec.batch_samples, num_samples=num_samples
        )
        return first, ring.record_shard(indices[first : first + count], batch_part, first), batch_part


class _ShardSampler(Iterable[list[int]]):
    """The DataLoader's batch sampler: the ring's shards as they are taken, ahead of time with load workers."""

    def __init__(self, draw: Callable[[int, Indices], DrawnShard | None]) -> None:
        self._draw = draw
        self._number, self._indices = 0, np.empty(0, np.int64)
        self.handed_out: deque[DrawnShard] = deque()

    def begin(self, number: int, indices: Indices) -> None:
        self._number, self._indices = number, indices
        self.handed_out.clear()

    def __iter__(self) -> Iterator[list[int]]:
        while (drawn := self._draw(self._number, self._indices)) is not None:
            self.handed_out.append(drawn)
            yield drawn[1].samples_to_load
