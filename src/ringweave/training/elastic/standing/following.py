"""What a member does from its first epoch on until it is level with the others; see `joining.backlog`."""

from collections.abc import Callable
from dataclasses import replace

from ringweave.errors import WireError
from ringweave.membership.rules.records import Standing
from ringweave.training.elastic.joining import catching
from ringweave.training.elastic.joining.backlog import Backlog, Begun
from ringweave.training.elastic.joining.catching import Catching
from ringweave.training.elastic.joining.entering import Entrance
from ringweave.training.elastic.joining.reading import Reading
from ringweave.training.elastic.standing.footing import Footing

_MOST_FAILURES = 5
"""Of a newcomer's reading of the state: each time it begins anew, from another member perhaps."""


class Following:
    """Of one member. Where it does not follow, nothing is to be done."""

    def __init__(self, footing: Footing, *, is_mean: bool) -> None:
        self._footing, self._is_mean = footing, is_mean
        self._num_failures = 0
        self._donor = ""
        """Of whom the state is read, or was."""
        self._reading: Reading | None = None

    # The thread that trains.

    def redo(self, own: Catching) -> None:
        """Do what the others have done, or are about to, with the sums that were kept.

        Raises:
            MembershipError: There will be none: this member was put out, or the job is over.
        """
        footing = self._footing
        with footing.bequeathing(), footing.lock:
            footing.lock.wait_for(lambda: own.is_behind() or footing.has_ended)
            if not own.is_behind() or footing.where.is_leaving:
                footing.raise_reason()
            replay, kept, is_last = own.take()
            if is_last:
                footing.catching = None
            footing.is_waiting = False
            footing.lock.notify_all()
        catching.redo(replay, kept, is_mean=self._is_mean)
        with footing.lock:
            own.give_back(kept)

    def pass_border(self, own: Catching, draw: Callable[[], None]) -> None:
        """The border of a member that follows: of its script alone, unless it has done all that the others have.

        Raises:
            MembershipError: This member was put out, or the job is over.
            SystemExit: It has left, as it wanted to.
        """
        footing = self._footing
        with footing.bequeathing(), footing.lock:
            footing.num_signs += 1
            footing.is_waiting = True
            footing.lock.wait_for(lambda: own.is_behind() or not footing.is_frozen or footing.has_ended)
            if not own.is_behind() or footing.where.is_leaving:
                footing.raise_reason()
            footing.is_waiting = False
            draw()

    # The session's own thread; with the lock held, but for the last.

    def is_due(self) -> bool:
        """The next reduction is to be taken part in with nothing."""
        footing = self._footing
        is_due = footing.is_up and footing.where.is_following and footing.reduction is None
        return is_due and footing.catching is not None and footing.catching.has_room()

    def take_part(self) -> RuntimeError | None:
        """Begin that; what went wrong, if the group is broken."""
        footing = self._footing
        assert footing.catching is not None, "it is due"
        footing.reduction = footing.catching.nothing(footing.where.committed + 1)
        return footing.start_buckets()

    def begin(self, begun: Begun, entrance: Entrance) -> None:
        """The epoch stands: for the script now, or after what is kept for it."""
        footing = self._footing
        if self._reading is not None:
            if self._donor in begun.decree.members:
                self._reading.hurry()
            else:
                self._reading.give_up()
        committed = max(begun.decree.committed, footing.where.committed)
        if begun.is_newcomer and entrance.layout:
            footing.catching = Catching(footing.member, footing.crew, Backlog(entrance.layout, committed))
            footing.where = replace(footing.where, is_following=True)
        has_state = not footing.where.is_following
        footing.where = replace(footing.where, has_state=has_state, committed=committed)
        if footing.catching is not None:
            footing.catching.begin(begun)
        else:
            catching.enter(footing.crew, begun)

    def read(self, begun: Begun, donor: int, name: str) -> None:
        """Begin to read the state of that member as it was when this epoch was formed."""
        giver, crew, reading = begun.decree.standings[donor], self._footing.crew, Reading()
        with self._footing.lock:
            own = self._footing.catching
            self._donor, self._reading = giver.member, reading
        if own is not None:
            own.read(
                lambda pace: reading.run(lambda: crew.pull(giver.place, name, reading, pace)),
                lambda error: self._begin_to_redo(own) if error is None else self._start_over(own, error),
            )

    # The thread that reads.

    def _begin_to_redo(self, own: Catching) -> None:
        footing = self._footing
        with footing.lock:
            own.is_loaded = True
            footing.num_signs += 1
            footing.lock.notify_all()

    def _start_over(self, own: Catching, error: Exception) -> None:
        """The state could not be read: what was kept is of no use, and this member is a newcomer again."""
        footing = self._footing
        with footing.lock:
            if footing.catching is not own or footing.out is not None:
                return
            self._num_failures += 1
            is_passing = isinstance(error, WireError | OSError) and self._num_failures <= _MOST_FAILURES
            broken = footing.ordered
            if is_passing:
                footing.freeze()
                footing.catching = None
                footing.where = Standing(member=footing.member, is_leaving=footing.where.is_leaving)
        if not is_passing:
            footing.refuse(error)
        elif footing.agent is not None and broken is not None:
            footing.agent.accuse(broken.ballot, [])

    # Whoever ends the session; with the lock held.

    def stop_reading(self) -> None:
        """The state is not needed any more."""
        if self._footing.catching is not None:
            self._footing.catching.stop()
