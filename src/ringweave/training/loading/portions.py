"""This rank's part of a batch."""

from dataclasses import dataclass

from ringweave.planning import balancing
from ringweave.planning.balancing.epochs import Indices
from ringweave.planning.balancing.shares import Shares


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Portion:
    """What a rank computes of one batch."""

    indices: Indices
    """Its samples, (num_samples,) int64; may be empty in a short last batch."""
    num_total: int
    """Samples of the batch over all ranks."""
    stand_ins: Indices
    """Samples of the batch that a rank computes, and throws away, where it has none of its own."""

    @property
    def to_load(self) -> list[int]:
        """What the data set is asked for: never nothing, since DDP wants a pass of every rank."""
        return self.indices.tolist() or self.stand_ins.tolist()


def stand_ins(batch: Indices) -> Indices:
    """Two samples, if there are: layers that normalise over a batch take no single one."""
    return batch[:2]


def portion(batch: Indices, shares: Shares, rank: int) -> Portion:
    """A rank's portion of a batch. One of other size than the shares say, as the last one is, is cut in proportion."""
    if len(batch) != sum(shares):
        shares = balancing.scale(shares, len(batch))
    return Portion(indices=batch[balancing.cut(shares, rank)], num_total=len(batch), stand_ins=stand_ins(batch))


def least_of(shares: Shares) -> int:
    """Samples of the smallest batch that, cut in proportion, leaves no rank a single one: what batch norms refuse.

    A whole batch is small enough for anybody.
    """
    whole = sum(shares)
    return min(whole, -(-2 * whole // min(share for share in shares if share)))
