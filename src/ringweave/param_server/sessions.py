"""Sessions of rings at the server: registration of leaders, pauses, barriers, assignments and silence."""

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from ringweave.errors import DeadlineError, RefusedError
from ringweave.membership.failure_detector import HEARTBEAT_TIMEOUT, ArrivalHistory
from ringweave.param_server import messages
from ringweave.param_server.barrier import BarrierResult
from ringweave.param_server.job import ServerJob
from ringweave.param_server.replication import Replicator
from ringweave.rpc import Ack, Identity, PeerStatus, RpcCall, RpcHandler

if TYPE_CHECKING:
    from ringweave.param_server.service import ParameterService

_SERVER_STALL_S = 0.5
"""Time between two checks above which this process itself was stopped, saved, or starved."""


class RingSilenceDetector:
    """Detects silent rings: learns the usual gaps between their messages, as membership does.

    The gaps include the delay of this process, so there is no extra grace. A false detection costs little, since a ring
    that no other waits for goes on all the same.
    """

    def __init__(self, now_s: float) -> None:
        """Start with no ring heard."""
        self._last_checked_s = now_s
        self._arrivals: dict[int, ArrivalHistory] = {}
        self._received: dict[tuple[Identity, str], float] = {}

    def silent_rings(
        self, peers: Sequence[PeerStatus], ring_of: Callable[[Identity], int | None], now_s: float
    ) -> set[int]:
        """Return the rings that are silent for unusually long; called regularly.

        `ring_of`: returns the ring of a peer; None if it is in none.
        """
        if now_s - self._last_checked_s > _SERVER_STALL_S:
            for history in self._arrivals.values():
                history.excuse(now_s)
        self._last_checked_s = now_s
        received = {(peer.identity, peer.address): peer.traffic["bytes_received"] for peer in peers}
        heard = {ring_of(peer[0]) for peer, num_bytes in received.items() if num_bytes > self._received.get(peer, 0)}
        self._received = received
        for ring in heard:
            if ring is not None:
                history = self._arrivals.setdefault(ring, ArrivalHistory(HEARTBEAT_TIMEOUT, now_s))
                if history.is_overdue(now_s):  # it was away: the gap is not usual
                    history.excuse(now_s)
                history.observe(now_s)
        return {ring for ring, history in self._arrivals.items() if history.is_overdue(now_s)}


RING_ABSENT_S = 15.0
"""Barriers do not wait for a ring after its connection closed abruptly and it was silent for so long: all of its
members are dead, or none has replaced its representative. Regrouping takes a second or two."""
SILENT_RING_S = 3.0
"""The same for a ring whose messages are overdue for so long, while its connections are open or not."""
_BARRIER_POLL_S = 0.5


class RingSessions:
    """Handlers for sessions of rings: registration, pauses, barriers, assignments."""

    def __init__(self, service: "ParameterService", replicator: Replicator, clock: Callable[[], float]) -> None:
        """`replicator` knows whether this server leads, and replicates the rings' messages to the standby."""
        self._service, self._replicator, self._clock = service, replicator, clock
        self._silence_detector = RingSilenceDetector(clock())
        self._overdue_since_s: dict[int, float] = {}
        self._incarnations_lock = threading.Lock()
        self._least_incarnations: dict[int, int] = {}
        """Slot -> least incarnation of a worker whose certificate counts."""

    def handlers(self) -> list[RpcHandler]:
        return [
            RpcHandler(
                message=messages.LeaderStatusRequest,
                handle=lambda _: messages.LeaderStatus(term=self._replicator.term, leads=self._replicator.may_answer),
            ),
            RpcHandler(message=messages.RegisterRingLeader, handle=self._register_leader),
            RpcHandler(message=messages.PauseRing, handle=self._pause_ring),
            RpcHandler(message=messages.BarrierArrival, handle=self._wait_at_barrier),
            RpcHandler(message=messages.RingAssignmentRequest, handle=self._assign_ring),
        ]

    def note_disconnect(self, peer: Identity) -> None:
        """Note an abrupt disconnect of a process: its ring regroups, is dead or cut off, and no ring waits for it.

        Where rings lose no members only a connection has broken: the ring computes, and returns with its push. The
        others wait for it at the staleness bound; if it is dead, the run ends.
        """
        with self._service.changed:
            job = self._service.job
            ring = ring_of(job, peer) if job and peer.role == "worker" else None
            if job is None or ring is None or ring in job.gone:
                return
            self._mark_away(job, ring)
            self._service.changed.notify_all()

    def check_silence(self, peers: Sequence[PeerStatus]) -> set[int]:
        """Check which rings are silent; called regularly. They delay no other ring until they are heard again.

        They may only be stopped, or cut off for a moment, so barriers wait for them for `SILENT_RING_S`.

        Returns:
            The rings that no other waits for from now on.
        """
        with self._service.changed:
            job = self._service.job
            if job is None or not job.setup.may_lose_members:
                return set()
            ring = lambda peer: ring_of(job, peer) if peer.role == "worker" else None  # noqa: E731 - for this job
            now_s = self._clock()
            overdue = self._silence_detector.silent_rings(peers, ring, now_s)
            self._overdue_since_s = {each: self._overdue_since_s.get(each, now_s) for each in overdue}
            found = overdue - job.silent - job.gone - job.away_s.keys()
            for each in found:
                self._stop_waiting_for(job, each)
            job.silent |= found
            if found:
                self._service.changed.notify_all()
            return found

    def note_takeover(self, connected: Iterable[Identity]) -> None:
        """Note that this server leads from now on: rings without a connection to it may be dead.

        A ring whose representative lives has a connection to both servers. No ring waits for the others until they are
        heard, and barriers give them as long as after a disconnect at this moment.
        """
        with self._service.changed:
            job = self._service.job
            if job is None:
                return
            connected_rings = {ring_of(job, peer) for peer in connected if peer.role == "worker"} - job.away_s.keys()
            for ring in set(range(len(job.setup.rings))) - connected_rings - job.gone:
                self._mark_away(job, ring)
            self._service.changed.notify_all()

    def present_rings(self) -> set[int]:
        """Return the rings that are present, as far as known; none before the job has started."""
        with self._service.changed:
            job = self._service.job
            return set(range(len(job.setup.rings))) - job.gone - job.away_s.keys() if job else set()

    def _mark_away(self, job: ServerJob, ring: int) -> None:
        """Note that the ring has no representative."""
        self._stop_waiting_for(job, ring)
        job.away_s[ring] = self._clock()

    @staticmethod
    def _stop_waiting_for(job: ServerJob, ring: int) -> None:
        """Stop waiting for the ring until it is heard again."""
        if job.setup.may_lose_members:
            job.ledger.pause(ring)
        job.dispatcher.note_away(ring)

    def _register_leader(self, call: RpcCall) -> Ack:
        registration: messages.RegisterRingLeader = call.message
        job = self._service.find_job(registration.term, registration.ring, call.peer)
        with self._service.changed:
            job.leader_fence.register_leader(registration.ring, registration.generation_id, call.peer.name)
            self._service.changed.notify_all()  # a previous representative stops waiting
        for slot, least in registration.least_incarnations:
            if slot in job.setup.rings[registration.ring]:
                self._raise_least_incarnation(slot, least)
        return Ack()

    def is_revoked(self, peer: Identity) -> bool:
        """Return whether a worker's certificate counts no more, and note that this process of its slot has called.

        A later process of the slot has called, or the ring has gone on without this one.
        """
        if peer.role != "worker":
            return False
        number = peer.name.partition(".")[2]
        incarnation = int(number) if number.isdecimal() else 0
        return incarnation < self._raise_least_incarnation(worker_slot(peer.name), incarnation)

    def _raise_least_incarnation(self, slot: int, incarnation: int) -> int:
        """Raise the least incarnation of a slot to this one, if it is less; return it."""
        with self._incarnations_lock:
            least = self._least_incarnations[slot] = max(incarnation, self._least_incarnations.get(slot, 0))
        return least

    def _pause_ring(self, call: RpcCall) -> Ack:
        pause: messages.PauseRing = call.message
        job = self._service.find_job(pause.term, pause.ring, call.peer)
        with self._service.changed:
            job.ledger.pause(pause.ring)
            self._service.changed.notify_all()
        self._replicator.replicate_fact(pause)
        return Ack()

    def _wait_at_barrier(self, call: RpcCall) -> messages.BarrierReply:
        arrival: messages.BarrierArrival = call.message
        job = self._service.find_job_for_leader(arrival.term, arrival.ring, call.peer)
        with self._service.changed:
            job.record_arrival(arrival)
            self._service.changed.notify_all()
        self._replicator.replicate_fact(arrival)
        result = self._wait_for_result(job, call)
        self._replicator.replicate_fact(result)  # another server gives the same answer
        return messages.BarrierReply(texts={str(ring): text for ring, text in result.texts.items()})

    def _wait_for_result(self, job: ServerJob, call: RpcCall) -> BarrierResult:
        """Return the texts of the rings, once all present ones have arrived at the barrier."""
        number = call.message.number
        while (result := self._wait_for_arrivals(job, call) or self._service.pass_over_absent(job, number)) is None:
            pass  # an absent ring was heard meanwhile
        return result

    def _wait_for_arrivals(self, job: ServerJob, call: RpcCall) -> BarrierResult | None:
        """Return the result of the barrier; None once the rings that are still missing are to be passed over."""
        arrival: messages.BarrierArrival = call.message
        with self._service.changed:
            while (result := job.barrier.result_of(arrival.number, job.gone, job.ring_progress)) is None:
                if job.barrier.missing_rings(arrival.number) <= job.gone | self.rings_to_pass_over(job):
                    return None
                if call.left_s() <= 0 or call.cancelled.is_set():
                    raise DeadlineError(
                        f"barrier {arrival.number} of the rings",
                        got="not all of them",
                        expected="all that are there",
                        do="Look which ring does not get on",
                    )
                self._service.changed.wait(min(_BARRIER_POLL_S, max(0.0, call.left_s())))
        return result

    def absent_rings(self, job: ServerJob) -> set[int]:
        """Return the rings that have left, or whose connections have ended long ago."""
        now_s = self._clock()
        return job.gone | {ring for ring, since_s in job.away_s.items() if now_s - since_s > RING_ABSENT_S}

    def rings_to_pass_over(self, job: ServerJob) -> set[int]:
        """Return the rings that barriers do not wait for although they have not left for good."""
        now_s = self._clock()
        silent = {ring for ring, since_s in self._overdue_since_s.items() if now_s - since_s > SILENT_RING_S}
        return (self.absent_rings(job) | silent) - job.gone

    def _assign_ring(self, call: RpcCall) -> messages.RingAssignmentReply:
        request: messages.RingAssignmentRequest = call.message
        self._replicator.check_term(request.term)
        with self._service.changed:
            job = self._service.job
            if job is None or not job.is_announced:
                return messages.RingAssignmentReply(rings=[])
            rings = job.setup.rings
            ring = next((index for index, each in enumerate(rings) if request.slot in each), None)
            if ring is None:
                return messages.RingAssignmentReply(rings=rings)
            if request.begins:  # drop what earlier members had requested for the ring
                job.last_pull_sequence.pop(ring, None)
                job.leader_fence.clear_ring(ring)
            last = job.ledger.pushed.get(ring)
            shard = next((each for each in job.dispatcher.last if each.ring == ring), None)
            num_barriers, epoch = job.barrier.restart_point(ring)
            resumed = job.resumed
            return messages.RingAssignmentReply(
                rings=rings,
                shares=job.setup.shares,
                local_steps=job.setup.local_steps,
                num_pushed=last.sequence if last else 0,
                num_shards=shard.number if shard else 0,
                num_barriers=num_barriers,
                epoch=max(epoch, shard.epoch if shard else 0, resumed.position.epoch if resumed else 0),
                ring_progress=job.ring_progress.get(ring, ""),
                resumed=list(resumed.position.done) if resumed else [],
                resumed_epoch=resumed.position.epoch if resumed else 0,
                resumed_seed=resumed.seed if resumed else None,
                next_fragment=job.next_fragment(),
            )


def check_ring_member(job: ServerJob, ring: int, peer: Identity) -> None:
    """Refuse a caller that does not belong to that ring.

    Raises:
        RefusedError: It is none of the ring's ranks.
    """
    members = job.setup.rings[ring] if ring < len(job.setup.rings) else []
    if peer.role == "worker" and worker_slot(peer.name) not in members:
        raise RefusedError(
            f"caller for ring {ring}",
            got=peer.name,
            expected=f"one of its ranks {', '.join(map(str, members)) or '(there is no such ring)'}",
            do="Join that ring first",
        )


def worker_slot(name: str) -> int:
    """Return the start rank of a worker by its name; in an elastic job the first part of `SLOT.INCARNATION`."""
    slot = name.partition(".")[0]
    return int(slot) if slot.isdecimal() else -1


def ring_of(job: ServerJob, peer: Identity) -> int | None:
    """Return the ring of a worker; None if it is in none."""
    slot = worker_slot(peer.name)
    return next((index for index, each in enumerate(job.setup.rings) if slot in each), None)
