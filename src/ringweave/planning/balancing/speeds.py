"""How fast a rank computes: seconds as an affine function of the number of samples."""

import math
from dataclasses import dataclass

from ringweave.errors import explain


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """What a rank needs for its part of a train step, apart from communication and from waiting for others.

    The fixed part is kept in samples and not in seconds: when a machine slows down, everything it does slows down, and
    only `s_per_sample` has to be learnt anew.
    """

    s_per_sample: float
    """Seconds of one more sample; positive."""
    overhead_samples: float = 0.0
    """The fixed work of a step (the update, calling kernels) as the number of samples that take as long."""
    noise: float = 0.0
    """How uncertain it is, as a fraction: a smaller gain than that is no reason to change anything."""

    def __post_init__(self) -> None:
        if not (0 < self.s_per_sample < math.inf and 0 <= self.overhead_samples < math.inf and self.noise >= 0):
            raise ValueError(
                explain(
                    "speed of a rank",
                    got=(self.s_per_sample, self.overhead_samples, self.noise),
                    expected="positive seconds per sample, overhead and noise of zero or more",
                    do="Measure it again",
                )
            )

    def seconds(self, num_samples: float) -> float:
        """Predicted seconds of a step with that many samples."""
        return self.s_per_sample * (self.overhead_samples + num_samples)

    def samples_within(self, limit_s: float) -> float:
        """How many samples it is predicted to compute in that time; negative if not even the fixed work."""
        return limit_s / self.s_per_sample - self.overhead_samples
