"""The coordinator over the wire: calls of members become events, orders become answers."""

import threading
import time
from collections.abc import Callable, Collection, Mapping

from ringweave.errors import RefusedError, explain
from ringweave.membership.messages import JOB, Accuse, Ask, Count, Enter, Heartbeat, Leave, Listen, Stand, Told
from ringweave.membership.rules.coordinator import Coordinator
from ringweave.membership.rules.records import BEFORE_ALL, Decree, Order, Standing
from ringweave.membership.serving import seeking
from ringweave.membership.serving.notes import Notes
from ringweave.wire import Answer, Call, Done, Handler, Identity, Message

_MEMBER = "worker"
"""The role of those who may become members."""
_LOOK_S = 0.5
"""How long somebody listens before the same is told again."""


class CoordinatorService:
    """One coordinator, called by many threads."""

    def __init__(
        self,
        coordinator: Coordinator,
        *,
        clock: Callable[[], float] = time.monotonic,
        part: str = JOB,
        notes: Notes | None = None,
        seek: Callable[[Mapping[str, str]], Collection[str]] = seeking.unreachable,
    ) -> None:
        """`part` is that of the job whose members these are; `notes` is told what is decided.

        `seek` tells which of these members, by where they listen, cannot be reached.
        """
        self._seek = seek
        self._coordinator, self._clock = coordinator, clock
        self._part, self._notes = part, notes or Notes()
        self._changed = threading.Condition()
        self._orders: dict[str, tuple[int, Order]] = {}
        self._noted: tuple[Decree | None, int] = None, 0
        """The epoch that was last noted, and the term in which it was."""
        self._num_woken = 0
        self._known: set[str] = set()
        self._lost: set[str] = set()
        self._handle = {each.message: each.handle for each in self.handlers()}

    def handlers(self) -> list[Handler]:
        """What the server has to know."""
        return [
            Handler(message=Enter, handle=self._enter),
            Handler(message=Listen, handle=self._listen),
            Handler(message=Heartbeat, handle=self._beat, is_quick=True),
            Handler(message=Stand, handle=self._stand),
            Handler(message=Accuse, handle=self._accuse),
            Handler(message=Leave, handle=self._leave),
            Handler(message=Ask, handle=lambda _: self.count()),
        ]

    def call(self, call: Call) -> Answer | Message:
        """What a handler does with a call."""
        return self._handle[type(call.message)](call)

    @property
    def ended(self) -> str:
        """Why the job is over; empty while it is not."""
        return self._coordinator.ended

    @property
    def num_here(self) -> int | None:
        """Members of the present epoch that are still there; None before the first, and where another one decides."""
        with self._changed:
            coordinator = self._coordinator
            if coordinator.decree is None or not coordinator.is_active:
                return None
            return len(set(coordinator.decree.members) & set(coordinator.present))

    @property
    def has_finished(self) -> bool:
        """A member has done all there was to do."""
        with self._changed:
            return self._coordinator.has_finished

    def give_up(self, reason: str) -> None:
        """The job is over."""
        self._event(lambda _now_s: self._coordinator.give_up(reason))

    def announce(self, members: Collection[str]) -> None:
        """These are about to be started: those that had their slots before have ended."""
        for member in members:
            self._event(lambda now_s, member=member: self._coordinator.announce(member, now_s))

    def tick(self, connected: Callable[[], Collection[str]]) -> None:
        """Time has passed; `connected` gives the names of those that hold a connection.

        It is asked with the lock held: whoever has entered by then has had a connection before.
        """
        with self._changed:
            there = connected()
            for member in self._coordinator.present:
                if member not in there:
                    self._coordinator.part(member)
            self._coordinator.tick(self._clock())
            self._tell()

    def hung_up(self, peer: Identity) -> None:
        """A process has hung up without a goodbye; see `wire.Server`."""
        if peer.role == _MEMBER:
            self._event(lambda now_s: self._coordinator.lose(peer.name, now_s))

    def hear_of(self, count: Count) -> None:
        """What the other coordinator says of itself."""
        if count.is_active:
            self._event(lambda _now_s: self._coordinator.hear_active(count.term, count.ballot))
        else:
            self._event(self._coordinator.hear_idle)

    def _event(self, action: Callable[[float], object]) -> Done:
        with self._changed:
            action(self._clock())
            self._tell()
        return Done()

    def _tell(self) -> None:
        """Wake those whose order has changed, and note what has happened; with the lock held."""
        coordinator = self._coordinator
        here = set(coordinator.present) if coordinator.is_active else set()
        if not coordinator.is_active:  # nobody is a standby's member, nor any more of one that has become one
            self._known.clear()
            self._lost.clear()
        for member in sorted(self._lost & here):
            self._notes.back(self._part, member, coordinator.term)
        self._lost = (self._lost | self._known) - here
        for member in sorted(self._known - here):
            self._notes.lost(self._part, member, coordinator.reason_for(member), coordinator.term)
        self._known = here
        if coordinator.num_woken > self._num_woken and coordinator.decree is not None:
            self._notes.woken(self._part, coordinator.decree.ballot)
        self._num_woken = coordinator.num_woken
        noted = coordinator.decree, coordinator.term
        if coordinator.decree is not None and noted != self._noted:
            if coordinator.decree is not self._noted[0]:
                self._lost.clear()
            self._noted = noted
            self._notes.begun(self._part, coordinator.decree, coordinator.term)
        if sought := coordinator.take_sought():
            threading.Thread(target=self._look_for, args=(sought,), name="ringweave seeking", daemon=True).start()
        changed = [each for each, (_, order) in self._orders.items() if coordinator.order_for(each) != order]
        for member in changed:
            self._orders[member] = (self._orders[member][0] + 1, coordinator.order_for(member))
        if changed:
            self._changed.notify_all()

    def _look_for(self, sought: Mapping[str, str]) -> None:
        for member in self._seek(sought):
            self._event(lambda now_s, member=member: self._coordinator.hear_unreachable(member, now_s))

    def _enter(self, call: Call) -> Done:
        if call.peer.role != _MEMBER:
            raise RefusedError(explain("role of a member", got=call.peer.role, expected=_MEMBER, do="Look who called"))
        member, rejoining = call.peer.name, call.message.rejoining
        if rejoining is None:
            return self._event(lambda now_s: self._coordinator.join(member, now_s))
        _check_self(member, rejoining.standing)
        return self._event(lambda now_s: self._coordinator.rejoin(rejoining, now_s))

    def _listen(self, call: Call) -> Told:
        member, known = call.peer.name, call.message.serial
        with self._changed:
            self._orders.setdefault(member, (1, self._coordinator.order_for(member)))
            self._changed.wait_for(lambda: self._orders[member][0] != known or call.cancelled.is_set(), _LOOK_S)
            serial, order = self._orders[member]
            # Who stood still while this one stepped down and decided again has to ask anew, or would wait for ever.
            is_active = self._coordinator.is_active and self._coordinator.knows(member)
            return Told(serial=serial, is_active=is_active, order=order)

    def _beat(self, call: Call) -> Done:
        return self._event_quiet(lambda now_s: self._coordinator.beat(call.peer.name, call.message.beat, now_s))

    def _event_quiet(self, action: Callable[[float], object]) -> Done:
        """One that changes no order."""
        with self._changed:
            action(self._clock())
        return Done()

    def _stand(self, call: Call) -> Done:
        _check_self(call.peer.name, call.message.standing)
        return self._event(lambda now_s: self._coordinator.stand(call.message.ballot, call.message.standing, now_s))

    def _accuse(self, call: Call) -> Done:
        message: Accuse = call.message
        return self._event(
            lambda now_s: self._coordinator.accuse(call.peer.name, message.ballot, message.suspects, now_s)
        )

    def _leave(self, call: Call) -> Done:
        message: Leave = call.message
        _check_self(call.peer.name, message.standing)
        return self._event(
            lambda now_s: self._coordinator.leave(message.standing, now_s, is_finished=message.is_finished)
        )

    def count(self) -> Count:
        """What it knows."""
        with self._changed:
            coordinator, decree = self._coordinator, self._coordinator.decree
            return Count(
                term=coordinator.term,
                is_active=coordinator.is_active,
                ballot=decree.ballot if decree else BEFORE_ALL,
                members=list(decree.members) if decree else [],
                committed=decree.committed if decree else 0,
                present=list(coordinator.present),
                ended=coordinator.ended,
            )


def _check_self(member: str, standing: Standing) -> None:
    """Nobody speaks for another."""
    if standing.member != member:
        raise RefusedError(
            explain("member", got=standing.member, expected=f"{member}, as the certificate says", do="Look who called")
        )
