"""Elastic ring worker: the ring's first member talks to the parameter server; all members apply the result or none.

The first member is the ring's representative. If it dies, the next member repeats the request: the server identifies
pushes, data shards and barriers by ring and number, and answers as before. All members of a ring have the same
gradients when they push, so any of them can. With local steps, every member keeps the last push until all members have
the answer. A push starts at the step boundary after it, so a member that joins there has it too and may be the one that
pushes.
"""

import json
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from ringweave import rpc
from ringweave.comm import peer_data
from ringweave.errors import RpcError
from ringweave.membership.membership_records import Membership, parse_member_name
from ringweave.param_server import flat, optimizers
from ringweave.param_server.client import RingClient, RingPush
from ringweave.param_server.data_shards import merge_spans
from ringweave.param_server.flat import FlatTensors
from ringweave.param_server.messages import OptimizerOption, ResumeDecision, TensorSpec
from ringweave.param_server.worker import UnpushedSamples
from ringweave.training.elastic import trainer_interface
from ringweave.training.elastic.retained_reductions import FetchedJson
from ringweave.training.elastic.session import ElasticSession
from ringweave.training.rings import elastic_trainer
from ringweave.training.rings.elastic_trainer import PendingPush, RingCursor, RingTrainerState
from ringweave.training.rings.shard_source import OfferedCheckpoint, ResumeStart


class RingExchange(Protocol):
    """The ring's exchanges with the server, as local steps need them."""

    received: FlatTensors
    """Parameters received from the server, on every member."""

    @property
    def is_representative(self) -> bool:
        """This member represents the ring."""
        ...

    def push_and_pull(self, ring_push: RingPush, outbox: FlatTensors) -> int:
        """Push, receive the next parameters and return their version; for the representative."""
        ...

    def push(self, ring_push: RingPush, outbox: FlatTensors) -> None:
        """Push without pulling; for the representative."""
        ...

    def broadcast_from_first(self, fetch: Callable[[], FetchedJson], tensors: Sequence[Tensor] = ()) -> FetchedJson:
        """Return what the representative fetches, on all members."""
        ...

    def change_atomically(self, change: Callable[[], None]) -> None:
        """Change something that joining members are told."""
        ...


class LocalStepChanges:
    """Local steps of one member, and the pushes of the parameters' changes."""

    def __init__(
        self,
        ring: RingExchange,
        trainer: Callable[[], RingTrainerState],
        parameters: Sequence[Tensor],
        specs: Sequence[TensorSpec],
        num_steps: int,
    ) -> None:
        """Start without changes.

        Args:
            ring: Exchanges of the ring.
            trainer: Returns the trainer state, once there is one.
            parameters: Trained parameters, in the server's order.
            specs: Names, shapes and dtypes of the parameters.
            num_steps: Local steps from one push to the next.
        """
        self._ring, self._crew, self._parameters, self._num_steps = ring, trainer, list(parameters), num_steps
        self.outbox = FlatTensors(specs)
        """Change of the parameters at the last push."""
        self._base = FlatTensors(specs, device=str(parameters[0].device))
        """Parameters at the last push, with the server's answers until then."""
        self._num_since = 0
        self._background_exchange: _BackgroundExchange | None = None

    def reset_base(self) -> None:
        """Count changes from the present parameters: the server's, or those of a peer that has just pushed."""
        torch._foreach_copy_(self._base.views, [each.detach() for each in self._parameters])
        self._num_since = 0

    @torch.no_grad()
    def count_step(self) -> None:
        """Count a local step. After the last one, apply the answer to the push before and start the next push."""
        self._num_since += 1
        if self._num_since < self._num_steps:
            return
        has_answer = self._apply_answer()
        changes = self._changes()
        if has_answer:  # the server's parameters plus the ring's own change
            torch._foreach_copy_(self._parameters, torch._foreach_add(changes, self._ring.received.views))
        self._ring.change_atomically(lambda: self._record_push(changes))
        self.reset_base()

    def send_pending(self) -> None:
        """Start a due push between two steps; on the representative."""
        if self._crew().ring_cursor.pending is not None and self._ring.is_representative:
            self._current_exchange()

    @torch.no_grad()
    def push_rest(self) -> None:
        """Push the remaining changes before the barrier, without pulling parameters."""
        self._apply_answer()
        if not self._num_since:
            return
        changes = self._changes()
        self._ring.change_atomically(lambda: self._record_push(changes))
        ring_push = self._pending_push()

        def push() -> FetchedJson:
            self._ring.push(ring_push, self.outbox)
            return {}

        self._ring.broadcast_from_first(push)
        self._ring.change_atomically(lambda: self._crew().ring_cursor.count_answer(None))
        self._num_since = 0

    def discard_steps(self) -> None:
        """Discard the local steps since the last push: the pass was broken off."""
        self._num_since = 0

    def wait_answered(self) -> None:
        """Wait until the server has the representative's pending push; waits for no other member."""
        if self._crew().ring_cursor.pending is not None:
            self._current_exchange().wait()

    def _apply_answer(self) -> bool:
        """Apply the answer to the push before, on all members; return False if there was none."""
        place = self._crew().ring_cursor
        if place.pending is None:
            return False
        answer = self._ring.broadcast_from_first(self._fetch_answer, self._ring.received.pieces)
        self._background_exchange = None
        self._ring.change_atomically(lambda: place.count_answer(answer["version"]))
        return True

    def _fetch_answer(self) -> FetchedJson:
        exchange = self._current_exchange()
        exchange.wait()
        return {"version": exchange.version}

    def _current_exchange(self) -> "_BackgroundExchange":
        """Return the exchange in progress; start it if there is none."""
        ring_push = self._pending_push()
        if self._background_exchange is None or self._background_exchange.sequence != ring_push.sequence:
            self._background_exchange = _BackgroundExchange(self._ring, ring_push, self.outbox)
        return self._background_exchange

    def _changes(self) -> list[Tensor]:
        return list(torch._foreach_sub([each.detach() for each in self._parameters], self._base.views))

    def _record_push(self, changes: list[Tensor]) -> None:
        """Record the ring's next push, of everything computed since the one before."""
        torch._foreach_copy_(self.outbox.views, changes)
        trainer = self._crew()
        trainer.ring_cursor.pending = PendingPush(
            num_samples=trainer.samples.num_samples,
            batch_share=trainer.samples.mean_share,
            ring_progress=elastic_trainer.ring_progress_json(trainer.accounting),
            num_batches=max(1, trainer.samples.num_batches),
            epoch=trainer.samples.epoch,
            spans=merge_spans(trainer.samples.spans),
        )
        trainer.samples.clear()

    def _pending_push(self) -> RingPush:
        place = self._crew().ring_cursor
        assert place.pending is not None, "noted"
        return RingPush(
            sequence=place.num_pushed + 1,
            base_version=place.base_version,
            content="change",
            num_samples=place.pending.num_samples,
            batch_share=place.pending.batch_share,
            ring_progress=place.pending.ring_progress,
            num_batches=place.pending.num_batches,
            pass_number=place.pending.epoch,
            epoch=place.pending.epoch,
            spans=place.pending.spans,
        )


class _BackgroundExchange:
    """A push in progress with the following pull, in a thread that delays no end of a process."""

    def __init__(self, ring: RingExchange, ring_push: RingPush, outbox: FlatTensors) -> None:
        self.sequence, self.version = ring_push.sequence, 0
        self._exchange = lambda: ring.push_and_pull(ring_push, outbox)
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="ringweave push", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the parameters have arrived.

        Raises:
            RingweaveError: The exchange has failed.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            with torch.no_grad():
                self.version = self._exchange()
        except Exception as error:  # raised by `wait`
            self._error = error


_MAX_SILENT_PAUSE_S = 1.0
"""Pause of the members after which the other rings no longer wait for this ring."""


class ElasticRingWorker:
    """Member of a ring; talks to the server if it is the representative."""

    def __init__(
        self,
        member: str,
        session: Callable[[], ElasticSession],
        trainer: Callable[[], RingTrainerState],
        servers: Sequence[Callable[[], rpc.RpcClient]],
        parameters: Sequence[Tensor],
        *,
        local_steps: int = 0,
    ) -> None:
        """Create it without a connection.

        Args:
            member: Name of this member.
            session: Returns its session in the ring's membership, once there is one.
            trainer: Returns its trainer state, once there is one.
            servers: Connectors, one for each server of the job.
            parameters: Trained parameters, in the server's order.
            local_steps: Steps from one push to the next; 0 pushes the gradients of each step.
        """
        self._member, self._session, self._trainer = member, session, trainer
        self._servers, self._parameters = list(servers), list(parameters)
        specs = flat.tensor_specs([(str(index), each) for index, each in enumerate(parameters)])
        device = str(parameters[0].device)
        self._specs = specs
        self.received = FlatTensors(specs, device=device)
        """Parameters received from the server, on every member."""
        self._outbox: FlatTensors | None = None
        self._inbox: FlatTensors | None = self.received if device == "cpu" else None
        self.changes = LocalStepChanges(self, trainer, parameters, specs, local_steps) if local_steps else None
        """Local steps of this member; None if every step is pushed."""
        self._lock = threading.Lock()
        self._client: RingClient | None = None
        self._paused_since_s: float | None = None

    @property
    def misses_samples(self) -> bool:
        """The last step misses samples of a lost member, which come next; nothing of it is pushed before."""
        return bool(self._trainer().accounting.missing)

    @torch.no_grad()
    def push_gradients(self, options: list[dict[str, OptimizerOption]]) -> None:
        """Push the gradients that the ring agrees on, and apply the next parameters."""
        trainer = self._trainer()
        place, samples = trainer.ring_cursor, trainer.samples
        absent = [index for index, each in enumerate(self._parameters) if each.grad is None]
        ring_push = _gradient_push(
            place, samples, absent, options, elastic_trainer.ring_progress_json(trainer.accounting)
        )

        def exchange() -> FetchedJson:
            self._outbox = self._outbox or FlatTensors(self._specs)  # only the representative needs it
            self._copy_gradients(self._outbox)
            return {"version": self.push_and_pull(ring_push, self._outbox)}

        answer = self.broadcast_from_first(exchange, self.received.pieces)
        self._apply_parameters(answer["version"])
        trainer.ring_cursor.num_pushed += 1
        samples.clear()

    def take_shard(self, epoch: int, wanted: int, total: int, min_samples: int) -> tuple[int, int]:
        """Take the ring's next shard; return (first sample, number of samples)."""
        place = self._trainer().ring_cursor

        def ask() -> FetchedJson:
            number = place.num_shards + 1
            first, count = self._get_client().take_shard(epoch, wanted, total, min_samples=min_samples, number=number)
            return {"first": first, "count": count}

        shard = self.broadcast_from_first(ask)
        place.num_shards += 1
        return shard["first"], shard["count"]

    @property
    def extra_tensors(self) -> tuple[Tensor, ...]:
        """Tensors that a joining member needs beside model and optimizer: the ring's last push."""
        return self.changes.outbox.pieces if self.changes is not None else ()

    def adopt_peer_state(self) -> None:
        """Adopt the state that this member has read from a peer, as it was between two steps."""
        if self.changes is not None:
            self.changes.reset_base()

    def send_pending(self) -> None:
        """Start a due push between two steps."""
        if self.changes is not None:
            self.changes.send_pending()

    @torch.no_grad()
    def refresh_parameters(self) -> None:
        """Take the newest parameters and the server's cursor when the ring starts or resumes."""

        def pull() -> FetchedJson:
            return self._start_ring(self._get_client())

        self._resume_ring(self.broadcast_from_first(pull, self.received.pieces))

    @torch.no_grad()
    def resume(self, offered: OfferedCheckpoint | None, num_samples: int) -> ResumeDecision:
        """Agree with all rings on the checkpoint to resume from; `num_samples` are those of an epoch."""

        def agree() -> FetchedJson:
            client = self._get_client()
            own = (offered.train_step, offered.checksum) if offered else (0, "")
            ruled = client.offer_checkpoint(*own)
            if ruled.verdict == "give" and offered is not None:
                start = ResumeStart.of_state(offered.state, num_samples)
                client.restore_snapshot(offered.content(), ruled, start.to_message(start.epoch))
                ruled = client.offer_checkpoint(*own)
            begun = self._start_ring(client) if ruled.verdict == "resumed" else {}
            return {"decision": ruled.model_dump(), **begun}

        outcome = self.broadcast_from_first(agree, self.received.pieces)
        if "cursor" in outcome:
            self._resume_ring(outcome)
        return ResumeDecision(**outcome["decision"])

    def has_training_begun(self) -> bool:
        """Return whether a ring has pushed: the same for all members of this ring, whenever they ask."""
        return bool(self.broadcast_from_first(lambda: {"version": self._get_client().status().version})["version"])

    def connect_server(self) -> RingClient:
        """Return a connection for this member's ring, beside the representative's."""
        return RingClient(self._servers, self._trainer().ring_cursor.ring)

    def _start_ring(self, client: RingClient) -> FetchedJson:
        """Pull the newest parameters; return the ring's cursor, epoch and last report."""
        reply = client.request_assignment(parse_member_name(self._member)[0], is_starting=True)
        if self.changes is not None:  # pushes in progress of earlier members are void
            client.leave_ring(is_for_good=False)
        version = client.pull(reply.num_pushed, self._get_inbox().buffers())
        self._copy_received()
        start = None
        if reply.resumed_seed is not None:
            start = {"epoch": reply.resumed_epoch, "done": reply.resumed, "seed": reply.resumed_seed}
        cursor = [reply.num_pushed, version, reply.num_shards, reply.num_barriers, version, None, start]
        return {"cursor": cursor, "epoch": reply.epoch, "ring_progress": reply.ring_progress}

    def _resume_ring(self, start: FetchedJson) -> None:
        ring_report = (
            _parse_json_object("progress of a ring", start["ring_progress"], "its account")
            if start["ring_progress"]
            else {}
        )
        self._session().change_atomically(
            lambda: self._trainer().resume_ring(start["cursor"], start["epoch"], ring_report)
        )
        self._apply_parameters(self._trainer().ring_cursor.base_version)

    @torch.no_grad()
    def pass_barrier(self, epoch: int, report: FetchedJson, *, use_up: int | None = None) -> dict[int, FetchedJson]:
        """Pass a barrier of all rings: return each ring's report, and take the same parameters.

        Args:
            epoch: Number of the epoch that ends.
            report: Report of this ring.
            use_up: Samples of an epoch that was broken off: they are not handed out any more.
        """
        if self.changes is not None:
            self.changes.push_rest()
        place = self._trainer().ring_cursor
        text = json.dumps(report)

        def gather() -> FetchedJson:
            client = self._get_client()
            if use_up is not None:
                client.take_shard(epoch, use_up, use_up, number=place.num_shards + 1, ended_epoch=epoch)
            client.leave_ring(is_for_good=False)
            met = client.wait_barrier(place.num_barriers + 1, epoch, text)
            version = client.pull(place.num_pushed, self._get_inbox().buffers())
            client.wait_barrier(place.num_barriers + 2, epoch, "")  # no ring pushes before all have the same parameters
            self._copy_received()
            return {"version": version, "reports": {str(ring): each for ring, each in met.items()}}

        result = self.broadcast_from_first(gather, self.received.pieces)
        self._apply_parameters(result["version"])
        place.num_barriers += 2
        place.num_shards += use_up is not None
        expected = "its account"
        return {
            int(ring): _parse_json_object(f"report of ring {ring}", each, expected)
            for ring, each in result["reports"].items()
        }

    def go_idle(self) -> None:
        """Let the ring be idle until the barrier. Waits for no other member, since it may have failed."""
        client = self._client
        if self.changes is not None:
            self.changes.discard_steps()
        if client is not None and self.is_representative:
            if self.changes is not None:
                self.changes.wait_answered()
            client.leave_ring(is_for_good=False)

    def on_pause(self, membership: Membership) -> None:
        """Tell the server that this ring pauses to form a new generation, so that no ring waits for it."""
        if membership.members[0] == self._member:
            threading.Thread(target=self._send_pause, name="ringweave pause", daemon=True).start()

    def check_pause(self, now_s: float, *, is_paused: bool) -> None:
        """Check regularly whether the ring is paused for long; then let no other ring wait for it."""
        if not is_paused:
            self._paused_since_s = None
        elif self._paused_since_s is None:
            self._paused_since_s = now_s
        elif now_s - self._paused_since_s > _MAX_SILENT_PAUSE_S:
            self._paused_since_s = math.inf  # once
            self.on_pause(self._session().membership)

    def leave_server(self) -> None:
        """Tell the server at the process's end that the ring has finished, unless this member failed or stopped."""
        session, client = self._session(), self._client
        has_failed = session.has_stopped or trainer_interface.script_has_failed()
        if client is not None and not has_failed and self.is_representative:
            if self.changes is not None:
                self.changes.wait_answered()
            client.leave_ring(is_for_good=True)

    def close_connection(self) -> None:
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _send_pause(self) -> None:
        try:
            self._get_client().pause_ring()
        except RpcError:
            return  # other rings then wait a little longer

    @property
    def is_representative(self) -> bool:
        """This member represents the ring."""
        return self._session().membership.members[0] == self._member

    def broadcast_from_first(self, fetch: Callable[[], FetchedJson], tensors: Sequence[Tensor] = ()) -> FetchedJson:
        """Return what the representative fetches from the server, on all members or none."""
        session, trainer = self._session(), self._trainer()
        if not self.is_representative:  # a member with a lower number has replaced it as representative
            self.close_connection()
        trainer.is_broadcasting = True
        try:
            return session.broadcast_from_first(fetch, tensors)
        finally:
            trainer.is_broadcasting = False

    def change_atomically(self, change: Callable[[], None]) -> None:
        """Change something that joining members are told, while no status is requested."""
        self._session().change_atomically(change)

    def push_and_pull(self, ring_push: RingPush, outbox: FlatTensors) -> int:
        """Push, receive the next parameters and return their version; for the representative."""
        _, version = self._get_client().push_and_pull(ring_push, outbox.buffers(), self._get_inbox().buffers())
        self._copy_received()
        return version

    def push(self, ring_push: RingPush, outbox: FlatTensors) -> None:
        """Push without pulling; for the representative."""
        self._get_client().push(ring_push, outbox.buffers())

    def _get_client(self) -> RingClient:
        with self._lock:
            if self._client is None:
                generation_id = lambda: self._session().membership.generation_id  # noqa: E731 - each generation has another
                self._client = RingClient(
                    self._servers, self._trainer().ring_cursor.ring, generation_id=generation_id, is_monitored=True
                )
            return self._client

    def _get_inbox(self) -> FlatTensors:
        """Return the memory for parameters from the server; for the representative."""
        self._inbox = self._inbox or FlatTensors(self._specs)
        return self._inbox

    def _copy_received(self) -> None:
        """Copy received parameters to the device."""
        if self._inbox is not None and self._inbox is not self.received:
            self.received.copy_(self._inbox)

    def _copy_gradients(self, outbox: FlatTensors) -> None:
        for parameter, view in zip(self._parameters, outbox.views, strict=True):
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad)

    def _apply_parameters(self, version: int) -> None:
        torch._foreach_copy_(self._parameters, self.received.views)
        place = self._trainer().ring_cursor
        place.base_version = place.next_version = version
        if self.changes is not None:
            self.changes.reset_base()


def _parse_json_object(what: str, text: str, expected: str) -> FetchedJson:
    return peer_data.decode_peer_data(text.encode(), what, peer_data.require_object, expected=expected)


def _gradient_push(
    place: RingCursor,
    samples: UnpushedSamples,
    absent: list[int],
    options: list[dict[str, OptimizerOption]],
    ring_progress: str,
) -> RingPush:
    return RingPush(
        sequence=place.num_pushed + 1,
        base_version=place.base_version,
        content="gradient",
        num_samples=samples.num_samples,
        batch_share=samples.mean_share,
        absent=absent,
        options=options,
        ring_progress=ring_progress,
        num_batches=max(1, samples.num_batches),
        pass_number=samples.pass_number,
        epoch=samples.epoch,
        spans=merge_spans(samples.spans),
    )


class ElasticRingOptimizer(Optimizer):
    """Wraps the script's optimizer and shares its groups; `step` is the ring's, and the server has the state.

    With local steps, the script's optimizer has the state, on each member.
    """

    def __init__(self, optimizer: Optimizer, worker: ElasticRingWorker) -> None:
        """Create it without changing the script's optimizer."""
        super().__init__(optimizer.param_groups, {})
        self._local_optimizer, self._worker = optimizer, worker

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a train step of the ring; `closure` computes the loss first, as in torch's optimizers."""
        if self._worker.misses_samples:
            self._local_optimizer.step()  # changes nothing: see `IncompleteStep`
            return None
        if self._worker.changes is not None:
            found = self._local_optimizer.step(closure) if closure else self._local_optimizer.step()
            self._worker.changes.count_step()
            return found
        found = closure() if closure else None
        self._worker.push_gradients([optimizers.group_options(group) for group in self.param_groups])
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the script's optimizer: its groups, and with local steps its state."""
        return self._local_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state that `state_dict` returned.

        Raises:
            TrainingError: It is the state of an optimizer that has taken steps, which the server's would not have.
        """
        if self._worker.changes is None:
            optimizers.check_fresh(state_dict["state"].values())
        self._local_optimizer.load_state_dict(state_dict)
        self.param_groups = self._local_optimizer.param_groups
