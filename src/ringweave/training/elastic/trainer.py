"""Trainer state of a member behind its session: accounts, shares, speeds, and the state that joining members read."""

import logging
import statistics
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from typing_extensions import Buffer

from ringweave import rpc
from ringweave.environment import EXACT
from ringweave.membership.membership_records import Membership, furthest_status
from ringweave.planning.balancing import MemoryLimit, Speed, SpeedEstimator
from ringweave.planning.balancing.epochs import Indices
from ringweave.rpc.state_transfer import ReadThrottle, StateServer
from ringweave.training import collectives
from ringweave.training.elastic import share_table
from ringweave.training.elastic.accounting import DataProgress, SampleAccounting
from ringweave.training.elastic.member_details import check_trainer_details
from ringweave.training.elastic.retained_reductions import Commit, ReductionRow
from ringweave.training.elastic.share_table import BatchShares, ShareTable
from ringweave.training.elastic.training_state import StateRead, TrainingState, copy_buffers
from ringweave.training.elastic.wire_choice import WireChoice
from ringweave.training.recorder import ElasticRecorder
from ringweave.training.timing import StepTimer

if TYPE_CHECKING:
    from ringweave.training.rings.ring_progress import RingProgress

_LOGGER = logging.getLogger("ringweave")
STATE_READ_TIMEOUT_S = 600.0
"""Time limit for a joining member to read the state."""
_NUM_EXCHANGE_TIMES = 5
"""Train steps whose median time of exchange a member reports."""
_REBALANCE_INTERVAL = 2
"""Reductions from one check of the speeds to the next."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberDescription:
    """Description of this member that does not change."""

    member: str
    state_address: str
    """Address at which other members read its state, as `HOST PORT`."""
    max_samples: int | None
    """Limit of samples of one batch."""
    assumed_speed: float
    """Relative speed from the cluster file."""
    must_match: dict[str, Any]
    """Values that must be the same on all members."""
    wires: WireChoice = field(default_factory=WireChoice)
    """Formats of its gradients, which the members choose together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateTransport:
    """Transport of the state between members."""

    state_server: StateServer
    authentication: rpc.PeerAuthentication


class TrainerState:
    """Trainer state of a member, alone in a ring or not. Called with the session's lock held, unless noted."""

    def __init__(
        self,
        description: MemberDescription,
        share_table: ShareTable,
        timer: StepTimer,
        state: TrainingState,
        transport: StateTransport,
        events: ElasticRecorder,
        *,
        ring: "Callable[[TrainerState], RingProgress] | None" = None,
    ) -> None:
        """Create the state; `events` reports events, and writes them on one of the members.

        In rings, `ring` makes the progress of this member's ring.
        """
        recomputes = description.must_match.get("on_failure") == "recompute"
        self.accounting = SampleAccounting(recomputes=recomputes)
        self.progress, self.share_table = DataProgress(), share_table
        self._description, self._timer, self._state, self._transport = description, timer, state, transport
        self._events = events
        self._estimator = SpeedEstimator()
        self._speed: Speed | None = None
        """Speed after the last step. The membership client's thread reads it while the script measures the next step.
        """
        self._exchange_times_s: deque[float] = deque(maxlen=_NUM_EXCHANGE_TIMES)
        self._exchange_s = 0.0
        """Median of these times, which another thread reads."""
        self._members: tuple[str, ...] = ()
        """Members of the last generation."""
        self._captured_buffers: dict[str, Buffer] = {}
        self._published: dict[str, bool] = {}
        self.ring = ring(self) if ring is not None else None

    @property
    def wires(self) -> WireChoice:
        """Formats of this member's gradients."""
        return self._description.wires

    def set_memory(self, limit: MemoryLimit) -> None:
        """Set the limit of this member's memory, which all members learn with its speed."""
        self._estimator.memory = limit

    def measure_step(self) -> None:
        self._timer.end_step()
        for step in self._timer.take_measured_steps():
            self._estimator.observe(step.num_samples, step.seconds)
            if step.exchange_s > 0 and self.member not in self.share_table.recovering:  # replays exchange nothing
                self._exchange_times_s.append(step.exchange_s)
        self._speed = self._estimator.speed
        self._exchange_s = statistics.median(self._exchange_times_s) if self._exchange_times_s else 0.0

    @property
    def ring_progress(self) -> "RingProgress":
        """Progress of this member's ring; only in rings."""
        assert self.ring is not None, "only in rings"
        return self.ring

    @property
    def member(self) -> str:
        return self._description.member

    def open_epoch(self, number: int) -> None:
        """Start a new epoch of the data."""
        self.progress.epoch, self.progress.position = number, 0
        self.accounting.open_epoch(number)

    def record_batch(self, batch: Indices) -> BatchShares:
        """Record that the members compute this batch now; return its shares, which a new generation does not change."""
        shares = self.share_table.shares_of_batch(self.progress.num_drawn)
        self.accounting.record_batch(batch, shares)
        self.progress.record_drawn(len(batch))
        return shares

    def record_missing(self) -> None:
        """Record that the members compute the next missing samples now."""
        shares = self.share_table.shares_of_batch(self.progress.num_drawn)
        self.progress.record_missing(self.accounting.record_next_missing(shares))

    @property
    def state_address(self) -> str:
        """Address at which other members read this member's state, as `HOST PORT`."""
        return self._description.state_address

    @property
    def supports_replay(self) -> bool:
        """A joining member can replay steps with the same sums; otherwise the others wait until it has the state.

        Not in rings: there the server has the optimizer, and repeats no step.
        """
        return self.ring is None

    @property
    def is_between_steps(self) -> bool:
        """No batch is open, or waits to be pushed, and no sample is missing in the last step.

        A joining member would have no part in the gradients that are accumulated, or kept for the missing samples.
        """
        is_pushed = self.ring is None or self.ring.samples.num_batches == 0
        return is_pushed and self.progress.num_since_commit == 0 and not self.accounting.missing

    def reduction_row(self) -> ReductionRow:
        """Return this member's row of the next reduction."""
        return ReductionRow(
            account=self.accounting.account_of(self._description.member),
            num_planned=self.accounting.num_planned,
            speed=self._speed,
        )

    def status_details(self) -> dict[str, Any]:
        """Return the details that other members need when a generation begins."""
        progress, speed = self.progress, self._speed
        return {
            "cap": self._description.max_samples,
            "assumed_speed": self._description.assumed_speed,
            "must_match": self._description.must_match,
            "speed": None if speed is None else list(speed.to_numbers()),
            "exchange_s": self._exchange_s,
            "position": [progress.epoch, progress.position, progress.num_drawn, progress.num_steps_before],
            "accounts": self.accounting.to_json(),
            **self.wires.status_details(),
            **(self.ring.status_details() if self.ring is not None else {}),
        }

    def drawn_batches(self) -> tuple[int, str]:
        """Return the number of drawn batches, and the shares of uncommitted ones as text; see `MemberStatus`."""
        end = self.progress.num_drawn
        num_open = self.progress.num_since_commit
        return end, share_table.shares_to_text(self.share_table.rows_between(end - num_open, end)) if num_open else ""

    def apply_commit(self, commit: Commit) -> None:
        """Record a committed reduction, and change the shares if members have caught up or if it pays."""
        if self.ring is not None and self.ring.is_broadcasting:
            return
        self._events.reduction_committed()
        self.progress.last_reduction = commit.number
        num_lost = self.accounting.record_commit(commit)
        self.progress.num_since_commit = 0
        if self.accounting.missing:
            self.progress.repeat_step(self.accounting.missing)
            self._events.samples_recomputed(commit, num_lost)
        else:
            self.progress.committed = (self.progress.epoch, self.progress.position)
            if num_lost:
                self._events.samples_lost(commit, num_lost)
        self.share_table.forget_before(self.progress.num_drawn)
        first = self.progress.num_drawn + self._description.must_match["num_prefetched"]
        if commit.caught_up:
            speeds = {member: row.speed for member, row in zip(commit.members, commit.rows, strict=True)}
            self.share_table.admit(
                first, commit.caught_up, [speeds.get(each) for each in self.share_table.latest.members]
            )
            self._events.members_caught_up(commit, first)
        elif commit.number % _REBALANCE_INTERVAL == 0 and commit.members == self.share_table.latest.members:
            change = self.share_table.rebalance(first, [row.speed for row in commit.rows])
            if change is not None:
                self._events.shares_changed(first, change)
        if self.ring is not None:
            self.ring.note_commit(commit)

    def check_membership(self, membership: Membership, details: Sequence[dict[str, Any]]) -> None:
        """Refuse to join a job that has prepared something else; members that agree with the job continue.

        Raises:
            TrainingError: The details of a member are malformed.
            DisagreementError: For the first value in which this member differs from the primary.
        """
        for status, member_details in zip(membership.statuses, details, strict=True):
            check_trainer_details(status, member_details)
            share_table.shares_of_text(status.batch_shares)
        primary = membership.primary
        names = [f"worker {member}" for member in (primary, self._description.member)]
        descriptions = [
            details[membership.members.index(member)]["must_match"] for member in (primary, self._description.member)
        ]
        collectives.check_equal(descriptions, list(self._description.must_match), names)
        if self.ring is not None:
            self.ring.check_membership(membership)

    def begin_generation(
        self,
        membership: Membership,
        details: Sequence[dict[str, Any]],
        *,
        is_joining: bool,
        recovering: Collection[str],
    ) -> None:
        """Begin a generation; recovering members have no samples unless they have caught up."""
        holders = [index for index, each in enumerate(membership.statuses) if each.has_state]
        if self.ring is not None:
            self.ring.begin_generation(details[holders[0] if holders else 0], is_joining=is_joining)
        if is_joining and holders:
            progress = self.progress
            progress.epoch, progress.position, progress.num_drawn, progress.num_steps_before = details[holders[0]][
                "position"
            ]
            epoch, progress.committed, progress.has_joined_late = (
                progress.epoch,
                (progress.epoch, progress.position),
                True,
            )
            self.accounting.load_json(epoch, details[holders[0]]["accounts"])
        still_recovering, furthest = (
            self.share_table.still_recovering(recovering),
            furthest_status(membership.statuses),
        )
        self.share_table.adopt_rows(share_table.shares_of_text(furthest.batch_shares))
        speeds = [
            None if member_details["speed"] is None else Speed.of_numbers(member_details["speed"])
            for member_details in details
        ]
        self.share_table.start_generation(
            furthest.num_drawn,
            membership.members,
            [member_details["cap"] for member_details in details],
            speeds,
            [member_details["assumed_speed"] for member_details in details],
            still_recovering,
        )
        self._events.generation_begun()
        lost = [name for name in self._members if name not in membership.members]
        self._members = tuple(membership.members)
        wire = self.wires.of_reduction(self.progress.last_reduction)
        if lost and wire != EXACT:
            self._events.residuals_lost(lost, wire)

    def change_wire(self, first: int, wire: str, members: Sequence[str]) -> None:
        """Let gradients take another format from a reduction on, as the members have chosen."""
        if self.wires.change_from(first, wire):
            self._events.wire_chosen(wire, first, members, self.wires.reason)

    def capture_state(self) -> None:
        """Capture the state while the script is paused; called without the lock.

        Large tensors are not copied: nothing changes them before the next reduction.
        """
        self._captured_buffers = self._state.to_buffers()

    def publish_state(self, name: str, *, is_lasting: bool) -> None:
        """Publish the captured state for joining members; called without the lock.

        A lasting one is copied while the script computes its next gradients.
        """
        captured, self._captured_buffers = self._captured_buffers, {}
        try:
            published = copy_buffers(captured) if is_lasting else captured
        except MemoryError:  # training goes on; a member that gets no state asks again
            _LOGGER.warning("state for a worker that joins: no memory for a copy of it. The worker begins anew.")
            published = {}
        self._transport.state_server.publish(name, published)
        self._published[name] = is_lasting

    def unpublish_state(self) -> None:
        """Unpublish the state before it changes; copies stay published until no member is recovering."""
        for name, is_lasting in list(self._published.items()):
            if not (is_lasting and self.share_table.recovering):
                self._transport.state_server.unpublish(name)
                del self._published[name]

    def fetch_state(self, address: str, name: str, state_read: StateRead, throttle: ReadThrottle | None = None) -> None:
        """Read the state of the member at this address; called without the lock."""
        host, port = address.split()
        self._state.fetch_from_peer(
            host,
            int(port),
            self._transport.authentication,
            name,
            timeout_s=STATE_READ_TIMEOUT_S,
            throttle=throttle,
            state_read=state_read,
        )
