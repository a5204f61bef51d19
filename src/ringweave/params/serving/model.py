"""The parameters as the server holds them: pushes count at once, and train steps are those of synchronous training.

An optimizer's state must not move once for each push: momentum would forget k times as fast, and Adam would take the
noise of a few samples for curvature. So pushes are gathered into *train steps*, each of as many samples as one of
synchronous training. What a ring is given is always the newest: the parameters at the start of the present train step,
moved by the optimizer with the mean of all that has been pushed since, by a step as long as these samples are worth.
The optimizer's state goes on when the train step is full. With one ring that is synchronous training, exactly.

Optimizers work element by element, so they are given blocks of tensors, few at a time: what is needed beside the
parameters, the state and the sum of gradients stays in the cache.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ringweave.errors import TrainingError, explain
from ringweave.params.flat import Flat
from ringweave.params.messages import Group, Option, Push, Setup
from ringweave.params.rules import Progress
from ringweave.params.serving import optimizers

BLOCK = 1 << 18
"""Elements that are worked on at once."""


class GatheredModel:
    """Parameters and optimizer of a job; one thread at a time."""

    def __init__(self, setup: Setup, initial: Flat, progress: Progress | None = None) -> None:
        """`initial` holds the first parameters, and is the model's from now on.

        Raises:
            TrainingError: The optimizer cannot be made.
        """
        self.setup = setup
        self.progress = progress or Progress()
        self._start = initial
        self._sum: Flat | None = None
        self.options: Sequence[dict[str, Option]] = ()
        """Of each group, as they came with the last push."""
        self.moved: set[int] = set()
        """Places of the parameters that the last train step has moved."""
        self._bases: dict[int, Flat] = {}
        self._starts = blocks_of(initial)
        self._places = [place for place, view in enumerate(initial.views) for _ in range(_num_blocks(view))]
        self._blocks = [nn.Parameter(block) for block in self._starts]
        self._scratch = Scratch()
        self.optimizer = optimizers.make(setup.optimizer, self._groups(), self._blocks)

    def apply_gradient(
        self,
        gradient: Flat,
        share: float,
        options: Sequence[dict[str, Option]],
        absent: Sequence[int] = (),
        damping: float = 1.0,
    ) -> None:
        """Count a gradient into the present train step, and finish that if it is full now.

        Args:
            gradient: The mean over its samples; it may be changed.
            share: Its part of a train step.
            options: Of each group, as they are now.
            absent: Places of parameters without a gradient; one that no push of the train step has stays as it is.
            damping: What it counts beside the others of its train step. The length of the step does not depend on
                it: training would be that many samples behind for good.

        Raises:
            TrainingError: Options or places do not belong to this model; nothing is changed.
        """
        self._check_places(absent)
        optimizers.adjust(self.optimizer, options, self.progress.length + share)
        self.options = options
        is_first = not self.progress.weight
        self.progress.add(share, share * damping, set(range(len(self.setup.tensors))) - set(absent))
        if is_first and self.progress.is_full:
            self._finish(gradient, 1.0)
            return
        self._gather(gradient, share * damping, is_first=is_first)
        if self.progress.is_full and self._sum is not None:
            self._finish(self._sum, 1 / self.progress.weight)

    def check(self, push: Push) -> None:
        """Refuse a push that could not be applied, before anybody else is told of it.

        Raises:
            TrainingError: As `apply_gradient` says.
        """
        if push.content == "gradient":
            self._check_places(push.absent)
            optimizers.check(self.optimizer, push.options)

    @torch.no_grad()
    def apply_change(self, change: Flat, share: float, num_steps: int = 1, damping: float = 1.0) -> None:
        """Move all parameters by a multiple of what changed in a ring's local steps.

        Args:
            change: By how much its parameters moved.
            share: The ring's part of a train step, in each of them.
            num_steps: How many there were.
            damping: What it counts beside the changes of others; so many steps are done all the same.
        """
        for own, moved in zip(self._start.pieces, change.pieces, strict=True):
            own.add_(moved, alpha=share * damping)
        self.progress.total += share * num_steps

    @torch.no_grad()
    def read(self, into: Flat, ahead: float = 0.0) -> None:
        """Put the newest parameters there, or what they will be so many train steps on.

        What is ahead follows from the mean of the gradients so far and from the optimizer's momentum; from that alone
        where the train step has none yet.
        """
        into.copy_(self._start)
        present = self.progress.present or self.moved
        length = self.progress.length + (ahead if present else 0.0)
        if not length:
            return
        optimizers.adjust(self.optimizer, self.options, length)
        outs, gathered = blocks_of(into), self.gathered
        sums = blocks_of(gathered) if gathered else None
        for batch in self._batches():
            with self._tried_out(batch, outs):
                self._step(batch, present, sums, 1 / self.progress.weight if sums else 0.0)

    def keep(self, holder: int, base: Flat) -> None:
        """Remember what the holder computes its next gradient on, as `compensate` needs it."""
        self._bases[holder] = base

    def release(self, holder: int) -> None:
        """Forget that."""
        self._bases.pop(holder, None)

    def compensate(self, holder: int, gradient: Flat) -> None:
        """Turn the holder's gradient into about that at the newest parameters. Needs a copy of these meanwhile."""
        base = self._bases.pop(holder, None)
        if base is not None:
            now = Flat(self.setup.tensors)
            self.read(now)
            compensate(gradient, now, base, self.setup.compensation)

    @property
    def bases(self) -> Mapping[int, Flat]:
        """What each ring computes its next gradient on, where that is kept."""
        return self._bases

    @property
    def start(self) -> Flat:
        """The parameters at the start of the present train step."""
        return self._start

    @property
    def gathered(self) -> Flat | None:
        """The sum of the weighed gradients of the present train step; None if there are none."""
        return self._sum if self.progress.weight else None

    @gathered.setter
    def gathered(self, found: Flat) -> None:
        self._sum = found

    @property
    def memory_bytes(self) -> int:
        """Bytes of all tensors held: parameters, optimizer's state, sum of gradients, what rings compute on."""
        bases = {id(base): base for base in self._bases.values()}
        gathered = self._sum.num_bytes if self._sum else 0
        return self.state_bytes + gathered + sum(base.num_bytes for base in bases.values())

    @property
    def state_bytes(self) -> int:
        """Bytes of one set of parameters and of the optimizer's state: what training alone would hold."""
        states = self.optimizer.state.values()
        state = sum(value.nbytes for each in states for value in each.values() if isinstance(value, Tensor))
        return self._start.num_bytes + state

    def _check_places(self, absent: Sequence[int]) -> None:
        if not all(place < len(self.setup.tensors) for place in absent):
            raise TrainingError(
                explain("absent gradients", got=list(absent), expected="places of parameters", do="Push them whole")
            )

    def _groups(self) -> list[Group]:
        """The script's groups, of blocks in the place of tensors."""
        found = []
        for group in self.setup.groups:
            members = set(group.parameters)
            blocks = [index for index, place in enumerate(self._places) if place in members]
            found.append(Group(parameters=blocks, options=group.options))
        return found

    @torch.no_grad()
    def _gather(self, gradient: Flat, weight: float, *, is_first: bool) -> None:
        self._sum = self._sum or Flat(self.setup.tensors)
        for total, piece in zip(self._sum.pieces, gradient.pieces, strict=True):
            if is_first:
                torch.mul(piece, weight, out=total)
            else:
                total.add_(piece, alpha=weight)

    def _finish(self, sums: Flat, scale: float) -> None:
        """The train step is full: the optimizer goes on for good."""
        blocks = blocks_of(sums)
        for batch in self._batches():
            self._scratch.clear()
            self._step(batch, self.progress.present, blocks, scale)
        self.moved = set(self.progress.present)
        self.progress.clear()

    def _step(self, batch: Sequence[int], present: Container[int], sums: Sequence[Tensor] | None, scale: float) -> None:
        """The optimizer's step of some blocks, by gradients of zero if there are none."""
        for index in batch:
            if self._places[index] not in present:
                continue
            if sums is None:
                self._blocks[index].grad = self._scratch.like(self._starts[index]).zero_()
            elif scale != 1.0:
                self._blocks[index].grad = torch.mul(sums[index], scale, out=self._scratch.like(sums[index]))
            else:
                self._blocks[index].grad = sums[index]
        self.optimizer.step()
        for index in batch:
            self._blocks[index].grad = None

    def _batches(self) -> Iterator[list[int]]:
        """Blocks that are worked on together."""
        batch, count = [], 0
        for index, block in enumerate(self._starts):
            if batch and count + len(block) > BLOCK:
                yield batch
                batch, count = [], 0
            batch.append(index)
            count += len(block)
        yield batch

    @contextmanager
    def _tried_out(self, batch: Sequence[int], outs: Sequence[Tensor]) -> Iterator[None]:
        """Let the optimizer move `outs` in the place of these blocks, and forget that it did."""
        state = self.optimizer.state
        self._scratch.clear()
        kept = {index: state.pop(self._blocks[index], None) for index in batch}
        for index, own in kept.items():
            self._blocks[index].data = outs[index]
            if own is not None:
                state[self._blocks[index]] = {name: self._scratch.copy(value) for name, value in own.items()}
        try:
            yield
        finally:
            for index, own in kept.items():
                self._blocks[index].data = self._starts[index]
                state.pop(self._blocks[index], None)
                if own is not None:
                    state[self._blocks[index]] = own


def blocks_of(flat: Flat) -> list[Tensor]:
    """The tensors, cut into pieces of at most `BLOCK` elements."""
    return [block for view in flat.views for block in view.view(-1).split(BLOCK)]


def _num_blocks(view: Tensor) -> int:
    return max(1, -(-view.numel() // BLOCK))


class Scratch:
    """Memory for what is needed while a few blocks are worked on, used again for the next ones.

    Fresh memory would be asked for by a thread of its own for each push, and the C library keeps some of what each of
    them frees.
    """

    def __init__(self) -> None:
        self._rooms: dict[torch.dtype, list[Tensor]] = {}
        self._num_used: dict[torch.dtype, int] = {}

    def clear(self) -> None:
        """Nobody needs any more what was given out."""
        self._num_used.clear()

    def like(self, tensor: Tensor) -> Tensor:
        """Memory of that shape and dtype, which holds anything."""
        rooms, number = self._rooms.setdefault(tensor.dtype, []), self._num_used.get(tensor.dtype, 0)
        self._num_used[tensor.dtype] = number + 1
        if number == len(rooms):
            rooms.append(tensor.new_empty(0))
        if len(rooms[number]) < tensor.numel():
            rooms[number] = tensor.new_empty(tensor.numel())
        return rooms[number][: tensor.numel()].view(tensor.shape)

    def copy(self, value: object) -> object:
        """A tensor's content in such memory; anything else as it is."""
        return self.like(value).copy_(value) if isinstance(value, Tensor) else value


def compensate(gradient: Flat, now: Flat, base: Flat, strength: float) -> None:
    """Turn a gradient at older parameters into about that at the newest: g + lambda g g (theta_now - theta_base).

    Source: Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation" (2017), equation 10.
    """
    for own, newest, older in zip(gradient.pieces, now.pieces, base.pieces, strict=True):
        for begin in range(0, len(own), BLOCK):
            block = slice(begin, begin + BLOCK)
            own[block].addcmul_(own[block] * own[block], newest[block] - older[block], value=strength)
