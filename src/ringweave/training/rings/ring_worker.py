"""Rank of a ring as worker of the parameter server, and the optimizer that the script gets back.

Only the representative of the ring talks to the server. All ways of working give all ranks the same parameters:

- *gradients*: the ring pushes its mean gradient, the server's optimizer makes the next version, which is broadcast.
- *changes*: the ring's own optimizer makes local steps. The ring pushes the change of its parameters while it
  computes the next local steps. It takes in the returned version one round later, with its own changes since then
  on top.
- *outer gradients*, of sites of mode `local`: the same, but each push has one fragment of the parameters, in turn, and
  the server applies the mean of all sites with the outer optimizer. Before a barrier, all fragments are pushed at once.

An exchange connects the ranks of a ring with each other and with the server. In a fixed ring it is a process group. In
an elastic ring the first member is the representative; if it dies, the next member repeats the request: the server
identifies pushes, data shards and barriers by ring and number, and answers as before. All members of a ring have the
same gradients when they push, so any of them can. With local steps, every member keeps the last push until all members
have the answer. A push starts at the step boundary after it, so a member that joins there has it too and may be the one
that pushes.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ringweave.comm.peer_data import BackgroundCall
from ringweave.errors import ExpiredGrantError, RemoteError
from ringweave.param_server import flat, optimizers
from ringweave.param_server.client import RingClient, RingPush
from ringweave.param_server.flat import FlatTensors
from ringweave.param_server.messages import OptimizerOption, PushResult
from ringweave.planning.sites import MIN_STEPS_CHANGE, NUM_REMEMBERED, RoundSplit
from ringweave.telemetry import print_line
from ringweave.training.elastic.retained_reductions import FetchedJson
from ringweave.training.rings.ring_progress import PendingPush, RingCursor, UnpushedSamples

_NUM_STEPS_S = 100
"""Local steps whose times decide about later ones."""


class RingExchange(Protocol):
    """Exchanges of a rank with its ring, and of the representative with the server."""

    starts_pushes_at_once: bool
    """A due push starts at once; else at the next step boundary, so that joining members have it too."""

    @property
    def cursor(self) -> RingCursor: ...

    @property
    def samples(self) -> UnpushedSamples:
        """Samples computed since the last push."""
        ...

    @property
    def is_representative(self) -> bool: ...

    @property
    def is_connected(self) -> bool:
        """This rank represents the ring and has talked to the server."""
        ...

    @property
    def misses_samples(self) -> bool:
        """The last step misses samples of a lost member, which come next; nothing of it is pushed before."""
        ...

    def client(self) -> RingClient:
        """Return the connection of the representative."""
        ...

    def last_words(self) -> str:
        """Return the report on the ring's samples that the server has if no rank of it is left."""
        ...

    def broadcast_from_first(self, fetch: Callable[[], FetchedJson], tensors: Sequence[Tensor] = ()) -> FetchedJson:
        """Return what the representative fetches, on all ranks or none; `tensors` are filled on all."""
        ...

    def change_atomically(self, change: Callable[[], None]) -> None:
        """Change something that joining members are told."""
        ...


class StaticExchange:
    """Exchanges of a fixed ring: a process group. Only the representative knows versions and answers."""

    starts_pushes_at_once = True
    misses_samples = False

    def __init__(self, process_group: dist.ProcessGroup, representative: int, client: RingClient | None) -> None:
        """Create it; `representative` is a global rank, and only that rank has a client."""
        self._group, self._representative, self._client = process_group, representative, client
        self.cursor, self.samples = RingCursor(ring=0), UnpushedSamples()

    @property
    def is_representative(self) -> bool:
        return self._client is not None

    @property
    def is_connected(self) -> bool:
        return self.is_representative

    def client(self) -> RingClient:
        assert self._client is not None, "the representative's"
        return self._client

    def last_words(self) -> str:
        """Return an empty text: the job ends with the first rank that is lost."""
        return ""

    def broadcast_from_first(self, fetch: Callable[[], FetchedJson], tensors: Sequence[Tensor] = ()) -> FetchedJson:
        fetched = fetch() if self.is_representative else {}
        if dist.get_world_size(self._group) > 1:
            for tensor in tensors:
                dist.broadcast(tensor, self._representative, group=self._group)
        return fetched

    def change_atomically(self, change: Callable[[], None]) -> None:
        change()


class RingWorker:
    """Rank of a ring, as worker of the parameter server."""

    def __init__(
        self,
        ring: RingExchange,
        parameters: Sequence[Tensor],
        *,
        local_steps: int = 0,
        max_local_steps: int | None = None,
        fragments: Sequence[Sequence[int]] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Create it without a connection.

        Args:
            ring: Exchanges of this rank.
            parameters: Trained parameters, in the server's order.
            local_steps: Steps from one push to the next; 0 pushes the gradients of each step.
            max_local_steps: Upper limit of local steps, where they follow from measured times; None: they are fixed.
            fragments: Indices of the parameters of each fragment, which is pushed alone; empty: every push has all.
            clock: Monotonic clock in seconds.
        """
        self.ring, self.parameters = ring, list(parameters)
        self.fragments = [list(each) for each in fragments]
        self.specs = flat.tensor_specs([(str(index), each) for index, each in enumerate(parameters)])
        device = str(parameters[0].device)
        self.received = self.make_flat(device)
        """Parameters received from the server, on every rank."""
        self._outbox: FlatTensors | None = None
        self._inbox: FlatTensors | None = self.received if device == "cpu" else None
        outbox = self.make_flat()
        self.changes = LocalStepChanges(self, outbox, local_steps, max_local_steps, clock) if local_steps else None
        """Local steps of this rank; None if every step is pushed."""
        self.last_result: PushResult | None = None
        """Result of the last push; None on ranks that do not push."""

    @property
    def num_fragments(self) -> int:
        """Fragments of the parameters; 0 if every push has all."""
        return len(self.fragments)

    def make_flat(self, device: str = "cpu") -> FlatTensors:
        """Return uninitialized memory for all parameters."""
        return FlatTensors(self.specs, device=device, fragments=self.fragments)

    @torch.no_grad()
    def push_gradients(self, options: list[dict[str, OptimizerOption]]) -> None:
        """Push the gradients that the ring agrees on, and apply the next parameters."""
        ring = self.ring
        absent = [index for index, each in enumerate(self.parameters) if each.grad is None]
        pending = PendingPush.of_samples(ring.samples, ring.last_words())
        ring_push = self.ring_push("gradient", pending, absent, options)

        def exchange() -> FetchedJson:
            self._outbox = self._outbox or FlatTensors(self.specs)  # only the representative needs it
            self._copy_gradients(self._outbox)
            return self.exchange(ring_push, self._outbox)

        answer = ring.broadcast_from_first(exchange, self.received.pieces)
        self.apply_parameters(answer.get("version", 0))
        ring.cursor.num_pushed += not answer.get("is_expired", False)
        ring.samples.clear()

    def ring_push(
        self,
        content: Literal["gradient", "change", "outer_gradient"],
        pending: PendingPush,
        absent: Sequence[int] = (),
        options: Sequence[dict[str, OptimizerOption]] = (),
        local_steps: int = 0,
    ) -> RingPush:
        """Return the ring's next push, without its buffers."""
        return RingPush(
            sequence=self.ring.cursor.num_pushed + 1,
            base_version=self.ring.cursor.base_version,
            content=content,
            fragments=list(pending.fragments),
            weight=pending.weight,
            local_steps=local_steps,
            num_samples=pending.num_samples,
            batch_share=pending.batch_share,
            absent=list(absent),
            options=list(options),
            ring_progress=pending.ring_progress,
            num_batches=pending.num_batches,
            pass_number=pending.epoch if pending.pass_number is None else pending.pass_number,
            epoch=pending.epoch,
            spans=list(pending.spans),
        )

    def exchange(self, ring_push: RingPush, outbox: FlatTensors) -> FetchedJson:
        """Push and receive the next parameters, of the same fragments; for the representative.

        Returns:
            Version of the parameters, with `waited_s` and `local_steps` of the server's answer; `is_expired` if the
            other rings have ended the epoch without this one: the samples of the push count as lost.
        """
        fragments = ring_push.fragments
        try:
            self.last_result, pulled = self.ring.client().push_and_pull(
                ring_push, outbox.buffers(fragments), self._get_inbox().buffers(fragments)
            )
        except RemoteError as error:
            _check_expired(error, ring_push)
            self.ring.client().leave_ring(is_for_good=False)  # it waits for no answer to that push any more
            return {"version": self.pull(ring_push.sequence - 1), "is_expired": True}
        self._copy_received(fragments)
        return {"version": pulled.version, "waited_s": pulled.waited_s, "local_steps": pulled.local_steps}

    def push(self, ring_push: RingPush, outbox: FlatTensors) -> FetchedJson:
        """Push without pulling; for the representative. Returns `is_expired` as `exchange` does."""
        try:
            self.last_result = self.ring.client().push(ring_push, outbox.buffers())
        except RemoteError as error:
            _check_expired(error, ring_push)
            return {"is_expired": True}
        return {}

    def pull(self, after_sequence: int, next_fragment: int = 0) -> int:
        """Receive the newest parameters and return their version; for the representative."""
        version = self.ring.client().pull(after_sequence, self._get_inbox().buffers(), next_fragment)
        self._copy_received()
        return version

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the newest parameters, at the start and after idling; changes since the last push are lost.

        Rings that do so while no ring pushes have the same parameters afterwards.
        """
        if self.changes is not None:
            self.changes.drop_answer()
        sequence = self.ring.cursor.num_pushed
        answer = self.ring.broadcast_from_first(lambda: {"version": self.pull(sequence)}, self.received.pieces)
        self.apply_parameters(answer.get("version", 0))

    @torch.no_grad()
    def apply_parameters(self, version: int) -> None:
        torch._foreach_copy_(self.parameters, self.received.views)
        self.ring.cursor.base_version = self.ring.cursor.next_version = version
        if self.changes is not None:
            self.changes.reset_base()

    def send_pending(self) -> None:
        """Start a due push between two steps."""
        if self.changes is not None:
            self.changes.send_pending()

    def go_idle(self) -> None:
        """Push local steps that are not pushed yet, and idle until the next `refresh`, so that no ring waits for this.

        Every rank of the ring calls it, or none.
        """
        if self.changes is not None:
            self.changes.push_rest()
        if self.ring.is_representative:
            self.ring.client().leave_ring(is_for_good=False)

    def discard_unpushed(self) -> None:
        """Idle, and lose the local steps that are not pushed yet. Waits for no other rank, since it may have failed."""
        if self.changes is not None:
            self.changes.discard_steps()
        self._leave_ring(is_for_good=False)

    def leave_server(self) -> None:
        """Finish the pending push and leave the server. This needs no other rank, so the ring may be gone already."""
        self._leave_ring(is_for_good=True)

    def _leave_ring(self, *, is_for_good: bool) -> None:
        if self.ring.is_connected:
            if self.changes is not None:
                self.changes.wait_answered()
            self.ring.client().leave_ring(is_for_good=is_for_good)

    def disconnect(self) -> None:
        """Close the connection: the ring is dissolved, and idle."""
        if self.ring.is_representative:
            self.ring.client().close()

    def _get_inbox(self) -> FlatTensors:
        """Return the memory for parameters from the server; for the representative."""
        self._inbox = self._inbox or self.make_flat()
        return self._inbox

    def _copy_received(self, fragments: Sequence[int] = ()) -> None:
        """Copy received parameters of these fragments, of all if there are none, to the device."""
        if self._inbox is not None and self._inbox is not self.received:
            for own, part in zip(self.received.select(fragments), self._inbox.select(fragments), strict=True):
                own.copy_(part)

    def _copy_gradients(self, outbox: FlatTensors) -> None:
        for parameter, view in zip(self.parameters, outbox.views, strict=True):
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad)


class LocalStepChanges:
    """Local steps of one rank, and the pushes of the parameters' changes."""

    def __init__(
        self,
        worker: RingWorker,
        outbox: FlatTensors,
        num_steps: int,
        max_steps: int | None,
        clock: Callable[[], float],
    ) -> None:
        """Start without changes.

        Args:
            worker: This rank in its ring.
            outbox: Memory for changes that are pushed.
            num_steps: Local steps from one push to the next.
            max_steps: Upper limit, where the representative derives them after each push; None: they are fixed.
            clock: Monotonic clock in seconds.
        """
        self._worker, self._ring = worker, worker.ring
        self._first_num_steps, self._max_steps, self._clock = num_steps, max_steps, clock
        self._step_ended_s: float | None = None
        self._steps_s, self._exchanges_s = (deque[float](maxlen=length) for length in (_NUM_STEPS_S, NUM_REMEMBERED))
        self.outbox = outbox
        """Change of the parameters at the last push."""
        self.base = worker.make_flat(str(worker.parameters[0].device))
        """Parameters at the last push of each fragment, with the server's answers until then."""
        self._num_since = self._wanted_steps = 0
        self._background_exchange: _BackgroundExchange | None = None

    def reset_base(self) -> None:
        """Count changes from the present parameters: the server's, or those of a peer that has just pushed."""
        torch._foreach_copy_(self.base.views, [each.detach() for each in self._worker.parameters])
        self._num_since = 0

    @property
    def joining_tensors(self) -> tuple[Tensor, ...]:
        """Tensors that a joining member of the ring needs: the last push, and the base of fragments that come later."""
        return (*self.outbox.pieces, *(self.base.pieces if self._worker.fragments else ()))

    @torch.no_grad()
    def count_step(self) -> None:
        """Count a local step. After the last one, apply the answer to the push before and start the next push."""
        self._num_since += 1
        self._measure_step()
        if self._num_since < self.num_steps:
            return
        pending = self._ring.cursor.pending
        answered = self._places(pending.fragments) if pending is not None else []
        answer = self._apply_answer()
        if answer is not None and answer.get("is_expired"):
            return
        fragments = self._ring.cursor.next_fragments(self._worker.num_fragments)
        pushed = self._places(fragments)
        changes = self._changes(pushed)
        if answer is not None:
            self._take_received(answered, changes if answered == pushed else self._changes(answered))
        self._ring.change_atomically(lambda: self._record_push(changes, fragments))
        if self._ring.starts_pushes_at_once:
            self.send_pending()
        self._count_from(pushed, [self._worker.parameters[place].detach() for place in pushed])
        self._num_since = 0
        self._step_ended_s = self._clock()

    def _take_received(self, places: Sequence[int], changes: list[Tensor]) -> None:
        """Take the server's parameters, plus the ring's own changes, which are counted from the server's now."""
        received = [self._worker.received.views[place] for place in places]
        if places:
            own = [self._worker.parameters[place] for place in places]
            torch._foreach_copy_(own, torch._foreach_add(changes, received))
        self._count_from(places, received)

    def _count_from(self, places: Sequence[int], values: Sequence[Tensor]) -> None:
        """Count the changes of these parameters from those values on."""
        if places:
            torch._foreach_copy_([self.base.views[place] for place in places], list(values))

    @property
    def num_steps(self) -> int:
        """Local steps from one push to the next; the same on all ranks of the ring."""
        return self._ring.cursor.local_steps or self._first_num_steps

    def _measure_step(self) -> None:
        now_s = self._clock()
        if self._step_ended_s is not None:
            self._steps_s.append(now_s - self._step_ended_s)
        self._step_ended_s = now_s

    def _derive_steps(self, exchange_s: float) -> int:
        """Return the fewest steps in whose time an exchange ends, by the last ones; on the representative."""
        self._exchanges_s.append(exchange_s)
        present, longest, num = self.num_steps, self._max_steps, max(1, self._worker.num_fragments)
        if longest is None or not self._steps_s:
            return present
        step_s, exchange_s = statistics.median(self._steps_s), statistics.median(self._exchanges_s)
        cycle = present * num  # in which each parameter is pushed once
        split = RoundSplit(batch_samples=1, inner_steps=cycle, speeds=(1.0,), fragments=num, max_inner_steps=longest)
        found = split.fitted(max(step_s, 1e-6), exchange_s, 0.0, 0.5, MIN_STEPS_CHANGE).round_steps
        before, self._wanted_steps = self._wanted_steps or present, found
        if found != before:
            why = f"an exchange takes {exchange_s:.3g} s, a step {step_s:.3g} s, measured"
            print_line(f"ringweave: ring {self._ring.cursor.ring}: {found} local steps a push, not {before}: {why}")
        return found

    def send_pending(self) -> None:
        """Start a due push between two steps; on the representative."""
        if self._ring.cursor.pending is not None and self._ring.is_representative:
            self._current_exchange()

    @torch.no_grad()
    def push_rest(self) -> None:
        """Push the remaining changes before the barrier, without pulling parameters.

        In a fixed ring the answer to the push before is not broadcast either, since `refresh` replaces all parameters:
        over a slow link that takes as long as a push.
        """
        if self._ring.starts_pushes_at_once:
            self.drop_answer()
        else:
            self._apply_answer()
        cursor = self._ring.cursor
        if not (self._num_since or cursor.partly_pushed):
            self._ring.change_atomically(cursor.make_level)
            return
        changes = self._changes(self._places(()))
        self._ring.change_atomically(lambda: self._record_push(changes, ()))
        ring_push = self._pending_push()
        answer = self._ring.broadcast_from_first(lambda: self._worker.push(ring_push, self.outbox))
        is_lost = answer.get("is_expired", False)

        def count() -> None:
            cursor.count_answer(None, is_lost=is_lost)
            cursor.make_level()

        self._ring.change_atomically(count)
        self._num_since = 0

    def discard_steps(self) -> None:
        """Discard the local steps since the last push: the pass was broken off."""
        self._num_since = 0
        self._ring.change_atomically(self._ring.cursor.make_level)

    def wait_answered(self) -> None:
        """Wait until the server has the representative's pending push; waits for no other rank."""
        if self._ring.cursor.pending is not None:
            self._current_exchange().wait()

    def drop_answer(self) -> None:
        """Wait for the answer to the push before, which no rank applies."""
        cursor, version = self._ring.cursor, None
        if cursor.pending is None:
            return
        if self._ring.is_representative:
            version = self._fetch_answer()["version"]
        self._background_exchange = None
        cursor.count_answer(version)

    def _apply_answer(self) -> FetchedJson | None:
        """Return the answer to the push before, which counts on all ranks; None if there was none.

        If the push has expired, the changes since then are lost too: they are of the same epoch.
        """
        cursor = self._ring.cursor
        if cursor.pending is None:
            return None
        received = self._worker.received
        pieces = [piece for part in received.select(cursor.pending.fragments) for piece in part.pieces]
        answer = self._ring.broadcast_from_first(self._fetch_answer, pieces)
        self._background_exchange = None
        is_lost = answer.get("is_expired", False)
        if is_lost and cursor.pending.fragments:  # only these have come
            version = self._ring.broadcast_from_first(self._pull_all, received.pieces)
            answer = {**answer, **version}

        def count() -> None:
            cursor.count_answer(answer.get("version"), is_lost=is_lost)
            cursor.local_steps = answer.get("local_steps", 0)
            if is_lost:
                cursor.make_level()

        self._ring.change_atomically(count)
        if is_lost:
            self._ring.samples.clear()
            self._worker.apply_parameters(answer["version"])
        return answer

    def _fetch_answer(self) -> FetchedJson:
        exchange = self._current_exchange()
        answer = exchange.wait()
        # All sites push a fragment after as many steps as the one that needs most, to be equally far.
        own = self._derive_steps(exchange.duration_s - answer.get("waited_s", 0.0))
        steps = max(own, answer.get("local_steps", 0))
        return {**answer, "local_steps": steps}

    def _pull_all(self) -> FetchedJson:
        return {"version": self._worker.pull(self._ring.cursor.num_pushed)}

    def _current_exchange(self) -> "_BackgroundExchange":
        """Return the exchange in progress; start it if there is none."""
        ring_push = self._pending_push()
        if self._background_exchange is None or self._background_exchange.sequence != ring_push.sequence:
            self._background_exchange = _BackgroundExchange(self._worker, ring_push, self.outbox, self._clock)
        return self._background_exchange

    def _places(self, fragments: Sequence[int]) -> list[int]:
        """Return the indices of the parameters of these fragments; of all if there are none."""
        if not fragments:
            return list(range(len(self._worker.parameters)))
        return [place for index in fragments for place in self._worker.fragments[index]]

    def _changes(self, places: Sequence[int]) -> list[Tensor]:
        if not places:
            return []
        now = [self._worker.parameters[place].detach() for place in places]
        return list(torch._foreach_sub(now, [self.base.views[place] for place in places]))

    def _record_push(self, changes: list[Tensor], fragments: tuple[int, ...]) -> None:
        """Record the ring's next push, of what these fragments lack; of all if there are none."""
        cursor, num_fragments = self._ring.cursor, self._worker.num_fragments
        for place, change in zip(self._places(fragments), changes, strict=True):
            self.outbox.views[place].copy_(change.neg() if num_fragments else change)
        computed = PendingPush.of_samples(self._ring.samples, self._ring.last_words())
        cursor.pending = cursor.push_outer(computed, fragments, num_fragments) if num_fragments else computed
        self._ring.samples.clear()

    def _pending_push(self) -> RingPush:
        pending = self._ring.cursor.pending
        assert pending is not None, "noted"
        if not self._worker.num_fragments:
            return self._worker.ring_push("change", pending)
        wanted = (self._wanted_steps or self.num_steps) if self._max_steps else 0
        return self._worker.ring_push("outer_gradient", pending, local_steps=wanted)


class _BackgroundExchange:
    """A push in progress with the following pull, in a thread that delays no end of a process."""

    def __init__(
        self, worker: RingWorker, ring_push: RingPush, outbox: FlatTensors, clock: Callable[[], float]
    ) -> None:
        self.sequence, self._clock = ring_push.sequence, clock
        self.duration_s = 0.0
        """Measured: seconds of the exchange, once it has ended."""
        self._call = BackgroundCall(lambda: self._run(lambda: worker.exchange(ring_push, outbox)), "ringweave push")

    def wait(self) -> FetchedJson:
        """Wait until the parameters have arrived; return what `RingWorker.exchange` returned.

        Raises:
            RingweaveError: The exchange has failed.
        """
        return self._call.result()

    @torch.no_grad()
    def _run(self, exchange: Callable[[], FetchedJson]) -> FetchedJson:
        began_s = self._clock()
        answer = exchange()
        self.duration_s = self._clock() - began_s
        return answer


def _check_expired(error: RemoteError, ring_push: RingPush) -> None:
    """Report that the samples of a push are lost, if that is the error; else raise it."""
    if error.error != ExpiredGrantError.__name__:
        raise error
    print_line(
        f"ringweave: {ring_push.num_samples} samples of push {ring_push.sequence} are lost: the other rings have ended "
        "the epoch, since nothing was heard of this one"
    )


class ParameterServerOptimizer(Optimizer):
    """Optimizer that a script gets back; it shares the groups of the script's own, for schedulers and clipping.

    Its state is on the server or, with local steps, in the script's optimizer on each rank.
    """

    def __init__(self, optimizer: Optimizer, worker: RingWorker) -> None:
        """Wrap the script's optimizer, without changing it."""
        super().__init__(optimizer.param_groups, {})
        self._local_optimizer, self._worker = optimizer, worker

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do one train step of the ring; `closure` computes the loss first, as in torch's optimizers."""
        if self._worker.ring.misses_samples:
            self._local_optimizer.step()  # changes nothing: see `IncompleteStep`
            return None
        if self._worker.changes is not None:
            result = self._local_optimizer.step(closure) if closure else self._local_optimizer.step()
            self._worker.changes.count_step()
            return result
        result = closure() if closure else None
        self._worker.push_gradients([optimizers.group_options(group) for group in self.param_groups])
        return result

    def move_to_ring(self, worker: RingWorker) -> None:
        """Join another ring; the previous one is idle."""
        self._worker = worker

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the script's optimizer: its groups, and with local steps its state."""
        return self._local_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned.

        Raises:
            TrainingError: It is the state of an optimizer that has taken steps, which the server's would not have.
        """
        if self._worker.changes is None:
            optimizers.check_fresh(state_dict["state"].values())
        self._local_optimizer.load_state_dict(state_dict)
        self.param_groups = self._local_optimizer.param_groups
