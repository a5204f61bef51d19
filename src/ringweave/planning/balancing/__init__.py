"""Which rank computes which samples of a batch: speeds, shares in whole samples, orders of an epoch, accounts."""

from ringweave.planning.balancing.accounts import Account, fingerprint
from ringweave.planning.balancing.epochs import EpochOrder, batch_part, cut, shuffled
from ringweave.planning.balancing.estimating import SpeedEstimator
from ringweave.planning.balancing.hesitating import Rebalancer
from ringweave.planning.balancing.pauses import steady_s
from ringweave.planning.balancing.shares import Change, apportion, limits, rebalance, scale, step_s
from ringweave.planning.balancing.speeds import Speed

__all__ = [
    "Account",
    "Change",
    "EpochOrder",
    "Rebalancer",
    "Speed",
    "SpeedEstimator",
    "apportion",
    "batch_part",
    "cut",
    "fingerprint",
    "limits",
    "rebalance",
    "scale",
    "shuffled",
    "steady_s",
    "step_s",
]
