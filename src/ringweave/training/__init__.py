"""Training on unequal workers, as a user's script imports it.

```python
model, optimizer, loader = ringweave.prepare(model, optimizer, loader)
```
"""

from ringweave.training.checkpoints.manager import Checkpoints
from ringweave.training.data.shared_loader import SharedLoader
from ringweave.training.options import Asynchronous, Local
from ringweave.training.preparation import prepare

__all__ = ["Asynchronous", "Checkpoints", "Local", "SharedLoader", "prepare"]
