"""The tree of switches and all rates, recovered from what flows between the nodes get. Pure: no sockets.

`survey` decides what to measure, batch by batch; `cluster` makes a cluster of what it found; `visible` says what of a
known cluster can be seen at all.
"""

from ringweave.topology.recovery.batches import Batch, Flow, meetings
from ringweave.topology.recovery.deciding import Effort, survey
from ringweave.topology.recovery.evidence import Evidence
from ringweave.topology.recovery.fitting import Fit
from ringweave.topology.recovery.trees import Host, MeasuredLink, cluster

__all__ = ["Batch", "Effort", "Evidence", "Fit", "Flow", "Host", "MeasuredLink", "cluster", "meetings", "survey"]
