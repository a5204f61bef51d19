"""The order of the samples in an epoch, the same for all ranks, and who takes which part of a batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


def shuffled(num_samples: int, seed: int, epoch: int) -> Indices:
    """A permutation of all samples that depends on seed and epoch alone."""
    return np.random.default_rng((seed, epoch)).permutation(num_samples)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EpochOrder:
    """All samples of an epoch in the order in which they are trained on, cut into batches for all ranks together."""

    indices: Indices
    """(num_samples,) int64: the samples, first to last."""
    batch_samples: int
    """Samples in a batch over all ranks."""
    drop_last: bool
    """Leave out a last batch that is not full."""
    start: int = 0
    """Position at which to go on: what comes before was trained on already."""

    @property
    def num_batches(self) -> int:
        """Batches from the start on."""
        left = len(self.indices) - self.start
        return left // self.batch_samples if self.drop_last else -(-left // self.batch_samples)

    def batch(self, index: int) -> Indices:
        """The samples of a batch, counted from the start; the last one may be short."""
        begin = self.start + index * self.batch_samples
        return self.indices[begin : begin + self.batch_samples]

    def passed(self, num_batches: int) -> Indices:
        """The samples of the first batches from the start on."""
        return self.indices[self.start : self.start + num_batches * self.batch_samples]


def cut(shares: Sequence[int], rank: int) -> slice:
    """Which part of a batch is a rank's: the ranks take theirs one after the other."""
    begin = sum(shares[:rank])
    return slice(begin, begin + shares[rank])


def batch_part(first: int, count: int, *, batch_samples: int, num_samples: int) -> float:
    """The train steps of synchronous training that these samples of an epoch make: each counts as in its batch there.

    Args:
        first: Place of the first one in the epoch's order.
        count: How many follow each other, with it.
        batch_samples: Of a whole batch; the last one may be smaller.
        num_samples: Of the epoch.
    """
    whole_end = num_samples - num_samples % batch_samples
    whole = max(0, min(first + count, whole_end) - first)
    return whole / batch_samples + ((count - whole) / (num_samples - whole_end) if count > whole else 0.0)
