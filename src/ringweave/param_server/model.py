"""Parameters on the server: every push takes effect at once, train steps are those of synchronous training.

The optimizer's state must not advance with each push: with k rings momentum would decay k times as fast, and Adam
would take the noise of a few samples for curvature. So pushes are accumulated into *train steps*, each of as many
samples as one of synchronous training. A ring always gets the newest parameters: those at the start of the present
train step, moved by the optimizer with the mean of all gradients pushed since, by a step scaled to the number of
these samples. The optimizer's state advances when the train step is full. With one ring this is synchronous
training, exactly.

Sites of mode `local` push outer gradients instead, one fragment of the parameters at a time. Then the optimizer is that
of outer steps, and each fragment has steps of its own: one is full when all sites have pushed the fragment.

Optimizers work element by element, so they get blocks of tensors, few at a time: the temporary memory beside the
parameters, the state and the gradient sum stays in the cache.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ringweave.errors import TrainingError
from ringweave.param_server import optimizers
from ringweave.param_server.flat import FlatTensors
from ringweave.param_server.messages import OptimizerOption, ParameterGroup, Push, ServerSetup
from ringweave.param_server.versions import TrainStepProgress

BLOCK_ELEMENTS = 1 << 18
"""Elements in one block."""


class AccumulatingModel:
    """Parameters and optimizer of a job; not thread-safe."""

    def __init__(self, setup: ServerSetup, initial: FlatTensors, progress: TrainStepProgress | None = None) -> None:
        """Take over the memory of the first parameters.

        Raises:
            TrainingError: The optimizer cannot be made.
        """
        self.setup = setup
        self.progress = progress or TrainStepProgress()
        self.outer_progress = [TrainStepProgress() for _ in setup.fragments]
        """Outer steps of each fragment; empty if gradients or changes are pushed."""
        self._step_start = initial
        self._gradient_sum: FlatTensors | None = None
        self.options: Sequence[dict[str, OptimizerOption]] = ()
        """Options of each group, as they came with the last push."""
        self.last_updated: set[int] = set()
        """Indices of the parameters that the last train step has updated."""
        self._ring_bases: dict[int, FlatTensors] = {}
        self._starts = tensor_blocks(initial)
        self._block_tensors = [place for place, view in enumerate(initial.views) for _ in range(_num_blocks(view))]
        by_place: dict[int, list[int]] = {}
        for index, place in enumerate(self._block_tensors):
            by_place.setdefault(place, []).append(index)
        self._blocks_of_parts = [
            [index for place in places for index in by_place[place]] for places in setup.places_of(())
        ]
        """Indices of the blocks of each fragment, in the order of its tensors."""
        self._blocks = [nn.Parameter(block) for block in self._starts]
        self._scratch = ScratchTensors()
        self.optimizer = optimizers.make_optimizer(setup.optimizer, self._block_groups(), self._blocks)

    def apply_gradient(
        self,
        gradient: FlatTensors,
        share: float,
        options: Sequence[dict[str, OptimizerOption]],
        absent: Sequence[int] = (),
        damping: float = 1.0,
    ) -> None:
        """Add a gradient to the present train step, and finish that if it is full now.

        Args:
            gradient: The mean over its samples; it may be changed.
            share: Its part of a train step.
            options: Present options of each group.
            absent: Indices of parameters without a gradient; one that no push of the train step has stays unchanged.
            damping: Its weight beside the others of its train step. The length of the step does not depend on it:
                training would stay that many samples behind.

        Raises:
            TrainingError: Options or indices do not belong to this model; nothing is changed.
        """
        self._check_places(absent)
        present = set(range(len(self.setup.tensors))) - set(absent)
        self._add_to_step(0, gradient, share, options, present, damping)

    def apply_outer_gradient(
        self, content: Sequence[tuple[int, FlatTensors]], weight: float, num_train_steps: float, damping: float = 1.0
    ) -> None:
        """Add a ring's outer gradients to the present outer steps of these fragments.

        Args:
            content: Fragments, each with its outer gradient.
            weight: Part of the ring in an outer step.
            num_train_steps: Train steps of all rings that are in the parameters of all fragments now.
            damping: As in `apply_gradient`.
        """
        options = [group.options for group in self.setup.groups]
        for fragment, gradient in content:
            self._add_to_step(fragment, gradient, weight, options, set(self.setup.fragments[fragment]), damping)
        self.progress.total += num_train_steps

    def _progress_of(self, part: int) -> TrainStepProgress:
        return self.outer_progress[part] if self.outer_progress else self.progress

    def _add_to_step(
        self,
        part: int,
        gradient: FlatTensors,
        share: float,
        options: Sequence[dict[str, OptimizerOption]],
        present: set[int],
        damping: float,
    ) -> None:
        """Add a gradient to the present step of a fragment, and finish that if it is full now."""
        progress = self._progress_of(part)
        optimizers.adjust_options(self.optimizer, options, progress.length + share)
        self.options = options
        is_first = not progress.weight
        progress.add(share, share * damping, present)
        if is_first and progress.is_full:
            self._finish_step(part, gradient, 1.0)
            return
        sums = self._accumulate(part, gradient, share * damping, is_first=is_first)
        if progress.is_full:
            self._finish_step(part, sums, 1 / progress.weight)

    def check_push(self, push: Push) -> None:
        """Refuse a push that could not be applied, before it is replicated.

        Raises:
            TrainingError: As in `apply_gradient`.
        """
        if (push.content == "outer_gradient") != bool(self.setup.fragments):
            do = "Run the same ringweave on all ranks"
            raise TrainingError("content of a push", got=push.content, expected="that of the job", do=do)
        if push.content == "gradient":
            self._check_places(push.absent)
            optimizers.check_options(self.optimizer, push.options)

    @torch.no_grad()
    def apply_change(self, change: FlatTensors, share: float, num_steps: int = 1, damping: float = 1.0) -> None:
        """Move all parameters by a multiple of the change in a ring's local steps.

        `damping`: weight beside the changes of others; the number of steps counts in full.
        """
        for own, moved in zip(self._step_start.pieces, change.pieces, strict=True):
            own.add_(moved, alpha=share * damping)
        self.progress.total += share * num_steps

    @torch.no_grad()
    def read_parameters(self, into: FlatTensors, ahead: float = 0.0) -> None:
        """Copy the newest parameters there, or those predicted for so many train steps ahead.

        The prediction follows from the mean of the gradients so far and the optimizer's momentum; from momentum alone
        if the train step has no gradient yet.
        """
        for part, own in enumerate(into.parts):
            self.read_part(part, own, ahead)

    @torch.no_grad()
    def read_part(self, part: int, into: FlatTensors, ahead: float = 0.0) -> None:
        """Copy the newest parameters of a fragment there, as `read_parameters` does."""
        progress = self._progress_of(part)
        into.copy_(self._step_start.parts[part])
        present = progress.present or self.last_updated
        length = progress.length + (ahead if present else 0.0)
        if not length:
            return
        optimizers.adjust_options(self.optimizer, self.options, length)
        outs, gathered = self._blocks_by_index(part, into), self._sums_of(part)
        sums = self._blocks_by_index(part, gathered) if gathered else None
        for batch in self._batches(part):
            with self._provisional_step(batch, outs):
                self._step_blocks(batch, present, sums, 1 / progress.weight if sums else 0.0)

    def keep_base(self, ring: int, base: FlatTensors) -> None:
        """Keep the parameters of the ring's next gradient for `compensate`."""
        self._ring_bases[ring] = base

    def release_base(self, ring: int) -> None:
        """Release the kept parameters of the ring."""
        self._ring_bases.pop(ring, None)

    def compensate(self, ring: int, gradient: FlatTensors) -> None:
        """Approximate the ring's gradient at the newest parameters. Needs a copy of these meanwhile."""
        base = self._ring_bases.pop(ring, None)
        if base is not None:
            now = FlatTensors(self.setup.tensors)
            self.read_parameters(now)
            compensate_gradient(gradient, now, base, self.setup.compensation)

    @property
    def ring_bases(self) -> Mapping[int, FlatTensors]:
        """Kept parameters of each ring's next gradient."""
        return self._ring_bases

    @property
    def step_start(self) -> FlatTensors:
        """Parameters at the start of the present train step."""
        return self._step_start

    @property
    def accumulated(self) -> FlatTensors | None:
        """Weighted sum of the gradients of the present train step; None if there are none."""
        has_some = any(each.weight for each in self.outer_progress or [self.progress])
        return self._gradient_sum if has_some else None

    @accumulated.setter
    def accumulated(self, found: FlatTensors) -> None:
        self._gradient_sum = found

    @property
    def memory_bytes(self) -> int:
        """Bytes of all tensors: parameters, optimizer's state, sum of gradients, kept parameters of rings."""
        bases = {id(base): base for base in self._ring_bases.values()}
        gathered = self._gradient_sum.num_bytes if self._gradient_sum else 0
        return self.state_bytes + gathered + sum(base.num_bytes for base in bases.values())

    @property
    def state_bytes(self) -> int:
        """Bytes of one set of parameters and the optimizer's state, as in training without the server."""
        states = self.optimizer.state.values()
        state = sum(value.nbytes for each in states for value in each.values() if isinstance(value, Tensor))
        return self._step_start.num_bytes + state

    def _check_places(self, absent: Sequence[int]) -> None:
        if not all(place < len(self.setup.tensors) for place in absent):
            raise TrainingError(
                "absent gradients", got=list(absent), expected="places of parameters", do="Push them whole"
            )

    def _block_groups(self) -> list[ParameterGroup]:
        """Return the script's groups, with blocks in place of tensors."""
        found = []
        for group in self.setup.groups:
            members = set(group.parameters)
            blocks = [index for index, place in enumerate(self._block_tensors) if place in members]
            found.append(ParameterGroup(parameters=blocks, options=group.options))
        return found

    @torch.no_grad()
    def _accumulate(self, part: int, gradient: FlatTensors, weight: float, *, is_first: bool) -> FlatTensors:
        """Add a gradient to the sum of a fragment's present step, and return that."""
        if self._gradient_sum is None:
            self._gradient_sum = FlatTensors(self.setup.tensors, fragments=self.setup.fragments)
            if self.setup.fragments:  # a snapshot has the sums of all fragments, also of those without any
                torch._foreach_zero_(list(self._gradient_sum.pieces))
        sums = self._gradient_sum.parts[part]
        for total, piece in zip(sums.pieces, gradient.pieces, strict=True):
            if is_first:
                torch.mul(piece, weight, out=total)
            else:
                total.add_(piece, alpha=weight)
        return sums

    def _sums_of(self, part: int) -> FlatTensors | None:
        has_some = self._gradient_sum is not None and self._progress_of(part).weight
        return self._gradient_sum.parts[part] if self._gradient_sum is not None and has_some else None

    def _blocks_by_index(self, part: int, content: FlatTensors) -> dict[int, Tensor]:
        return dict(zip(self._blocks_of_parts[part], tensor_blocks(content), strict=True))

    def _finish_step(self, part: int, sums: FlatTensors, scale: float) -> None:
        """Finish the full train step of a fragment: the optimizer's state advances."""
        blocks, progress = self._blocks_by_index(part, sums), self._progress_of(part)
        for batch in self._batches(part):
            self._scratch.clear()
            self._step_blocks(batch, progress.present, blocks, scale)
        self.last_updated = set(progress.present)
        progress.clear()

    def _step_blocks(
        self, batch: Sequence[int], present: Container[int], sums: Mapping[int, Tensor] | None, scale: float
    ) -> None:
        """Step the optimizer on some blocks, with zero gradients if there are none."""
        for index in batch:
            if self._block_tensors[index] not in present:
                continue
            if sums is None:
                self._blocks[index].grad = self._scratch.like_tensor(self._starts[index]).zero_()
            elif scale != 1.0:
                self._blocks[index].grad = torch.mul(sums[index], scale, out=self._scratch.like_tensor(sums[index]))
            else:
                self._blocks[index].grad = sums[index]
        self.optimizer.step()
        for index in batch:
            self._blocks[index].grad = None

    def _batches(self, part: int) -> Iterator[list[int]]:
        """Yield the indices of blocks of a fragment that are processed together."""
        batch, count = list[int](), 0
        for index in self._blocks_of_parts[part]:
            block = self._starts[index]
            if batch and count + len(block) > BLOCK_ELEMENTS:
                yield batch
                batch, count = [], 0
            batch.append(index)
            count += len(block)
        yield batch

    @contextmanager
    def _provisional_step(self, batch: Sequence[int], outs: Mapping[int, Tensor]) -> Iterator[None]:
        """Let the optimizer move `outs` in place of these blocks, then restore its state."""
        state = self.optimizer.state
        self._scratch.clear()
        kept = {index: state.pop(self._blocks[index], None) for index in batch}
        for index, own in kept.items():
            self._blocks[index].data = outs[index]
            if own is not None:
                state[self._blocks[index]] = {name: self._scratch.copy_value(value) for name, value in own.items()}
        try:
            yield
        finally:
            for index, own in kept.items():
                self._blocks[index].data = self._starts[index]
                state.pop(self._blocks[index], None)
                if own is not None:
                    state[self._blocks[index]] = own


def tensor_blocks(flat: FlatTensors) -> list[Tensor]:
    """Return the tensors in blocks of at most `BLOCK_ELEMENTS` elements."""
    return [block for view in flat.views for block in view.view(-1).split(BLOCK_ELEMENTS)]


def _num_blocks(view: Tensor) -> int:
    return max(1, -(-view.numel() // BLOCK_ELEMENTS))


class ScratchTensors:
    """Scratch memory for a few blocks, used again for the next ones.

    Fresh memory would be allocated in another thread for each push, and the C library retains part of what each thread
    frees.
    """

    def __init__(self) -> None:
        self._buffers: dict[torch.dtype, list[Tensor]] = {}
        self._num_used: dict[torch.dtype, int] = {}

    def clear(self) -> None:
        """Reclaim all memory that was given out."""
        self._num_used.clear()

    def like_tensor(self, tensor: Tensor) -> Tensor:
        """Return uninitialized memory of that shape and dtype."""
        buffers, number = self._buffers.setdefault(tensor.dtype, []), self._num_used.get(tensor.dtype, 0)
        self._num_used[tensor.dtype] = number + 1
        if number == len(buffers):
            buffers.append(tensor.new_empty(0))
        if len(buffers[number]) < tensor.numel():
            buffers[number] = tensor.new_empty(tensor.numel())
        return buffers[number][: tensor.numel()].view(tensor.shape)

    def copy_value(self, value: object) -> object:
        """Return a copy of a tensor in scratch memory; anything else unchanged."""
        return self.like_tensor(value).copy_(value) if isinstance(value, Tensor) else value


def compensate_gradient(gradient: FlatTensors, now: FlatTensors, base: FlatTensors, strength: float) -> None:
    """Approximate a gradient at the newest parameters: g + lambda g g (theta_now - theta_base).

    Source: Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation" (2017), equation 10.
    """
    for own, newest, older in zip(gradient.pieces, now.pieces, base.pieces, strict=True):
        for begin in range(0, len(own), BLOCK_ELEMENTS):
            block = slice(begin, begin + BLOCK_ELEMENTS)
            own[block].addcmul_(own[block] * own[block], newest[block] - older[block], value=strength)
