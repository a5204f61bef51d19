"""Checkpoints as the server sees them: a snapshot that a ring reads and writes down, or gives back at the start."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Protocol

from ringweave.errors import DeadlineError, TrainingError, explain
from ringweave.params.messages import Setup
from ringweave.params.resuming import STATE, Forget, Offer, Restore, Ruled, Snap, Snapped
from ringweave.params.rules import Position, Resumed
from ringweave.params.serving import job as jobs
from ringweave.params.serving import snapshots
from ringweave.params.serving.job import Job
from ringweave.params.serving.replicas import Replica
from ringweave.params.serving.snapshots import Snapshot
from ringweave.wire import Call, Done, Handler, Identity
from ringweave.wire.states import Shelf

_LOOK_S = 0.5
_MOST_STATES = 8
"""Copies of the parameters that an optimizer's state may be as large as; more is no snapshot."""
_BOOKS_BYTES = 64 << 20


class Desk(Protocol):
    """What the service has of its job."""

    changed: threading.Condition
    job: Job | None

    def find(self, term: int, ring: int, peer: Identity) -> Job:
        """The job, if that peer may speak for that ring."""
        ...

    def started_job(self) -> Job:
        """The job."""
        ...

    def copying(self, num_bytes: int) -> AbstractContextManager[None]:
        """So many bytes are held meanwhile."""
        ...


class Keeping:
    """Handles what rings say of checkpoints."""

    def __init__(
        self,
        desk: Desk,
        replica: Replica,
        shelf: Shelf,
        absent: Callable[[Job], set[int]],
        clock: Callable[[], float],
    ) -> None:
        """Has nothing yet.

        Args:
            desk: Has the job.
            replica: Knows whether this server leads, and tells the standby of another state.
            shelf: Where rings read the snapshot.
            absent: Rings that nobody waits for.
            clock: Gives seconds.
        """
        self._desk, self._replica, self._shelf, self._absent, self._clock = desk, replica, shelf, absent, clock
        self._held: AbstractContextManager[None] | None = None
        self._deposits: dict[int, bytearray] = {}

    def handlers(self) -> list[Handler]:
        """What the wire's server has to know."""
        return [
            Handler(message=Snap, handle=self._snap),
            Handler(message=Forget, handle=self._forget),
            Handler(message=Offer, handle=self._offer),
            Handler(message=Restore, handle=self._restore),
        ]

    def _snap(self, call: Call) -> Snapped:
        snap: Snap = call.message
        self._desk.find(snap.term, snap.ring, call.peer)
        with self._desk.changed:
            job = self._desk.started_job()
            gone = job.gone | set(job.away_s)
            if any(ring not in gone for ring in range(snap.ring)):
                return Snapped(is_there=False)
            found = jobs.snapshot(job)
        self._hold(self._desk.copying(found.num_bytes))
        self._shelf.offer(STATE, snapshots.to_buffers(found))
        return Snapped(is_there=True)

    def _forget(self, call: Call) -> Done:
        forget: Forget = call.message
        self._desk.find(forget.term, forget.ring, call.peer)
        self._shelf.withdraw(STATE)
        self._hold(None)
        return Done()

    def _hold(self, held: AbstractContextManager[None] | None) -> None:
        """Count the memory of the snapshot that can be read, in place of the one before it."""
        with self._desk.changed:
            before, self._held = self._held, held
            if held is not None:
                held.__enter__()
            if before is not None:
                before.__exit__(None, None, None)

    def _offer(self, call: Call) -> Ruled:
        offer: Offer = call.message
        self._desk.find(offer.term, offer.ring, call.peer)
        with self._desk.changed:
            job = self._desk.started_job()
            if job.has_begun and offer.ring not in job.offers:
                return Ruled(verdict="begun", num_done=job.model.progress.num_done)
            job.offers[offer.ring] = (offer.train_step, offer.check)
            self._desk.changed.notify_all()
            while (ruled := self._ruled(self._desk.started_job(), offer.ring)) is None:
                if call.left_s() <= 0 or call.cancelled.is_set():
                    raise DeadlineError(
                        explain(
                            "what the rings go on from",
                            got="some have not said which checkpoint they have",
                            expected="all that are there",
                            do="Call Checkpoints.load on every rank",
                        )
                    )
                self._desk.changed.wait(min(_LOOK_S, max(0.0, call.left_s())))
        return ruled

    def _ruled(self, job: Job, ring: int) -> Ruled | None:
        """What that ring hears; None as long as it has to wait."""
        if job.resumed is not None:
            resumed, num_done = job.resumed, job.model.progress.num_done
            return Ruled(verdict="resumed", train_step=resumed.train_step, check=resumed.check, num_done=num_done)
        if job.has_nothing_to_resume:
            return Ruled(verdict="nothing", num_done=job.model.progress.num_done)
        here = set(range(len(job.setup.rings))) - self._absent(job)
        if not here <= job.offers.keys():
            return None
        best = max((job.offers[each] for each in here if job.offers[each][1]), default=None)
        if best is None:
            job.has_nothing_to_resume = True
            return Ruled(verdict="nothing")
        giver = min(each for each in here if job.offers[each] == best)
        return Ruled(verdict="give", train_step=best[0], check=best[1]) if ring == giver else None

    def _restore(self, call: Call) -> Done:
        piece: Restore = call.message
        job = self._desk.find(piece.term, piece.ring, call.peer)
        content = self._deposit(job, piece, b"".join(call.buffers))
        if content is None:
            return Done()
        found = snapshots.from_bytes(content)
        with self._desk.changed:
            job = self._desk.started_job()
            if job.resumed is None:  # else it is said again, or another ring was faster
                if job.has_begun:
                    raise TrainingError(
                        explain(
                            "checkpoint to go on from",
                            got="one after the first samples were drawn",
                            expected="it before",
                            do="Call Checkpoints.load right after prepare",
                        )
                    )
                start = piece.start
                position = Position(pass_number=start.pass_number, epoch=start.epoch, done=tuple(start.done))
                resumed = Resumed(train_step=piece.train_step, check=piece.check, seed=start.seed, position=position)
                self._desk.job = jobs.restored(job, fitted(found, job.setup), resumed, self._clock)
        self._replica.started()
        with self._desk.changed:
            self._desk.changed.notify_all()
        return Done()

    def _deposit(self, job: Job, piece: Restore, content: bytes) -> bytes | None:
        """All of it, once it is whole.

        Raises:
            TrainingError: It is larger than any snapshot of this job, or has gaps.
        """
        most = _BOOKS_BYTES + _MOST_STATES * job.model.start.num_bytes
        with self._desk.changed:
            held = bytearray() if piece.first_byte == 0 else self._deposits.get(piece.ring, bytearray())
            is_too_long = max(piece.num_bytes, len(held) + len(content)) > min(most, piece.num_bytes)
            if is_too_long or len(held) != piece.first_byte:
                raise TrainingError(
                    explain(
                        "piece of a snapshot",
                        got=f"byte {piece.first_byte} of {piece.num_bytes}",
                        expected=f"byte {len(held)}, of at most {most}",
                        do="Give back what this server, or one of the same model, has written",
                    )
                )
            held += content
            self._deposits[piece.ring] = held
            if len(held) < piece.num_bytes:
                return None
            return bytes(self._deposits.pop(piece.ring))


def fitted(found: Snapshot, setup: Setup) -> Snapshot:
    """The snapshot, for this job's rings.

    Raises:
        TrainingError: It is of another model or another optimizer, or of another way to push.
    """
    both = [
        {
            "parameters": [(each.name, tuple(each.shape), each.dtype) for each in one.tensors],
            "optimizer": one.optimizer,
            "groups of parameters": [list(group.parameters) for group in one.groups],
            "local steps": one.overlaps,
        }
        for one in (found.setup, setup)
    ]
    for what, wanted in both[1].items():
        if both[0][what] != wanted:
            got, expected = str(both[0][what])[:200], str(wanted)[:200]
            do = "Train what the checkpoint is of, or begin in another folder"
            raise TrainingError(explain(f"{what} of the checkpoint of rings", got=got, expected=expected, do=do))
    return replace(found, setup=setup, pushed={}, live=None, bases={})
