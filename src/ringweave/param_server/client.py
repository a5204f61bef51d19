"""Client of one ring: finds the leading server, pushes exactly once, pulls, takes shards, reconnects."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeVar

from typing_extensions import Buffer

from ringweave import rpc
from ringweave.errors import ConnectionLostError, DeadlineError, NotLeaderError, RemoteError, RpcError, explain
from ringweave.param_server import messages
from ringweave.param_server.data_shards import Span
from ringweave.rpc import state_transfer
from ringweave.rpc.state_transfer import BackgroundThrottle

LEADER_CALL_TIMEOUT_S = 3.0
LEADER_POLL_INTERVAL_S = 0.2
"""Interval in which each server is queried."""
_STATUS_FRESH_S = 1.0
"""A server's answer is outdated after so long."""


@dataclass(frozen=True, slots=True)
class _ServerAnswer:
    """Answer of a server, with its time."""

    status: messages.LeaderStatus
    at_s: float


class LeaderFinder:
    """Finds the leading server of a job, for one ring; thread-safe."""

    def __init__(self, connects: Sequence[Callable[[], rpc.RpcClient]], *, is_monitored: bool = False) -> None:
        """Store the arguments; the first call of `connect_leader` connects.

        Args:
            connects: Each connects to one server; the one that leads at the start comes first.
            is_monitored: The server monitors whether it hears from this ring, so even a single server is asked
                regularly.
        """
        self._connects, self._is_monitored = list(connects), is_monitored
        self._term = 0
        self._connect_lock = threading.Lock()
        self._changed = threading.Condition()
        self._leader_index = 0
        self._client: rpc.RpcClient | None = None
        self._answers: dict[int, _ServerAnswer] = {}
        self._last_error: RpcError | None = None
        self._stopped = threading.Event()
        self._pollers: list[threading.Thread] = []

    def connect_leader(self) -> tuple[rpc.RpcClient, int]:
        """Return a connection to the leading server, and its term.

        Raises:
            WireError: No leading server answers.
        """
        with self._connect_lock:
            with self._changed:
                if self._client is not None:
                    return self._client, self._term
                if self._is_monitored:
                    self._start_pollers()
            index, term = (0, self._term) if len(self._connects) == 1 else self._wait_for_leader()
            try:
                client = self._connects[index]()
            except RpcError:
                with self._changed:
                    self._answers.pop(index, None)
                raise
            with self._changed:
                self._client, self._leader_index, self._term = client, index, term
            return client, term

    def drop_connection(self, client: rpc.RpcClient) -> None:
        """Drop a connection that is of no more use."""
        with self._changed:
            if self._client is client:
                self._client = None
        client.close()

    def close(self) -> None:
        """Close the connections; the next call connects again."""
        with self._changed:
            client, self._client = self._client, None
            pollers, self._pollers = self._pollers, []
            self._stopped.set()
        if client is not None:
            client.close(is_awaited=True)  # so that the next client does not exceed the number of peers
        deadline_s = time.monotonic() + 2 * LEADER_CALL_TIMEOUT_S
        for poller in pollers:
            poller.join(max(0.0, deadline_s - time.monotonic()))

    def _wait_for_leader(self) -> tuple[int, int]:
        """Return index and term of the leading server."""
        with self._changed:
            self._start_pollers()
            self._changed.wait_for(lambda: self._known_leader() is not None, LEADER_CALL_TIMEOUT_S)
            found, reason = self._known_leader(), self._last_error
        if found is None:
            got, do = f"none ({reason})" if reason else "only standbys", "Look at the servers' logs"
            text = explain("parameter server that leads", got=got, expected="one", do=do)
            raise ConnectionLostError(text) from reason
        return found

    def _known_leader(self) -> tuple[int, int] | None:
        """Return the leader of the latest term, by recent answers; with the lock held."""
        since_s = time.monotonic() - _STATUS_FRESH_S
        leading = [(at, each.status) for at, each in self._answers.items() if each.status.leads and each.at_s > since_s]
        return max(((at, entered.term) for at, entered in leading), key=lambda pair: pair[1], default=None)

    def _start_pollers(self) -> None:
        """Start to poll each server; with the lock held."""
        if not self._pollers:
            self._stopped, self._answers, self._last_error = threading.Event(), {}, None
            for index in range(len(self._connects)):
                poller = threading.Thread(
                    target=self._poll_server, args=(index, self._stopped), name="params leader", daemon=True
                )
                self._pollers.append(poller)
                poller.start()

    def _poll_server(self, index: int, stop: threading.Event) -> None:
        client: rpc.RpcClient | None = None
        while not stop.is_set():
            try:
                client = client or self._connects[index]()
                status = _query_leader_status(client)
            except RpcError as error:
                client = None
                self._record_answer(index, None, error)
            else:
                self._record_answer(index, status, None)
            stop.wait(LEADER_POLL_INTERVAL_S)
        if client is not None:
            client.close()

    def _record_answer(self, index: int, status: messages.LeaderStatus | None, reason: RpcError | None) -> None:
        """Record the answer or failure of a server; a leader of a later term replaces the present one."""
        client: rpc.RpcClient | None = None
        with self._changed:
            if status is None:
                self._answers.pop(index, None)
                self._last_error = reason
            else:
                self._answers[index] = _ServerAnswer(status, time.monotonic())
                if status.leads and status.term > self._term and index != self._leader_index:
                    client, self._client = self._client, None
            self._changed.notify_all()
        if client is not None:
            client.abort()  # it may be cut off: a graceful close would have to wait


def _query_leader_status(client: rpc.RpcClient) -> messages.LeaderStatus:
    try:
        status = client.call(messages.LeaderStatusRequest(), timeout_s=LEADER_CALL_TIMEOUT_S).message
    except RpcError:
        client.close()
        raise
    assert isinstance(status, messages.LeaderStatus), "the class of the reply"
    return status


# Every call of a ring to the server is one short method here.


CallResultT = TypeVar("CallResultT")
MakeMessage = Callable[[int], rpc.RpcMessage]
"""Returns the message for the server of a term."""
_RECONNECT_INTERVAL_S = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class RingPush:
    """Push of a ring, without its buffers."""

    sequence: int
    base_version: int
    content: Literal["gradient", "change", "outer_gradient"]
    num_samples: int
    batch_share: float
    fragments: list[int] = field(default_factory=list)
    weight: float = 0.0
    local_steps: int = 0
    absent: list[int] = field(default_factory=list)
    options: list[dict[str, messages.OptimizerOption]] = field(default_factory=list)
    ring_progress: str = ""
    num_batches: int = 1
    pass_number: int = 0
    epoch: int = 0
    spans: list[Span] = field(default_factory=list)


class RingClient:
    """Client of one ring. One thread may push while another takes samples: both share the connection.

    A broken connection is made again, and the call is repeated: the server applies no push twice. If there are several
    servers, another one may lead when the first does not answer any more; calls are repeated there.
    """

    # Longer than a constructor should be: it only stores its arguments, and half of it is its docstring.
    def __init__(  # noqa: PLR0913 - its servers, its ring and its timeouts
        self,
        servers: Sequence[Callable[[], rpc.RpcClient]],
        ring: int,
        *,
        generation_id: Callable[[], tuple[int, int]] | None = None,
        least_incarnations: Callable[[], Mapping[int, int]] = lambda: {},
        is_monitored: bool = False,
        answer_timeout_s: float = 1800.0,
        reconnect_timeout_s: float = 20.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Store the arguments; the first call connects.

        Args:
            servers: Each connects to one server of the job; the one that leads at the start comes first.
            ring: Index of the ring.
            generation_id: Returns the generation of the ring's membership in which this process represents it; the
                server refuses representatives of an earlier one. None where rings lose no members.
            least_incarnations: Returns slot -> least incarnation whose certificate counts; told with the generation.
            is_monitored: No ring waits for this one while the server hears nothing from this client; see
                `LeaderFinder`.
            answer_timeout_s: Longest time of an answer; a pull also waits for the slowest ring.
            reconnect_timeout_s: How long the server may be out of reach, counted from the break of a connection that
                lasted as long, or from the first failure of a call.
            clock: Returns seconds.
            sleep: Waits between two attempts to connect.
        """
        self._leader_finder, self._ring = LeaderFinder(servers, is_monitored=is_monitored), ring
        self._answer_timeout_s, self._reconnect_timeout_s = answer_timeout_s, reconnect_timeout_s
        self._clock, self._sleep = clock, sleep
        self._num_shards = 0
        self._generation_id, self._least_incarnations = generation_id, least_incarnations
        self._registered_leader: tuple[rpc.RpcClient, tuple[int, int]] | None = None
        """Connection and generation for which the leader of the ring is registered."""

    def start_job(self, setup: messages.ServerSetup, parameters: Sequence[Buffer]) -> None:
        """Start the job; only rank 0 calls this."""
        self._ask(lambda term: messages.StartJob(term=term, setup=setup), parameters)

    def benchmark_exchange(
        self, setup: messages.ServerSetup, content: Sequence[Buffer], into: Sequence[Buffer]
    ) -> messages.ExchangeBenchmarkResult:
        """Benchmark a push and a pull before the job starts, without a trace; return the server's costs so far."""
        return self._ask(lambda term: messages.ExchangeBenchmark(term=term, setup=setup), content, into)

    def end_benchmark(self) -> None:
        self._ask(lambda term: messages.EndExchangeBenchmark(term=term))

    def pull(self, after_sequence: int, into: Sequence[Buffer], next_fragment: int = 0) -> int:
        """Fetch all parameters; return their version. `next_fragment` is the one that the ring pushes next."""
        pull = {"ring": self._ring, "after_sequence": after_sequence, "next_fragment": next_fragment}
        return self._ask_as_leader(lambda term: messages.Pull(term=term, **pull), into=into).version

    def push_and_pull(
        self, ring_push: RingPush, content: Sequence[Buffer], into: Sequence[Buffer]
    ) -> tuple[messages.PushResult, messages.PullResult]:
        """Push, and fetch the parameters that follow, of the same fragments, in one round trip.

        Returns:
            The results of the push and of the pull.
        """

        def once(client: rpc.RpcClient, term: int) -> tuple[messages.PushResult, messages.PullResult]:
            pull = messages.Pull(
                term=term, ring=self._ring, after_sequence=ring_push.sequence, fragments=ring_push.fragments
            )
            pushing = client.start(self._push_message(ring_push, term), content, timeout_s=self._answer_timeout_s)
            pulling = client.start(pull, timeout_s=self._answer_timeout_s, into=into)
            try:
                pushed = pushing.wait().message
            except RpcError:
                pulling.cancel()
                raise
            pulled = pulling.wait().message
            assert isinstance(pushed, messages.PushResult), "the class of the reply"
            assert isinstance(pulled, messages.PullResult), "the class of the reply"
            return pushed, pulled

        return self._call_as_leader(once)

    def push(self, ring_push: RingPush, content: Sequence[Buffer]) -> messages.PushResult:
        """Push without fetching parameters: the ring is idle afterwards."""
        return self._ask_as_leader(lambda term: self._push_message(ring_push, term), content)

    def take_shard(
        self,
        epoch: int,
        num_samples: int,
        epoch_samples: int,
        *,
        min_samples: int = 1,
        number: int | None = None,
        ended_epoch: int | None = None,
    ) -> tuple[int, int]:
        """Take the next samples of the ring, as (first, how many); none when the epoch is used up.

        The ring gets at least `min_samples` if there are so many. `number` is that of the shard among the ring's, where
        another client may have asked for it already; None counts this client's. `ended_epoch` is that of an aborted
        pass.
        """
        self._num_shards = shard_number = self._num_shards + 1 if number is None else number
        taken: messages.ShardResult = self._ask_as_leader(
            lambda term: messages.TakeShard(
                term=term,
                ring=self._ring,
                number=shard_number,
                epoch=epoch,
                num_samples=num_samples,
                least=min_samples,
                epoch_samples=epoch_samples,
                ended_epoch=ended_epoch,
            )
        )
        return taken.first, taken.num_samples

    def pause_ring(self) -> None:
        """Pause the ring while it regroups: no ring waits for it until it pushes or pulls."""
        self._ask(lambda term: messages.PauseRing(term=term, ring=self._ring))

    def wait_barrier(self, number: int, epoch: int, text: str) -> dict[int, str]:
        """Wait until all present rings have arrived at the barrier of that number; return the text of each.

        `epoch` is the one that ends with it.
        """
        met: messages.BarrierReply = self._ask_as_leader(
            lambda term: messages.BarrierArrival(term=term, ring=self._ring, number=number, epoch=epoch, text=text)
        )
        return {int(ring): each for ring, each in met.texts.items()}

    def request_assignment(self, slot: int, *, is_starting: bool = False) -> messages.RingAssignmentReply:
        """Return the rings, once the job has started, and the progress of that slot's ring.

        `is_starting` says that no member of the ring has anything in flight.
        """
        return self._ask(lambda term: messages.RingAssignmentRequest(term=term, slot=slot, begins=is_starting))

    def regroup(self, rings: Sequence[Sequence[int]]) -> None:
        """Form other rings; all of them are idle, and each has new clients afterwards."""
        new_rings = [list(ring) for ring in rings]
        self._ask(lambda term: messages.RegroupRings(term=term, ring=self._ring, rings=new_rings))

    def read_snapshot(self) -> dict[str, memoryview] | None:
        """Read the server's present state (`snapshots.parts_from_buffers`); None where another ring reads it.

        Pushes go on; reading yields to other users of the links.
        """

        def once(client: rpc.RpcClient, term: int) -> dict[str, memoryview] | None:
            snapped = client.call(
                messages.SnapshotRequest(term=term, ring=self._ring), timeout_s=self._answer_timeout_s
            ).message
            assert isinstance(snapped, messages.SnapshotReply), "the class of the reply"
            if not snapped.is_there:
                return None
            pace = BackgroundThrottle(lambda: 0.0, threading.Event())
            snapshot = state_transfer.fetch_state(
                client, messages.SNAPSHOT_STATE_NAME, timeout_s=self._answer_timeout_s, throttle=pace
            )
            client.call(messages.ReleaseSnapshot(term=term, ring=self._ring), timeout_s=self._answer_timeout_s)
            return snapshot

        return self._call(once)

    def offer_checkpoint(self, train_step: int, check: str) -> messages.ResumeDecision:
        """Offer a checkpoint; return the decision once all rings have. `check` is empty without a checkpoint."""
        offer = {"ring": self._ring, "train_step": train_step, "check": check}
        return self._ask(lambda term: messages.OfferCheckpoint(term=term, **offer))

    def restore_snapshot(self, content: bytes, decision: messages.ResumeDecision, start: messages.DataStart) -> None:
        """Send the snapshot of the checkpoint from which all resume; see `RestoreSnapshot`."""

        def once(client: rpc.RpcClient, term: int) -> None:
            for first in range(0, len(content), messages.SNAPSHOT_CHUNK_BYTES):
                piece = messages.RestoreSnapshot(
                    term=term,
                    ring=self._ring,
                    num_bytes=len(content),
                    first_byte=first,
                    train_step=decision.train_step,
                    check=decision.check,
                    start=start,
                )
                client.call(
                    piece, [content[first : first + messages.SNAPSHOT_CHUNK_BYTES]], timeout_s=self._answer_timeout_s
                )

        self._call(once)

    def status(self) -> messages.ServerStatus:
        return self._ask(lambda _: messages.ServerStatusRequest())

    def leave_ring(self, *, is_for_good: bool) -> None:
        """Become idle until the next pull; or leave for good and close the connection."""
        self._ask_as_leader(lambda term: messages.LeaveRing(term=term, ring=self._ring, is_for_good=is_for_good))
        if is_for_good:
            self.close()

    def close(self) -> None:
        self._leader_finder.close()

    def _push_message(self, ring_push: RingPush, term: int) -> messages.Push:
        return messages.Push(term=term, ring=self._ring, **asdict(ring_push))

    def _ask(self, make: MakeMessage, content: Sequence[Buffer] = (), into: Sequence[Buffer] | None = None) -> Any:
        """Return the leading server's answer, of class `reply`, to the message that `make` returns for its term."""
        return self._call(self._single_call(make, content, into))

    def _ask_as_leader(
        self, make: MakeMessage, content: Sequence[Buffer] = (), into: Sequence[Buffer] | None = None
    ) -> Any:
        """Ask as `_ask` does, after the representative of the ring is registered at the server."""
        return self._call_as_leader(self._single_call(make, content, into))

    def _single_call(
        self, make: MakeMessage, content: Sequence[Buffer], into: Sequence[Buffer] | None
    ) -> Callable[[rpc.RpcClient, int], rpc.RpcMessage]:
        return lambda client, term: (
            client.call(make(term), content, timeout_s=self._answer_timeout_s, into=into).message
        )

    def _call_as_leader(self, do: Callable[[rpc.RpcClient, int], CallResultT]) -> CallResultT:
        """Call as `_call` does, after the representative of the ring is registered at the server."""

        def once(client: rpc.RpcClient, term: int) -> CallResultT:
            spoken = (client, self._generation_id()) if self._generation_id else None
            if spoken is not None and spoken != self._registered_leader:
                least = sorted(self._least_incarnations().items())
                registration = messages.RegisterRingLeader(
                    term=term, ring=self._ring, generation_id=spoken[1], least_incarnations=least
                )
                client.call(registration, timeout_s=self._answer_timeout_s)
                self._registered_leader = spoken
            return do(client, term)

        return self._call(once)

    def _call(self, do: Callable[[rpc.RpcClient, int], CallResultT]) -> CallResultT:
        """Call the leading server, again on a new connection if one breaks."""
        began_s = self._clock()
        failing_since_s: float | None = None
        while True:
            attempt_began_s, client = self._clock(), None
            try:
                client, term = self._leader_finder.connect_leader()
                return do(client, term)
            except (ConnectionLostError, DeadlineError, RemoteError) as error:
                if isinstance(error, RemoteError) and error.error != NotLeaderError.__name__:
                    raise
                if client is not None:
                    self._leader_finder.drop_connection(client)
                now_s = self._clock()
                if failing_since_s is None or now_s - attempt_began_s >= self._reconnect_timeout_s:
                    failing_since_s = now_s
                if now_s - failing_since_s >= self._reconnect_timeout_s or now_s - began_s >= self._answer_timeout_s:
                    raise
                self._sleep(_RECONNECT_INTERVAL_S)
