"""Client of the membership coordinator: heartbeats, watched directives, and failover to the other coordinator."""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from ringweave import rpc
from ringweave.errors import RpcError
from ringweave.membership import messages
from ringweave.membership.election import Rejoin
from ringweave.membership.failure_detector import HEARTBEAT_INTERVAL_S, CoordinatorMonitor, Heartbeat
from ringweave.membership.membership_records import (
    BeginGeneration,
    GenerationId,
    MemberRules,
    Membership,
    MemberStatus,
    PauseTraining,
    StopTraining,
)
from ringweave.membership.messages import WHOLE_JOB


class CoordinatorConnector:
    """Connects to coordinators by index. One thread calls `connect_spare` and `drop_spare`; any may call the others."""

    def __init__(self, addresses: Sequence[tuple[str, int]], authentication: rpc.PeerAuthentication) -> None:
        self._addresses, self.authentication = list(addresses), authentication
        self._lock = threading.Lock()
        self._spare: _SpareConnection | None = None

    def address(self, index: int) -> tuple[str, int]:
        """Return the address of that coordinator; indices wrap around."""
        return self._addresses[index % len(self._addresses)]

    def connect_spare(self, index: int, patience_s: float) -> None:
        """Begin to connect to that coordinator in the background, unless a spare connection exists."""
        with self._lock:
            if self._spare is None:
                self._spare = _SpareConnection(self, index, patience_s)

    def drop_spare(self) -> None:
        with self._lock:
            spare, self._spare = self._spare, None
        if spare is not None:
            spare.discard()

    def connect(self, index: int, patience_s: float) -> rpc.RpcClient:
        """Return the spare connection, or else a new one; each step of connecting has this timeout.

        Raises:
            WireError: It cannot be reached.
        """
        with self._lock:
            spare, self._spare = self._spare, None
        client = (
            spare.take_client(patience_s)
            if spare is not None and self.address(spare.index) == self.address(index)
            else None
        )
        return client or self.connect_new(index, patience_s)

    def connect_new(self, index: int, patience_s: float) -> rpc.RpcClient:
        """Open a new connection.

        Raises:
            WireError: It cannot be reached.
        """
        limits, (host, port) = rpc.RpcLimits(handshake_s=patience_s), self.address(index)
        return rpc.RpcClient.connect(
            host, port, self.authentication, role="coordinator", limits=limits, timeout_s=patience_s
        )


class _SpareConnection:
    """Spare connection, opened in a thread of its own."""

    def __init__(self, connector: CoordinatorConnector, index: int, patience_s: float) -> None:
        self.index = index
        self._connector, self._patience_s = connector, patience_s
        self._lock, self._connected = threading.Lock(), threading.Event()
        self._client: rpc.RpcClient | None = None
        self._is_needed = True
        threading.Thread(target=self._run, name="ringweave idle connection", daemon=True).start()

    def _run(self) -> None:
        try:
            client = self._connector.connect_new(self.index, self._patience_s)
        except RpcError:
            client = None
        with self._lock:
            self._client, is_needed = client, self._is_needed
        self._connected.set()
        if client is not None and not is_needed:
            client.close()

    def take_client(self, patience_s: float) -> rpc.RpcClient | None:
        """Return the client once it is connected; None if it failed, or is broken."""
        self._connected.wait(patience_s)
        with self._lock:
            client, self._is_needed = self._client, False
        return client if client is not None and client.failure is None else None

    def discard(self) -> None:
        """Close the connection, now or when it is open."""
        with self._lock:
            client, self._is_needed = self._client, False
        if client is not None:
            client.close()


_PROBE_INTERVAL_S = 0.5


class CoordinatorProbe:
    """Probe of a coordinator that was given up: repeated in its own thread while members wait for the other one."""

    def __init__(
        self, connector: CoordinatorConnector, coordinator_index: int, *, part: str, min_term: int, patience_s: float
    ) -> None:
        """Store the arguments; probe nothing yet.

        Args:
            connector: Connects to coordinators.
            coordinator_index: Index of the coordinator to probe.
            part: Part of the job that the membership belongs to.
            min_term: An active coordinator of an earlier term is outdated.
            patience_s: Timeout of one answer.
        """
        self._connector, self._coordinator_index, self._part, self._min_term = (
            connector,
            coordinator_index,
            part,
            min_term,
        )
        self._patience_s = patience_s
        self._stopped, self._is_confirmed = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_active(self) -> bool:
        """The probed coordinator is active, in no earlier term."""
        return self._is_confirmed.is_set()

    def start_once(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ringweave probe", daemon=True)
            self._thread.start()

    def __enter__(self) -> "CoordinatorProbe":
        return self

    def __exit__(self, *_: object) -> None:
        """Stop probing; a call in flight ends by itself, within one or two timeouts."""
        self._stopped.set()

    def _run(self) -> None:
        while not (self._stopped.is_set() or self.is_active):
            with suppress(RpcError):  # it is down, or out of reach
                if self._is_coordinator_active():
                    self._is_confirmed.set()
            self._stopped.wait(_PROBE_INTERVAL_S)

    def _is_coordinator_active(self) -> bool:
        with self._connector.connect_new(self._coordinator_index, self._patience_s) as client:
            count = client.call(messages.CoordinatorStatusRequest(), timeout_s=self._patience_s).message
        assert isinstance(count, messages.CoordinatorStatus), "the class of the reply"
        term = count.parts.get(self._part, 0) if self._part != WHOLE_JOB else count.term if count.is_active else 0
        return term >= self._min_term


CALL_TIMEOUT_S = 3.0
"""Timeout of a call. Heartbeats detect the loss of a coordinator (`CoordinatorMonitor`)."""
COORDINATOR_SEARCH_S = 30.0
"""Longest search for a coordinator by a member that cannot go on without one. Without a working coordinator a settled
generation goes on training."""
_LEAVE_TIMEOUT_S = 5.0
_TAKEOVER_WAIT_S = 4.0
"""Time for a standby to take over, before the member asks the other coordinator again."""
_PROBE_PREVIOUS_AFTER_S = 0.5
"""Delay after which the member probes the coordinator that it left, which may be active after all."""
_RETRY_INTERVAL_S = 0.1
_TIMER_SLACK_S = 0.005
_SPARE_CONNECT_FRACTION = 0.5
"""Fraction of the answer timeout. With less time left, the member connects to the other coordinator in advance."""
_CONNECT_BACKOFF_FACTOR = 2.0
"""Timeout multiplier for each address that does not answer. On a busy machine connecting takes longer than an
answer."""


class MembershipListener(Protocol):
    """Training side of a member, as its membership client sees it.

    The client calls these methods in its own thread; none may block.
    """

    def pause_training(self, *, is_urgent: bool) -> MemberStatus | None:
        """Pause, at once if urgent, and return the status; None if `report_status` will give it later."""
        ...

    def current_status(self) -> MemberStatus:
        """Return the status of this moment; only its name and what it has committed count."""
        ...

    def begin_generation(self, membership: Membership) -> None:
        """Continue in this generation."""
        ...

    def stop_training(self, stop: StopTraining) -> None:
        """Change no state any more."""
        ...


class MembershipClient:
    """Membership client of one member. `start` returns at once; everything else happens in its threads."""

    # Longer than a constructor should be: it only stores, and a third is its docstring.
    def __init__(
        self,
        member: str,
        addresses: Sequence[tuple[str, int]],
        authentication: rpc.PeerAuthentication,
        listener: MembershipListener,
        heartbeat: Callable[[], Heartbeat],
        *,
        join: messages.Join | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Store the arguments.

        Args:
            member: Name of the member, `SLOT.INCARNATION`.
            addresses: Addresses of the coordinators, the one that is active at first before the others.
            authentication: Proves this end, and checks the coordinator.
            listener: Training side of the member.
            heartbeat: Returns the content of the next heartbeat.
            join: Names the part of the job to join; None means the whole job.
            clock: Returns seconds.
        """
        self._connector = CoordinatorConnector(addresses, authentication)
        self._join_request = join or messages.Join()
        self._listener, self._read_heartbeat, self._clock = listener, heartbeat, clock
        self._rules = MemberRules(member)
        self._membership: Membership | None = None
        self._pending_proposal: GenerationId | None = None
        self._is_in_generation = True
        self._failure_report: messages.FailureReport | None = None
        self._is_leaving = False
        self._client: rpc.RpcClient | None = None
        self._is_connected_to_active = False
        self._monitor = CoordinatorMonitor(clock())
        self._last_heartbeat = Heartbeat()
        self._coordinator_index = 0
        self._lock = threading.RLock()
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(run,), name=f"ringweave {name}", daemon=True)
            for run, name in ((self._watch, "orders"), (self._send_heartbeats, "heartbeat"))
        ]

    def start(self) -> "MembershipClient":
        """Start the threads, which ask to become a member."""
        for thread in self._threads:
            thread.start()
        return self

    def report_status(self, status: MemberStatus) -> None:
        """Report the status for the pending proposal, which `pause_training` left unanswered."""
        with self._lock:
            generation_id, self._pending_proposal = self._pending_proposal, None
        if generation_id is not None:
            self._send_status(generation_id, status)

    def report_failure(self, generation_id: GenerationId, suspects: Sequence[str]) -> None:
        """Report that the generation is broken; resent to every other coordinator until there is another generation."""
        failure_report = messages.FailureReport(generation_id=generation_id, suspects=list(suspects))
        if self._membership is None or generation_id >= self._membership.generation_id:
            self._failure_report = failure_report
        self._send(failure_report)

    def leave_membership(self, *, is_finished: bool) -> None:
        """Leave: at the next step boundary, or at once if finished; then wait until a coordinator has confirmed it."""
        leave = messages.LeaveMembership(status=self._listener.current_status(), is_finished=is_finished)
        self._is_leaving = not is_finished
        deadline_s = self._clock() + _LEAVE_TIMEOUT_S
        while not self._send(leave) and is_finished and self._clock() < deadline_s and not self._stopped.is_set():
            self._stopped.wait(_RETRY_INTERVAL_S)

    def close(self, timeout_s: float = _LEAVE_TIMEOUT_S, *, is_graceful: bool = False) -> None:
        """Stop the threads and close the connection, each within `timeout_s`.

        Without `is_graceful` the connection ends as if the process had ended. With it the server knows that this
        process lives.
        """
        self._stopped.set()
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close() if is_graceful else client.abort()
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(timeout_s)

    def _send_status(self, generation_id: GenerationId, status: MemberStatus) -> None:
        self._send(messages.StatusReport(generation_id=generation_id, status=status))

    def _send(self, message: rpc.RpcMessage) -> bool:
        """Send a message; return whether it arrived. If not, drop the connection: the next call starts afresh."""
        client = self._client
        if client is None:
            return False
        try:
            client.call(message, timeout_s=CALL_TIMEOUT_S)
        except RpcError:
            self._drop_connection(client)
            return False
        return True

    def _resend_requests(self) -> None:
        """Resend requests that a lost coordinator may not have received."""
        if self._failure_report is not None:
            self._send(self._failure_report)
        if self._is_leaving:
            self._send(messages.LeaveMembership(status=self._listener.current_status(), is_finished=False))

    def _run(self, run: Callable[[], None]) -> None:
        """Run a thread's function. If it fails, this member leaves, because others would wait for it forever."""
        try:
            run()
        except Exception as error:
            if not self._stopped.is_set():
                self._stopped.set()
                self._listener.stop_training(
                    StopTraining(reason=f"its membership client failed: {error!r}", is_end=False)
                )

    def _send_heartbeats(self) -> None:
        """Send heartbeats in turn; drop a coordinator that leaves one unanswered for too long."""
        in_flight: tuple[rpc.RpcClient, rpc.PendingCall] | None = None
        while not self._stopped.wait(self._heartbeat_delay_s(is_asking=in_flight is not None)):
            with self._lock:
                self._last_heartbeat = self._monitor.observe_self(self._read_heartbeat(), self._clock())
            client = self._client
            if client is None:
                in_flight = None
                continue
            try:
                if in_flight is not None and in_flight[0] is client:
                    if not in_flight[1].is_done:
                        self._check_coordinator_silence(client)
                        continue
                    in_flight[1].wait()
                    self._connector.drop_spare()
                    with self._lock:
                        self._monitor.note_answer(self._clock(), is_active=self._is_connected_to_active)
                in_flight = (
                    client,
                    client.start(
                        messages.HeartbeatReport(heartbeat=self._last_heartbeat), timeout_s=2 * CALL_TIMEOUT_S
                    ),
                )
            except RpcError:
                self._drop_connection(client)

    def _heartbeat_delay_s(self, *, is_asking: bool) -> float:
        with self._lock:
            left_s = self._monitor.until_lost_s(self._clock()) + _TIMER_SLACK_S if is_asking else HEARTBEAT_INTERVAL_S
        return min(HEARTBEAT_INTERVAL_S, left_s)

    def _check_coordinator_silence(self, client: rpc.RpcClient) -> None:
        with self._lock:
            left_s, patience_s = self._monitor.until_lost_s(self._clock()), self._monitor.answer_timeout_s
        if left_s == 0.0:
            self._drop_connection(client)
        elif self._is_connected_to_active and left_s < _SPARE_CONNECT_FRACTION * patience_s:
            self._connector.connect_spare(self._coordinator_index + 1, patience_s)

    def _watch(self) -> None:
        revision = 0
        while not self._stopped.is_set():
            client = self._client
            if client is None:
                client, revision = self._find_coordinator(), 0
                if client is None:
                    continue
                self._resend_requests()
            try:
                update = client.call(messages.MembershipWatch(revision=revision), timeout_s=2 * CALL_TIMEOUT_S).message
            except RpcError:
                self._drop_connection(client)
                continue
            assert isinstance(update, messages.WatchUpdate), "the class of the reply"
            if not update.is_active:  # another coordinator is known to be active
                self._drop_connection(client)
                continue
            revision = update.revision
            self._apply_update(update)

    def _apply_update(self, update: messages.WatchUpdate) -> None:
        for action in self._rules.apply_directive(update.directive):
            match action:
                case PauseTraining():
                    self._pause_training(action)
                case BeginGeneration():
                    self._membership, self._is_in_generation, self._failure_report = action.membership, True, None
                    self._listener.begin_generation(action.membership)
                case StopTraining():
                    self._stopped.set()
                    self._listener.stop_training(action)

    def _pause_training(self, pause: PauseTraining) -> None:
        with self._lock:
            self._pending_proposal, self._is_in_generation = pause.generation_id, False
        status = self._listener.pause_training(is_urgent=pause.is_urgent)
        if status is not None:
            self.report_status(status)

    def _drop_connection(self, client: rpc.RpcClient) -> None:
        with self._lock:
            if self._client is client:
                self._client, self._is_connected_to_active = None, False
        client.close()

    def _find_coordinator(self) -> rpc.RpcClient | None:
        """Join at one of the addresses; None if the search was stopped or failed.

        A member that lost its coordinator begins with the other one: that one takes over, or the lost one is asked
        again.
        """
        since_s = self._clock()
        reason = "no coordinator answers"
        self._coordinator_index += self._membership is not None
        patience_s = CALL_TIMEOUT_S if self._membership is None else self._answer_timeout_s
        while not self._stopped.is_set() and self._clock() - since_s < COORDINATOR_SEARCH_S:
            if self._membership is not None and self._is_in_generation and self._failure_report is None:
                since_s = self._clock()  # training continues without a coordinator
            try:
                client = self._join_at_current(min(CALL_TIMEOUT_S, patience_s))
            except RpcError as error:
                reason = str(error)
            else:
                if client is not None:
                    return client
            self._coordinator_index += 1
            patience_s *= _CONNECT_BACKOFF_FACTOR
            self._stopped.wait(_RETRY_INTERVAL_S)
        if not self._stopped.is_set():
            self._stopped.set()
            self._listener.stop_training(
                StopTraining(reason=f"no coordinator within {COORDINATOR_SEARCH_S:g} s: {reason}", is_end=False)
            )
        return None

    def _join_at_current(self, patience_s: float) -> rpc.RpcClient | None:
        """Join or rejoin there; None if it is a standby that is not active (yet)."""
        client = self._connector.connect(self._coordinator_index, patience_s)
        try:
            client.call(
                self._join_request.model_copy(update={"rejoining": self._rejoin_request()}), timeout_s=patience_s
            )
            with self._lock:
                self._monitor.await_coordinator(self._clock())
                self._client = client
            if self._wait_until_active(client, patience_s):
                return client
        except RpcError:
            self._drop_connection(client)
            raise
        self._drop_connection(client)
        return None

    def _wait_until_active(self, client: rpc.RpcClient, patience_s: float) -> bool:
        """Wait until that coordinator is active; False if it is not in time, or the previous one still is."""
        since_s, membership, revision = self._clock(), self._membership, 0
        least_term, part = membership.generation_id[0] if membership else 0, self._join_request.part
        with CoordinatorProbe(
            self._connector, self._coordinator_index + 1, part=part, min_term=least_term, patience_s=patience_s
        ) as previous:
            while self._clock() - since_s < _TAKEOVER_WAIT_S and not previous.is_active:
                watch = messages.MembershipWatch(revision=revision)  # it is answered as soon as that one is active
                update = client.call(watch, timeout_s=2 * CALL_TIMEOUT_S).message
                assert isinstance(update, messages.WatchUpdate), "the class of the reply"
                if update.is_active:
                    with self._lock:
                        self._is_connected_to_active = True
                    return True
                if membership is None:  # a standby admits no newcomers; it takes over existing members
                    return False
                revision = update.revision
                if self._clock() - since_s > _PROBE_PREVIOUS_AFTER_S:
                    previous.start_once()
        return False

    @property
    def _answer_timeout_s(self) -> float:
        with self._lock:
            return self._monitor.answer_timeout_s

    def _rejoin_request(self) -> Rejoin | None:
        """Return the rejoin request; None before the first generation, when this member joins like any newcomer."""
        promised_id = self._rules.promised_id
        self._rules.forget_coordinator()
        if self._membership is None:
            return None
        status = _without_payloads(self._listener.current_status())
        membership = replace(
            self._membership, statuses=tuple(map(_without_payloads, self._membership.statuses)), finished=()
        )
        with self._lock:
            lost_s, heartbeat = self._monitor.since_active_s(self._clock()), self._last_heartbeat
            patience_s = self._monitor.answer_timeout_s
        return Rejoin(
            status=status,
            membership=membership,
            promised=promised_id,
            is_settled=self._is_in_generation and self._failure_report is None,
            lost_s=lost_s,
            patience_s=patience_s,
            heartbeat=heartbeat,
        )


def _without_payloads(status: MemberStatus) -> MemberStatus:
    """Return the status without the texts that coordinators only forward."""
    return replace(status, note="", layout="", batch_shares="")
