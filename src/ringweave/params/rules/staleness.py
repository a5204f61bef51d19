"""What becomes of a push that is some versions old: how much it counts, and how old it may be at most."""

from dataclasses import dataclass

from ringweave.errors import TrainingError, explain


@dataclass(frozen=True, kw_only=True, slots=True)
class StalenessPolicy:
    """The rule of one job. Staleness is counted in versions: the pushes applied since the parameters were taken.

    Source: damping by Zhang et al., arXiv 1511.05950; the bound is that of stale synchronous parallel training;
    compensation by Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation" (2017).
    """

    num_rings: int
    overlaps: bool = False
    """Rings go on computing while their push is under way, so that each round begins one push of all rings earlier."""
    compensation: float = 0.0
    """Lambda in g + lambda g g (theta_now - theta_base); 0 switches it off, and saves the server a copy of the
    parameters for each ring. Off, since 0.04 changed no loss in decision 0021."""

    def __post_init__(self) -> None:
        if self.num_rings < 1 or not self.compensation >= 0:
            raise TrainingError(
                explain(
                    "staleness policy",
                    got=(self.num_rings, self.compensation),
                    expected="at least one ring, and a compensation of 0 or more",
                    do="Choose others",
                )
            )

    @property
    def steady_versions(self) -> int:
        """Staleness when all rings take turns."""
        return 2 * self.num_rings - 1 if self.overlaps else self.num_rings - 1

    @property
    def most_versions(self) -> int:
        """The hard bound: no push is ever applied that is older."""
        return max(4, 4 * self.num_rings)

    @property
    def reserve_versions(self) -> int:
        """How far below the bound a ring stays that is not the oldest, so that the oldest can always go on."""
        return 2 * (self.num_rings - 1) if self.overlaps else 0

    def damping(self, staleness_versions: int) -> float:
        """What a push of that age counts: all up to twice the usual age, from there on less, as 1 / sqrt(1 + age)."""
        undamped = 2 * self.steady_versions
        return min(1.0, ((1.0 + undamped) / (1.0 + staleness_versions)) ** 0.5)
