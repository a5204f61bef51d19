"""Standby server: copies the leader's state, replays what it replicates, and watches which rings it can reach."""

import argparse
import ipaddress
import threading
import time
from collections.abc import Callable, Sequence
from functools import singledispatchmethod

from ringweave import rpc
from ringweave.errors import NotLeaderError, RefusedError, RpcError, UsageError, explain
from ringweave.param_server import leadership_log, snapshots
from ringweave.param_server.barrier import BarrierResult
from ringweave.param_server.data_shards import DataShard
from ringweave.param_server.failover import SERVER_STATE_NAME, ServerLeadership
from ringweave.param_server.flat import FlatTensors
from ringweave.param_server.job import ServerJob
from ringweave.param_server.leadership import LeadershipRecord, Reachability, RingReachability
from ringweave.param_server.messages import BarrierArrival, LeaveRing, PauseRing, Push
from ringweave.param_server.replication import (
    FACT_MESSAGES,
    CopyState,
    FollowLeader,
    RenewLease,
    ReplicateGrant,
    ReplicatePush,
)
from ringweave.param_server.service import ParameterService
from ringweave.param_server.sessions import ring_of
from ringweave.rpc import Ack, IncomingCall, PeerStatus, RpcCall, RpcHandler, state_transfer
from ringweave.telemetry import print_line


class LeaderReplay:
    """Replays the leader's events on a standby; an event that comes twice is applied once."""

    def __init__(self, service: ParameterService) -> None:
        """`service` is this server's own."""
        self._service = service

    def allocate_push(self, push: Push, sizes: Sequence[int]) -> Sequence[memoryview]:
        """Return memory for a push that the leader applies next."""
        return self._service.push_buffers(self._service.started_job(), push, sizes)

    def replay_push(self, push: Push, buffers: Sequence[memoryview]) -> None:
        """Apply a push, in the leader's order."""

        def book(job: ServerJob) -> None:
            if job.ledger.receipt(push.ring, push.sequence) is None:
                self._service.apply_push(job, push, buffers)

        self._replay(push.ring, book)

    def replay_grant(self, ring: int, version: int, ahead: float) -> None:
        """Record that the ring has the parameters of that version, predicted for so many train steps ahead."""

        def book(job: ServerJob) -> None:
            job.gone.discard(ring)
            job.ledger.grant(ring, version)
            job.prediction.steps_ahead(ring, job.model.progress.total)
            if job.setup.compensation:
                base = FlatTensors(job.setup.tensors)
                job.model.read_parameters(base, ahead)
                job.model.keep_base(ring, base)

        self._replay(ring, book)

    @singledispatchmethod
    def replay_fact(self, fact: object) -> None:
        raise AssertionError(f"no fact: {fact}")

    @replay_fact.register
    def _(self, shard: DataShard) -> None:
        def book(job: ServerJob) -> None:
            job.dispatcher.record_shard(shard)
            job.record_shard(shard)

        self._replay(shard.ring, book)

    @replay_fact.register
    def _(self, leave: LeaveRing) -> None:
        self._replay(leave.ring, lambda job: job.leave_ring(leave.ring, is_for_good=leave.is_for_good))

    @replay_fact.register
    def _(self, pause: PauseRing) -> None:
        self._replay(pause.ring, lambda job: job.ledger.pause(pause.ring))

    @replay_fact.register
    def _(self, meet: BarrierArrival) -> None:
        self._replay(meet.ring, lambda job: job.record_arrival(meet))

    @replay_fact.register
    def _(self, answer: BarrierResult) -> None:
        with self._service.changed:
            self._service.started_job().record_barrier_result(answer)

    def _replay(self, ring: int, apply: Callable[[ServerJob], object]) -> None:
        """Apply an event of a ring that the leader has heard."""
        with self._service.changed:
            job = self._service.started_job()
            job.note_heard(ring)
            apply(job)


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
            RpcHandler(message=FollowLeader, handle=self._admit_standby),
            RpcHandler(message=CopyState, handle=self._copy_state),
            RpcHandler(message=ReplicatePush, handle=self._replay_push, allocate=self._allocate_push),
            RpcHandler(message=ReplicateGrant, handle=self._replay_grant),
            *(RpcHandler(message=each, handle=self._replay_fact) for each in FACT_MESSAGES),
            RpcHandler(message=RenewLease, handle=self._renew_lease),
        ]

    def request_to_follow(self) -> bool:
        """Ask the other server to become its standby; return whether it agreed. Returns after all state is copied."""
        try:
            with self._connect() as client:
                self._leader_client = client
                client.call(FollowLeader(), timeout_s=_FOLLOW_TIMEOUT_S)
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
        rooms: dict[str, bytearray] = {}

        def place(description: state_transfer.StateDescription) -> dict[str, bytearray]:
            rooms.update({piece.name: bytearray(piece.num_bytes) for piece in description.pieces})
            return rooms

        client, is_borrowed = self._leader_client, self._leader_client is not None
        client = client or self._connect()
        try:
            state_transfer.fetch_state(
                client, SERVER_STATE_NAME, place, timeout_s=min(_STATE_COPY_TIMEOUT_S, call.left_s())
            )
        finally:
            if not is_borrowed:
                client.close()
        if rooms[SERVER_STATE_NAME]:
            self._service.resume(snapshots.snapshot_from_bytes(bytes(rooms.pop(SERVER_STATE_NAME))))
        self._leadership.become_standby()
        return Ack()

    def _allocate_push(self, incoming: IncomingCall) -> Sequence[memoryview]:
        _check_server(incoming.peer)
        self._leadership.note_leader_heard()
        return self._replay.allocate_push(incoming.message.push, incoming.sizes)

    def _replay_push(self, call: RpcCall) -> Ack:
        self._leadership.note_leader_heard()
        self._replay.replay_push(call.message.push, call.buffers)
        return Ack()

    def _replay_grant(self, call: RpcCall) -> Ack:
        self._check_leader(call)
        granted: ReplicateGrant = call.message
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


def join_as_standby(
    handlers: StandbyHandlers, leadership: ServerLeadership, stop: Callable[[float], bool], retry_s: float = 0.5
) -> None:
    """Ask until this server leads, follows, or has to end; for a thread of its own."""
    while not (leadership.is_leading or leadership.is_following or leadership.superseded):
        if handlers.request_to_follow() or stop(retry_s):
            return


def _check_server(peer: rpc.Identity) -> None:
    if peer.role != "server":
        do = "Push and pull: that is what rings do"
        raise RefusedError(explain("caller", got=peer.role, expected="the other server of the job", do=do))


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
            raise UsageError(explain("standby", got=got, expected="--other HOST:PORT and --claims DIR", do=do))
        self._address, self._authentication = (host, int(port)), authentication
        self._reachability = ReachabilityMonitor(args.host, args.lease_s)
        self.leadership = ServerLeadership(
            args.index,
            leadership_log.open_log(args.claims),
            self._connect,
            lease_s=args.lease_s,
            reachability=self._reachability.reachability,
            on_record=on_record,
        )
        self._handlers: StandbyHandlers | None = None
        self._last_complaint = ""

    def handlers(self, service: ParameterService) -> list[RpcHandler]:
        """Return the handlers for the RPC server beside those of the service."""
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
            raise NotLeaderError(explain("parameter server", got=got, expected="one that is needed", do=do))

    def _connect(self) -> rpc.RpcClient:
        return rpc.RpcClient.connect(
            *self._address, self._authentication, role="server", timeout_s=_PEER_CONNECT_TIMEOUT_S
        )
