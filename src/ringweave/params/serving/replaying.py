"""What a standby does with what its leader tells it: the same as the leader, so that both have the same books."""

from collections.abc import Callable, Sequence
from functools import singledispatchmethod

from ringweave.params.flat import Flat
from ringweave.params.messages import Leave, Meet, Pause, Push
from ringweave.params.rules import Answer, Ticket
from ringweave.params.serving.job import Job
from ringweave.params.serving.service import ParameterService


class Replay:
    """Of one server, as long as it follows. Whatever is told twice is booked once."""

    def __init__(self, service: ParameterService) -> None:
        """`service` is this server's own."""
        self._service = service

    def room(self, push: Push, sizes: Sequence[int]) -> Sequence[memoryview]:
        """Memory for a push that the leader applies next."""
        return self._service.room_of(self._service.started_job(), push, sizes)

    def push(self, push: Push, buffers: Sequence[memoryview]) -> None:
        """Apply it, in the leader's order."""

        def book(job: Job) -> None:
            if job.ledger.receipt(push.ring, push.sequence) is None:
                self._service.apply(job, push, buffers)

        self._book(push.ring, book)

    def grant(self, ring: int, version: int, ahead: float) -> None:
        """The ring has the parameters of that version, so many train steps ahead."""

        def book(job: Job) -> None:
            job.gone.discard(ring)
            job.ledger.grant(ring, version)
            job.leads.grant(ring, job.model.progress.total)
            if job.setup.compensation:
                base = Flat(job.setup.tensors)
                job.model.read(base, ahead)
                job.model.keep(ring, base)

        self._book(ring, book)

    @singledispatchmethod
    def note(self, fact: object) -> None:
        """What is in the leader's books."""
        raise AssertionError(f"no fact: {fact}")

    @note.register
    def _(self, ticket: Ticket) -> None:
        def book(job: Job) -> None:
            job.tickets.book(ticket)
            job.book_ticket(ticket)

        self._book(ticket.ring, book)

    @note.register
    def _(self, leave: Leave) -> None:
        self._book(leave.ring, lambda job: job.leave(leave.ring, is_for_good=leave.is_for_good))

    @note.register
    def _(self, pause: Pause) -> None:
        self._book(pause.ring, lambda job: job.ledger.pause(pause.ring))

    @note.register
    def _(self, meet: Meet) -> None:
        self._book(meet.ring, lambda job: job.book_meeting(meet))

    @note.register
    def _(self, answer: Answer) -> None:
        with self._service.changed:
            self._service.started_job().meetings.settle(answer)

    def _book(self, ring: int, book: Callable[[Job], object]) -> None:
        """Something of that ring, which the leader has heard of."""
        with self._service.changed:
            job = self._service.started_job()
            job.heard(ring)
            book(job)
