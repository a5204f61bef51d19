"""One member's part in an elastic job: reductions that are kept until they count, through one epoch after another.

Three threads meet here. The one that trains hands in buckets and stops at borders; the agent's brings orders; the
session's own sums, forms groups and decides nothing. The lock is held for moments only, never while something waits.
"""

# Longer than a file should be: in two, the rules of which thread may touch what under the lock would stand in neither.

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from ringweave.comm.regrouping import EpochGroups
from ringweave.errors import MembershipError, RingweaveError, TrainingError
from ringweave.membership.agent import Agent
from ringweave.membership.rules.follower import Out, resolve
from ringweave.membership.rules.records import Decree, Standing
from ringweave.membership.rules.signs import Beat
from ringweave.training.elastic import rows, seams
from ringweave.training.elastic.kept import Reduction, Room
from ringweave.training.elastic.rows import Commit, Row
from ringweave.training.elastic.seams import Crew

_CLOSE_S = 5.0
LEFT_CODE = 143
"""128 + SIGTERM: what a process ends with that has left on request."""


class Session:
    """Where this member stands. It is the agent's participant."""

    def __init__(
        self, member: str, groups: EpochGroups, crew: Crew, *, buffers: Callable[[], list[Tensor]], is_mean: bool
    ) -> None:
        """`buffers` are tensors of the model that become those of the first member with every reduction."""
        self._member, self._groups, self._crew = member, groups, crew
        self._buffers, self._is_mean = buffers, is_mean
        self._lock = threading.Condition()
        self._agent: Agent | None = None
        self._decree: Decree | None = None
        self._next: Decree | None = None
        self._out: Out | None = None
        self._refusal: RingweaveError | None = None
        self._where = Standing(member=member)
        self._generation = 0
        self._is_frozen, self._is_ordered, self._is_up = True, False, False
        self._wants_stop, self._stops = False, False
        self._reduction: Reduction | None = None
        self._room = Room()
        self._last: Commit | None = None
        self._num_signs, self._is_waiting = 0, False
        self.save_last: Callable[[], str] | None = None
        """Saves the state when the job ends and this member is to do so; says what came of it."""
        self._thread = threading.Thread(target=self._serve, name="ringweave elastic", daemon=True)

    # The thread that trains.

    def start(self, agent: Agent) -> Decree:
        """Become a member; returns with the first epoch, once this member has the job's state.

        Raises:
            MembershipError: It was not let in, or the job is over.
        """
        self._agent = agent
        self._thread.start()
        agent.start()
        with self._lock:
            self._wait_thawed()
            assert self._decree is not None
            return self._decree

    @property
    def decree(self) -> Decree:
        """The epoch that holds."""
        assert self._decree is not None, "after start"
        return self._decree

    def reduce(self, bucket: Tensor, *, is_last: bool) -> torch.futures.Future[Tensor]:
        """One more bucket of this backward pass; the future has the mean once all of them count."""
        with self._lock:
            self._num_signs += 1
            if self._reduction is None:
                self._reduction = Reduction(number=self._where.committed + 1)
            reduction = self._reduction
            future = reduction.add(bucket, self._room)
            if is_last:
                reduction.row, reduction.is_whole = self._crew.row(), True
                self._is_waiting = True
            error = self._start_buckets()
            if self._out is not None:
                reduction.fail(seams.error_of(self._out))
            self._lock.notify_all()
        self._tell_broken(error)
        return future

    @property
    def num_committed(self) -> int:
        """Reductions that count, from the begin of the job on."""
        return self._where.committed

    def wait_counted(self) -> None:
        """Until what was reduced counts; called at the end of a backward pass, before DDP reads the sums.

        Raises:
            MembershipError: It never will: this member was put out, or the job is over.
        """
        with self._bequeathing(), self._lock:
            self._lock.wait_for(lambda: self._reduction is None or self._out is not None or self._refusal is not None)
            if self._reduction is not None:
                self._raise_reason()

    def border(self, draw: Callable[[], None]) -> None:
        """Between two train steps: where members come and go. `draw` notes that the next batch is taken.

        Raises:
            MembershipError: This member was put out, or the job is over.
            SystemExit: It has left, as it wanted to.
        """
        agent, standing = self._agent, None
        with self._lock:
            self._num_signs += 1
            is_border = self._reduction is None and self._crew.is_between_steps
            self._where = replace(self._where, at_border=is_border)
            if self._stops and not self._is_frozen:
                self._freeze()
                standing = self._standing()
        if agent is not None and standing is not None:
            agent.stand(standing)
        with self._bequeathing(), self._lock:
            self._is_waiting = True
            self._wait_thawed()
            self._is_waiting = False
            self._where = replace(self._where, at_border=False)
            draw()

    @contextmanager
    def _bequeathing(self) -> Iterator[None]:
        """Saves the state where the job's end is raised, if this member is to; outside of the lock."""
        try:
            yield
        except (MembershipError, SystemExit) as reason:
            if self._out is None or self._out.heir != self._member or self.save_last is None:
                raise
            said = self.save_last()
            if isinstance(reason, SystemExit):
                raise
            raise MembershipError(f"job is over: {self._out.reason}. {said}") from reason

    def sign(self) -> None:
        """The thread that trains gets on."""
        self._num_signs += 1

    def ask_to_leave(self) -> None:
        """This member goes at the next border."""
        self._where = replace(self._where, is_leaving=True)
        if self._agent is not None:
            self._agent.leave(is_finished=False)

    @property
    def is_out(self) -> bool:
        """This member changes nothing any more: it was put out, or the job is over."""
        return self._out is not None

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """End the session's thread, so that none is in native code when the interpreter ends."""
        with self._lock:
            self._out = self._out or Out(reason="it has ended", is_end=True)
            self._lock.notify_all()
        self._groups.abort()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def beat(self, cpu_s: float) -> Beat:
        """A sign of life."""
        return Beat(progress=self._num_signs, is_waiting=self._is_waiting, cpu_s=cpu_s)

    # The agent's thread.

    def freeze(self, *, is_urgent: bool) -> Standing | None:
        """Stand still; see `agent.Participant`.

        An epoch that was ordered and is not formed yet is formed first, and its step ended: members that gave it up
        for the next one, in which they are to stop at a border, would do so for ever and get nowhere.
        """
        with self._lock:
            if not is_urgent and (self._is_ordered or not self._is_frozen):
                self._wants_stop = True
                return None
            self._freeze()
        self._groups.abort()
        with self._lock:
            return self._standing()  # after the abort: a store that a group was being formed in is not told again

    def standing(self) -> Standing:
        """Where this member stands just now."""
        with self._lock:
            return self._standing()

    def form(self, decree: Decree) -> None:
        """Go on in this epoch."""
        with self._lock:
            self._next, self._is_ordered, self._wants_stop = decree, True, False
            self._lock.notify_all()

    def end(self, out: Out) -> None:
        """Change nothing any more."""
        with self._lock:
            self._out = out
            self._freeze()
            if self._reduction is not None:
                self._reduction.fail(seams.error_of(out))
            self._lock.notify_all()
        self._groups.abort()

    # The session's own thread.

    def _serve(self) -> None:
        try:
            while self._serve_once():
                pass
        except Exception as error:  # whatever it is, nobody but the script can hear of it
            self._refuse(error)

    def _serve_once(self) -> bool:
        """Wait for an order or a whole reduction, and do it; False at the end."""
        with self._lock:
            self._lock.wait_for(lambda: self._out or self._next or self._is_ready())
            if self._out is not None:
                return False
            decree, self._next = self._next, None
            reduction, generation, num_aborts = self._reduction, self._generation, self._groups.num_aborts
        with torch.inference_mode(mode=False), torch.no_grad():
            if decree is not None:
                self._form(decree, generation, num_aborts)
            elif reduction is not None:
                self._finish(reduction, generation)
        return True

    def _refuse(self, error: Exception) -> None:
        """This member cannot go on: its script raises, and the others hear that it is gone when its process ends."""
        with self._lock:
            self._refusal = seams.refusal_of(error)
            self._lock.notify_all()
        self._groups.abort()

    def _is_ready(self) -> bool:
        return self._is_up and self._reduction is not None and self._reduction.is_whole

    def _finish(self, reduction: Reduction, generation: int) -> None:
        """Sum what is left, hear that all members have all sums, and let them count."""
        try:
            reduction.wait()
            buffers = self._sync_buffers()
            with self._lock:
                if generation != self._generation:
                    return
                self._where = replace(self._where, is_prepared=True)
                row = replace(reduction.row, wants_stop=self._wants_stop)
            gathered = [torch.empty(rows.WIDTH, dtype=torch.int64) for _ in self.decree.members]
            dist.all_gather(gathered, rows.to_tensor(row))
        except RuntimeError as error:
            self._tell_broken(error, generation)
            return
        said = tuple(Row.of(each.tolist()) for each in gathered)
        with self._lock:
            if generation != self._generation:
                return  # an order came first: what becomes of this is decided when the next epoch begins
            commit = Commit(number=reduction.number, members=self.decree.members, rows=said)
            self._stops = all(each.wants_stop for each in said)
            self._take(commit)
        self._settle(reduction, commit, buffers)

    def _take(self, commit: Commit) -> None:
        """It counts; with the lock held."""
        self._crew.withdraw()
        self._crew.commit(commit)
        self._last, self._reduction = commit, None
        self._where = replace(self._where, committed=commit.number, is_prepared=False)
        self._num_signs += 1
        self._is_waiting = False
        self._lock.notify_all()

    def _settle(self, reduction: Reduction, commit: Commit, buffers: Sequence[tuple[Tensor, Tensor]]) -> None:
        for own, first in buffers:
            own.copy_(first)
        reduction.resolve(commit, is_mean=self._is_mean)

    def _sync_buffers(self) -> list[tuple[Tensor, Tensor]]:
        """(buffer, that of the first member), for all buffers of the model."""
        found = []
        for buffer in self._buffers():
            first = buffer.detach().clone()
            dist.broadcast(first, 0)
            found.append((buffer, first))
        self._synced = found
        return found

    def _form(self, decree: Decree, generation: int, num_aborts: int) -> None:
        """End what the epoch before left unfinished, and meet the members of the next."""
        notes = [json.loads(each.note) for each in decree.standings]
        rank = decree.members.index(self._member)
        holders = [decree.members.index(each) for each in decree.holders] or [0]
        self._crew.check(decree, notes)
        if not self._end_reduction(decree, generation):
            return
        is_newcomer = not self._where.has_state and rank not in holders
        newcomers = [
            index for index, each in enumerate(decree.standings) if not each.has_state and index not in holders
        ]
        try:
            if any(holders[place % len(holders)] == rank for place in range(len(newcomers))):
                self._crew.offer()
            term, number = decree.ballot
            self._groups.form(notes[0]["store"], f"{term}.{number}", rank, len(decree.members), num_aborts)
            if is_newcomer:
                self._crew.pull(notes, holders[newcomers.index(rank) % len(holders)])
        except TrainingError:
            raise  # this member's own: another epoch would not mend it
        except (RuntimeError, RingweaveError, OSError) as error:
            self._tell_broken(error, generation, decree)
            return
        with self._lock:
            if generation != self._generation:
                return
            self._decree = decree
            self._where = replace(self._where, has_state=True, committed=max(decree.committed, self._where.committed))
            self._crew.begin(decree, notes, is_newcomer=is_newcomer)
            self._is_frozen, self._is_ordered, self._is_up, self._stops = False, False, True, False
            error = self._start_buckets()
            self._lock.notify_all()
        self._tell_broken(error, generation)

    def _end_reduction(self, decree: Decree, generation: int) -> bool:
        """Take over the results that are there if one of the members has, else be ready to reduce again.

        Returns:
            Whether the order still holds: this member may have promised to follow another one meanwhile.
        """
        with self._lock:
            reduction, resolution = self._reduction, resolve(self._standing(), decree)
        if reduction is not None:
            reduction.let_go()
        if resolution != "take":
            with self._lock:
                if generation != self._generation:
                    return False
                self._where = replace(self._where, is_prepared=False)
                return True
        assert reduction is not None, "it was prepared"
        left = [each.testament for each in (*decree.standings, *decree.finished) if each.testament]
        said = (Commit.of_words(json.loads(each)) for each in left)
        commit = next(each for each in said if each.number == decree.committed)
        with self._lock:
            if generation != self._generation:
                return False
            self._take(commit)
        self._settle(reduction, commit, self._synced)
        return True

    # With the lock held, but for the last.

    def _freeze(self) -> None:
        self._is_frozen, self._is_up = True, False
        self._next, self._is_ordered = None, False  # ordered before: it is over
        self._generation += 1

    def _standing(self) -> Standing:
        note = {**self._crew.note(), "store": self._groups.store_place}
        testament = json.dumps(self._last.to_words()) if self._last else ""
        return replace(self._where, note=json.dumps(note), testament=testament)

    def _wait_thawed(self) -> None:
        self._lock.wait_for(lambda: not self._is_frozen or self._out is not None or self._refusal is not None)
        self._raise_reason()

    def _raise_reason(self) -> None:
        """Why this member cannot go on, if it cannot."""
        if self._refusal is not None:
            raise self._refusal
        if self._out is not None:
            if self._where.is_leaving:  # as it wanted to, alone or with all others
                raise SystemExit(LEFT_CODE)
            raise seams.error_of(self._out)

    def _start_buckets(self) -> RuntimeError | None:
        """Begin to sum what is there; what went wrong, if the group is broken."""
        if self._is_up and self._reduction is not None:
            try:
                self._reduction.start()
            except RuntimeError as error:
                return error
        return None

    def _tell_broken(
        self, error: Exception | None, generation: int | None = None, decree: Decree | None = None
    ) -> None:
        """The group does not work: if that is not known already, let the coordinator know."""
        if error is None:
            return
        with self._lock:
            if generation is not None and generation != self._generation:
                return
            decree = decree or self._decree
            self._is_up = False
            self._generation += 1
        if self._agent is not None and decree is not None:
            self._agent.accuse(decree.ballot, seams.suspects(error, decree))
