"""Coordinator service over RPC: calls of members become events, directives become answers.

Each part of a job (the whole job, each ring, the startup rendezvous) has a coordinator of its own, so a change in
one does not pause another. All of them run in one process; a member talks to the part that it joined last.
"""

import errno
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ringweave import relayed_address, rpc
from ringweave.errors import RefusedError, RpcError
from ringweave.membership import messages
from ringweave.membership.coordinator import Coordinator
from ringweave.membership.membership_records import (
    KEPT_INCARNATIONS,
    NO_GENERATION,
    GenerationId,
    MemberDirective,
    Membership,
    MemberStatus,
)
from ringweave.membership.messages import STARTUP_RENDEZVOUS, WHOLE_JOB, CoordinatorStatus
from ringweave.membership.settings import MemberBounds, MembershipSettings
from ringweave.rpc import Ack, Identity, RpcCall, RpcHandler, RpcMessage, RpcReply


class CoordinatorListener:
    """Listener that ignores all decisions; a subclass overrides some methods. Called with a lock held: be short.

    `part` is the part of the job, `term` that of the coordinator.
    """

    def generation_begun(self, part: str, membership: Membership, term: int) -> None:
        """A generation has begun, or goes on with another coordinator."""

    def member_lost(self, part: str, member: str, reason: str, term: int) -> None:
        """A member is evicted, or about to be."""

    def member_returned(self, part: str, member: str, term: int) -> None:
        """A silent member has returned, before a generation has begun without it."""

    def standstill_restarted(self, part: str, generation_id: GenerationId) -> None:
        """In this generation all members waited for each other in vain, and another one follows."""


NUM_PROBES, PROBE_INTERVAL_S = 2, 0.05
"""Number of connection attempts, and seconds between them. One SYN may be lost."""
MAX_PROBE_PAUSE_S = 1.0
"""Longest pause between two such looks for a member, each of which it records as a refused connection."""
PROBE_TIMEOUT_S = 0.15
"""Wait after the last attempt. On a network that a job of several nodes can use, an answer takes a tenth of that."""
_UNREACHABLE_ERRNOS = frozenset(
    {errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT}
)


def unreachable_members(addresses: Mapping[str, str]) -> dict[str, bool]:
    """Return the members at whose addresses nothing listens any more, and whether their processes have ended.

    Two connection attempts that send nothing show it. A node that refuses lives, and no process has the port. A relay
    refuses also while it does not reach the host behind it, which proves nothing. A member that cannot be probed, for
    example by a name instead of an address, counts as reachable.

    Args:
        addresses: Member -> `HOST PORT` at which it listens as long as it lives.
    """
    codes: dict[socket.socket, int] = {}
    probes: dict[str, list[socket.socket]] = {}
    for number in range(NUM_PROBES):
        time.sleep(PROBE_INTERVAL_S if number else 0.0)
        for member, address in addresses.items():
            if (probe := _start_probe(address)) is not None:
                probes.setdefault(member, []).append(probe[0])
                codes[probe[0]] = probe[1]
    answers = _await_answers(codes, PROBE_TIMEOUT_S)
    for sock in codes:
        sock.close()
    found: dict[str, bool] = {}
    for member, socks in probes.items():
        answered = {answers[sock] for sock in socks if sock in answers}
        if answered <= _UNREACHABLE_ERRNOS:
            is_direct = not relayed_address.is_relayed(addresses[member].partition(" ")[0])
            found[member] = is_direct and errno.ECONNREFUSED in answered
    return found


def _start_probe(address_text: str) -> tuple[socket.socket, int] | None:
    """Begin to connect; return the socket and the error number so far, None if that cannot be tried."""
    host, _, port = address_text.partition(" ")
    if not (port.isascii() and port.isdigit() and len(port) < 6 and 0 < int(port) < 1 << 16):
        return None
    try:
        infos = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        family, kind, protocol, _, address = infos[0]
        sock = socket.socket(family, kind, protocol)
    except (OSError, ValueError):
        return None
    sock.setblocking(False)
    code = sock.connect_ex(address)
    if code in {0, errno.EINPROGRESS, *_UNREACHABLE_ERRNOS}:
        return sock, code
    sock.close()
    return None


def _await_answers(probes: Mapping[socket.socket, int], timeout_s: float) -> dict[socket.socket, int]:
    """Return the error number of each socket that was answered in time: 0 if it is connected."""
    answers = {sock: code for sock, code in probes.items() if code != errno.EINPROGRESS}
    waiting = {sock.fileno(): sock for sock in probes if sock not in answers}
    poll, deadline_s = select.poll(), time.monotonic() + timeout_s
    for number in waiting:
        poll.register(number, select.POLLOUT)
    is_over = False
    while waiting and not is_over:
        left_s = deadline_s - time.monotonic()
        is_over = left_s <= 0.0  # then once more: this process may have been descheduled while answers came
        for number, _ in poll.poll(max(0.0, left_s) * 1000):
            poll.unregister(number)
            sock = waiting.pop(number)
            answers[sock] = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    return answers


_WORKER_ROLE = "worker"
"""Role of processes that may become members."""
_WATCH_TIMEOUT_S = 0.5
"""Longest wait before the same directive is sent again."""


class CoordinatorService:
    """Thread-safe service around one coordinator."""

    def __init__(
        self,
        coordinator: Coordinator,
        *,
        clock: Callable[[], float] = time.monotonic,
        part: str = WHOLE_JOB,
        listener: CoordinatorListener | None = None,
        find_unreachable: Callable[[Mapping[str, str]], Mapping[str, bool]] = unreachable_members,
    ) -> None:
        """Store the arguments.

        Args:
            coordinator: The state machine.
            clock: Returns seconds.
            part: Part of the job that the members belong to.
            listener: Receives the decisions.
            find_unreachable: Returns the unreachable ones of these members, by their addresses; see
                `unreachable_members`.
        """
        self._find_unreachable = find_unreachable
        self._coordinator, self._clock = coordinator, clock
        self._part, self._listener = part, listener or CoordinatorListener()
        self._changed = threading.Condition()
        self._directives: dict[str, tuple[int, MemberDirective]] = {}
        self._reported: tuple[Membership | None, int] = None, 0
        """Generation that was last reported, and the term in which it was."""
        self._num_standstill_restarts = 0
        self._reported_members: set[str] = set()
        self._reported_lost: set[str] = set()
        self._handlers_by_type = {each.message: each.handle for each in self.handlers()}

    def handlers(self) -> list[RpcHandler]:
        return [
            RpcHandler(message=messages.Join, handle=self._join),
            RpcHandler(message=messages.MembershipWatch, handle=self._watch),
            RpcHandler(message=messages.HeartbeatReport, handle=self._record_heartbeat, is_quick=True),
            RpcHandler(message=messages.StatusReport, handle=self._report_status),
            RpcHandler(message=messages.FailureReport, handle=self._report_failure),
            RpcHandler(message=messages.LeaveMembership, handle=self._request_leave),
            RpcHandler(message=messages.CoordinatorStatusRequest, handle=lambda _: self.status()),
        ]

    def dispatch(self, call: RpcCall) -> RpcReply | RpcMessage:
        return self._handlers_by_type[type(call.message)](call)

    @property
    def end_reason(self) -> str:
        """Reason of the end of the job; empty while it runs."""
        return self._coordinator.end_reason

    @property
    def num_present(self) -> int | None:
        """Present members of the present generation; None before the first, and on a standby."""
        with self._changed:
            coordinator = self._coordinator
            if coordinator.membership is None or not coordinator.is_active:
                return None
            return len(set(coordinator.membership.members) & set(coordinator.present))

    @property
    def has_finished(self) -> bool:
        with self._changed:
            return self._coordinator.has_finished

    def end_job(self, reason: str) -> None:
        self._apply_event(lambda _now_s: self._coordinator.end_job(reason))

    def announce_starts(self, members: Collection[str]) -> None:
        """Note that these are about to be started: earlier processes of their slots have ended."""
        for member in members:
            self._apply_event(lambda now_s, member=member: self._coordinator.announce_start(member, now_s))

    def tick(self, connected: Callable[[], Collection[str]]) -> None:
        """Advance the time; `connected` returns the names of connected members.

        It is called with the lock held: a member that has joined by then was connected before.
        """
        with self._changed:
            connected_members = connected()
            for member in self._coordinator.present:
                if member not in connected_members:
                    self._coordinator.note_disconnect(member)
            self._coordinator.tick(self._clock())
            self._publish()

    def peer_exited(self, peer: Identity) -> None:
        """Note that a process has closed its connection abruptly; see `rpc.RpcServer`."""
        if peer.role == _WORKER_ROLE:
            self._apply_event(lambda now_s: self._coordinator.note_process_exit(peer.name, now_s))

    def update_from_other(self, other: CoordinatorStatus) -> None:
        """Apply the state of the other coordinator."""
        if other.is_active:
            self._apply_event(lambda _now_s: self._coordinator.note_other_active(other.term, other.generation_id))
        else:
            self._apply_event(self._coordinator.note_other_idle)

    def _apply_event(self, action: Callable[[float], object]) -> Ack:
        with self._changed:
            action(self._clock())
            self._publish()
        return Ack()

    def _publish(self) -> None:
        """Wake members whose directive has changed, and report events; with the lock held."""
        coordinator = self._coordinator
        present = set(coordinator.present) if coordinator.is_active else set()
        if not coordinator.is_active:  # a standby has no members, nor has one that has stepped down
            self._reported_members.clear()
            self._reported_lost.clear()
        for member in sorted(self._reported_lost & present):
            self._listener.member_returned(self._part, member, coordinator.term)
        self._reported_lost = (self._reported_lost | self._reported_members) - present
        for member in sorted(self._reported_members - present):
            self._listener.member_lost(self._part, member, coordinator.eviction_reason(member), coordinator.term)
        self._reported_members = present
        if coordinator.num_standstill_restarts > self._num_standstill_restarts and coordinator.membership is not None:
            self._listener.standstill_restarted(self._part, coordinator.membership.generation_id)
        self._num_standstill_restarts = coordinator.num_standstill_restarts
        reported = coordinator.membership, coordinator.term
        if coordinator.membership is not None and reported != self._reported:
            if coordinator.membership is not self._reported[0]:
                self._reported_lost.clear()
            self._reported = reported
            self._listener.generation_begun(self._part, coordinator.membership, coordinator.term)
        if probe_targets := coordinator.take_probe_targets():
            threading.Thread(target=self._probe, args=(probe_targets,), name="ringweave seeking", daemon=True).start()
        for member in [each for each in self._directives if coordinator.is_long_gone(each)]:
            del self._directives[member]
        changed = [each for each, (_, order) in self._directives.items() if coordinator.directive_for(each) != order]
        for member in changed:
            self._directives[member] = (self._directives[member][0] + 1, coordinator.directive_for(member))
        if changed:
            self._changed.notify_all()

    def _probe(self, targets: Mapping[str, str]) -> None:
        """Look for members as long as they are awaited: a killed process listens until the kernel has its memory."""
        pause_s = PROBE_INTERVAL_S
        while targets:
            for member, has_ended in self._find_unreachable(targets).items():
                self._apply_event(
                    lambda now_s, member=member, has_ended=has_ended: self._coordinator.note_unreachable(
                        member, now_s, has_ended=has_ended
                    )
                )
            with self._changed:
                awaited = self._coordinator.awaited_voters
                targets = {member: address for member, address in targets.items() if member in awaited}
            time.sleep(pause_s if targets else 0.0)
            pause_s = min(MAX_PROBE_PAUSE_S, 2 * pause_s)

    def _join(self, call: RpcCall) -> Ack:
        if call.peer.role != _WORKER_ROLE:
            raise RefusedError(
                "role of a member", got=call.peer.role, expected=_WORKER_ROLE, do="Check which process called"
            )
        member, rejoin = call.peer.name, call.message.rejoining
        if rejoin is None:
            return self._apply_event(lambda now_s: self._coordinator.join(member, now_s))
        _check_sender(member, rejoin.status)
        return self._apply_event(lambda now_s: self._coordinator.rejoin(rejoin, now_s))

    def _watch(self, call: RpcCall) -> messages.WatchUpdate:
        member, known_revision = call.peer.name, call.message.revision
        with self._changed:
            known = self._directives.setdefault(member, (1, self._coordinator.directive_for(member)))
            self._changed.wait_for(
                lambda: self._directives.get(member, known)[0] != known_revision or call.cancelled.is_set(),
                _WATCH_TIMEOUT_S,
            )
            after_long_gone = known[0] + 1, self._coordinator.directive_for(member)
            revision, directive = self._directives.get(member, after_long_gone)
            # A member that paused while this one stepped down and became active again must ask anew, or it hangs.
            is_active = self._coordinator.is_active and self._coordinator.knows_member(member)
            return messages.WatchUpdate(revision=revision, is_active=is_active, directive=directive)

    def _record_heartbeat(self, call: RpcCall) -> Ack:
        return self._apply_silently(
            lambda now_s: self._coordinator.record_heartbeat(call.peer.name, call.message.heartbeat, now_s)
        )

    def _apply_silently(self, action: Callable[[float], object]) -> Ack:
        """Apply an event that changes no directive."""
        with self._changed:
            action(self._clock())
        return Ack()

    def _report_status(self, call: RpcCall) -> Ack:
        _check_sender(call.peer.name, call.message.status)
        return self._apply_event(
            lambda now_s: self._coordinator.report_status(call.message.generation_id, call.message.status, now_s)
        )

    def _report_failure(self, call: RpcCall) -> Ack:
        message: messages.FailureReport = call.message
        return self._apply_event(
            lambda now_s: self._coordinator.report_failure(
                call.peer.name, message.generation_id, message.suspects, now_s
            )
        )

    def _request_leave(self, call: RpcCall) -> Ack:
        message: messages.LeaveMembership = call.message
        _check_sender(call.peer.name, message.status)
        return self._apply_event(
            lambda now_s: self._coordinator.request_leave(message.status, now_s, is_finished=message.is_finished)
        )

    def status(self) -> CoordinatorStatus:
        with self._changed:
            coordinator, membership = self._coordinator, self._coordinator.membership
            return CoordinatorStatus(
                term=coordinator.term,
                is_active=coordinator.is_active,
                generation_id=membership.generation_id if membership else NO_GENERATION,
                members=list(membership.members) if membership else [],
                committed=membership.last_committed if membership else 0,
                present=list(coordinator.present),
                ended=coordinator.end_reason,
            )


def _check_sender(member: str, status: MemberStatus) -> None:
    """Refuse a message about another member than its sender."""
    if status.member != member:
        raise RefusedError(
            "member", got=status.member, expected=f"{member}, as the certificate says", do="Check which process called"
        )


_MAX_PARTS = 4096
"""More parts are refused: each costs memory, and any process with credentials may ask for one."""


class CoordinatorSet:
    """Coordinators of a job and of its parts; that of a part is made when the first member joins it."""

    def __init__(
        self,
        whole_job: CoordinatorService,
        make_service: Callable[[str, MembershipSettings], CoordinatorService],
        settings: MembershipSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Store the arguments; no part is known yet.

        Args:
            whole_job: Coordinator of the whole job.
            make_service: Makes the coordinator of a part, from its name and settings.
            settings: Settings of the whole job.
            clock: Returns seconds.
        """
        self._make_service, self._settings, self._clock = make_service, settings, clock
        self._lock = threading.Lock()
        self._services = {WHOLE_JOB: whole_job}
        self._part_of: dict[str, str] = {}
        self._too_few_since_s: float | None = None

    def handlers(self) -> list[RpcHandler]:
        forwarded = [
            RpcHandler(message=each, handle=self._forward)
            for each in (
                messages.MembershipWatch,
                messages.StatusReport,
                messages.FailureReport,
                messages.LeaveMembership,
            )
        ]
        forwarded.append(RpcHandler(message=messages.HeartbeatReport, handle=self._forward, is_quick=True))
        return [
            RpcHandler(message=messages.Join, handle=self._join),
            RpcHandler(message=messages.CoordinatorStatusRequest, handle=self._report_status),
            *forwarded,
        ]

    @property
    def end_reason(self) -> str:
        """Reason of the end of the job or of all its parts; empty while one of them runs."""
        parts = [each for name, each in self.services() if name not in (WHOLE_JOB, STARTUP_RENDEZVOUS)]
        end_reasons = [each.end_reason for each in parts] or [self._services[WHOLE_JOB].end_reason]
        return end_reasons[0] if all(end_reasons) else ""

    def announce_start(self, members: Collection[str]) -> None:
        """Note that these are about to be started as members of the whole job; see `Coordinator.announce_start`."""
        self._services[WHOLE_JOB].announce_starts(members)

    def tick(self, connected: Callable[[], Collection[str]]) -> None:
        """Advance the time; `connected` returns the names of connected members, when each part asks."""
        for _, each in self.services():
            each.tick(connected)
        self._end_if_too_few()

    def peer_exited(self, peer: Identity) -> None:
        """Note that a process has closed its connection abruptly; see `rpc.RpcServer`."""
        self._service_of(peer.name).peer_exited(peer)

    def update_from_other(self, other: CoordinatorStatus) -> None:
        """Apply the state of the other coordinator."""
        terms = {**other.parts, WHOLE_JOB: other.term if other.is_active else 0}
        for name, each in self.services():
            term, generation_id = (
                terms.get(name, 0),
                other.generation_id if name == WHOLE_JOB else other.generations.get(name, NO_GENERATION),
            )
            if (
                name == STARTUP_RENDEZVOUS and not term
            ):  # nothing is lost with it: a member that finds it gone starts anew
                continue
            each.update_from_other(
                other.model_copy(update={"term": term, "is_active": term > 0, "generation_id": generation_id})
            )

    def _end_if_too_few(self) -> None:
        """End the job if too few members are left in all rings together, and no others come."""
        rings = [each for name, each in self.services() if name not in (WHOLE_JOB, STARTUP_RENDEZVOUS)]
        counts = [each.num_present for each in rings]
        min_members, now_s = self._settings.bounds.min_members, self._clock()
        num_here = sum(each for each in counts if each is not None)
        if (
            not rings
            or self.end_reason
            or None in counts
            or num_here >= min_members
            or any(each.has_finished for each in rings)
        ):
            self._too_few_since_s = None
            return
        self._too_few_since_s = since_s = self._too_few_since_s or now_s
        if now_s - since_s > self._settings.member_wait_s:
            waited = f"{self._settings.member_wait_s:g} s"
            for each in rings:
                each.end_job(
                    f"workers left: {num_here} in {len(rings)} rings, expected at least {min_members}, "
                    f"and no other came within {waited}"
                )

    def services(self) -> list[tuple[str, CoordinatorService]]:
        """Return the coordinators of the whole job and of its parts, by name of the part."""
        with self._lock:
            return list(self._services.items())

    def _service_of(self, member: str) -> CoordinatorService:
        with self._lock:
            return self._services[self._part_of.get(member, WHOLE_JOB)]

    def _join(self, call: RpcCall) -> Any:
        message: messages.Join = call.message
        with self._lock:
            service = self._services.get(message.part) or self._add_part(message)
            self._note_part(call.peer.name, message.part)
        return service.dispatch(call)

    def _note_part(self, member: str, part: str) -> None:
        """Note the part that a member has joined, and forget those of processes of its slot long before; locked."""
        self._part_of.pop(member, None)
        self._part_of[member] = part
        slot = member.partition(".")[0]
        of_slot = [each for each in self._part_of if each.partition(".")[0] == slot]
        for each in of_slot[:-KEPT_INCARNATIONS]:
            del self._part_of[each]

    def _add_part(self, message: messages.Join) -> CoordinatorService:
        """Add the coordinator of a part for the first member that joins it; with the lock held."""
        if len(self._services) > _MAX_PARTS:
            raise RefusedError(
                "part of the job", got=message.part, expected=f"one of {_MAX_PARTS}", do="Check which process called"
            )
        if message.part == STARTUP_RENDEZVOUS:
            settings = replace(self._settings, expected=message.expected)
        else:
            bounds = MemberBounds(min_members=1, max_members=message.expected)
            settings = replace(self._settings, bounds=bounds, expected=message.expected, has_external_state=True)
        service = self._make_service(message.part, settings)
        self._services[message.part] = service
        return service

    def _forward(self, call: RpcCall) -> Any:
        return self._service_of(call.peer.name).dispatch(call)

    def _report_status(self, call: RpcCall) -> CoordinatorStatus:
        del call
        statuses = {name: each.status() for name, each in self.services()}
        active = {name: count for name, count in statuses.items() if name != WHOLE_JOB and count.is_active}
        terms = {name: count.term for name, count in active.items()}
        generations = {name: count.generation_id for name, count in active.items()}
        return statuses[WHOLE_JOB].model_copy(
            update={"parts": terms, "generations": generations, "ended": self.end_reason}
        )


def make_coordinator_set(
    job_settings: MembershipSettings,
    *,
    index: int,
    is_standby: bool,
    listener: CoordinatorListener,
    clock: Callable[[], float] = time.monotonic,
) -> CoordinatorSet:
    """Make the coordinators of one process.

    Args:
        job_settings: Settings of the whole job.
        index: Index of this one of the job's two processes.
        is_standby: It decides nothing until members ask it to take over.
        listener: Receives the decisions.
        clock: Returns seconds.
    """

    def make(part: str, settings: MembershipSettings) -> CoordinatorService:
        return CoordinatorService(
            Coordinator(settings, now_s=clock(), index=index, is_standby=is_standby),
            clock=clock,
            part=part,
            listener=listener,
        )

    return CoordinatorSet(make(WHOLE_JOB, job_settings), make, job_settings, clock)


_POLL_INTERVAL_S = 1.0
_POLL_TIMEOUT_S = 3.0


class OtherCoordinatorPoller:
    """Polls the other coordinator; one that was active in an older term learns so that it is superseded."""

    def __init__(
        self,
        address: tuple[str, int],
        authentication: rpc.PeerAuthentication,
        on_status: Callable[[CoordinatorStatus], object],
    ) -> None:
        """Store the address of the other coordinator, and the callback for its state."""
        self._address, self._authentication, self._on_status = address, authentication, on_status
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ringweave other coordinator", daemon=True)

    def __enter__(self) -> "OtherCoordinatorPoller":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join(_POLL_TIMEOUT_S)

    def _run(self) -> None:
        while not self._stopped.wait(_POLL_INTERVAL_S):
            with suppress(RpcError):  # it is down, or unreachable: no answer is possible
                self._poll()

    def _poll(self) -> None:
        host, port = self._address
        with rpc.RpcClient.connect(
            host, port, self._authentication, role="coordinator", timeout_s=_POLL_TIMEOUT_S
        ) as client:
            while not self._stopped.is_set():
                status = client.call(messages.CoordinatorStatusRequest(), timeout_s=_POLL_TIMEOUT_S).message
                assert isinstance(status, CoordinatorStatus), "the class of the reply"
                self._on_status(status)
                self._stopped.wait(_POLL_INTERVAL_S)
