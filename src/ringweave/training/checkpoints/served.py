"""The part of a checkpoint that the parameter server has: read from it while training goes on, given back at the start.

In rings no process has the state of the training. The server has it: the parameters, the optimizer's state, and which
samples they are of. One ring reads it, and writes it down beside what the script's own parts are on that process.
"""

from typing import Any

from ringweave.params.resuming import Ruled
from ringweave.params.serving import snapshots
from ringweave.training.checkpoints.disk import Content, Saved
from ringweave.training.rings.resuming import Offered, ServedLoader, state_of

SERVER = "parameter server"
"""Name of the part."""


class Served:
    """What `Checkpoints` does about it."""

    def __init__(self, name: str, loader: ServedLoader) -> None:
        """`name` is that of the loader among the parts."""
        self.name, self.loader = name, loader

    def read(self) -> tuple[int, dict[str, Any]] | None:
        """(train steps of all rings, states of the server and the data); None where another ring is to save.

        Raises:
            WireError: The server cannot be reached.
        """
        client = self.loader.connect()
        try:
            buffers = client.read_snapshot()
        finally:
            client.close()
        if buffers is None:
            return None
        books, tensors = snapshots.of_buffers(buffers)
        found = snapshots.of_parts(books, tensors)
        state = state_of(found.position, self.loader.seed, self.loader.num_samples)
        return found.progress.num_done, {self.name: state, SERVER: {"books": books, "tensors": tensors}}

    def resume(self, found: tuple[Saved, Content] | None) -> Ruled:
        """Have all rings go on from one checkpoint: this one, if no other ring has a newer one."""
        return self.loader.resume(self._offered(*found) if found else None)

    def num_train_steps(self) -> int:
        """Whole train steps of all rings by now."""
        client = self.loader.connect()
        try:
            return int(client.status().train_steps)
        finally:
            client.close()

    def has_begun(self) -> bool:
        """Rings have pushed, or the server goes on from a checkpoint."""
        client = self.loader.connect()
        try:
            return client.status().version > 0
        finally:
            client.close()

    def _offered(self, saved: Saved, content: Content) -> Offered | None:
        state, kept = content.parts.get(self.name), content.parts.get(SERVER)
        if state is None or kept is None:
            return None
        return Offered(
            train_step=saved.train_step,
            check=saved.check,
            state=state,
            content=lambda: snapshots.to_bytes(snapshots.of_parts(kept["books"], kept["tensors"])),
        )
