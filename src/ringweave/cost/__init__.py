"""Cost of a collective on a cluster: lower bound, bytes on each link, predicted time."""

from ringweave.cost.bounds import (
    ENCRYPTION_S_PER_BYTE,
    Assumptions,
    Bound,
    ScheduleDemand,
    bound,
    network_bound,
    predict,
    schedule_demand,
)
from ringweave.cost.loads import bytes_on_links, vertices_of_ranks
from ringweave.cost.network import GroupNetwork, group_network
