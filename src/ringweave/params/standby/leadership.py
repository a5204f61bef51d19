"""One of a job's two servers: knows whether it leads, tells the other what it is about to acknowledge, takes over.

A server begins with nothing. The first one claims to lead; the other asks it for its state, and follows. A leader that
misses its standby claims to go on alone; a standby that misses its leader claims to lead. Who comes too late with its
claim is *deposed*: what it has is worth nothing, it acknowledges nothing, and its process ends, to be started again
with nothing.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from ringweave import wire
from ringweave.errors import LeadershipError, WireError, explain
from ringweave.params.messages import Push
from ringweave.params.rules.succession import LEASE_S, Claim, Succession
from ringweave.params.serving.replicas import Fact
from ringweave.params.standby.claims import Claims
from ringweave.params.standby.link import Link
from ringweave.params.standby.messages import Copy, Granted, Pushing, note_of
from ringweave.wire.states import Shelf

STATE = "server"
"""Name under which the leader offers its state."""
_RENEW_PER_LEASE = 5


class Model(Protocol):
    """What is led with, as far as it matters here."""

    def standing_still(self) -> AbstractContextManager[bytes]:
        """The whole state, while no push is applied."""
        ...


class Leadership:
    """See above; a `serving.replicas.Replica`. For any number of threads."""

    def __init__(
        self,
        own: int,
        claims: Claims,
        connect: Callable[[], wire.Client],
        *,
        lease_s: float = LEASE_S,
        clock: Callable[[], float] = time.monotonic,
        note: Callable[[Claim, str], object] = lambda claim, why: None,
    ) -> None:
        """Server 0 or 1 of a job.

        Args:
            own: Which of them.
            claims: The register.
            connect: Connects to the other one.
            lease_s: Silence of the other one that is too long.
            clock: Gives seconds.
            note: Is told of the claims that this server makes, and why.
        """
        self.shelf = Shelf()
        self._succession = Succession(own, lease_s=lease_s)
        self._claims, self._connect, self._clock, self._note = claims, connect, clock, note
        self._lease_s = lease_s
        self._changed = threading.Condition()
        self._link: Link | None = None
        self._is_admitting = False
        self._model: Model | None = None
        self.deposed = ""
        """Why this server may not go on; empty as long as it may."""

    def begin(self, model: Model) -> None:
        """Lead, if nobody ever has.

        Raises:
            LeadershipError: The register cannot be used.
        """
        self._model = model
        with self._changed:
            if self._succession.own == 0 and self._claims.newest() is None:
                self._claim(self._succession.first(), "the first to lead")

    @property
    def leads(self) -> bool:
        """Whether it does, as far as it knows."""
        return self._succession.leads and not self.deposed

    @property
    def follows(self) -> bool:
        """Whether it has all that another one leads with."""
        return self._succession.claim is not None and not self._succession.leads and not self.deposed

    @property
    def has_standby(self) -> bool:
        """Whether another one has all that this one leads with."""
        return self._link is not None

    @property
    def term(self) -> int:
        """Of the leader that it knows of."""
        return self._succession.term

    def check_term(self, term: int) -> None:
        """See Replica.

        Raises:
            LeadershipError: It is not this one's, or this server may not answer now.
        """
        self.check()
        if term != self.term:
            raise _refusal(f"term {term}", f"{self.term}, that of this one")

    def check(self) -> None:
        """Make sure that this server leads at this moment.

        Raises:
            LeadershipError: It does not.
        """
        with self._changed:
            if self.leads and not self._succession.has_lease(self._clock()):
                self._look()
            if not self.leads:
                raise _refusal(self.deposed or "a standby", "the server that leads")

    def started(self) -> None:
        """See Replica."""
        link = self._settled_link()
        if link is not None and self._model is not None:
            with self._model.standing_still() as state:
                self.shelf.offer(STATE, {STATE: state})
                self._say(link, Copy())
                self.shelf.withdraw(STATE)

    def pushing(self, push: Push, buffers: Sequence[memoryview]) -> None:
        """See Replica."""
        # Not settled: whoever takes the other one in lets no push be applied meanwhile.
        self._say(self._link, Pushing(push=push), buffers)

    def granted(self, ring: int, version: int, ahead: float, *, is_between_pushes: bool) -> None:
        """See Replica."""
        link = self._link if is_between_pushes else self._settled_link()
        self._say(link, Granted(ring=ring, version=version, ahead=ahead))

    def noted(self, fact: Fact) -> None:
        """See Replica."""
        self._say(self._settled_link(), note_of(fact))

    def admit(self) -> None:
        """Give the other one, which has nothing, all there is; from then on it is told of everything.

        Raises:
            LeadershipError: This server does not lead.
            WireError: The other one was lost meanwhile.
        """
        self.check()
        link, model = self._link, self._model
        assert model is not None, "begun"
        if link is not None:  # it has died and come back
            self._lose(link)
        with self._changed:
            if self._is_admitting:
                raise _refusal("one that takes a standby in already", "one that is free")
            self._is_admitting = True
        try:
            self._take_in(model, Link(self._connect))
        finally:
            self.shelf.withdraw(STATE)
            with self._changed:
                self._is_admitting = False
                self._changed.notify_all()

    def followed(self) -> None:
        """This server has all that the other one leads with."""
        newest = self._claims.newest()
        assert newest is not None, "somebody leads"
        with self._changed:
            self._succession.hold(newest, self._clock())

    def heard(self) -> None:
        """The leader has spoken.

        Raises:
            LeadershipError: This server does not follow it (any more).
        """
        with self._changed:
            if not self.follows:
                raise _refusal(self.deposed or "one that has nothing, or leads", "a standby")
            self._succession.heard(self._clock())

    def tick(self, *, is_leader_connected: bool) -> bool:
        """Time has passed: take over if the leader is gone or silent; whether this server has, just now."""
        with self._changed:
            now_s = self._clock()
            is_silent = self._succession.is_silent(now_s)
            if self.follows and (is_silent or not is_leader_connected):
                self._go_on("the leader is silent" if is_leader_connected else "the leader is gone")
                return self.leads
        return False

    def close(self) -> None:
        """Hang up."""
        if self._link is not None:
            self._link.close()

    def _take_in(self, model: Model, link: Link) -> None:
        threading.Thread(target=self._renew, args=(link,), name="params lease", daemon=True).start()
        try:
            with model.standing_still() as state:
                self.shelf.offer(STATE, {STATE: state})
                link.tell(Copy())
                with self._changed:
                    other = 1 - self._succession.own
                    self._claim(self._succession.joined(other), "a standby has everything")
                    self._link = link
                self.check()
        except BaseException:
            link.close()
            raise

    def _renew(self, link: Link) -> None:
        """Ask again and again, until the link is closed or lost."""
        while not link.wait_end(self._lease_s / _RENEW_PER_LEASE):
            asked_s = self._clock()
            try:
                link.renew(self._lease_s)
            except WireError:
                self._lose(link)
                return
            with self._changed:
                self._succession.heard(asked_s)

    def _settled_link(self) -> Link | None:
        """The link; waits while the other one is being taken in, since it was told what had been decided before."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_admitting)
            return self._link

    def _say(self, link: Link | None, message: wire.Message, buffers: Sequence[memoryview] = ()) -> None:
        """Tell the standby; without it this server goes on alone, if it may.

        Raises:
            LeadershipError: It may not.
        """
        if link is not None:
            asked_s = self._clock()
            try:
                link.tell(message, buffers)
            except WireError:
                self._lose(link)
            else:
                with self._changed:
                    self._succession.heard(asked_s)
        self.check()

    def _lose(self, link: Link) -> None:
        """The standby is gone, stands still or refuses: go on alone, or not at all."""
        link.close()
        with self._changed:
            if self._link is link:
                self._link = None
                self._go_on("the standby is lost")

    def _look(self) -> None:
        """The lease is over: whether another one has taken over is in the register. With the lock held."""
        newest = self._claims.newest()
        own = self._succession.claim
        if own is not None and newest is not None and newest.number > own.number:
            self.deposed = f"one that stood still, while server {newest.leader} took over in term {newest.term}"
        elif self._link is not None:
            link, self._link = self._link, None
            threading.Thread(target=link.close, daemon=True).start()
            self._go_on("the standby is silent")

    def _go_on(self, why: str) -> None:
        """Claim to lead alone. With the lock held."""
        newest = self._claims.newest()
        claim = self._succession.alone(newest) if newest is not None else None
        if claim is None:
            self.deposed = "one that the other server goes on without"
        else:
            self._claim(claim, why)

    def _claim(self, claim: Claim, why: str) -> None:
        """With the lock held."""
        if self._claims.make(claim):
            self._succession.hold(claim, self._clock())
            self._note(claim, why)
        else:
            self.deposed = "one that came too late: the other server has gone on without it"


def _refusal(got: str, expected: str) -> LeadershipError:
    do = "Ask the other server"
    return LeadershipError(explain("parameter server", got=got, expected=expected, do=do))
