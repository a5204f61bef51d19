"""What a collective costs on a cluster: the bound that nothing beats, bytes on links, predicted times."""

from ringweave.cost.bounds import Bound, bound, network_bound
from ringweave.cost.network import Network, network

__all__ = ["Bound", "Network", "bound", "network", "network_bound"]
