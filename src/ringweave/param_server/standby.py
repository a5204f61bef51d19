"""Two servers of a job: leadership and takeover; the standby copies the leader's state and replays what it replicates.

A server begins with nothing. The first one claims the lead; the other one asks it for its state and follows. A
leader that loses its standby records that it goes on alone; a standby that loses its leader records that it leads.
Either does so once rings show that they need it, and answers nothing before. A server whose record comes too late
is *superseded*: its state is worthless, it acknowledges nothing, and its process ends, to be started again with
nothing.
"""

import argparse
import contextlib
import ipaddress
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from ringweave import rpc
from ringweave.errors import DeadlineError, NotLeaderError, RefusedError, RpcError, UsageError
from ringweave.param_server import replication, snapshots
from ringweave.param_server.barrier import BarrierResult
from ringweave.param_server.data_shards import DataShard
from ringweave.param_server.flat import FlatTensors
from ringweave.param_server.job import ServerJob
from ringweave.param_server.leadership import (
    LEASE_S,
    FailoverRules,
    LeadershipLog,
    LeadershipRecord,
    Reachability,
    RingReachability,
    open_log,
)
from ringweave.param_server.messages import BarrierArrival, LeaveRing, PauseRing, Push
from ringweave.param_server.service import ParameterService
from ringweave.param_server.sessions import ring_of
from ringweave.rpc import Ack, IncomingCall, PeerStatus, RpcCall, RpcHandler, state_transfer
from ringweave.rpc.state_transfer import StateServer
from ringweave.telemetry import print_line

SERVER_STATE_NAME = "server"
"""Name under which the leader publishes its state."""
_RENEWALS_PER_LEASE = 5


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
        self._link: replication.StandbyLink | None = None
        self._separation_reason = ""
        self._is_other_gone = False
        self._follow_requested_s: float | None = None
        self._is_admitting = False
        self._service: ParameterService | None = None
        self.superseded = ""
        """Reason why this server may not go on; empty as long as it may."""

    def begin_leading(self, service: ParameterService) -> None:
        """Lead with the state of this service, if no server ever has.

        Raises:
            LeadershipError: The log cannot be used.
        """
        self._service = service
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
        if link is not None and self._service is not None:
            with self._service.paused_state() as state:
                self.state_server.publish(SERVER_STATE_NAME, {SERVER_STATE_NAME: state})
                self._replicate(link, replication.CopyState())
                self.state_server.unpublish(SERVER_STATE_NAME)

    def replicate_push(self, push: Push, buffers: Sequence[memoryview]) -> None:
        # Not the settled link: the admission of a standby lets no push be applied meanwhile.
        self._replicate(self._link, replication.ReplicatePush(push=push), buffers)

    def replicate_grant(self, ring: int, version: int, ahead: float, *, is_between_pushes: bool) -> None:
        link = self._link if is_between_pushes else self._settled_link()
        self._replicate(link, replication.ReplicateGrant(ring=ring, version=version, ahead=ahead))

    def replicate_fact(self, fact: replication.ReplicatedFact) -> None:
        self._replicate(self._settled_link(), replication.ReplicateFact(fact=fact))

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
        service = self._service
        assert service is not None, "begun"
        with self._changed:
            if self._is_admitting:
                raise _not_leading_error("one that takes a standby in already", "one that is free")
            self._is_admitting = True
        try:
            self._copy_to_standby(service, replication.StandbyLink(self._connect))
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

    def _copy_to_standby(self, service: ParameterService, link: replication.StandbyLink) -> None:
        threading.Thread(target=self._renew_lease, args=(link,), name="params lease", daemon=True).start()
        try:
            with service.paused_state() as state:
                self.state_server.publish(SERVER_STATE_NAME, {SERVER_STATE_NAME: state})
                link.replicate(replication.CopyState())
                with self._changed:
                    self._record_standby(link)
                self.check_leading()
        except BaseException:
            link.close()
            raise

    def _record_standby(self, link: replication.StandbyLink) -> None:
        """Record that the standby has all state; with the lock held."""
        self._separation_reason, self._is_other_gone = "the standby was not taken in", True  # if the claim fails
        if not self._append_record(self._rules.record_with_standby(1 - self._rules.own), "a standby has everything"):
            raise _not_leading_error("one that is not sure of its own records", "one that can take a standby in")
        self._link, self._follow_requested_s = link, None

    def _renew_lease(self, link: replication.StandbyLink) -> None:
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

    def _settled_link(self) -> replication.StandbyLink | None:
        """Return the link, after the admission of a standby is over: it has received all earlier decisions."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_admitting)
            return self._link

    def _replicate(
        self, link: replication.StandbyLink | None, message: rpc.RpcMessage, buffers: Sequence[memoryview] = ()
    ) -> None:
        """Replicate a message to the standby; without one this server goes on alone, if it may."""
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

    def _lose_standby(self, link: replication.StandbyLink, cause: RpcError) -> None:
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
        """Record that this server goes on alone, unless superseded or not needed. Called with the lock held."""
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
    return NotLeaderError("parameter server", got=got, expected=expected, do=do)


class LeaderReplay:
    """Replays the leader's events on a standby; an event that comes twice is applied once."""

    def __init__(self, service: ParameterService) -> None:
        """`service` is this server's own."""
        self._service = service

    def replay_push(self, push: Push, buffers: Sequence[memoryview]) -> None:
        """Apply a push, in the leader's order."""
        with self._job_that_hears(push.ring) as job:
            if job.ledger.receipt(push.ring, push.sequence) is None:
                self._service.apply_push(job, push, buffers)

    def replay_grant(self, ring: int, version: int, ahead: float) -> None:
        """Record that the ring has the parameters of that version, predicted for so many train steps ahead."""
        with self._job_that_hears(ring) as job:
            job.gone.discard(ring)
            job.ledger.grant(ring, version)
            job.prediction.steps_ahead(ring, job.model.progress.total)
            if job.setup.compensation:
                base = FlatTensors(job.setup.tensors)
                job.model.read_parameters(base, ahead)
                job.model.keep_base(ring, base)

    def replay_fact(self, fact: replication.ReplicatedFact) -> None:
        if isinstance(fact, BarrierResult):
            with self._service.changed:
                self._service.started_job().record_barrier_result(fact)
            return
        with self._job_that_hears(fact.ring) as job:
            match fact:
                case DataShard():
                    job.dispatcher.record_shard(fact)
                    job.record_shard(fact)
                case LeaveRing():
                    job.leave_ring(fact.ring, is_for_good=fact.is_for_good)
                case PauseRing():
                    job.ledger.pause(fact.ring)
                case BarrierArrival():
                    job.record_arrival(fact)

    @contextlib.contextmanager
    def _job_that_hears(self, ring: int) -> Iterator[ServerJob]:
        """Hold the service's lock, and note that the ring was heard."""
        with self._service.changed:
            job = self._service.started_job()
            job.note_heard(ring)
            yield job


_STATE_COPY_TIMEOUT_S = 3600.0
_FOLLOW_TIMEOUT_S = 3600.0


class StandbyHandlers:
    """Handlers of a server for the other server of the job."""

    def __init__(
        self, leadership: ServerLeadership, service: ParameterService, connect: Callable[[], rpc.RpcClient]
    ) -> None:
        """`connect` connects to the other server."""
        self._leadership, self._service, self._connect = leadership, service, connect
        self._replay = LeaderReplay(service)
        self._leader_client: rpc.RpcClient | None = None

    def handlers(self) -> list[RpcHandler]:
        return [
            RpcHandler(message=replication.FollowLeader, handle=self._admit_standby),
            RpcHandler(message=replication.CopyState, handle=self._copy_state),
            RpcHandler(message=replication.ReplicatePush, handle=self._replay_push, allocate=self._allocate_push),
            RpcHandler(message=replication.ReplicateGrant, handle=self._replay_grant),
            RpcHandler(message=replication.ReplicateFact, handle=self._replay_fact),
            RpcHandler(message=replication.RenewLease, handle=self._renew_lease),
        ]

    def request_to_follow(self) -> bool:
        """Ask the other server to become its standby; return whether it agreed. Returns after all state is copied."""
        try:
            with self._connect() as client:
                self._leader_client = client
                client.call(replication.FollowLeader(), timeout_s=_FOLLOW_TIMEOUT_S)
        except RpcError:
            return False
        finally:
            self._leader_client = None
        return True

    def _admit_standby(self, call: RpcCall) -> Ack:
        _check_server(call.peer)
        self._leadership.admit_standby()
        return Ack()

    def _copy_state(self, call: RpcCall) -> Ack:
        """Read the state of the leader, which waits for it."""
        _check_server(call.peer)
        client, is_borrowed = self._leader_client, self._leader_client is not None
        client = client or self._connect()
        try:
            timeout_s = min(_STATE_COPY_TIMEOUT_S, call.left_s())
            state = state_transfer.fetch_state(client, SERVER_STATE_NAME, timeout_s=timeout_s)[SERVER_STATE_NAME]
        finally:
            if not is_borrowed:
                client.close()
        if state:
            self._service.resume(snapshots.snapshot_from_bytes(bytes(state)))
        self._leadership.become_standby()
        return Ack()

    def _allocate_push(self, incoming: IncomingCall) -> Sequence[memoryview]:
        _check_server(incoming.peer)
        self._leadership.note_leader_heard()
        return self._service.push_buffers(self._service.started_job(), incoming.message.push, incoming.sizes)

    def _replay_push(self, call: RpcCall) -> Ack:
        self._leadership.note_leader_heard()
        self._replay.replay_push(call.message.push, call.buffers)
        return Ack()

    def _replay_grant(self, call: RpcCall) -> Ack:
        self._check_leader(call)
        granted: replication.ReplicateGrant = call.message
        self._replay.replay_grant(granted.ring, granted.version, granted.ahead)
        return Ack()

    def _replay_fact(self, call: RpcCall) -> Ack:
        self._check_leader(call)
        self._replay.replay_fact(call.message.fact)
        return Ack()

    def _renew_lease(self, call: RpcCall) -> Ack:
        _check_server(call.peer)
        if self._leadership.is_following:  # else it is being admitted
            self._leadership.note_leader_heard()
        elif self._leadership.is_leading or self._leadership.superseded:
            self._leadership.note_leader_heard()  # refuses
        return Ack()

    def _check_leader(self, call: RpcCall) -> None:
        _check_server(call.peer)
        self._leadership.note_leader_heard()


_FOLLOW_RETRY_S = 0.5


def join_as_standby(handlers: StandbyHandlers, leadership: ServerLeadership, stop: Callable[[float], bool]) -> None:
    """Ask until this server leads, follows, or has to end; for a thread of its own."""
    while not (leadership.is_leading or leadership.is_following or leadership.superseded):
        if handlers.request_to_follow() or stop(_FOLLOW_RETRY_S):
            return


def _check_server(peer: rpc.Identity) -> None:
    if peer.role != "server":
        do = "Push and pull: that is what rings do"
        raise RefusedError("caller", got=peer.role, expected="the other server of the job", do=do)


_FRESH_LEASE_FRACTION = 0.5
"""Rings that were heard in the second half of the lease were not lost together with the other server."""


class ReachabilityMonitor:
    """Tracks which rings this server hears, by received bytes on their connections; thread-safe."""

    def __init__(self, host: str, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`host` is the address at which this server listens; see `ServerLeadership` for `lease_s`."""
        self._host, self._lease_s, self._clock = host, lease_s, clock
        self._reachability, self._lock = RingReachability(_FRESH_LEASE_FRACTION * lease_s), threading.Lock()
        self._rings: frozenset[int] = frozenset()
        self._received: dict[tuple[rpc.Identity, str], float] = {}
        self._last_checked_s = clock()
        self._last_heard_s: dict[rpc.Identity, float] = {}

    def observe_peers(self, peers: Sequence[PeerStatus], service: ParameterService) -> None:
        """Check all connections; called regularly. New bytes count from the time of the last check."""
        rings = service.ring_sessions.present_rings()
        job, now_s = service.job, self._clock()
        since_s, self._last_checked_s = self._last_checked_s, now_s
        received = {(peer.identity, peer.address): peer.traffic["bytes_received"] for peer in peers}
        with self._lock:
            self._rings = frozenset(rings)
            for (peer, address), num_bytes in received.items():
                if peer.role == "worker" and num_bytes > self._received.get((peer, address), 0):
                    ring = ring_of(job, peer) if job else None
                    self._last_heard_s[peer] = since_s
                    self._reachability.note_heard(
                        -1 if ring is None else ring, since_s, is_remote=self._is_remote(address)
                    )
            self._received = received
            connected = {peer for peer, _ in received}
            self._last_heard_s = {each: at_s for each, at_s in self._last_heard_s.items() if each in connected}

    def reachability(self) -> Reachability:
        with self._lock:
            return self._reachability.reachability(self._rings, self._clock())

    def recently_heard(self, peers: Sequence[PeerStatus]) -> list[rpc.Identity]:
        """Return the connected peers that were heard lately; others may be cut off without notice."""
        with self._lock:
            since_s = self._clock() - self._lease_s
            return [
                each for each in {peer.identity for peer in peers} if self._last_heard_s.get(each, since_s) > since_s
            ]

    def _is_remote(self, address: str) -> bool:
        """Return whether a peer is heard only over the network; on one machine, where nothing is cut off, all count."""
        host = address.rpartition(":")[0]
        return host != self._host or ipaddress.ip_address(host).is_loopback


_PEER_CONNECT_TIMEOUT_S = 1.0


class ServerPair:
    """One of two servers in its process, with the connection to the other one."""

    def __init__(
        self,
        args: argparse.Namespace,
        authentication: rpc.PeerAuthentication,
        on_record: Callable[[LeadershipRecord, str], object],
    ) -> None:
        """Create the leadership from the arguments of the process.

        Raises:
            UsageError: There is no log of leadership records, or no address.
        """
        host, _, port = args.other.rpartition(":")
        if args.claims is None or not host or not port.isdigit():
            got = f"--other {args.other}" + ("" if args.claims else " without --claims")
            do = "Give the address of the other server and a folder that both can write to"
            raise UsageError("standby", got=got, expected="--other HOST:PORT and --claims DIR", do=do)
        self._address, self._authentication = (host, int(port)), authentication
        self._reachability = ReachabilityMonitor(args.host, args.lease_s)
        self.leadership = ServerLeadership(
            args.index,
            open_log(args.claims),
            self._connect,
            lease_s=args.lease_s,
            reachability=self._reachability.reachability,
            on_record=on_record,
        )
        self._handlers: StandbyHandlers | None = None
        self._last_complaint = ""

    def handlers(self, service: ParameterService) -> list[RpcHandler]:
        self._handlers = StandbyHandlers(self.leadership, service, self._connect)
        return self._handlers.handlers()

    def begin(self, service: ParameterService, stop: threading.Event) -> None:
        """Lead, or ask the other server for its state; called once this one listens."""
        self.leadership.begin_leading(service)
        assert self._handlers is not None, "its handlers are known"
        handlers = self._handlers
        threading.Thread(
            target=join_as_standby, args=(handlers, self.leadership, stop.wait), name="params following", daemon=True
        ).start()

    def tick(self, peers: Sequence[PeerStatus], service: ParameterService) -> None:
        """Take over, go on alone, or leave it to the other server; called regularly.

        Raises:
            LeadershipError: The other server has gone on without this one, which has to end.
        """
        self._reachability.observe_peers(peers, service)
        is_connected = any(peer.identity.role == "server" for peer in peers)
        complaint = ""
        try:
            if self.leadership.tick(is_leader_connected=is_connected):
                service.ring_sessions.note_takeover(self._reachability.recently_heard(peers))
        except NotLeaderError as error:  # the log cannot be used just now
            complaint = str(error)
        if self.leadership.is_blocked:
            complaint = (
                complaint or "answers nothing: it hears neither its standby nor the rings that it needs to go on alone"
            )
        if complaint not in ("", self._last_complaint):
            print_line(f"parameter server: {complaint}", is_error=True)
        self._last_complaint = complaint
        if self.leadership.superseded:
            got, do = self.leadership.superseded, "Start it again: it follows the one that leads"
            raise NotLeaderError("parameter server", got=got, expected="one that is needed", do=do)

    def _connect(self) -> rpc.RpcClient:
        return rpc.RpcClient.connect(
            *self._address, self._authentication, role="server", timeout_s=_PEER_CONNECT_TIMEOUT_S
        )
