"""Local steps of a ring that may lose members: what it pushes is under way while it computes the next ones.

All members keep what was pushed until all of them have the answer, so whoever represents the ring by then can say it
again. A push begins at the border of the step after it: who joins there has it too, and may be the one that pushes.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ringweave.params.flat import Flat
from ringweave.params.messages import TensorSpec
from ringweave.params.ring.client import Round
from ringweave.params.rules.positions import united
from ringweave.training.elastic.kept import Said
from ringweave.training.rings.elastic import accounts
from ringweave.training.rings.elastic.crew import RingCrew
from ringweave.training.rings.elastic.places import Pending


class Ring(Protocol):
    """What a member's local steps need of its part in the ring."""

    landed: Flat
    """Where parameters arrive, on every member."""

    @property
    def is_first(self) -> bool:
        """This member represents the ring."""
        ...

    def exchange(self, round_: Round, outbox: Flat) -> int:
        """Push, and have the parameters that follow land; their version. For the representative."""
        ...

    def push(self, round_: Round, outbox: Flat) -> None:
        """Push, and ask for nothing; likewise."""
        ...

    def spread(self, fetch: Callable[[], Said], tensors: Sequence[Tensor] = ()) -> Said:
        """What the representative fetches, on all members."""
        ...

    def change(self, change: Callable[[], None]) -> None:
        """Do something that newcomers are told of."""
        ...


class LocalChanges:
    """Of one member."""

    def __init__(
        self,
        ring: Ring,
        crew: Callable[[], RingCrew],
        parameters: Sequence[Tensor],
        specs: Sequence[TensorSpec],
        num_steps: int,
    ) -> None:
        """Nothing has changed yet.

        Args:
            ring: This member's part in it.
            crew: What it knows, once there is one.
            parameters: Those that are trained, in the order of the server's.
            specs: What they are.
            num_steps: Local steps from one push to the next.
        """
        self._ring, self._crew, self._parameters, self._num_steps = ring, crew, list(parameters), num_steps
        self.outbox = Flat(specs)
        """By how much the parameters had changed at the last push."""
        self._mark = Flat(specs, device=str(parameters[0].device))
        """The parameters at the last push, with what the server had said until then."""
        self._num_since = 0
        self._under_way: _Exchange | None = None

    def begin_anew(self) -> None:
        """The parameters are what changes are counted from: of the server, or of a peer that has just pushed."""
        torch._foreach_copy_(self._mark.views, [each.detach() for each in self._parameters])
        self._num_since = 0

    @torch.no_grad()
    def count_step(self) -> None:
        """One local step more. After the last one take in what came of the push before, and have the next one begin."""
        self._num_since += 1
        if self._num_since < self._num_steps:
            return
        has_answer = self._settle()
        changes = self._changes()
        if has_answer:  # what the server has, with the ring's own change on top
            torch._foreach_copy_(self._parameters, torch._foreach_add(changes, self._ring.landed.views))
        self._ring.change(lambda: self._note(changes))
        self.begin_anew()

    def send(self) -> None:
        """Between two steps: a push that is due begins; on the representative, whoever that is by now."""
        if self._crew().ring_place.pending is not None and self._ring.is_first:
            self._exchange()

    @torch.no_grad()
    def finish(self) -> None:
        """Before the rings meet: push what is left, too. What comes back the ring has no use for."""
        self._settle()
        if not self._num_since:
            return
        changes = self._changes()
        self._ring.change(lambda: self._note(changes))
        round_ = self._round()

        def push() -> Said:
            self._ring.push(round_, self.outbox)
            return {}

        self._ring.spread(push)
        self._ring.change(lambda: self._crew().ring_place.count_answer(None))
        self._num_since = 0

    def give_up(self) -> None:
        """Local steps since the last push are lost: the pass was broken off."""
        self._num_since = 0

    def wait_answered(self) -> None:
        """Until what the representative has begun, or was to begin, is at the server; waits for no other member."""
        if self._crew().ring_place.pending is not None:
            self._exchange().wait()

    def _settle(self) -> bool:
        """Take in the answer to the push before, on all members; False if there was none."""
        place = self._crew().ring_place
        if place.pending is None:
            return False
        said = self._ring.spread(self._fetch, self._ring.landed.pieces)
        self._under_way = None
        self._ring.change(lambda: place.count_answer(said["version"]))
        return True

    def _fetch(self) -> Said:
        exchange = self._exchange()
        exchange.wait()
        return {"version": exchange.version}

    def _exchange(self) -> "_Exchange":
        """The one that is under way, begun here if it is not."""
        round_ = self._round()
        if self._under_way is None or self._under_way.sequence != round_.sequence:
            self._under_way = _Exchange(self._ring, round_, self.outbox)
        return self._under_way

    def _changes(self) -> list[Tensor]:
        return list(torch._foreach_sub([each.detach() for each in self._parameters], self._mark.views))

    def _note(self, changes: list[Tensor]) -> None:
        """That is the ring's next push, of all that was computed since the one before."""
        torch._foreach_copy_(self.outbox.views, changes)
        crew = self._crew()
        crew.ring_place.pending = Pending(
            num_samples=crew.samples.num_samples,
            batch_share=crew.samples.mean_share,
            testament=accounts.testament(crew.books),
            num_batches=max(1, crew.samples.num_batches),
            epoch=crew.samples.epoch,
            spans=united(crew.samples.spans),
        )
        crew.samples.clear()

    def _round(self) -> Round:
        place = self._crew().ring_place
        assert place.pending is not None, "noted"
        return Round(
            sequence=place.num_pushed + 1,
            base_version=place.base_version,
            content="change",
            num_samples=place.pending.num_samples,
            batch_share=place.pending.batch_share,
            testament=place.pending.testament,
            num_batches=place.pending.num_batches,
            pass_number=place.pending.epoch,
            epoch=place.pending.epoch,
            spans=place.pending.spans,
        )


class _Exchange:
    """A push that is under way, and the parameters that follow; in a thread that holds up no end of a process."""

    def __init__(self, ring: Ring, round_: Round, outbox: Flat) -> None:
        self.sequence, self.version = round_.sequence, 0
        self._do = lambda: ring.exchange(round_, outbox)
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="ringweave push", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until the parameters are there.

        Raises:
            RingweaveError: They cannot be had.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            with torch.no_grad():
                self.version = self._do()
        except Exception as error:  # told where it is waited for
            self._error = error
