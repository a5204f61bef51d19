"""What a collective costs on a cluster: the bound that nothing beats, bytes on links, predicted times."""

from ringweave.cost.bounds import Bound, bound, network_bound
from ringweave.cost.loads import bytes_on_links, vertices
from ringweave.cost.network import Network, network
from ringweave.cost.predictions import Assumptions, Demand, demand, predict

__all__ = [
    "Assumptions",
    "Bound",
    "Demand",
    "Network",
    "bound",
    "bytes_on_links",
    "demand",
    "network",
    "network_bound",
    "predict",
    "vertices",
]
