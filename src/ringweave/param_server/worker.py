"""Rank of a ring at the end of a round, and the optimizer that the script gets back.

Only the representative of the ring talks to the server. Both ways of working give all ranks the same parameters:

- *gradients*: the ring pushes its mean gradient, the server's optimizer makes the next version, which is broadcast.
- *changes*: the ring's own optimizer makes local steps. The ring pushes the change of its parameters while it
  computes the next local steps. It takes in the returned version one round later, with its own changes since then
  on top.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ringweave.param_server import flat, optimizers
from ringweave.param_server.client import RingClient, RingPush
from ringweave.param_server.data_shards import Span, merge_spans
from ringweave.param_server.flat import FlatTensors
from ringweave.param_server.messages import OptimizerOption, PushResult


@dataclass(slots=True)
class UnpushedSamples:
    """Samples computed since the last push."""

    num_samples: int = 0
    """Samples of the whole ring."""
    batch_share: float = 0.0
    """Train steps of all rings that these samples make; each batch adds its part."""
    num_batches: int = 0
    pass_number: int = 0
    """Number of the pass over the data that contains the last batch."""
    epoch: int = 0
    """Epoch of that pass."""
    spans: list[Span] = field(default_factory=list)
    """Samples of the pass; unpushed samples of the pass before are in no position any more."""

    def add(self, num_samples: int, batch_share: float) -> None:
        self.num_samples += num_samples
        self.batch_share += batch_share
        self.num_batches += 1

    def note_spans(self, pass_number: int, epoch: int, spans: Iterable[Span]) -> None:
        if (pass_number, epoch) != (self.pass_number, self.epoch):
            self.pass_number, self.epoch = pass_number, epoch
            self.spans.clear()
        self.spans.extend(spans)

    def take(self) -> "UnpushedSamples":
        """Return a copy and reset, for the next push."""
        taken = replace(self, spans=list(self.spans))
        self.clear()
        return taken

    def clear(self) -> None:
        self.num_samples, self.batch_share, self.num_batches = 0, 0.0, 0
        self.spans.clear()

    @property
    def mean_share(self) -> float:
        """Mean over the batches of the ring's part of a train step."""
        return self.batch_share / self.num_batches if self.num_batches else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RingPlacement:
    """Position of a rank in its ring."""

    process_group: dist.ProcessGroup
    representative: int
    """Global rank of the representative, which talks to the server."""
    client: RingClient | None
    """Client of the representative; None on other ranks."""


class RingWorker:
    """Rank of a ring, as worker of the parameter server."""

    def __init__(self, placement: RingPlacement, parameters: Sequence[Tensor], *, overlaps: bool = False) -> None:
        """`parameters` are the trained ones, in the server's order."""
        self._placement, self._parameters = placement, list(parameters)
        self._overlaps = overlaps
        specs = flat.tensor_specs([(str(index), each) for index, each in enumerate(parameters)])
        device = str(parameters[0].device)
        self._received = FlatTensors(specs, device=device)
        """Received parameters, on every rank."""
        is_host = device == "cpu"
        self._inbox = self._received if is_host and not overlaps else FlatTensors(specs)
        self._outbox = FlatTensors(specs) if placement.client else None
        self._last_pushed = FlatTensors(specs, device=device) if overlaps else None
        """Parameters at the last push."""
        self._sequence, self._base_version = 0, 0
        self._next_version = 0
        self._has_pushed = False
        """A change was pushed since the last `refresh`, and its answer has to be taken in."""
        self._push_executor = ThreadPoolExecutor(1, "params push") if overlaps and placement.client else None
        self._pending_push: Future[tuple[PushResult, int]] | None = None
        self.last_result: PushResult | None = None
        """Result of the last push; None on ranks that do not push."""

    @torch.no_grad()
    def push_gradients(self, samples: UnpushedSamples, options: list[dict[str, OptimizerOption]]) -> None:
        """Push the ring's reduced gradients, and take the next parameters."""
        self._sequence += 1
        if self._placement.client and self._outbox:
            absent = [index for index, each in enumerate(self._parameters) if each.grad is None]
            for parameter, view in zip(self._parameters, self._outbox.views, strict=True):
                if parameter.grad is None:
                    view.zero_()
                else:
                    view.copy_(parameter.grad)
            ring_push = self._ring_push("gradient", samples, absent=absent, options=options)
            self.last_result, self._base_version = self._placement.client.push_and_pull(
                ring_push, self._outbox.buffers(), self._inbox.buffers()
            )
        self._broadcast_received()
        torch._foreach_copy_(self._parameters, self._received.views)

    @torch.no_grad()
    def push_change(self, samples: UnpushedSamples) -> None:
        """Take in the answer to the previous push, then push the changes since, without waiting for the answer."""
        assert self._last_pushed is not None, "made with overlaps"
        if self._has_pushed:
            self._receive_parameters()
        self._sequence += 1
        changes = torch._foreach_sub(self._parameters, self._last_pushed.views)
        if self._has_pushed:  # the server's parameters, with the ring's own change on top
            torch._foreach_copy_(self._parameters, torch._foreach_add(changes, self._received.views))
        if self._placement.client and self._outbox and self._push_executor:
            torch._foreach_copy_(self._outbox.views, changes)
            self._pending_push = self._push_executor.submit(
                self._placement.client.push_and_pull,
                self._ring_push("change", samples),
                self._outbox.buffers(),
                self._inbox.buffers(),
            )
        torch._foreach_copy_(self._last_pushed.views, self._parameters)
        self._has_pushed = True

    @torch.no_grad()
    def push_last_change(self, samples: UnpushedSamples) -> None:
        """Push the changes since the last push before becoming idle, and drop the answer to the previous push.

        The next `refresh` replaces all parameters. So neither that answer nor the one to this push has to be awaited or
        broadcast to the ring: over a slow link each of them takes as long as the push.
        """
        self._finish_push()
        self._sequence += 1
        if self._placement.client and self._outbox and self._last_pushed:
            torch._foreach_copy_(self._outbox.views, torch._foreach_sub(self._parameters, self._last_pushed.views))
            self.last_result = self._placement.client.push(self._ring_push("change", samples), self._outbox.buffers())

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the newest parameters, at the start and after idling; changes since the last push are lost.

        Rings that do so while no ring pushes have the same parameters afterwards.
        """
        if self._placement.client:
            self._base_version = self._next_version = self._placement.client.pull(self._sequence, self._inbox.buffers())
        self._has_pushed = False
        self._broadcast_received()
        torch._foreach_copy_(self._parameters, self._received.views)
        if self._last_pushed:
            self._last_pushed.copy_(self._received)

    def go_idle(self) -> None:
        """Finish the pending push and idle until the next `refresh`, so that no ring waits for this one."""
        self._finish_push()
        if self._placement.client:
            self._placement.client.leave_ring(is_for_good=False)

    def disconnect(self) -> None:
        """Close the connection: the ring is dissolved, and idle."""
        self._finish_push()
        if self._push_executor:
            self._push_executor.shutdown()
        if self._placement.client:
            self._placement.client.close()

    def leave_server(self) -> None:
        """Finish the pending push and leave the server. This needs no other rank, so the ring may be gone already."""
        self._finish_push()
        if self._push_executor:
            self._push_executor.shutdown()
        if self._placement.client:
            self._placement.client.leave_ring(is_for_good=True)

    def _receive_parameters(self) -> None:
        """Wait for the parameters after the previous push, on all ranks of the ring."""
        self._finish_push()
        self._broadcast_received()

    def _finish_push(self) -> None:
        """Wait for the answer to the pending push."""
        if self._pending_push is not None:
            self.last_result, version = self._pending_push.result()
            self._base_version, self._next_version = self._next_version, version
            self._pending_push = None

    def _ring_push(
        self,
        content: str,
        samples: UnpushedSamples,
        absent: Sequence[int] = (),
        options: Sequence[dict[str, OptimizerOption]] = (),
    ) -> RingPush:
        return RingPush(
            sequence=self._sequence,
            base_version=self._base_version,
            content="gradient" if content == "gradient" else "change",
            num_samples=samples.num_samples,
            batch_share=samples.mean_share,
            absent=list(absent),
            options=list(options),
            num_batches=max(1, samples.num_batches),
            pass_number=samples.pass_number,
            epoch=samples.epoch,
            spans=merge_spans(samples.spans),
        )

    def _broadcast_received(self) -> None:
        """Broadcast the representative's received parameters to all ranks of the ring."""
        if self._placement.client and self._inbox is not self._received:
            self._received.copy_(self._inbox)
        if dist.get_world_size(self._placement.process_group) > 1:
            for piece in self._received.pieces:
                dist.broadcast(piece, self._placement.representative, group=self._placement.process_group)


class ParameterServerOptimizer(Optimizer):
    """Optimizer that a script gets back; it shares the groups of the script's own, for schedulers and clipping.

    Its state is on the server or, with local steps, in the script's optimizer on each rank.
    """

    def __init__(
        self, optimizer: Optimizer, ring_worker: RingWorker, samples: UnpushedSamples, local_steps: int = 0
    ) -> None:
        """Wrap the script's optimizer, without changing it.

        Args:
            optimizer: Optimizer of the script.
            ring_worker: This rank of its ring.
            samples: Computed samples, filled by the loader and emptied by every push.
            local_steps: Steps of the script's optimizer from one push to the next; 0 pushes each step's gradients.
        """
        super().__init__(optimizer.param_groups, {})
        self._local_optimizer, self._ring_worker, self._samples = optimizer, ring_worker, samples
        self._local_steps = local_steps
        self._num_unpushed_steps = 0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do one train step of the ring; `closure` computes the loss first, as in torch's optimizers."""
        if self._local_steps:
            result = self._local_optimizer.step(closure) if closure else self._local_optimizer.step()
            self._num_unpushed_steps += 1
            if self._num_unpushed_steps == self._local_steps:
                self._ring_worker.push_change(self._samples.take())
                self._num_unpushed_steps = 0
            return result
        result = closure() if closure else None
        options = [optimizers.group_options(group) for group in self.param_groups]
        self._ring_worker.push_gradients(self._samples.take(), options)
        return result

    def move_to_ring(self, ring_worker: RingWorker) -> None:
        """Join another ring; the previous one is idle."""
        self._ring_worker = ring_worker

    def discard_unpushed(self) -> None:
        """Idle until the next `refresh` of the ring worker, and lose the local steps that are not pushed yet.

        This waits for no other rank of the ring, which may have failed.
        """
        self._num_unpushed_steps = 0
        self._samples.clear()
        self._ring_worker.go_idle()

    def go_idle(self) -> None:
        """Push local steps that are not pushed yet, and idle until the next `refresh` of the ring worker.

        Every rank of the ring calls it, or none.
        """
        if self._num_unpushed_steps:
            self._ring_worker.push_last_change(self._samples.take())
            self._num_unpushed_steps = 0
        self._ring_worker.go_idle()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the script's optimizer: its groups, and with local steps its state."""
        return self._local_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned.

        Raises:
            TrainingError: It is the state of an optimizer that has taken steps, which the server's would not have.
        """
        if not self._local_steps:
            optimizers.check_fresh(state_dict["state"].values())
        self._local_optimizer.load_state_dict(state_dict)
        self.param_groups = self._local_optimizer.param_groups
