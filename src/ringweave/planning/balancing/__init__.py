"""Balancing: shares of a batch in whole samples, from measured speeds; epoch orders and sample accounts."""

from ringweave.planning.balancing.epochs import (
    EpochOrder,
    SampleAccount,
    batch_fraction,
    fingerprint,
    rank_slice,
    shuffle_indices,
)
from ringweave.planning.balancing.memory import MemoryLimit, MemoryUse
from ringweave.planning.balancing.shares import (
    Rebalancer,
    ShareChange,
    apportion,
    rebalance,
    scale_shares,
    share_limits,
    slowest_compute_s,
)
from ringweave.planning.balancing.speed import Speed, SpeedEstimator, steady_state_s
