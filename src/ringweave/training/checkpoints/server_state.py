"""Checkpoints of rings: the parameter server's state is read while training goes on, and restored at the start.

In rings no process has the state of the training. The server has the parameters, the optimizer's state and the spans of
samples that they include. One ring reads them and writes them together with the script's own parts of that process.
"""

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from ringweave.errors import TrainingError, explain
from ringweave.param_server import snapshots
from ringweave.param_server.messages import ResumeDecision, ServerStatus
from ringweave.training.checkpoints import exchange
from ringweave.training.checkpoints.exchange import SERVER_PART, CheckpointReporter
from ringweave.training.checkpoints.format import StateEncoder
from ringweave.training.checkpoints.store import CheckpointContent, CheckpointFile, StagingBuffers, WriteJob
from ringweave.training.rings.ring_resume import OfferedCheckpoint, ServerBackedLoader, loader_state

FoundCheckpoint = tuple[CheckpointFile, CheckpointContent]


class ServerCheckpoint:
    """Saves and loads checkpoints where the parameter server has the state."""

    def __init__(
        self, name: str, loader: ServerBackedLoader, parts: Mapping[str, Any], reporter: CheckpointReporter
    ) -> None:
        """Create it; `name` is the loader's part name, `parts` are the other parts."""
        self._name, self._loader, self._parts, self._reporter = name, loader, parts, reporter

    def begin_save(self, train_step: int) -> WriteJob | None:
        """Copy the script's own parts for a checkpoint that the writer completes; None if another rank saves."""
        return self._copy_own_parts(train_step) if self._loader.may_save else None

    def take_final(self, stage: StagingBuffers) -> WriteJob | None:
        """Return the state at the end of a job that is over; None if another ring saves it.

        Raises:
            RpcError: The server cannot be reached.
        """
        return self.complete(self._copy_own_parts(0), stage)

    def _copy_own_parts(self, train_step: int) -> WriteJob:
        started_s, encoder = time.perf_counter(), StateEncoder()
        trees = {name: encoder.encode(part.state_dict(), name) for name, part in self._parts.items()}
        tensors = {name: tensor.clone() for name, tensor in encoder.tensors.items()}
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        document = {"train_step": train_step, "rank": 0, "world_size": world_size, "parts": trees}
        copy_s = time.perf_counter() - started_s
        return WriteJob(train_step=train_step, staged=None, document=document, copy_s=copy_s, tensors=tensors)

    def complete(self, job: WriteJob, stage: StagingBuffers) -> WriteJob | None:
        """Complete a checkpoint with the server's state and its train steps; None if another ring saves it.

        Raises:
            RpcError: The server cannot be reached.
        """
        found = self._read_server()
        if found is None:
            return None
        train_step, states = found
        encoder = StateEncoder()
        trees = {name: encoder.encode(state, name) for name, state in states.items()}
        staged = stage.stage({**job.tensors, **encoder.tensors})
        parts = {**job.document["parts"], **trees}
        document = {**job.document, "train_step": train_step, "parts": parts}
        return WriteJob(train_step=train_step, staged=staged, document=document, copy_s=job.copy_s)

    def load(
        self,
        read_newest: Callable[[], FoundCheckpoint | None],
        read_by_checksum: Callable[[str], FoundCheckpoint | None],
    ) -> int:
        """Let all rings resume from one checkpoint, the newest that any of them has.

        Args:
            read_newest: Reads the newest complete checkpoint.
            read_by_checksum: Reads the checkpoint with this checksum.

        Returns:
            Finished train steps of all rings.

        Raises:
            TrainingError: It holds other parts than these, does not fit them, or cannot be read here.
        """
        if self._loader.has_joined_late:
            return self._report_joined(self._num_train_steps())
        messages = None if self._loader.is_elastic else exchange.rank_messages(os.environ)
        found = read_newest() if messages is None else exchange.agree_on_checkpoint(read_newest(), messages)
        if found is not None:
            wanted = {**self._parts, SERVER_PART: None, self._name: None}
            exchange.check_part_names(found[0], found[1].parts, wanted)
        decision = self._loader.resume(self._offered_checkpoint(*found) if found else None)
        if decision.verdict == "begun":
            return self._report_joined(decision.num_done)
        if decision.verdict == "resumed":
            is_own = found is not None and found[0].checksum == decision.check
            self._restore_parts(found if is_own else read_by_checksum(decision.check), decision)
        return decision.num_done

    def clear(self, remove: Callable[[], None]) -> int:
        """Remove all checkpoints; in an elastic job no ring trains before the folder is empty for all."""
        if self._loader.has_joined_late or self._loader.has_training_begun():
            return self._report_joined(self._num_train_steps())
        if self._loader.may_save:
            remove()
        return self._loader.resume(None).num_done

    def _restore_parts(self, found: FoundCheckpoint | None, decision: ResumeDecision) -> None:
        if found is None:
            raise TrainingError(
                explain(
                    "checkpoint that the rings go on from",
                    got=f"nothing of step {decision.train_step} with check {decision.check} that this worker can read",
                    expected="its file",
                    do="Keep the checkpoints of an elastic job on a disk that all its workers reach",
                )
            )
        saved, content = found
        for name, part in self._parts.items():
            exchange.load_part(saved, name, part, content.parts[name])
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._reporter.report_loaded(rank, saved, saved_world_size=content.world_size, world_size=world_size)

    def _read_server(self) -> tuple[int, dict[str, Any]] | None:
        """Return (train steps of all rings, states of the server and the data); None if another ring saves."""
        client = self._loader.connect_server()
        try:
            buffers = client.read_snapshot()
        finally:
            client.close()
        if buffers is None:
            return None
        metadata, tensors = snapshots.parts_from_buffers(buffers)
        found = snapshots.snapshot_from_parts(metadata, tensors)
        state = loader_state(found.position, self._loader.seed, self._loader.num_samples)
        return found.progress.num_done, {self._name: state, SERVER_PART: {"books": metadata, "tensors": tensors}}

    def _offered_checkpoint(self, saved: CheckpointFile, content: CheckpointContent) -> OfferedCheckpoint:
        logged = content.parts[SERVER_PART]
        return OfferedCheckpoint(
            train_step=saved.train_step,
            checksum=saved.checksum,
            state=content.parts[self._name],
            content=lambda: snapshots.snapshot_to_bytes(
                snapshots.snapshot_from_parts(logged["books"], logged["tensors"])
            ),
        )

    def _report_joined(self, num_train_steps: int) -> int:
        self._reporter.report_joined(num_train_steps)
        return num_train_steps

    def _num_train_steps(self) -> int:
        return int(self._server_status().train_steps)

    def _server_status(self) -> ServerStatus:
        client = self._loader.connect_server()
        try:
            return client.status()
        finally:
            client.close()
