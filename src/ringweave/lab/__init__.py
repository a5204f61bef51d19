"""A cluster file brought up on one Linux machine: nodes as namespaces, links with limited rates, devices with quotas.

```python
from ringweave import lab, topology

with_racks = lab.up(topology.load("examples/clusters/two-racks.yaml"))
subprocess.run(with_racks.command("a-0", ["ping", "-c", "1", "b-3"]))
with_racks.set_rate("r0->core", 12.5e6)
lab.down("two-racks")
```
"""

from ringweave.lab.lab import Lab, down, find, is_up, names, up
from ringweave.lab.tools import lab_problems

__all__ = ["Lab", "down", "find", "is_up", "lab_problems", "names", "up"]
