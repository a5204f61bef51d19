"""What a user's script imports: training on unequal workers as if they were one.

```python
model, optimizer, loader = ringweave.prepare(model, optimizer, loader)
```
"""

from ringweave.training.checkpoints import Checkpoints
from ringweave.training.loading.loader import SharedLoader
from ringweave.training.preparing import prepare
from ringweave.training.rings.settings import Asynchronous

__all__ = ["Asynchronous", "Checkpoints", "SharedLoader", "prepare"]
