"""Which rank computes which blocks: stages of consecutive blocks, one behind the other, in one or more replicas."""

import bisect
import itertools
from dataclasses import dataclass

from ringweave.errors import UsageError, explain


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Blocks on ranks. Pure: the same on every rank, without asking anybody.

    The ranks of a replica are consecutive: stage s of replica r is rank r x stages + s.

    Raises:
        UsageError: Splits that are not a partition of the blocks, or less than one replica.
    """

    num_blocks: int
    """Of the whole model."""
    splits: tuple[int, ...]
    """Last blocks, counted from 1, of all stages but the last, as `ringweave partition` prints them. Equal neighbours
    are an empty stage between them: what arrives there is passed on."""
    num_replicas: int = 1
    """Copies of the whole pipeline; each computes its own samples, and their gradients are averaged."""

    def __post_init__(self) -> None:
        edges = (0, *self.splits, self.num_blocks)
        if self.num_blocks < 1 or any(left > right for left, right in itertools.pairwise(edges)):
            expected = f"numbers from 0 to {self.num_blocks}, the blocks there are, none smaller than the one before it"
            raise UsageError(
                explain("splits", got=self.splits, expected=expected, do="Take what `ringweave partition` prints")
            )
        if self.num_replicas < 1:
            do = "Start a whole number of workers for each stage"
            raise UsageError(explain("replicas of the pipeline", got=self.num_replicas, expected="1 or more", do=do))

    @property
    def num_stages(self) -> int:
        """S."""
        return len(self.splits) + 1

    @property
    def world_size(self) -> int:
        """Ranks that it takes."""
        return self.num_stages * self.num_replicas

    @property
    def ranges(self) -> tuple[range, ...]:
        """Of each stage: its blocks, counted from 0."""
        edges = (0, *self.splits, self.num_blocks)
        return tuple(range(first, end) for first, end in itertools.pairwise(edges))

    def stage_of(self, rank: int) -> int:
        """The stage that a rank computes."""
        return rank % self.num_stages

    def replica_of(self, rank: int) -> int:
        """The replica that a rank belongs to."""
        return rank // self.num_stages

    def stage_with(self, block: int) -> int:
        """The stage that has a block, counted from 0."""
        return bisect.bisect_right(self.splits, block)

    def ranks_of_replica(self, replica: int) -> tuple[int, ...]:
        """Its ranks in the order of their stages."""
        return tuple(range(replica * self.num_stages, (replica + 1) * self.num_stages))

    def ranks_of_stage(self, stage: int) -> tuple[int, ...]:
        """The ranks that compute a stage, one of each replica."""
        return tuple(range(stage, self.world_size, self.num_stages))


def even_splits(num_blocks: int, num_stages: int) -> tuple[int, ...]:
    """The splits that give each stage as many blocks as the others; earlier ones get one more where that is uneven."""
    each, more = divmod(num_blocks, num_stages)
    return tuple(stage * each + min(stage, more) for stage in range(1, num_stages))
