"""`ringweave.Checkpoints`: what a training needs to go on after anything, with two lines in the script."""

import os
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ringweave.comm import regrouping
from ringweave.environment import WorkerEnvironment
from ringweave.errors import RingweaveError, TrainingError, explain
from ringweave.training import reducing
from ringweave.training.checkpoints import disk, meeting, randomness
from ringweave.training.checkpoints import parts as checkpoint_parts
from ringweave.training.checkpoints.disk import Content, Saved
from ringweave.training.checkpoints.encoding import Encoder
from ringweave.training.checkpoints.served import Served
from ringweave.training.checkpoints.staging import Stage
from ringweave.training.checkpoints.telling import Teller
from ringweave.training.checkpoints.writing import Job, Writer
from ringweave.training.elastic.loader import ElasticLoader
from ringweave.training.rings.resuming import ServedLoader

_RANDOM = "random numbers"


class Checkpoints:
    """The last few checkpoints of a training, in a folder.

    ```python
    checkpoints = ringweave.Checkpoints("runs/text/checkpoints", model=model, optimizer=optimizer, loader=loader)
    for train_step in range(checkpoints.load() + 1, steps + 1):
        ...
        if train_step % 100 == 0:
            checkpoints.save(train_step)
    ```

    `save` copies the state in memory and returns; a thread writes it while training goes on. A disk that is full,
    broken or gone costs checkpoints, said in the log and the event log, and never the training. Rank 0 writes the
    state, which is the same on all ranks, and each rank its random numbers. In rings the first of them writes what the
    parameter server has.
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int = 3, rng: bool = True, **parts: Any) -> None:
        """Say what belongs to a checkpoint, and where it goes.

        Args:
            folder: Where they are; on a disk that all ranks can reach, or at least rank 0's, also next time.
            keep: How many to keep; older ones are removed when a newer one is on the disk. Those of later steps,
                which an earlier training left, and those that `load` found damaged do not count.
            rng: Save and load the random numbers of each rank as well.
            parts: The model, the optimizer, the loader that `prepare` returned, a learning-rate schedule: whatever has
                state_dict and load_state_dict, under names of your own. What DistributedDataParallel holds is taken
                out of it.

        Raises:
            TrainingError: One of them has no state that rank 0 could save for all.
        """
        checkpoint_parts.check(keep, parts)
        self.folder = Path(folder).absolute()
        self._keep, self._rng = keep, rng
        self._parts = {name: reducing.inside(part) for name, part in parts.items()}
        self._refused: set[Path] = set()
        self._teller = Teller(WorkerEnvironment.from_environ(os.environ))
        self._stage = Stage()
        self._writer = Writer(self._write, self._pass_over)
        self._elastic = next((part for part in parts.values() if isinstance(part, ElasticLoader)), None)
        self._elastic_name = next((name for name, part in parts.items() if part is self._elastic), "")
        if self._elastic is not None:
            self._elastic.save_at_end(self._save_last)
        ring = next((name for name, part in parts.items() if isinstance(part, ServedLoader)), "")
        self._served: Served | None = None
        if ring:
            served_loader = self._parts.pop(ring)
            self._served = Served(ring, served_loader, self._parts, self._teller)
            served_loader.save_at_end(self._save_last_of_rings)

    def save(self, train_step: int) -> None:
        """Take the state after so many train steps; every rank calls it, and nobody waits for another.

        In rings the number is not needed: what is saved is named by the train steps of all rings by then.

        Returns when the state is copied. If the disk is still busy with an earlier one, this one waits for its turn,
        and gives it up when a third comes.

        Raises:
            TrainingError: There is something in the state that cannot be saved without pickle.
        """
        rank, _ = _place()
        if self._served is not None:
            job = self._served.begin(train_step)
            if job is not None:
                self._writer.submit(job)
            return
        if self._elastic is not None:
            self._elastic.count_train_steps(train_step)
        started_s = time.perf_counter()
        states = {name: part.state_dict() for name, part in self._parts.items()} if rank == 0 else {}
        if self._rng:
            states[_RANDOM] = randomness.take()
        if states:
            self._submit(train_step, rank, states, started_s)

    def _submit(self, train_step: int, rank: int, states: dict[str, Any], started_s: float) -> None:
        """Copy these states, and have them written."""
        encoder = Encoder()
        trees = {name: encoder.encode(state, name) for name, state in states.items()}
        try:
            staged = self._stage.copy(encoder.tensors)
        except (MemoryError, RuntimeError) as error:
            self._teller.failed(rank, train_step, self.folder, f"no memory for a copy ({error}).")
            return
        document = {"train_step": train_step, "rank": rank, "world_size": _place()[1], "parts": trees}
        copy_s = time.perf_counter() - started_s
        self._writer.submit(Job(train_step=train_step, staged=staged, document=document, copy_s=copy_s))

    def load(self) -> int:
        """Put all parts where the newest whole checkpoint has them; every rank calls it, after `prepare`.

        A damaged one is passed over, and it is said. Ranks that cannot reach the folder get the state from one that
        can. The number of ranks may be another one; the random numbers then begin anew. A worker that has joined an
        elastic job has the others' state, which is newer than any checkpoint: it keeps that, and asks nobody. In rings
        it is the server that gets the state, and the steps are those of all rings.

        Returns:
            How many train steps that was after; 0 if there is no checkpoint.

        Raises:
            TrainingError: It holds other parts than these, or does not fit them; or the loader of an elastic job is
                not among them; or, in rings, training has begun.
        """
        self.wait()
        if self._served is not None:
            return self._served.load(self._newest, self._named)
        if self._is_latecomer():
            return self._joined()
        among = meeting.messages(os.environ)
        own = self._newest()
        found = own if among is None else meeting.agree(own, among)
        if found is None:
            return 0
        saved, content = found
        self._put(saved, content)
        rank, world_size = _place()
        self._teller.loaded(rank, saved, saved_world_size=content.world_size, world_size=world_size)
        if self._elastic is not None:
            self._elastic.count_train_steps(content.train_step)
        return content.train_step

    def clear(self) -> int:
        """Remove the checkpoints of an earlier training in this folder; every rank calls it.

        Returns:
            0 train steps; of a worker that has joined an elastic job as many as `load` says, and nothing is removed.

        Raises:
            OSError: They cannot be removed.
            TrainingError: The loader of an elastic job is not among the parts.
        """
        self.wait()
        if self._served is not None:
            return self._served.clear(self._remove_all)
        if self._is_latecomer():
            return self._joined()
        if _place()[0] == 0:
            self._remove_all()
        if dist.is_initialized():
            dist.barrier()
        return 0

    def _remove_all(self) -> None:
        disk.remove(iter(disk.list_saved(self.folder)))
        disk.remove_partials(self.folder)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until what was saved is on the disk, or has failed; False if the time was up before.

        Not needed at the end of a script: Python itself waits then.
        """
        return self._writer.wait_idle(timeout_s)

    def _is_latecomer(self) -> bool:
        """Whether the others of an elastic job, which are training, would not answer."""
        if self._elastic is None and regrouping.is_of_an_epoch():
            raise TrainingError(
                explain(
                    "parts of checkpoints of an elastic job",
                    got=", ".join(sorted(self._parts)) or "none",
                    expected="the loader that ringweave.prepare returned among them",
                    do="Give Checkpoints loader=loader, by which a worker that joins knows where the others are",
                )
            )
        return self._elastic is not None and self._elastic.is_latecomer

    def _joined(self) -> int:
        assert self._elastic is not None, "who joins has a loader that knows"
        self._teller.joined(self._elastic.num_train_steps)
        return self._elastic.num_train_steps

    def _save_last(self, position: dict[str, int]) -> str:
        """The job ends before its time, and this member is to save its state; what came of it, in words."""
        assert self._elastic is not None, "it asks for this"
        train_step, started_s = self._elastic.num_train_steps, time.perf_counter()
        states = {name: part.state_dict() for name, part in self._parts.items()}
        self._submit(train_step, 0, {**states, self._elastic_name: position}, started_s)
        return self._told_last(train_step)

    def _save_last_of_rings(self) -> str:
        """Likewise, for this member's ring: the state is the server's."""
        assert self._served is not None, "its loader asks for this"
        self.wait()
        try:
            job = self._served.take_last(self._stage)
        except (RingweaveError, MemoryError, RuntimeError) as error:
            self._teller.failed(0, 0, self.folder, f"{_reason(error)}.")
            return f"The parameter server's state could not be saved in {self.folder}: see the warning."
        if job is None:
            return "Another ring saves the parameter server's state. Start the run again to go on from it."
        self._writer.submit(job)
        return self._told_last(job.train_step)

    def _told_last(self, train_step: int) -> str:
        self.wait()
        if not any(saved.train_step == train_step for saved in disk.list_saved(self.folder, rank=0)):
            return f"The state after {train_step} train steps could not be saved in {self.folder}: see the warning."
        return f"The state after {train_step} train steps is in {self.folder}. Start the run again to go on from it."

    def _newest(self) -> tuple[Saved, Content] | None:
        """The newest whole one that this rank can read."""
        for saved in disk.list_saved(self.folder, rank=0):
            content = self._read(saved)
            if content is not None:
                return saved, content
        return None

    def _named(self, check: str) -> tuple[Saved, Content] | None:
        """The one with that check, if this rank can read it whole."""
        for saved in disk.list_saved(self.folder, rank=0):
            content = self._read(saved) if saved.check == check else None
            if content is not None:
                return saved, content
        return None

    def _read(self, saved: Saved) -> Content | None:
        try:
            return disk.read(saved)
        except TrainingError as error:
            self._refused.add(saved.path)
            self._teller.refused(_place()[0], saved, str(error))
            return None

    def _put(self, saved: Saved, content: Content) -> None:
        states = dict(content.parts)
        random_numbers = states.pop(_RANDOM, None)
        checkpoint_parts.check_names(saved, states, self._parts)
        for name, part in self._parts.items():
            checkpoint_parts.load(saved, name, part, states[name])
        if self._rng:
            self._put_random_numbers(saved, content, random_numbers)

    def _put_random_numbers(self, saved: Saved, content: Content, of_first: Any) -> None:
        rank, world_size = _place()
        state, why = of_first, "they were not saved"
        if content.world_size != world_size:
            state, why = None, f"{content.world_size} ranks saved, {world_size} go on"
        elif rank > 0:
            own = [each for each in disk.list_saved(self.folder, rank=rank) if each.train_step == saved.train_step]
            contents = [found for found in map(self._read, own) if found is not None]
            state, why = contents[0].parts.get(_RANDOM) if contents else None, "their file is damaged or gone"
        if state is None:
            self._teller.new_numbers(rank, saved.train_step, why)
        else:
            randomness.put(state)

    def _write(self, job: Job) -> None:
        """In the writer's thread: whatever happens is said, and nothing is raised."""
        rank, started_s, staged = job.document["rank"], time.perf_counter(), job.staged
        try:
            if self._served is not None and staged is None:
                completed = self._served.complete(job, self._stage)
                if completed is None:  # another ring saves
                    return
                job, staged, started_s = completed, completed.staged, time.perf_counter()
            assert staged is not None, "complete"
            staged.wait_copied()
            place = {"rank": rank, "train_step": job.train_step}
            saved = disk.write(self.folder, **place, document=job.document, staged=staged)
            write_s = time.perf_counter() - started_s
            self._teller.saved(saved, num_bytes=staged.num_bytes, copy_s=job.copy_s, write_s=write_s)
            self._refused.discard(saved.path)
            self._remove_old(saved)
        except Exception as error:
            self._teller.failed(rank, job.train_step, self.folder, f"{_reason(error)}.")
        finally:
            if staged is not None:
                self._stage.give_back(staged)

    def _pass_over(self, job: Job) -> None:
        if job.staged is not None:
            self._stage.give_back(job.staged)
        text = "the disk was still busy with an earlier one when a later one came."
        self._teller.failed(job.document["rank"], job.train_step, self.folder, text)

    def _remove_old(self, written: Saved) -> None:
        """Up to what was just written, all but the newest whole ones.

        Of other ranks those that belong to none that is kept: they may be gone for ever.
        """
        own = [
            each for each in disk.list_saved(self.folder, rank=written.rank) if each.train_step <= written.train_step
        ]
        kept = [each for each in own if each.path not in self._refused][: self._keep]
        oldest = min((each.train_step for each in kept), default=written.train_step)
        old = [each for each in own if each.train_step < oldest] if len(kept) == self._keep else []
        if written.rank == 0:
            old += [each for each in disk.list_saved(self.folder) if each.rank > 0 and each.train_step < oldest]
        try:
            disk.remove(iter(old))
        except OSError as error:
            self._teller.not_removed(self.folder, _reason(error))


def _place() -> tuple[int, int]:
    """(rank, ranks) of the process group; (0, 1) without one."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _reason(error: Exception) -> str:
    """Without the path, which is told apart."""
    return f"[Errno {error.errno}] {error.strerror}" if isinstance(error, OSError) and error.errno else str(error)
