"""Moves blocks between two train steps, while training goes on, or leaves everything as it was.

```text
 end of step t-1   headers: what comes; receivers make room                     vote: can all go on?
 step t            state is copied while the stages compute (nothing changes it before the optimizer's step)
 optimizer's step  before it: gradients, buffers, extra state follow            vote: has all arrived?
                   it: sender and receiver make the same update
                   after it: both compare 63 bits of everything                 vote: is it the same?
 step t+1          by the new partition; the sender's copies are gone
```

Up to the last vote the senders' blocks are those that train, untouched by the move; a rank that fails says so in the
next vote, and all drop what has arrived. It frees at once what has arrived on itself: the update of its own blocks may
come before that vote, and then has the memory that it has without a move. A rank that dies ends the vote with an error
on the others, who then hold the old partition whole.
"""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ringweave.errors import PeerError, RingweaveError, UsageError, explain, shorten
from ringweave.pipeline.layouts import Layout
from ringweave.pipeline.moving import contents, parcels
from ringweave.pipeline.moving.parcels import Receiving, Sending
from ringweave.pipeline.moving.voting import compare, vote
from ringweave.pipeline.pipeline import Pipeline
from ringweave.planning.repartitioning import Move, moves

BOUNDARIES = ("packing", "making room", "copying", "changes", "arrived", "updating", "updated", "voted")
"""Names of the moments at which a test may let a rank fail: they are handed to `at_boundary`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a move ended, the same on all ranks."""

    splits: tuple[int, ...]
    """Those that were to hold."""
    at_step: int
    """Number of the first train step behind it."""
    is_done: bool
    """False: the old partition holds."""
    cause: str = ""
    """Why not, with the rank."""
    pause_s: float = 0.0
    """Seconds that the slowest rank spent on it while it did nothing else."""


@dataclass(slots=True)
class _Pending:
    """A move under way, on one rank."""

    layout: Layout
    sent: dict[int, Move] = field(default_factory=dict)
    """Number of the move in the list of all -> move."""
    received: dict[int, Move] = field(default_factory=dict)
    num_moves: int = 0
    blocks: dict[int, nn.Module] = field(default_factory=dict)
    """Those that arrive, by index."""
    receiving: dict[int, Receiving] = field(default_factory=dict)
    sending: list[Sending] = field(default_factory=list)
    works: list[dist.Work] = field(default_factory=list)
    cause: str = ""
    is_copying: bool = False
    is_whole: bool = False
    """All has arrived, and the blocks are held beside the old ones."""
    spent_s: float = 0.0
    begun_s: float = 0.0
    """When what is being done now began, by the clock."""


class Mover:
    """Moves the blocks of one pipeline. All ranks make it, and begin the same moves between the same steps.

    Its work is done inside of `pipeline.optimizer.step()`, which every way to train calls once gradients are final:
    clipped, unscaled, averaged over replicas. A step that a `GradScaler` leaves out only puts the move off.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        done: Callable[[Outcome], None] = lambda _: None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        at_boundary: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`done` is told how each move ended, in the optimizer's step that ended it."""
        self._pipeline, self._done, self._clock, self._at_boundary = pipeline, done, clock, at_boundary
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)
        self._group = group
        self._pending: _Pending | None = None
        pipeline.optimizer.register_step_pre_hook(lambda *_: self._before_update())
        pipeline.optimizer.register_step_post_hook(lambda *_: self._after_update())

    @property
    def is_moving(self) -> bool:
        """A move was begun and has not ended."""
        return self._pending is not None

    def begin(self, splits: tuple[int, ...]) -> bool:
        """Begin to move all blocks that the new partition has elsewhere; they have moved after the next update.

        Returns:
            False if a rank could not go on; `done` was told why, and nothing has changed.

        Raises:
            UsageError: Splits for another number of stages, or a move is under way.
            PeerError: A rank has died.
        """
        self._pending = self._new(splits)
        self._timed(self._prepare)
        return self.is_moving

    def _new(self, splits: tuple[int, ...]) -> _Pending:
        old = self._pipeline.layout
        if self._pending is not None:
            do = "Wait until it has ended, with the next update"
            raise UsageError(explain("move of blocks", got=splits, expected="no other under way", do=do))
        if len(splits) != len(old.splits):
            do = "A pipeline keeps its number of stages; leave one empty if need be"
            raise UsageError(explain("splits", got=splits, expected=f"{len(old.splits)} splits", do=do))
        new = Layout(num_blocks=old.num_blocks, splits=splits, num_replicas=old.num_replicas)
        pending, made = _Pending(new), moves(old.splits, splits, old.num_blocks)
        replica, stage = old.replica_of(self._pipeline.rank), self._pipeline.stage
        for place, move in enumerate(made):
            number = replica * len(made) + place
            if stage == move.src:
                pending.sent[number] = move
            elif stage == move.dst:
                pending.received[number] = move
        pending.num_moves = len(made) * old.num_replicas
        return pending

    def _prepare(self, pending: _Pending) -> None:
        """Exchange headers, make room, and let the copy begin if all could."""
        headers = self._exchange_headers(pending, self._pack_state)
        for number, header in headers.items():
            self._try(pending, lambda n=number, h=header: self._make_room(pending, n, h))
        if not self._agree(pending):
            return
        pending.is_copying = True
        self._start_large(pending)
        self._try(pending, lambda: self._at_boundary("copying"))

    def _before_update(self) -> None:
        if self._pending is not None and self._pending.is_copying:
            self._timed(self._follow_up)

    def _follow_up(self, pending: _Pending) -> None:
        """What the step changed goes after the state; then the blocks are held twice."""
        self._wait(pending)
        for receiving in pending.receiving.values():
            self._try(pending, receiving.land)
        states = dict(pending.receiving)
        headers = self._exchange_headers(pending, self._pack_changes)
        for number, header in headers.items():
            self._try(pending, lambda n=number, h=header: self._expect_changes(pending, n, h))
        if not self._agree(pending):
            return
        self._start_large(pending)
        self._wait(pending)
        for number, move in pending.received.items():
            if not pending.cause:
                self._try(pending, lambda n=number, m=move: self._install(pending, m.block, states[n], n))
        if pending.cause:
            self._free(pending)
        pending.is_whole = True

    def _after_update(self) -> None:
        if self._pending is not None and self._pending.is_whole:
            self._timed(self._commit)

    def _commit(self, pending: _Pending) -> None:
        """Compare, vote for the last time, and go over to the new partition."""
        sent, arrived = {}, {}
        for numbers, moved in () if pending.cause else ((sent, pending.sent), (arrived, pending.received)):
            for number, move in moved.items():
                self._try(pending, lambda into=numbers, n=number, m=move: into.update({n: self._digest(m.block)}))
        self._try(pending, lambda: self._at_boundary("updated"))
        if not self._agree(pending):
            return
        different = self._talk(lambda: compare(sent, arrived, pending.num_moves, self._group))
        if different:
            got, expected = f"{len(different)} blocks differ", "the same bits where they were and where they go"
            do = "Take an optimizer whose update depends on the block alone"
            self._drop(pending, explain("blocks after the same update", got=got, expected=expected, do=do))
            return
        self._at_boundary("voted")
        self._pending = None
        for move in pending.received.values():
            self._pipeline.optimizer.keep(move.block)
        self._pipeline.repartition(pending.layout.splits)
        pause = torch.tensor([pending.spent_s + self._clock() - pending.begun_s], dtype=torch.float64)
        self._talk(lambda: dist.all_reduce(pause, op=dist.ReduceOp.MAX, group=self._group))
        self._tell(pending, is_done=True, pause_s=float(pause))

    def _pack_state(self, block: int) -> Sending:
        self._at_boundary("packing")
        return Sending(contents.state_of(self._pipeline.blocks[block], self._pipeline.optimizer.of(block)))

    def _pack_changes(self, block: int) -> Sending:
        self._at_boundary("changes")
        return Sending(contents.changes_of(self._pipeline.blocks[block]))

    def _make_room(self, pending: _Pending, number: int, header: parcels.Header) -> None:
        self._at_boundary("making room")
        block = pending.received[number].block
        module = copy.deepcopy(self._pipeline.blocks[block]).to_empty(device=self._pipeline.device)
        pending.receiving[number] = Receiving(header, module)
        pending.blocks[block] = module

    def _expect_changes(self, pending: _Pending, number: int, header: parcels.Header) -> None:
        pending.receiving[number] = Receiving(header, pending.blocks[pending.received[number].block])

    def _install(self, pending: _Pending, block: int, state: Receiving, number: int) -> None:
        """Hold a block that has arrived; the optimizer's step that follows updates it."""
        changes, module = pending.receiving[number], pending.blocks[block]
        changes.land()
        self._at_boundary("arrived")
        for name, requires_grad in state.arrived.facts["requires_grad"].items():
            module.get_parameter(name).requires_grad_(requires_grad)
        contents.fill_changes(module, changes.arrived)
        self._pipeline.blocks.put(block, module)
        optimizer = self._pipeline.optimizer.take(block, attempt=lambda update: self._update(pending, update))
        contents.fill_state(optimizer, state.arrived)

    def _update(self, pending: _Pending, update: Callable[[], None]) -> None:
        """Make the update of a block that has arrived; unlike that of this stage's own blocks it may fail."""

        def make() -> None:
            self._at_boundary("updating")
            update()

        self._try(pending, make)
        if pending.cause:
            self._free(pending)

    def _digest(self, block: int) -> int:
        return contents.digest(self._pipeline.blocks[block], self._pipeline.optimizer.of(block))

    def _exchange_headers(self, pending: _Pending, pack: Callable[[int], Sending]) -> dict[int, parcels.Header]:
        """Of the blocks that come here, but of those whose sender has failed: it says so itself in the next vote."""
        self._finish_sending(pending)
        for move in pending.sent.values():
            sending = self._try(pending, lambda m=move: pack(m.block)) or Sending(None, error=pending.cause)
            pending.sending.append(sending)
            dst = self._rank_of(move.dst)
            pending.works += self._talk(lambda s=sending, d=dst: s.send_header(d, self._group))
        headers = {
            number: self._talk(lambda m=move: parcels.receive_header(self._rank_of(m.src), self._group))
            for number, move in pending.received.items()
        }
        return {number: header for number, header in headers.items() if not header["error"]}

    def _start_large(self, pending: _Pending) -> None:
        for sending, move in zip(pending.sending, pending.sent.values(), strict=True):
            dst = self._rank_of(move.dst)
            pending.works += self._talk(lambda s=sending, d=dst: s.send(d, self._group))
        for number, move in pending.received.items():
            src, receiving = self._rank_of(move.src), pending.receiving[number]
            pending.works += self._talk(lambda r=receiving, s=src: r.receive(s, self._group))

    def _rank_of(self, stage: int) -> int:
        layout = self._pipeline.layout
        return layout.ranks_of_replica(layout.replica_of(self._pipeline.rank))[stage]

    def _wait(self, pending: _Pending) -> None:
        works, pending.works = pending.works, []
        for work in works:
            self._talk(work.wait)

    def _finish_sending(self, pending: _Pending) -> None:
        self._wait(pending)
        pending.sending = []

    def _agree(self, pending: _Pending) -> bool:
        """Vote; drop the move if a rank cannot go on."""
        cause = self._talk(lambda: vote(pending.cause, self._group))
        if cause:
            self._drop(pending, cause)
        return not cause

    def _drop(self, pending: _Pending, cause: str) -> None:
        """Forget the move: the old partition is whole."""
        self._wait(pending)
        self._forget()
        self._tell(pending, is_done=False, cause=cause)

    def _forget(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            self._free(pending)

    def _free(self, pending: _Pending) -> None:
        """Give up the memory of all that has arrived here."""
        own = self._pipeline.layout.ranges[self._pipeline.stage]
        for block in pending.blocks:
            if block not in own:
                self._pipeline.optimizer.release(block)
                self._pipeline.blocks.drop(block)

    def _tell(self, pending: _Pending, *, is_done: bool, cause: str = "", pause_s: float = 0.0) -> None:
        at_step = self._pipeline.train_step_index
        splits = pending.layout.splits
        self._done(Outcome(splits=splits, at_step=at_step, is_done=is_done, cause=cause, pause_s=pause_s))

    def _timed(self, work: Callable[[_Pending], None]) -> None:
        pending = self._pending
        assert pending is not None
        pending.begun_s = self._clock()
        try:
            work(pending)
        finally:
            pending.spent_s += self._clock() - pending.begun_s

    def _try(self, pending: _Pending, action: Callable[[], Any]) -> Any:
        """Do something on this rank alone; what fails is told in the next vote."""
        try:
            return action()
        except Exception as cause:
            pending.cause = pending.cause or (str(cause) if isinstance(cause, RingweaveError) else shorten(cause))
            return None

    def _talk(self, action: Callable[[], Any]) -> Any:
        """Do something with the others; if that fails the move is off here, and training cannot go on."""
        try:
            return action()
        except (RuntimeError, ValueError) as cause:
            self._forget()
            do = "Start again from a checkpoint"
            where = f"rank {self._pipeline.rank}, holding the partition {self._pipeline.layout.splits}"
            text = explain("move of blocks", got=cause, expected="answers of all ranks", do=do, where=where)
            raise PeerError(text) from cause
