"""Memory of a worker: bytes of a batch as an affine function of its samples, and the passes of a share that needs more.

A share above the samples that fit at once is computed in microbatches: the last one keeps its activations until the
backward pass; the others drop them, and repeat their forward pass within the backward pass.

Source of the repeated forward pass: Chen et al., Training Deep Nets with Sublinear Memory Cost (2016).
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ringweave.errors import explain

RESERVE = 0.1
"""Fraction of the memory that no plan uses: fragments of the allocator, libraries, messages."""
REPEATED_FORWARD = 1 / 3
"""Time of a second forward pass, as a fraction of forward and backward: backward does about twice the work."""
_DOES_NOT_FIT = 1000.0
"""Factor on the time of samples that do not fit even one by one: they go elsewhere unless nothing else is left."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUse:
    """Bytes that a worker's process, or its part of a card, uses at the peak of a train step."""

    fixed_bytes: float
    """Bytes without any sample: parameters, gradients, the optimizer's state."""
    sample_bytes: float
    """Bytes of one more sample that is computed at once; positive."""

    @classmethod
    def fit(cls, measured: Sequence[tuple[int, float]]) -> "MemoryUse":
        """Return the least-squares line through (samples, peak bytes), raised until no measurement lies above it.

        Args:
            measured: At least two different numbers of samples.
        """
        samples, peaks = zip(*measured, strict=True)
        slope = max(statistics.linear_regression(samples, peaks).slope, 1.0)
        return cls(fixed_bytes=max(peak - slope * count for count, peak in measured), sample_bytes=slope)

    def peak_bytes(self, num_samples: float) -> float:
        """Return the predicted peak."""
        return self.fixed_bytes + self.sample_bytes * num_samples


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLimit:
    """Limit of a worker's memory, in samples: the same numbers mean the same passes on every worker that hears them."""

    whole_samples: float
    """Most samples that are computed at once; positive, may be below one."""
    split_samples: float = 0.0
    """Memory that a share in microbatches takes beside its samples (sums of gradients), in samples."""
    waiting_samples: float = 0.0
    """Memory of a sample that waits in another microbatch (its inputs and outputs), in samples."""

    def __post_init__(self) -> None:
        numbers = (self.whole_samples, self.split_samples, self.waiting_samples)
        if not all(0 <= each < math.inf for each in numbers) or not self.whole_samples:
            expected, do = "finite numbers of samples, at least one at once above zero", "Measure the memory again"
            raise ValueError(explain("memory of a rank", got=numbers, expected=expected, do=do))

    @classmethod
    def of_bytes(cls, use: MemoryUse, limit_bytes: float, split_bytes: float, waiting_bytes: float) -> "MemoryLimit":
        """Return the limit of a worker with so many bytes, of which a reserve stays free.

        Args:
            use: Measured use.
            limit_bytes: All bytes that the worker may use.
            split_bytes: Bytes that a share in microbatches takes once.
            waiting_bytes: Bytes of each of its samples, computed or not.
        """
        room = ((1 - RESERVE) * limit_bytes - use.fixed_bytes) / use.sample_bytes
        return cls(
            whole_samples=max(room, 1e-6),
            split_samples=split_bytes / use.sample_bytes,
            waiting_samples=waiting_bytes / use.sample_bytes,
        )

    def room(self, num_samples: float) -> int:
        """Return the samples of one microbatch of a share that is too large to be computed at once; 0 if none fits."""
        return max(0, math.floor(self.whole_samples - self.split_samples - self.waiting_samples * num_samples))

    def split(self, num_samples: int) -> tuple[int, ...]:
        """Return the samples of each microbatch of a share; the last one keeps its activations.

        A share of which no sample fits is computed sample by sample.
        """
        if num_samples <= self.whole_samples:
            return (num_samples,)
        room = min(max(1, self.room(num_samples)), num_samples)
        repeated = num_samples - room
        num_passes = -(-repeated // room)
        smaller, num_larger = divmod(repeated, max(1, num_passes))
        return (*(smaller + (index < num_larger) for index in range(num_passes)), room)

    def extra_samples(self, num_samples: float, overhead_samples: float) -> float:
        """Return the additional work of a share in microbatches, as samples that take as long."""
        if num_samples <= self.whole_samples:
            return 0.0
        room = self.room(num_samples)
        if room < 1:
            return (_DOES_NOT_FIT - 1) * num_samples
        num_passes = math.ceil(num_samples / room)
        return REPEATED_FORWARD * (num_samples - room) + overhead_samples * (num_passes - 1)
