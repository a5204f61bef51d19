"""A member as the random tests of the protocol have it: its follower, and the reductions that it has taken over."""

from dataclasses import dataclass, field, replace

from ringweave.membership.election import Rejoin
from ringweave.membership.failure_detector import CoordinatorMonitor, Heartbeat
from ringweave.membership.membership_records import NO_GENERATION, GenerationId, MemberRules, Membership, MemberStatus

NUM_FIRST = 4
"""Reductions with which a member starts."""
PAUSED_S = 0.5
"""Between two looks: more means that it did not run."""
MOST_KEPT = 6
"""Reductions that are kept for a script that follows."""


@dataclass
class Member:
    """A process. Its script trains; its session, another thread, forms epochs and ends reductions."""

    name: str
    follower: MemberRules = field(init=False)
    status: MemberStatus = field(init=False)
    membership: Membership | None = None
    forming: Membership | None = None
    """The epoch that was ordered, while its group is not formed."""
    has_come: bool = False
    """It is where the members of that epoch meet."""
    is_settled: bool = True
    """It was not asked to stand still since its last epoch was ordered."""
    life: GenerationId = NO_GENERATION
    """The epoch in which members began with a state that is kept elsewhere as well, if any has; see `World.lives`."""
    history: dict[int, GenerationId] = field(default_factory=dict)
    """Number of a reduction -> the epoch whose members' gradients are in it."""
    share_table: dict[int, GenerationId] = field(default_factory=dict)
    """First of the batches -> the epoch whose members share those from there on. A batch has its reduction's number."""
    drawn: dict[int, GenerationId] = field(default_factory=dict)
    """Batch -> the epoch whose members shared it when this one drew it."""
    prepared_in: GenerationId = NO_GENERATION
    """The epoch of the sums that it has while it is prepared."""
    is_training_paused: bool = True
    wants_pause: bool = False
    pauses_at_boundary: bool = False
    """All want to stop, and it does so at its next border."""
    is_dead: bool = False
    is_paused: bool = False
    is_stuck: bool = False
    """Its script hangs; its other threads do not."""
    through_s: float | None = None
    """When its script was through."""
    has_finished: bool = False
    """It was through, and its process has ended."""
    alone_s: float = 0.0
    """When it last heard a coordinator that decides, or needed none."""
    heard_s: float = 0.0
    """When it last heard a coordinator that decides."""
    contact: CoordinatorMonitor = field(init=False)
    """What it knows of waiting."""
    has_missed: GenerationId | None = None
    """An epoch in which it does not notice what it has to do, while it believes that it waits for the others."""
    num_progress: int = 0
    """What its script and its session have got done."""
    looked_s: float = 0.0
    """When it last looked what that is."""
    on_s: float = 0.0
    """When it had last got on by then, or waited; what it was paused for does not count."""
    num_seen: int = -1
    """What it had got done by then."""
    num_gaps: int = 0
    longest_s: float = 0.0
    """Between two looks at which it had got on."""
    idle_s: dict[int, float] = field(default_factory=dict)
    """Number of a heartbeat -> for how long it had neither got on nor waited when it said so."""
    num_reductions: int = 0
    """Reductions that its script had the results of when they counted."""
    num_retained: int = 0
    """Reductions that it follows, and that its script does later."""
    reason: str = ""
    at: int = 0
    """The coordinator that it asks."""
    unstood: GenerationId | None = None
    accused: GenerationId | None = None
    suspects: tuple[str, ...] = ()
    rejoining: Rejoin | None = None
    num_connections: int = 0
    knows_it_decides: bool = False
    """On its connection it has heard that the coordinator decides."""
    is_heard: bool = True
    """The coordinator that it asks knows that it is there; it listens to orders from then on."""

    def __post_init__(self) -> None:
        self.follower = MemberRules(self.name)
        self.status = MemberStatus(member=self.name)
        self.contact = CoordinatorMonitor(self.heard_s)
        self.looked_s = self.on_s = self.heard_s

    def record_batch(self, number: int) -> None:
        """The next batch, shared as is known here."""
        roster = self.share_table[max(first for first in self.share_table if first <= number)]
        self.drawn[number] = roster
        sharing = f"{roster[0]} {roster[1]}"
        self.status = replace(self.status, at_step_boundary=False, num_drawn=number, batch_shares=sharing)

    def begin_roster(self, membership: Membership) -> None:
        """What others have drawn is shared as they say; what nobody has, by the members of this epoch."""
        training = [each for each in membership.statuses if each.has_state or each.is_recovering]
        drawn = max((each.num_drawn for each in training), default=membership.last_committed)
        self.share_table = {number: roster for number, roster in self.share_table.items() if number <= drawn}
        for each in training:
            if each.batch_shares and each.num_drawn == drawn:
                term, number = map(int, each.batch_shares.split())
                self.share_table[drawn] = term, number
        self.share_table[drawn + 1] = membership.generation_id

    def look(self, now_s: float) -> Heartbeat:
        """Its next heartbeat."""
        if now_s - self.looked_s > PAUSED_S:
            self.on_s += now_s - self.looked_s
        gets_on, waits = self.num_progress != self.num_seen, self.is_waiting
        if gets_on:
            self.num_gaps, self.longest_s = self.num_gaps + 1, max(self.longest_s, now_s - self.on_s)
        if gets_on or waits:
            self.on_s = now_s
        self.looked_s, self.num_seen = now_s, self.num_progress
        beat = Heartbeat(
            progress=self.num_progress,
            is_waiting=waits,
            is_starting=self.is_starting,
            num_reductions=self.num_reductions,
        )
        said = self.contact.observe_self(beat, now_s)
        self.idle_s[said.number] = now_s - self.on_s
        return said

    @property
    def has_missed_it(self) -> bool:
        """What it has to do in its epoch."""
        return self.has_missed == self.follower.generation_id

    @property
    def is_waiting(self) -> bool:
        """For the others: it has every sum, or its script stands still and does not hang elsewhere."""
        if self.has_missed_it:
            return True
        may_wait = self.is_training_paused or self.status.is_recovering
        return self.status.is_prepared or (may_wait and not self.is_stuck)

    @property
    def is_starting(self) -> bool:
        """How late it beats now says nothing of later."""
        return self.status.is_recovering or self.num_reductions < NUM_FIRST

    @property
    def can_act(self) -> bool:
        """It lives, runs and may."""
        return not (self.is_dead or self.is_paused or self.follower.is_stopped)
