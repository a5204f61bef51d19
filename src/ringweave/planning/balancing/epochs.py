"""Sample order of an epoch, the same on all ranks, and the proof that every sample was trained on exactly once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


def shuffle_indices(num_samples: int, seed: int, epoch: int) -> Indices:
    """A permutation of all samples that depends on seed and epoch alone."""
    return np.random.default_rng((seed, epoch)).permutation(num_samples)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EpochOrder:
    """All samples of an epoch in training order, cut into batches for all ranks together."""

    indices: Indices
    """(num_samples,) int64: the samples, first to last."""
    batch_samples: int
    """Samples in a batch over all ranks."""
    drop_last: bool
    """Leave out a last batch that is not full."""
    start: int = 0
    """Position to resume at: the samples before it were trained on already."""

    @property
    def num_batches(self) -> int:
        left = len(self.indices) - self.start
        return left // self.batch_samples if self.drop_last else -(-left // self.batch_samples)

    def batch(self, index: int) -> Indices:
        """Return the samples of a batch, counted from the start; the last one may be short."""
        begin = self.start + index * self.batch_samples
        return self.indices[begin : begin + self.batch_samples]

    def trained_indices(self, num_batches: int) -> Indices:
        """Return the samples of the first batches from the start on."""
        return self.indices[self.start : self.start + num_batches * self.batch_samples]


def rank_slice(shares: Sequence[int], rank: int) -> slice:
    """Return a rank's slice of a batch: the ranks take theirs one after the other."""
    begin = sum(shares[:rank])
    return slice(begin, begin + shares[rank])


def batch_fraction(first: int, count: int, *, batch_samples: int, num_samples: int) -> float:
    """Return these samples' size in train steps of synchronous training: each counts as in its batch there.

    Args:
        first: Place of the first one in the epoch's order.
        count: Number of consecutive samples from it on.
        batch_samples: Size of a whole batch; the last one may be smaller.
        num_samples: Size of the epoch.
    """
    whole_end = num_samples - num_samples % batch_samples
    whole = max(0, min(first + count, whole_end) - first)
    return whole / batch_samples + ((count - whole) / (num_samples - whole_end) if count > whole else 0.0)


_MODULUS = 2**64


def fingerprint(indices: Indices | Sequence[int]) -> int:
    """Return a 64-bit number that identifies a collection of samples, independent of their order and rank.

    The sum modulo 2^64 of a mix of each index: a lost, doubled or exchanged sample changes it, except in one case of
    2^64.

    Source: the mix is SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
    """
    mixed = np.asarray(indices, dtype=np.int64).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return int((mixed ^ (mixed >> np.uint64(31))).sum(dtype=np.uint64))


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleAccount:
    """Number and fingerprint of a collection of samples."""

    num_samples: int = 0
    fingerprint: int = 0
    """Combined fingerprint, as `fingerprint` computes it."""

    @classmethod
    def from_indices(cls, indices: Indices | Sequence[int]) -> Self:
        return cls(num_samples=len(indices), fingerprint=fingerprint(indices))

    def __add__(self, other: "SampleAccount") -> "SampleAccount":
        return SampleAccount(
            num_samples=self.num_samples + other.num_samples,
            fingerprint=(self.fingerprint + other.fingerprint) % _MODULUS,
        )

    def __sub__(self, other: "SampleAccount") -> "SampleAccount":
        """Remove samples that are among these."""
        return SampleAccount(
            num_samples=self.num_samples - other.num_samples,
            fingerprint=(self.fingerprint - other.fingerprint) % _MODULUS,
        )
