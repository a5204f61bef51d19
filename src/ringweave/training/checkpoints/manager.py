"""`ringweave.Checkpoints`: saves and loads the state that a training needs to go on after a failure."""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ringweave.comm import generation_group
from ringweave.environment import WorkerEnvironment
from ringweave.errors import RingweaveError, TrainingError
from ringweave.param_server import snapshots
from ringweave.param_server.messages import ResumeDecision
from ringweave.training import gradients
from ringweave.training.checkpoints import exchange, format, store
from ringweave.training.checkpoints.exchange import SERVER_PART, CheckpointReporter
from ringweave.training.checkpoints.format import StateEncoder
from ringweave.training.checkpoints.store import (
    CheckpointContent,
    CheckpointFile,
    CheckpointWriter,
    StagingBuffers,
    WriteJob,
)
from ringweave.training.collectives import ControlGroup
from ringweave.training.data.shared_loader import SharedLoader
from ringweave.training.data.sources import OrderSource
from ringweave.training.rings.ring_progress import OfferedCheckpoint
from ringweave.training.rings.shard_source import ShardSource, loader_state
from ringweave.training.timing import cuda_devices

FoundCheckpoint = tuple[CheckpointFile, CheckpointContent]


class ServerCheckpoint:
    """Saves and loads checkpoints where the parameter server has the state."""

    def __init__(self, name: str, source: ShardSource, parts: Mapping[str, Any], reporter: CheckpointReporter) -> None:
        """Create it; `name` is the loader's part name, `parts` are the other parts."""
        self._name, self._source, self._parts, self._reporter = name, source, parts, reporter
        self._ring = source.membership

    def begin_save(self, train_step: int) -> WriteJob | None:
        """Copy the script's own parts for a checkpoint that the writer completes; None if another rank saves."""
        return self._copy_own_parts(train_step) if self._ring.may_save else None

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
        document = {"train_step": train_step, "rank": 0, "world_size": _rank_and_world_size()[1], "parts": trees}
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

    def load(self, read: Callable[[str], FoundCheckpoint | None]) -> int:
        """Let all rings resume from one checkpoint, the newest that any of them has.

        `read` reads the checkpoint with that checksum here, the newest one if it is empty.

        Returns:
            Finished train steps of all rings.

        Raises:
            TrainingError: It holds other parts than these, does not fit them, or cannot be read here.
        """
        if self._ring.has_joined_late:
            return self._report_joined(self._num_train_steps())
        messages = None if self._ring.is_elastic else exchange.rank_messages(os.environ)
        found = read("") if messages is None else exchange.agree_on_checkpoint(read(""), messages)
        if found is not None:
            wanted = {**self._parts, SERVER_PART: None, self._name: None}
            exchange.check_part_names(found[0], found[1].parts, wanted)
        decision = self._source.resume(self._offered_checkpoint(*found) if found else None)
        if decision.verdict == "begun":
            return self._report_joined(decision.num_done)
        if decision.verdict == "resumed":
            is_own = found is not None and found[0].checksum == decision.check
            self._restore_parts(found if is_own else read(decision.check), decision)
        return decision.num_done

    def clear(self, remove: Callable[[], None]) -> int:
        """Remove all checkpoints; in an elastic job no ring trains before the folder is empty for all."""
        if self._ring.has_joined_late or self._ring.has_training_begun():
            return self._report_joined(self._num_train_steps())
        if self._ring.may_save:
            remove()
        return self._source.resume(None).num_done

    def _restore_parts(self, found: FoundCheckpoint | None, decision: ResumeDecision) -> None:
        if found is None:
            raise TrainingError(
                "checkpoint that the rings go on from",
                got=f"nothing of step {decision.train_step} with check {decision.check} that this worker can read",
                expected="its file",
                do="Keep the checkpoints of an elastic job on a disk that all its workers reach",
            )
        saved, content = found
        for name, part in self._parts.items():
            exchange.load_part(saved, name, part, content.parts[name])
        rank, world_size = _rank_and_world_size()
        self._reporter.report_loaded(rank, saved, saved_world_size=content.world_size, world_size=world_size)

    def _read_server(self) -> tuple[int, dict[str, Any]] | None:
        """Return (train steps of all rings, states of the server and the data); None if another ring saves."""
        client = self._ring.connect_server()
        try:
            buffers = client.read_snapshot()
        finally:
            client.close()
        if buffers is None:
            return None
        metadata, tensors = snapshots.parts_from_buffers(buffers)
        found = snapshots.snapshot_from_parts(metadata, tensors)
        state = loader_state(found.position, self._source.seed, self._source.spec.epoch_samples)
        return found.progress.num_done, {self._name: state, SERVER_PART: {"metadata": metadata, "tensors": tensors}}

    def _offered_checkpoint(self, saved: CheckpointFile, content: CheckpointContent) -> OfferedCheckpoint:
        logged = content.parts[SERVER_PART]
        return OfferedCheckpoint(
            train_step=saved.train_step,
            checksum=saved.checksum,
            state=content.parts[self._name],
            content=lambda: snapshots.snapshot_to_bytes(
                snapshots.snapshot_from_parts(logged["metadata"], logged["tensors"])
            ),
        )

    def _report_joined(self, num_train_steps: int) -> int:
        self._reporter.report_joined(num_train_steps)
        return num_train_steps

    def _num_train_steps(self) -> int:
        client = self._ring.connect_server()
        try:
            return int(client.status().train_steps)
        finally:
            client.close()


_RNG_PART = "random numbers"
_RESIDUAL_PART = "residuals of gradients"
_SITE_PART = "state of a site"
_UNSENT_PART = "not sent by the site"


class Checkpoints:
    """Keeps the last few checkpoints of a training in a folder.

    ```python
    checkpoints = ringweave.Checkpoints("runs/text/checkpoints", model=model, optimizer=optimizer, loader=loader)
    for train_step in range(checkpoints.load() + 1, steps + 1):
        ...
        if train_step % 100 == 0:
            checkpoints.save(train_step)
    ```

    `save` copies the state in memory and returns; a thread writes it while training goes on. A disk that is full,
    broken or gone costs checkpoints, which the log and the event log report, and never the training. Rank 0 writes the
    state, which is the same on all ranks, and each rank writes its random numbers. In rings, the first ring writes the
    parameter server's state. Of a sharded model (FSDP2, HSDP) and its optimizer, each rank writes its part.
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int = 3, rng: bool = True, **parts: Any) -> None:
        """Set the parts of a checkpoint and the folder.

        Args:
            folder: Folder of the checkpoints, on a disk that all ranks can reach, or at least rank 0, also next time.
            keep: Number of checkpoints to keep; older ones are removed when a newer one is on the disk. Checkpoints
                of later steps from an earlier training, and damaged ones, do not count.
            rng: Save and load the random numbers of each rank as well.
            parts: The model, the optimizer, the loader that `prepare` returned, a learning-rate schedule: any objects
                with state_dict and load_state_dict, under names of your own. The module inside of
                DistributedDataParallel is saved.

        Raises:
            TrainingError: Rank 0 cannot save a part for all ranks.
        """
        exchange.check_parts(keep, parts)
        self.folder = Path(folder).absolute()
        self._keep, self._rng = keep, rng
        self._parts = {name: gradients.unwrap_ddp(part) for name, part in parts.items()}
        self._residuals = next(filter(None, map(gradients.residuals_of, parts.values())), None)
        self._damaged_paths: set[Path] = set()
        self._reporter = CheckpointReporter(WorkerEnvironment.from_environ(os.environ))
        self._staging = StagingBuffers()
        self._writer = CheckpointWriter(self._write_job, self._report_replaced)
        self._loader_name = next((name for name, part in parts.items() if isinstance(part, SharedLoader)), "")
        self._loader: SharedLoader | None = parts.get(self._loader_name)
        self._server_checkpoint: ServerCheckpoint | None = None
        models = [part for part in self._parts.values() if isinstance(part, nn.Module)]
        self._is_sharded = any(map(gradients.is_sharded, models))
        self._run = ""
        """Name of this training in the files with shards."""
        source = self._loader.source if self._loader is not None else None
        self._request_save: Callable[[], bool] | None = None
        if isinstance(source, OrderSource):
            source.register_final_save(self._save_final)
            self._request_save = source.membership.register_deferred_save(self._save_now)
        elif isinstance(source, ShardSource):
            del self._parts[self._loader_name]
            self._server_checkpoint = ServerCheckpoint(self._loader_name, source, self._parts, self._reporter)
            source.membership.register_final_save(self._save_final_of_rings)

    def save(self, train_step: int) -> None:
        """Save the state after so many train steps; every rank calls it, and no rank waits for another.

        In rings and in mode local the number is not used: the checkpoint is named by the train steps of all rings or
        sites by then. In mode local, with several sites, the state is copied after the next outer step.

        Returns when the state is copied. If the disk is still busy with an earlier checkpoint, this one waits, and is
        dropped when a third one comes.

        Raises:
            TrainingError: The state cannot be saved without pickle.
        """
        if self._server_checkpoint is not None:
            job = self._server_checkpoint.begin_save(train_step)
            if job is not None:
                self._writer.submit(job)
            return
        if self._loader is not None:
            self._loader.count_train_steps(train_step)
        if self._is_sharded:
            self._save_shards(train_step, _rank_and_world_size()[0], time.perf_counter())
        elif self._request_save is None:
            self._save_now(train_step)
        elif not self._request_save():
            self._save_now(self._loader.num_train_steps if self._loader is not None else train_step)

    def _save_now(self, train_step: int) -> None:
        """Save the state of this rank; rank 0's, and one rank's of another site, hold more than random numbers."""
        rank, started_s = _rank_and_world_size()[0], time.perf_counter()
        states = {name: part.state_dict() for name, part in self._parts.items()} if rank == 0 else {}
        if rank not in (self._sites or (range(rank + 1),))[0]:
            own = {name: part.state_dict() for name, part in self._site_parts.items()}
            states[_SITE_PART] = {"sites": self._sites, "parts": own}
        if self._rng:
            states[_RNG_PART] = format.capture_rng_state(self._gpu)
        if self._residuals is not None:
            states[_RESIDUAL_PART] = self._residuals[0].state_dict(self._residuals[1])
        if states:
            self._submit(train_step, rank, states, started_s)

    @property
    def _sites(self) -> tuple[tuple[int, ...], ...]:
        """Sites of mode local, if there are several."""
        source = self._loader.source if self._loader is not None else None
        return source.membership.sites if source is not None else ()

    @property
    def _site_parts(self) -> dict[str, Any]:
        """Parts that differ between sites after an outer step: optimizers, schedules, and what a site has not sent."""
        own = {name: part for name, part in self._parts.items() if not isinstance(part, (nn.Module, SharedLoader))}
        unsent = self._loader.source.membership.site_state if self._loader is not None else None
        return own if unsent is None else {**own, _UNSENT_PART: unsent}

    @property
    def _gpu(self) -> torch.device | None:
        """GPU of the first part that is a model on one; None without."""
        gpus = [each for part in self._parts.values() if isinstance(part, nn.Module) for each in cuda_devices(part)]
        return gpus[0] if gpus else None

    def _submit(self, train_step: int, rank: int, states: dict[str, Any], started_s: float) -> None:
        encoder = StateEncoder()
        trees = {name: encoder.encode(state, name) for name, state in states.items()}
        self._submit_copy(train_step, rank, {"parts": trees}, encoder.tensors, started_s)

    def _submit_copy(
        self, train_step: int, rank: int, content: dict[str, Any], tensors: Mapping[str, torch.Tensor], started_s: float
    ) -> None:
        try:
            staged = self._staging.stage(tensors)
        except (MemoryError, RuntimeError) as error:
            self._reporter.report_failed(rank, train_step, self.folder, f"no memory for a copy ({error}).")
            return
        document = {"train_step": train_step, "rank": rank, "world_size": _rank_and_world_size()[1], **content}
        copy_s = time.perf_counter() - started_s
        self._writer.submit(WriteJob(train_step=train_step, staged=staged, document=document, copy_s=copy_s))

    def _save_shards(self, train_step: int, rank: int, started_s: float) -> None:
        """Copy this rank's part of the state, once its earlier ones are on the disk.

        None is dropped on a slow disk: the ranks would drop different ones, and none would be complete.
        """
        from ringweave.training.checkpoints.shards import ShardEncoder

        if not self._run:
            self._run = exchange.agree_on_run(os.environ)
        self.wait()
        encoder, rng_encoder = ShardEncoder(keeps_whole=rank == 0), StateEncoder()
        trees = {name: encoder.encode(part.state_dict(), name) for name, part in self._parts.items()}
        rng = rng_encoder.encode(format.capture_rng_state(self._gpu), _RNG_PART) if self._rng else None
        whole = encoder.tensors if rank == 0 else {name: encoder.tensors[name] for name in encoder.offsets}
        document = {"parts": trees if rank == 0 else {}, "offsets": encoder.offsets, "rng": rng, "run": self._run}
        self._submit_copy(train_step, rank, document, {**whole, **rng_encoder.tensors}, started_s)

    def load(self) -> int:
        """Restore all parts from the newest complete checkpoint; every rank calls it, after `prepare`.

        A damaged checkpoint is skipped and reported. Ranks that cannot reach the folder get the state from a rank that
        can. The number of ranks may differ; the random numbers then start again. A worker that has joined an elastic
        job has the others' state, which is newer than any checkpoint, and keeps it. In rings the server gets the state,
        and the steps are those of all rings.

        Returns:
            Train steps of the checkpoint; 0 if there is no checkpoint.

        Raises:
            TrainingError: It holds other parts than these, or does not fit them; or the loader of an elastic job is
                missing among the parts; or, in rings, training has begun.
        """
        self.wait()
        if self._server_checkpoint is not None:
            train_step = self._server_checkpoint.load(self._read)
            if train_step and self._residuals is not None:
                rank, reason = _rank_and_world_size()[0], "checkpoints of rings hold none"
                self._reporter.report_lost_residuals(rank, train_step, reason)
            return train_step
        if self._has_joined_late():
            return self._report_joined()
        messages = exchange.rank_messages(os.environ)
        own_newest = self._read()
        found = own_newest if messages is None else exchange.agree_on_checkpoint(own_newest, messages)
        loaded = self._load_shards(found[0].train_step if found else 0, messages)
        if loaded is None and found is not None:
            self._restore(*found)
            if self._sites and messages is not None:
                self._restore_site(*found, messages)
            loaded = found[0], found[1].world_size
        if loaded is None:
            return 0
        saved, saved_world_size = loaded
        rank, world_size = _rank_and_world_size()
        self._reporter.report_loaded(rank, saved, saved_world_size=saved_world_size, world_size=world_size)
        if self._loader is not None:
            self._loader.count_train_steps(saved.train_step)
        return saved.train_step

    def _load_shards(self, after: int, messages: ControlGroup | None) -> tuple[CheckpointFile, int] | None:
        """Restore the newest complete checkpoint with shards of a train step later than `after`.

        Returns:
            Its first file and the number of ranks that saved it; None if there is no such checkpoint.
        """
        sets = store.complete_sets(self.folder)
        if not exchange.any_rank(messages, is_true=bool(sets)):
            return None
        from ringweave.training.checkpoints import shards

        rank, world_size = _rank_and_world_size()
        for files in shards.agree_on_sets(sets, messages):
            damage = shards.find_damage(files, messages) if files[0].train_step > after else []
            for text in damage:
                self._reporter.report_damaged(rank, files[0], text)
            if not damage and files[0].train_step > after:
                reader = shards.ShardReader(files)
                states = reader.states()
                exchange.check_part_names(files[0], states, self._parts)
                for name, part in self._parts.items():
                    exchange.load_part(files[0], name, part, shards.fit_state(part, states[name], reader.read))
                if self._rng:
                    state, reason = None, f"{len(files)} ranks saved, {world_size} go on"
                    if len(files) == world_size:
                        state, reason = reader.rng_state(rank), "they were not saved"
                    self._restore_rng(files[0], state, reason)
                return files[0], len(files)
        return None

    def clear(self) -> int:
        """Remove the checkpoints of an earlier training in this folder; every rank calls it.

        Returns:
            0 train steps. A worker that has joined an elastic job removes nothing; it returns the number of `load`.

        Raises:
            OSError: They cannot be removed.
            TrainingError: The loader of an elastic job is missing among the parts.
        """
        self.wait()
        if self._server_checkpoint is not None:
            return self._server_checkpoint.clear(self._remove_all)
        if self._has_joined_late():
            return self._report_joined()
        if _rank_and_world_size()[0] == 0:
            self._remove_all()
        if dist.is_initialized():
            with generation_group.direct_collectives():
                dist.barrier()
        return 0

    def _remove_all(self) -> None:
        store.remove_files(iter([*store.list_checkpoints(self.folder), *store.list_shards(self.folder)]))
        store.remove_partials(self.folder)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all saved checkpoints are on the disk or have failed; return False on a timeout.

        Not needed at the end of a script: Python itself waits.
        """
        return self._writer.wait_idle(timeout_s)

    def _has_joined_late(self) -> bool:
        """Return whether the other members of an elastic job are training already, and would not answer."""
        if self._loader is None and generation_group.is_generation_group():
            raise TrainingError(
                "parts of checkpoints of an elastic job",
                got=", ".join(sorted(self._parts)) or "none",
                expected="the loader that ringweave.prepare returned among them",
                do="Give Checkpoints loader=loader, by which a worker that joins knows where the others are",
            )
        return self._loader is not None and self._loader.has_joined_late

    def _report_joined(self) -> int:
        assert self._loader is not None, "who joins has a loader that knows"
        self._reporter.report_joined(self._loader.num_train_steps)
        return self._loader.num_train_steps

    def _save_final(self, position: dict[str, int]) -> str:
        """Save the final checkpoint of a job that ends early; return a text about the outcome."""
        assert self._loader is not None, "it asks for this"
        train_step, started_s = self._loader.num_train_steps, time.perf_counter()
        states = {name: part.state_dict() for name, part in self._parts.items()}
        self._submit(train_step, 0, {**states, self._loader_name: position}, started_s)
        return self._describe_final_save(train_step)

    def _save_final_of_rings(self) -> str:
        """Save the final checkpoint for this member's ring: the server's state."""
        assert self._server_checkpoint is not None, "its loader asks for this"
        self.wait()
        try:
            job = self._server_checkpoint.take_final(self._staging)
        except (RingweaveError, MemoryError, RuntimeError) as error:
            self._reporter.report_failed(0, 0, self.folder, f"{_error_text(error)}.")
            return f"The parameter server's state could not be saved in {self.folder}: see the warning."
        if job is None:
            return "Another ring saves the parameter server's state. Start the run again to go on from it."
        self._writer.submit(job)
        return self._describe_final_save(job.train_step)

    def _describe_final_save(self, train_step: int) -> str:
        self.wait()
        if not any(saved.train_step == train_step for saved in store.list_checkpoints(self.folder, rank=0)):
            return f"The state after {train_step} train steps could not be saved in {self.folder}: see the warning."
        return f"The state after {train_step} train steps is in {self.folder}. Start the run again to go on from it."

    def _read(self, checksum: str = "") -> FoundCheckpoint | None:
        """Return the newest complete checkpoint that this rank can read; with a checksum, the one that has it."""
        for saved in store.list_checkpoints(self.folder, rank=0):
            content = self._read_or_report(saved) if checksum in ("", saved.checksum) else None
            if content is not None:
                return saved, content
        return None

    def _read_own(self, saved: CheckpointFile) -> list[CheckpointContent]:
        """Return the contents of this rank's own files of the same train step, without damaged ones."""
        own = store.list_checkpoints(self.folder, rank=_rank_and_world_size()[0])
        found = (self._read_or_report(each) for each in own if each.train_step == saved.train_step)
        return [each for each in found if each is not None]

    def _read_or_report(self, saved: CheckpointFile) -> CheckpointContent | None:
        try:
            return store.read_checkpoint(saved)
        except TrainingError as error:
            self._damaged_paths.add(saved.path)
            self._reporter.report_damaged(_rank_and_world_size()[0], saved, str(error))
            return None

    def _restore(self, saved: CheckpointFile, content: CheckpointContent) -> None:
        states = dict(content.parts)
        rng_state, residuals = states.pop(_RNG_PART, None), states.pop(_RESIDUAL_PART, None)
        exchange.check_part_names(saved, states, self._parts)
        if self._is_sharded:
            states = exchange.fit_whole_states(self._parts, states)
        for name, part in self._parts.items():
            exchange.load_part(saved, name, part, states[name])
        if self._rng:
            self._restore_rng(saved, *self._own_state(saved, content, _RNG_PART, rng_state))
        if self._residuals is not None:
            state, reason = self._own_state(saved, content, _RESIDUAL_PART, residuals)
            if state is None:
                self._reporter.report_lost_residuals(_rank_and_world_size()[0], saved.train_step, reason)
            self._residuals[0].load_state_dict(state or {}, self._residuals[1])

    def _restore_rng(self, saved: CheckpointFile, state: Any, reason: str) -> None:
        """Restore the random numbers that this rank has saved; None: they begin anew, for that reason."""
        if state is None:
            self._reporter.report_new_rng(_rank_and_world_size()[0], saved.train_step, reason)
        else:
            format.restore_rng_state(state, self._gpu)

    def _restore_site(self, saved: CheckpointFile, content: CheckpointContent, messages: ControlGroup) -> None:
        """Restore what differs between sites, on all ranks or none; without it all sites have rank 0's."""
        rank, world_size = _rank_and_world_size()
        is_first, found = rank in self._sites[0], None
        if not is_first and content.world_size == world_size:
            states = [each.parts.get(_SITE_PART) for each in self._read_own(saved)]
            found = next((each for each in states if each and each["sites"] == self._sites), None)
        missing = [
            str(number)
            for number, said in enumerate(messages.gather_json({"has": is_first or found is not None}))
            if not said["has"]
        ]
        if missing:
            self._reporter.report_new_site_state(rank, saved.train_step, f"no file of rank {', '.join(missing)}")
        elif found is not None:
            for name, part in self._site_parts.items():
                exchange.load_part(saved, name, part, found["parts"][name])

    def _own_state(
        self, saved: CheckpointFile, content: CheckpointContent, name: str, first_rank_state: Any
    ) -> tuple[Any, str]:
        """Return a state that each rank has saved for itself; None with the reason if it is not there."""
        rank, world_size = _rank_and_world_size()
        state, reason = first_rank_state, "they were not saved"
        if content.world_size != world_size:
            state, reason = None, f"{content.world_size} ranks saved, {world_size} go on"
        elif rank > 0:
            contents = self._read_own(saved)
            state, reason = contents[0].parts.get(name) if contents else None, "their file is damaged or gone"
        return state, reason

    def _write_job(self, job: WriteJob) -> None:
        """Write a checkpoint in the writer's thread; errors are reported, never raised."""
        rank, started_s, staged = job.document["rank"], time.perf_counter(), job.staged
        try:
            if self._server_checkpoint is not None and staged is None:
                completed = self._server_checkpoint.complete(job, self._staging)
                if completed is None:  # another ring saves
                    return
                job, staged, started_s = completed, completed.staged, time.perf_counter()
            assert staged is not None, "complete"
            staged.wait_copied()
            place = {"rank": rank, "train_step": job.train_step, "run": job.document.get("run", "")}
            saved = store.write_checkpoint(self.folder, **place, document=job.document, staged=staged)
            write_s = time.perf_counter() - started_s
            self._reporter.report_saved(saved, num_bytes=staged.num_bytes, copy_s=job.copy_s, write_s=write_s)
            self._damaged_paths.discard(saved.path)
            self._remove_old(saved)
        except Exception as error:
            self._reporter.report_failed(rank, job.train_step, self.folder, f"{_error_text(error)}.")
        finally:
            if staged is not None:
                self._staging.recycle(staged)

    def _report_replaced(self, job: WriteJob) -> None:
        if job.staged is not None:
            self._staging.recycle(job.staged)
        text = "the disk was still busy with an earlier one when a later one came."
        self._reporter.report_failed(job.document["rank"], job.train_step, self.folder, text)

    def _remove_old(self, written: CheckpointFile) -> None:
        """Remove all but the newest complete checkpoints, up to the one just written.

        Also remove files of other ranks that belong to no kept checkpoint: those ranks may be gone forever. Of
        checkpoints with shards, complete ones count.
        """
        if written.run:
            self._remove_old_shards(written)
            return
        own = [
            each
            for each in store.list_checkpoints(self.folder, rank=written.rank)
            if each.train_step <= written.train_step
        ]
        logged = [each for each in own if each.path not in self._damaged_paths][: self._keep]
        oldest = min((each.train_step for each in logged), default=written.train_step)
        old = [each for each in own if each.train_step < oldest] if len(logged) == self._keep else []
        if written.rank == 0:
            old += [each for each in store.list_checkpoints(self.folder) if each.rank > 0 and each.train_step < oldest]
        self._remove_or_report(old)

    def _remove_old_shards(self, written: CheckpointFile) -> None:
        complete = [files[0].train_step for files in store.complete_sets(self.folder)]
        logged = [step for step in dict.fromkeys(complete) if step <= written.train_step][: self._keep]
        if len(logged) < self._keep:
            return
        old = [each for each in store.list_shards(self.folder) if each.train_step < logged[-1]]
        self._remove_or_report([each for each in old if each.rank == written.rank or each.rank >= written.num_files])

    def _remove_or_report(self, old: list[CheckpointFile]) -> None:
        try:
            store.remove_files(iter(old))
        except OSError as error:
            self._reporter.report_not_removed(self.folder, _error_text(error))


def _rank_and_world_size() -> tuple[int, int]:
    """Return (rank, world size) of the process group; (0, 1) without one."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _error_text(error: Exception) -> str:
    """Return the text of an error without the path, which is reported separately."""
    return f"[Errno {error.errno}] {error.strerror}" if isinstance(error, OSError) and error.errno else str(error)
