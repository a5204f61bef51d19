"""The proof that every sample was trained on exactly once: counts and fingerprints that add up over ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from ringweave.planning.balancing.epochs import Indices

_MODULUS = 2**64


def fingerprint(indices: Indices | Sequence[int]) -> int:
    """A number of 64 bits that tells collections of samples apart, however they are ordered or spread over ranks.

    The sum modulo 2^64 of a mix of each index: a sample that is lost, doubled or put in the place of another changes
    it, but for one case in 2^64.

    Source: the mix is SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
    """
    mixed = np.asarray(indices, dtype=np.int64).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return int((mixed ^ (mixed >> np.uint64(31))).sum(dtype=np.uint64))


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """How many samples, and which."""

    num_samples: int = 0
    fingerprint: int = 0
    """Of all of them, as `fingerprint` computes it."""

    @classmethod
    def of(cls, indices: Indices | Sequence[int]) -> Self:
        """The account of these samples."""
        return cls(num_samples=len(indices), fingerprint=fingerprint(indices))

    def __add__(self, other: "Account") -> "Account":
        """Both together."""
        return Account(
            num_samples=self.num_samples + other.num_samples,
            fingerprint=(self.fingerprint + other.fingerprint) % _MODULUS,
        )

    def __sub__(self, other: "Account") -> "Account":
        """What is left of these samples without others that are among them."""
        return Account(
            num_samples=self.num_samples - other.num_samples,
            fingerprint=(self.fingerprint - other.fingerprint) % _MODULUS,
        )
