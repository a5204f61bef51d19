"""Training on unequal workers, as a user's script imports it.

```python
model, optimizer, loader = ringweave.prepare(model, optimizer, loader)
```
"""

from ringweave.training.checkpoints.manager import Checkpoints
from ringweave.training.data.shared_loader import SharedLoader
from ringweave.training.preparation import prepare
from ringweave.training.rings.ring_settings import Asynchronous

__all__ = ["Asynchronous", "Checkpoints", "SharedLoader", "prepare"]
