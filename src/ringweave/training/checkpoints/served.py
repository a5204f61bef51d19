"""Checkpoints of rings: what the parameter server has is read while training goes on, and given back at the start.

In rings no process has the state of the training. The server has it: the parameters, the optimizer's state, and which
samples they are of. One ring reads it, and writes it down beside what the script's own parts are on that process.
"""

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from ringweave.errors import TrainingError, explain
from ringweave.params.messages import Status
from ringweave.params.resuming import Ruled
from ringweave.params.serving import snapshots
from ringweave.training.checkpoints import meeting
from ringweave.training.checkpoints import parts as checkpoint_parts
from ringweave.training.checkpoints.disk import Content, Saved
from ringweave.training.checkpoints.encoding import Encoder
from ringweave.training.checkpoints.parts import SERVER
from ringweave.training.checkpoints.staging import Stage
from ringweave.training.checkpoints.telling import Teller
from ringweave.training.checkpoints.writing import Job
from ringweave.training.rings.resuming import Offered, ServedLoader, state_of

Found = tuple[Saved, Content]


class Served:
    """What `Checkpoints` does where the server has the state."""

    def __init__(self, name: str, loader: ServedLoader, parts: Mapping[str, Any], teller: Teller) -> None:
        """`name` is that of the loader; `parts` are the others."""
        self._name, self._loader, self._parts, self._teller = name, loader, parts, teller

    def begin(self, train_step: int) -> Job | None:
        """Copy the script's own parts, for a checkpoint that is completed in the thread; None if others save."""
        return self._begun(train_step) if self._loader.may_save else None

    def take_last(self, stage: Stage) -> Job | None:
        """The state at the end of a job that is over; None where it is for another ring to save.

        Raises:
            WireError: The server cannot be reached.
        """
        return self.complete(self._begun(0), stage)

    def _begun(self, train_step: int) -> Job:
        started_s, encoder = time.perf_counter(), Encoder()
        trees = {name: encoder.encode(part.state_dict(), name) for name, part in self._parts.items()}
        tensors = {name: tensor.clone() for name, tensor in encoder.tensors.items()}
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        document = {"train_step": train_step, "rank": 0, "world_size": world_size, "parts": trees}
        copy_s = time.perf_counter() - started_s
        return Job(train_step=train_step, staged=None, document=document, copy_s=copy_s, tensors=tensors)

    def complete(self, job: Job, stage: Stage) -> Job | None:
        """With what the server has now, and named by its train steps; None where it is for another ring to save.

        Raises:
            WireError: The server cannot be reached.
        """
        found = self._read()
        if found is None:
            return None
        train_step, states = found
        encoder = Encoder()
        trees = {name: encoder.encode(state, name) for name, state in states.items()}
        staged = stage.copy({**job.tensors, **encoder.tensors})
        parts = {**job.document["parts"], **trees}
        document = {**job.document, "train_step": train_step, "parts": parts}
        return Job(train_step=train_step, staged=staged, document=document, copy_s=job.copy_s)

    def load(self, newest: Callable[[], Found | None], named: Callable[[str], Found | None]) -> int:
        """Have all rings go on from one checkpoint, the newest that any of them has.

        Args:
            newest: Reads the newest whole one.
            named: Reads the one with that check.

        Returns:
            Train steps of all rings that are done.

        Raises:
            TrainingError: It holds other parts than these, does not fit them, or cannot be read here.
        """
        if self._loader.is_latecomer:
            return self._join(self._num_train_steps())
        among = None if self._loader.is_elastic else meeting.messages(os.environ)
        found = newest() if among is None else meeting.agree(newest(), among)
        if found is not None:
            wanted = {**self._parts, SERVER: None, self._name: None}
            checkpoint_parts.check_names(found[0], found[1].parts, wanted)
        ruled = self._loader.resume(self._offered(*found) if found else None)
        if ruled.verdict == "begun":
            return self._join(ruled.num_done)
        if ruled.verdict == "resumed":
            is_own = found is not None and found[0].check == ruled.check
            self._put(found if is_own else named(ruled.check), ruled)
        return ruled.num_done

    def clear(self, remove: Callable[[], None]) -> int:
        """Remove all checkpoints; no ring of an elastic job trains before the folder is empty for all."""
        if self._loader.is_latecomer or self._loader.has_begun():
            return self._join(self._num_train_steps())
        if self._loader.may_save:
            remove()
        return self._loader.resume(None).num_done

    def _put(self, found: Found | None, ruled: Ruled) -> None:
        if found is None:
            raise TrainingError(
                explain(
                    "checkpoint that the rings go on from",
                    got=f"nothing of step {ruled.train_step} with check {ruled.check} that this worker can read",
                    expected="its file",
                    do="Keep the checkpoints of an elastic job on a disk that all its workers reach",
                )
            )
        saved, content = found
        for name, part in self._parts.items():
            checkpoint_parts.load(saved, name, part, content.parts[name])
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._teller.loaded(rank, saved, saved_world_size=content.world_size, world_size=world_size)

    def _read(self) -> tuple[int, dict[str, Any]] | None:
        """(train steps of all rings, states of the server and the data)."""
        client = self._loader.connect()
        try:
            buffers = client.read_snapshot()
        finally:
            client.close()
        if buffers is None:
            return None
        books, tensors = snapshots.of_buffers(buffers)
        found = snapshots.of_parts(books, tensors)
        state = state_of(found.position, self._loader.seed, self._loader.num_samples)
        return found.progress.num_done, {self._name: state, SERVER: {"books": books, "tensors": tensors}}

    def _offered(self, saved: Saved, content: Content) -> Offered:
        kept = content.parts[SERVER]
        return Offered(
            train_step=saved.train_step,
            check=saved.check,
            state=content.parts[self._name],
            content=lambda: snapshots.to_bytes(snapshots.of_parts(kept["books"], kept["tensors"])),
        )

    def _join(self, num_train_steps: int) -> int:
        self._teller.joined(num_train_steps)
        return num_train_steps

    def _num_train_steps(self) -> int:
        return int(self._status().train_steps)

    def _status(self) -> Status:
        client = self._loader.connect()
        try:
            return client.status()
        finally:
            client.close()
