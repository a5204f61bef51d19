"""One of a job's two servers: knows whether it leads, tells the other what it is about to acknowledge, takes over.

A server begins with nothing. The first one claims to lead; the other asks it for its state, and follows. A leader that
misses its standby claims to go on alone; a standby that misses its leader claims to lead; either does so once rings
show that they need it, and answers nothing before. Who comes too late with its claim is *deposed*: what it has is worth
nothing, it acknowledges nothing, and its process ends, to be started again with nothing.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from ringweave import wire
from ringweave.errors import DeadlineError, LeadershipError, WireError, explain
from ringweave.params.messages import Push
from ringweave.params.rules.audience import Reach
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
        reach: Callable[[], Reach] = lambda: Reach.MOST,
        clock: Callable[[], float] = time.monotonic,
        note: Callable[[Claim, str], object] = lambda claim, why: None,
    ) -> None:
        """Server 0 or 1 of a job.

        Args:
            own: Which of them.
            claims: The register.
            connect: Connects to the other one.
            lease_s: Silence of the other one that is too long.
            reach: Tells which rings are heard now.
            clock: Gives seconds.
            note: Is told of the claims that this server makes, and why.
        """
        self.shelf = Shelf()
        self._succession = Succession(own, lease_s=lease_s)
        self._claims, self._connect, self._clock, self._note = claims, connect, clock, note
        self._lease_s, self._reach = lease_s, reach
        self._changed = threading.Condition()
        self._link: Link | None = None
        self._parted = ""
        self._is_other_gone = False
        self._asked_s: float | None = None
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
    def answers(self) -> bool:
        """Whether it leads, and may say so: it has a standby that it hears, or has claimed to go on alone."""
        return self.leads and self._succession.has_lease(self._clock())

    @property
    def waits(self) -> bool:
        """Whether it leads, has lost its standby, and may not go on alone yet."""
        return self.leads and self._link is None and not self.answers

    @property
    def follows(self) -> bool:
        """Whether it has all that another one leads with."""
        return self._succession.claim is not None and not self._succession.leads and not self.deposed

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
            LeadershipError: It does not, or may not answer now, or the register cannot be used.
        """
        with self._changed:
            if self.leads and not self._succession.has_lease(self._clock()):
                self._part("the standby is silent", is_gone=False)
                self._settle(self._parted)
                if self.leads and not self._succession.has_lease(self._clock()):
                    raise _refusal("one that hears neither its standby nor the rings that it needs to go on alone")
            if not self.leads:
                raise _refusal(self.deposed or "a standby")

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
        with self._changed:
            self._asked_s = self._clock()
            if self._link is not None:
                self._part("the standby is lost", is_gone=True)
        self.check()
        model = self._model
        assert model is not None, "begun"
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
        """Time has passed: go on without the other one if it is gone or silent; whether this server has taken over.

        Raises:
            LeadershipError: The register cannot be used.
        """
        with self._changed:
            is_silent = self._succession.is_silent(self._clock())
            is_gone = self._is_asked or not is_leader_connected
            if self.follows and (is_silent or is_gone):
                self._is_other_gone = is_gone
                self._settle("the leader is gone" if is_gone else "the leader is silent")
                return self.leads
            if self.waits:
                self._settle(self._parted)
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
                    self._join(link)
                self.check()
        except BaseException:
            link.close()
            raise

    def _join(self, link: Link) -> None:
        """The standby has everything. With the lock held."""
        self._parted, self._is_other_gone = "the standby was not taken in", True  # if the claim fails
        if not self._claim(self._succession.joined(1 - self._succession.own), "a standby has everything"):
            raise _refusal("one that is not sure of its own claims", "one that can take a standby in")
        self._link, self._asked_s = link, None

    def _renew(self, link: Link) -> None:
        """Ask again and again, until the link is closed or lost."""
        while not link.wait_end(self._lease_s / _RENEW_PER_LEASE):
            asked_s = self._clock()
            try:
                link.renew(self._lease_s)
            except WireError as error:
                self._lose(link, error)
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
            except WireError as error:
                self._lose(link, error)
            else:
                with self._changed:
                    self._succession.heard(asked_s)
        self.check()

    def _lose(self, link: Link, cause: WireError) -> None:
        """The standby is gone, stands still or refuses: go on alone, or not at all."""
        with self._changed:
            if self._link is link:
                self._part("the standby is lost", is_gone=not isinstance(cause, DeadlineError))
                with contextlib.suppress(LeadershipError):  # `check` says so to whoever wants an answer
                    self._settle(self._parted)
                return
        link.close()

    def _part(self, why: str, *, is_gone: bool) -> None:
        """Tell the standby nothing any more: from then on it may lack what happens. With the lock held."""
        link, self._link = self._link, None
        if link is not None:
            self._parted, self._is_other_gone = why, is_gone
            self._succession.lost()
            threading.Thread(target=link.close, daemon=True).start()

    def _settle(self, why: str) -> None:
        """Claim to go on without the other one, if it has not gone on without this one and rings want it to.

        With the lock held.

        Raises:
            LeadershipError: The register cannot be used.
        """
        newest = self._claims.newest()
        if newest is None:
            raise _refusal("one whose register has lost all claims", "one that can look who leads")
        claim = self._succession.alone(newest)
        if claim is None:
            taken = f"server {newest.leader} leads without it in term {newest.term}"
            self.deposed = f"one that died, stood still or was cut off: {taken}"
        elif self._should_go_on() and not self._claim(claim, why):
            self.deposed = "one that came too late: the other server has gone on without it"

    def _should_go_on(self) -> bool:
        """Whether that is better than to leave it to the other one. With the lock held."""
        reach = Reach.MOST if self._is_asked else self._reach()
        is_gone = self._is_asked or self._is_other_gone
        return self._succession.should_go_on(self._clock(), reach, is_other_gone=is_gone)

    @property
    def _is_asked(self) -> bool:
        """The other one has just asked to be taken in: it has ended meanwhile, and begins with nothing."""
        return self._asked_s is not None and self._clock() - self._asked_s < self._lease_s

    def _claim(self, claim: Claim, why: str) -> bool:
        """Register it; False if there is another one of that number. With the lock held."""
        self._succession.claiming()
        if self._claims.make(claim):
            self._succession.hold(claim, self._clock())
            self._note(claim, why)
            return True
        return False


def _refusal(got: str, expected: str = "the server that leads") -> LeadershipError:
    do = "Ask the other server"
    return LeadershipError(explain("parameter server", got=got, expected=expected, do=do))
