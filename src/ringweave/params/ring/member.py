"""What every rank of a ring does at the end of a round; only the representative talks to the server.

Either way of working gives all ranks of the ring the same parameters:

- *gradients*: the ring's mean gradient is pushed, the server's optimizer makes the next version, which is broadcast.
- *changes*: the ring's own optimizer has made some local steps; by how much they moved the parameters is pushed while
  the next local steps are computed. The version that comes back is taken in one round later, with what the ring has
  moved meanwhile on top.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from ringweave.params import flat
from ringweave.params.flat import Flat
from ringweave.params.messages import Option, Pushed
from ringweave.params.ring.client import RingClient, Round
from ringweave.params.rules import Span
from ringweave.params.rules.positions import united


@dataclass(slots=True)
class Samples:
    """What was computed since the last push."""

    num_samples: int = 0
    """In the whole ring."""
    batch_share: float = 0.0
    """Train steps of all rings that these samples make; each batch adds its part."""
    num_batches: int = 0
    pass_number: int = 0
    """Of the pass over the data that the last batch was of."""
    epoch: int = 0
    """That it was of."""
    spans: list[Span] = field(default_factory=list)
    """Which samples of it; what is left of the pass before is in no position any more."""

    def add(self, num_samples: int, batch_share: float) -> None:
        """One more batch of the ring."""
        self.num_samples += num_samples
        self.batch_share += batch_share
        self.num_batches += 1

    def note(self, pass_number: int, epoch: int, spans: Iterable[Span]) -> None:
        """That batch is of these samples."""
        if (pass_number, epoch) != (self.pass_number, self.epoch):
            self.pass_number, self.epoch = pass_number, epoch
            self.spans.clear()
        self.spans.extend(spans)

    def taken(self) -> "Samples":
        """What was computed; another push begins."""
        found = replace(self, spans=list(self.spans))
        self.clear()
        return found

    def clear(self) -> None:
        """Begin anew."""
        self.num_samples, self.batch_share, self.num_batches = 0, 0.0, 0
        self.spans.clear()

    @property
    def mean_share(self) -> float:
        """The ring's part of a train step, over the batches."""
        return self.batch_share / self.num_batches if self.num_batches else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A rank's place in its ring."""

    process_group: dist.ProcessGroup
    representative: int
    """Global rank of the one that talks to the server."""
    client: RingClient | None
    """Only the representative has it."""


class Member:
    """One rank of a ring."""

    def __init__(self, place: Place, parameters: Sequence[Tensor], *, overlaps: bool = False) -> None:
        """`parameters` are those that are trained, in the order of the server's."""
        self._place, self._parameters = place, list(parameters)
        self._overlaps = overlaps
        specs = flat.specs_of([(str(index), each) for index, each in enumerate(parameters)])
        device = str(parameters[0].device)
        self._landed = Flat(specs, device=device)
        """Where parameters arrive, on every rank."""
        is_host = device == "cpu"
        self._inbox = self._landed if is_host and not overlaps else Flat(specs)
        self._outbox = Flat(specs) if place.client else None
        self._mark = Flat(specs, device=device) if overlaps else None
        """The parameters at the last push."""
        self._sequence, self._base_version = 0, 0
        self._next_version = 0
        self._has_pushed = False
        """Changes, since the last `refresh`: then what comes back has to be taken in."""
        self._thread = ThreadPoolExecutor(1, "params push") if overlaps and place.client else None
        self._under_way: Future[tuple[Pushed, int]] | None = None
        self.last: Pushed | None = None
        """What became of the last push; None on ranks that do not push."""

    @torch.no_grad()
    def push_gradients(self, samples: Samples, options: list[dict[str, Option]]) -> None:
        """Push the gradients that the ring agrees on, and take the next parameters."""
        self._sequence += 1
        if self._place.client and self._outbox:
            absent = [place for place, each in enumerate(self._parameters) if each.grad is None]
            for parameter, view in zip(self._parameters, self._outbox.views, strict=True):
                if parameter.grad is None:
                    view.zero_()
                else:
                    view.copy_(parameter.grad)
            round_ = self._round("gradient", samples, absent=absent, options=options)
            self.last, self._base_version = self._place.client.exchange(
                round_, self._outbox.buffers(), self._inbox.buffers()
            )
        self._spread()
        torch._foreach_copy_(self._parameters, self._landed.views)

    @torch.no_grad()
    def push_change(self, samples: Samples) -> None:
        """Take in what came back from the push before, then push what has changed since, without waiting for it."""
        assert self._mark is not None, "made with overlaps"
        if self._has_pushed:
            self._take_in()
        self._sequence += 1
        changes = torch._foreach_sub(self._parameters, self._mark.views)
        if self._has_pushed:  # what the server has, with the ring's own change on top
            torch._foreach_copy_(self._parameters, torch._foreach_add(changes, self._landed.views))
        if self._place.client and self._outbox and self._thread:
            torch._foreach_copy_(self._outbox.views, changes)
            self._under_way = self._thread.submit(
                self._place.client.exchange,
                self._round("change", samples),
                self._outbox.buffers(),
                self._inbox.buffers(),
            )
        torch._foreach_copy_(self._mark.views, self._parameters)
        self._has_pushed = True

    @torch.no_grad()
    def push_last_change(self, samples: Samples) -> None:
        """Push what has changed since, before a rest: what came back from the push before is not taken in any more.

        The next `refresh` replaces all parameters, so neither that nor an answer to this push has to be waited for, or
        to go through the ring: over a slow link each of them takes as long as the push.
        """
        self._finish()
        self._sequence += 1
        if self._place.client and self._outbox and self._mark:
            torch._foreach_copy_(self._outbox.views, torch._foreach_sub(self._parameters, self._mark.views))
            self.last = self._place.client.push(self._round("change", samples), self._outbox.buffers())

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the newest parameters, at the start and after a rest; what has changed since the last push is lost.

        Rings that do so while nobody pushes have the same ones afterwards.
        """
        if self._place.client:
            self._base_version = self._next_version = self._place.client.pull(self._sequence, self._inbox.buffers())
        self._has_pushed = False
        self._spread()
        torch._foreach_copy_(self._parameters, self._landed.views)
        if self._mark:
            self._mark.copy_(self._landed)

    def rest(self) -> None:
        """Finish what is under way and compute nothing until the next `refresh`, so that no ring waits for this one."""
        self._finish()
        if self._place.client:
            self._place.client.leave(is_for_good=False)

    def retire(self) -> None:
        """Hang up: the ring is one no more, and rests."""
        self._finish()
        if self._thread:
            self._thread.shutdown()
        if self._place.client:
            self._place.client.close()

    def leave(self) -> None:
        """Finish what is under way and leave the server. Talks to nobody else, so the ring may be gone already."""
        self._finish()
        if self._thread:
            self._thread.shutdown()
        if self._place.client:
            self._place.client.leave(is_for_good=True)

    def _take_in(self) -> None:
        """Wait for the parameters that follow the push before, on all ranks of the ring."""
        self._finish()
        self._spread()

    def _finish(self) -> None:
        """Wait for the answer to the push that is under way."""
        if self._under_way is not None:
            self.last, version = self._under_way.result()
            self._base_version, self._next_version = self._next_version, version
            self._under_way = None

    def _round(
        self,
        content: str,
        samples: Samples,
        absent: Sequence[int] = (),
        options: Sequence[dict[str, Option]] = (),
    ) -> Round:
        return Round(
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
            spans=united(samples.spans),
        )

    def _spread(self) -> None:
        """What the representative has received goes to all ranks of the ring."""
        if self._place.client and self._inbox is not self._landed:
            self._landed.copy_(self._inbox)
        if dist.get_world_size(self._place.process_group) > 1:
            for piece in self._landed.pieces:
                dist.broadcast(piece, self._place.representative, group=self._place.process_group)
