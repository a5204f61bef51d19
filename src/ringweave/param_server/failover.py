"""Leadership of one of two servers: replicates to the standby, appends leadership records, takes over.

A server begins with nothing. The first one claims the lead; the other one asks it for its state and follows. A
leader that loses its standby records that it goes on alone; a standby that loses its leader records that it leads.
Either does so once rings show that they need it, and answers nothing before. A server whose record comes too late
is *superseded*: its state is worthless, it acknowledges nothing, and its process ends, to be started again with
nothing.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from ringweave import rpc
from ringweave.errors import DeadlineError, NotLeaderError, RpcError, explain
from ringweave.param_server.leadership import LEASE_S, FailoverRules, LeadershipRecord, Reachability
from ringweave.param_server.leadership_log import LeadershipLog
from ringweave.param_server.messages import Push
from ringweave.param_server.replication import (
    CopyState,
    ReplicatedFact,
    ReplicateGrant,
    ReplicatePush,
    StandbyLink,
    message_of_fact,
)
from ringweave.rpc.state_transfer import StateServer

SERVER_STATE_NAME = "server"
"""Name under which the leader publishes its state."""
_RENEWALS_PER_LEASE = 5


class ReplicatedModel(Protocol):
    """Model of the leader, as far as replication needs it."""

    def paused_state(self) -> AbstractContextManager[bytes]:
        """Yield the whole state, while no push is applied."""
        ...


class ServerLeadership:
    """Leadership of one of two servers, as a `replication.Replicator`; thread-safe."""

    def __init__(
        self,
        own_index: int,
        log: LeadershipLog,
        connect: Callable[[], rpc.RpcClient],
        *,
        lease_s: float = LEASE_S,
        reachability: Callable[[], Reachability] = lambda: Reachability.MOST,
        clock: Callable[[], float] = time.monotonic,
        on_record: Callable[[LeadershipRecord, str], object] = lambda record, reason: None,
    ) -> None:
        """Store the arguments for server 0 or 1 of a job.

        Args:
            own_index: Index of this server.
            log: Log of leadership records.
            connect: Connects to the other server.
            lease_s: Silence of the other server after which it counts as lost.
            reachability: Returns which rings are reachable now.
            clock: Returns seconds.
            on_record: Receives each record that this server appends, with the reason.
        """
        self.state_server = StateServer()
        self._rules = FailoverRules(own_index, lease_s=lease_s)
        self._log, self._connect, self._clock, self._on_record = log, connect, clock, on_record
        self._lease_s, self._reachability = lease_s, reachability
        self._changed = threading.Condition()
        self._link: StandbyLink | None = None
        self._separation_reason = ""
        self._is_other_gone = False
        self._follow_requested_s: float | None = None
        self._is_admitting = False
        self._model: ReplicatedModel | None = None
        self.superseded = ""
        """Reason why this server may not go on; empty as long as it may."""

    def begin_leading(self, model: ReplicatedModel) -> None:
        """Lead, if no server ever has.

        Raises:
            LeadershipError: The log cannot be used.
        """
        self._model = model
        with self._changed:
            if self._rules.own == 0 and self._log.latest() is None:
                self._append_record(self._rules.first_record(), "the first to lead")

    @property
    def is_leading(self) -> bool:
        """True if it leads, as far as it knows."""
        return self._rules.leads and not self.superseded

    @property
    def may_answer(self) -> bool:
        """True if it leads and may answer: it reaches its standby, or has recorded that it goes on alone."""
        return self.is_leading and self._rules.has_lease(self._clock())

    @property
    def is_blocked(self) -> bool:
        """True if it leads, has lost its standby, and may not go on alone yet."""
        return self.is_leading and self._link is None and not self.may_answer

    @property
    def is_following(self) -> bool:
        """True if it has all state of another server that leads."""
        return self._rules.record is not None and not self._rules.leads and not self.superseded

    @property
    def term(self) -> int:
        """Term of the leader that it knows of."""
        return self._rules.term

    def check_term(self, term: int) -> None:
        """Check the term, and that this server leads.

        Raises:
            LeadershipError: The term is another one's, or this server may not answer now.
        """
        self.check_leading()
        if term != self.term:
            raise _not_leading_error(f"term {term}", f"{self.term}, that of this one")

    def check_leading(self) -> None:
        """Check that this server leads at this moment.

        Raises:
            LeadershipError: It does not, or may not answer now, or the log cannot be used.
        """
        with self._changed:
            if self.is_leading and not self._rules.has_lease(self._clock()):
                self._separate("the standby is silent", is_gone=False)
                self._settle_leadership(self._separation_reason)
                if self.is_leading and not self._rules.has_lease(self._clock()):
                    raise _not_leading_error(
                        "one that hears neither its standby nor the rings that it needs to go on alone"
                    )
            if not self.is_leading:
                raise _not_leading_error(self.superseded or "a standby")

    def replicate_start(self) -> None:
        link = self._settled_link()
        if link is not None and self._model is not None:
            with self._model.paused_state() as state:
                self.state_server.publish(SERVER_STATE_NAME, {SERVER_STATE_NAME: state})
                self._replicate(link, CopyState())
                self.state_server.unpublish(SERVER_STATE_NAME)

    def replicate_push(self, push: Push, buffers: Sequence[memoryview]) -> None:
        # Not the settled link: the admission of a standby lets no push be applied meanwhile.
        self._replicate(self._link, ReplicatePush(push=push), buffers)

    def replicate_grant(self, ring: int, version: int, ahead: float, *, is_between_pushes: bool) -> None:
        link = self._link if is_between_pushes else self._settled_link()
        self._replicate(link, ReplicateGrant(ring=ring, version=version, ahead=ahead))

    def replicate_fact(self, fact: ReplicatedFact) -> None:
        self._replicate(self._settled_link(), message_of_fact(fact))

    def admit_standby(self) -> None:
        """Copy all state to the other server, which has none; from then on replicate everything to it.

        Raises:
            LeadershipError: This server does not lead.
            WireError: The other server was lost meanwhile.
        """
        with self._changed:
            self._follow_requested_s = self._clock()
            if self._link is not None:
                self._separate("the standby is lost", is_gone=True)
        self.check_leading()
        model = self._model
        assert model is not None, "begun"
        with self._changed:
            if self._is_admitting:
                raise _not_leading_error("one that takes a standby in already", "one that is free")
            self._is_admitting = True
        try:
            self._copy_to_standby(model, StandbyLink(self._connect))
        finally:
            self.state_server.unpublish(SERVER_STATE_NAME)
            with self._changed:
                self._is_admitting = False
                self._changed.notify_all()

    def become_standby(self) -> None:
        """Become the standby: this server has all state of the leader."""
        newest = self._log.latest()
        assert newest is not None, "somebody leads"
        with self._changed:
            self._rules.adopt(newest, self._clock())

    def note_leader_heard(self) -> None:
        """Note that the leader has sent something.

        Raises:
            LeadershipError: This server does not follow it (any more).
        """
        with self._changed:
            if not self.is_following:
                raise _not_leading_error(self.superseded or "one that has nothing, or leads", "a standby")
            self._rules.note_heard(self._clock())

    def tick(self, *, is_leader_connected: bool) -> bool:
        """Go on without the other server if it is gone or silent; return whether this server has taken over.

        Raises:
            LeadershipError: The log cannot be used.
        """
        with self._changed:
            is_silent = self._rules.is_silent(self._clock())
            is_gone = self._is_follow_requested or not is_leader_connected
            if self.is_following and (is_silent or is_gone):
                self._is_other_gone = is_gone
                self._settle_leadership("the leader is gone" if is_gone else "the leader is silent")
                return self.is_leading
            if self.is_blocked:
                self._settle_leadership(self._separation_reason)
        return False

    def close(self) -> None:
        if self._link is not None:
            self._link.close()

    def _copy_to_standby(self, model: ReplicatedModel, link: StandbyLink) -> None:
        threading.Thread(target=self._renew_lease, args=(link,), name="params lease", daemon=True).start()
        try:
            with model.paused_state() as state:
                self.state_server.publish(SERVER_STATE_NAME, {SERVER_STATE_NAME: state})
                link.replicate(CopyState())
                with self._changed:
                    self._record_standby(link)
                self.check_leading()
        except BaseException:
            link.close()
            raise

    def _record_standby(self, link: StandbyLink) -> None:
        """Record that the standby has all state; with the lock held."""
        self._separation_reason, self._is_other_gone = "the standby was not taken in", True  # if the claim fails
        if not self._append_record(self._rules.record_with_standby(1 - self._rules.own), "a standby has everything"):
            raise _not_leading_error("one that is not sure of its own records", "one that can take a standby in")
        self._link, self._follow_requested_s = link, None

    def _renew_lease(self, link: StandbyLink) -> None:
        """Renew the lease regularly, until the link is closed or lost."""
        while not link.wait_closed(self._lease_s / _RENEWALS_PER_LEASE):
            asked_s = self._clock()
            try:
                link.renew_lease(self._lease_s)
            except RpcError as error:
                self._lose_standby(link, error)
                return
            with self._changed:
                self._rules.note_heard(asked_s)

    def _settled_link(self) -> StandbyLink | None:
        """Return the link, after the admission of a standby is over: it has received all earlier decisions."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_admitting)
            return self._link

    def _replicate(self, link: StandbyLink | None, message: rpc.RpcMessage, buffers: Sequence[memoryview] = ()) -> None:
        """Replicate a message to the standby; without one this server goes on alone, if it may.

        Raises:
            LeadershipError: It may not.
        """
        if link is not None:
            asked_s = self._clock()
            try:
                link.replicate(message, buffers)
            except RpcError as error:
                self._lose_standby(link, error)
            else:
                with self._changed:
                    self._rules.note_heard(asked_s)
        self.check_leading()

    def _lose_standby(self, link: StandbyLink, cause: RpcError) -> None:
        """Handle a standby that is gone, stalled or refuses: go on alone, or not at all."""
        with self._changed:
            if self._link is link:
                self._separate("the standby is lost", is_gone=not isinstance(cause, DeadlineError))
                with contextlib.suppress(NotLeaderError):  # `check_leading` raises for callers that want an answer
                    self._settle_leadership(self._separation_reason)
                return
        link.close()

    def _separate(self, reason: str, *, is_gone: bool) -> None:
        """Stop replicating to the standby, which may lack events from then on; with the lock held."""
        link, self._link = self._link, None
        if link is not None:
            self._separation_reason, self._is_other_gone = reason, is_gone
            self._rules.note_standby_lost()
            threading.Thread(target=link.close, daemon=True).start()

    def _settle_leadership(self, reason: str) -> None:
        """Record that this server goes on alone, unless it is superseded or rings do not need it; with the lock held.

        Raises:
            LeadershipError: The log cannot be used.
        """
        should_go_on = self._should_go_on()  # before the log is read, which may take longer than rings count as heard
        newest = self._log.latest()
        if newest is None:
            raise _not_leading_error("one whose leadership log is empty", "one that can read it")
        record = self._rules.record_without_other(newest)
        if record is None:
            superseding = f"server {newest.leader} leads without it in term {newest.term}"
            self.superseded = f"one that died, was paused or was cut off: {superseding}"
        elif should_go_on and not self._append_record(record, reason):
            self.superseded = "one that came too late: the other server has gone on without it"

    def _should_go_on(self) -> bool:
        """Return whether to go on rather than leave it to the other server; with the lock held."""
        reachability = Reachability.MOST if self._is_follow_requested else self._reachability()
        is_gone = self._is_follow_requested or self._is_other_gone
        return self._rules.should_go_on(self._clock(), reachability, is_other_gone=is_gone)

    @property
    def _is_follow_requested(self) -> bool:
        """True if the other server has just asked to follow: it has restarted, and has nothing."""
        return self._follow_requested_s is not None and self._clock() - self._follow_requested_s < self._lease_s

    def _append_record(self, record: LeadershipRecord, reason: str) -> bool:
        """Append a record; False if there is another one of that number. With the lock held."""
        self._rules.note_record_pending()
        if self._log.append(record):
            self._rules.adopt(record, self._clock())
            self._on_record(record, reason)
            return True
        return False


def _not_leading_error(got: str, expected: str = "the server that leads") -> NotLeaderError:
    do = "Ask the other server"
    return NotLeaderError(explain("parameter server", got=got, expected=expected, do=do))
