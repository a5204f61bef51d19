"""Members, two coordinators and a bad network, on a virtual clock: what the random tests of the protocol play with."""

# Longer than a file should be: one world, whose events change what the others look at.

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

from ringweave.membership.rules.coordinator import Coordinator
from ringweave.membership.rules.electing import Rejoining
from ringweave.membership.rules.follower import Follower, Form, Freeze, Out, resolve
from ringweave.membership.rules.records import BEFORE_ALL, Ballot, Decree, Order, Standing, slot_of
from ringweave.membership.rules.settings import Bounds, Settings
from ringweave.membership.rules.signs import Beat

TICK_S = 0.1
SAYS_S = 5.0
"""How long a member that is through tries to say so."""
SEARCH_S = 30.0
"""How long one that cannot go on looks for a coordinator."""
NUM_FIRST_SIGNS = 8
"""Of a member that starts."""
Letter = Callable[[], None]


@dataclass
class Member:
    """A process: its follower, and the reductions that it has taken over."""

    name: str
    follower: Follower = field(init=False)
    standing: Standing = field(init=False)
    decree: Decree | None = None
    forming: Decree | None = None
    """The epoch that was ordered, while its group is not formed."""
    has_come: bool = False
    """It is where the members of that epoch meet."""
    is_settled: bool = True
    """It was not asked to stand still since its last epoch was ordered."""
    history: dict[int, Ballot] = field(default_factory=dict)
    """Number of a reduction -> the epoch whose members' gradients are in it."""
    prepared_in: Ballot = BEFORE_ALL
    """The epoch of the sums that it has while it is prepared."""
    is_frozen: bool = True
    wants_stop: bool = False
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
    num_signs: int = 0
    reason: str = ""
    at: int = 0
    """The coordinator that it asks."""
    unstood: Ballot | None = None
    accused: Ballot | None = None
    suspects: tuple[str, ...] = ()
    rejoining: Rejoining | None = None
    num_connections: int = 0
    is_heard: bool = True
    """The coordinator that it asks knows that it is there; it listens to orders from then on."""

    def __post_init__(self) -> None:
        self.follower = Follower(self.name)
        self.standing = Standing(member=self.name)

    @property
    def is_waiting(self) -> bool:
        """For the others: it has every sum, or stands still."""
        return self.is_frozen or self.standing.is_prepared or self.standing.is_following

    @property
    def can_act(self) -> bool:
        return not (self.is_dead or self.is_paused or self.follower.is_out)


class World:
    """Everything that there is."""

    def __init__(self, num_members: int, *, least: int = 1) -> None:
        self.now_s = 0.0
        self.wanted = Settings(bounds=Bounds(least=least, most=16), expected=num_members, patience_s=20.0)
        self.coordinators = [
            Coordinator(self.wanted, now_s=0.0),
            Coordinator(self.wanted, now_s=0.0, index=1, is_standby=True),
        ]
        self.is_down = [False, False]
        self.members: dict[str, Member] = {}
        self.cut: set[tuple[str, int]] = set()
        """(member, coordinator): nothing passes."""
        self.mute: set[tuple[str, int]] = set()
        """Nothing that the member says arrives."""
        self.deaf: set[tuple[str, int]] = set()
        """Nothing that the coordinator says arrives."""
        self.limit: int | None = None
        """The last reduction of the training."""
        self.letters: list[Letter] = []
        self.decrees: dict[Ballot, Decree] = {}
        self.entered: dict[tuple[Ballot, int], set[str]] = {}
        self.taken: dict[int, Ballot] = {}
        """Number of a reduction -> the epoch of the gradients that whoever has ever taken it over took over."""
        for slot in range(num_members):
            self.enter(f"{slot}.0")

    def enter(self, name: str) -> None:
        self.members[name] = Member(name, alone_s=self.now_s)
        self._send(self.members[name], lambda each, now_s: each.join(name, now_s))

    def _send(self, member: Member, event: Callable[[Coordinator, float], None], *, is_kernel: bool = False) -> None:
        """Put a letter of a member to its coordinator on its way."""
        at, process = member.at, self.coordinators[member.at]

        def arrive() -> None:
            if self.coordinators[at] is not process:
                return  # its connection broke with that one
            if not self.is_down[at] and (is_kernel or (member.name, at) not in self.cut | self.mute):
                event(self.coordinators[at], self.now_s)
                self.note_decrees()

        self.letters.append(arrive)

    def note_decrees(self) -> None:
        """Epochs that have begun are remembered."""
        for each in self.coordinators:
            if each.decree is not None:
                known = self.decrees.setdefault(each.decree.ballot, each.decree)
                assert known == each.decree, "no two epochs have the same term and number"

    # What may happen.

    def tick(self) -> None:
        """A tenth of a second: who lives beats and asks for orders; what is asked is on its way."""
        self.now_s += TICK_S
        for index, each in enumerate(self.coordinators):
            if not self.is_down[index]:
                each.tick(self.now_s)
        self.note_decrees()
        for member in self.members.values():
            if member.can_act:
                self._live(member)

    def _live(self, member: Member) -> None:
        if member.decree is None:
            self._send(member, lambda each, now_s: each.join(member.name, now_s))
        if member.rejoining is not None and not member.is_heard:
            self._ask_back(member, member.rejoining)
        is_starting = member.standing.is_following or member.num_signs < NUM_FIRST_SIGNS
        beat = Beat(progress=member.num_signs, is_waiting=member.is_waiting, is_starting=is_starting)
        self._send(member, lambda each, now_s: each.beat(member.name, beat, now_s))
        if member.through_s is not None and member.is_heard:
            self._say_through(member)
        if member.unstood is not None and member.is_frozen and member.forming is None:
            ballot, standing = member.unstood, member.standing
            self._send(member, lambda each, now_s: each.stand(ballot, standing, now_s))
        if member.accused is not None and member.accused == member.follower.epoch:  # said again until there is another
            name, accused = member.name, member.accused
            suspects = list(member.suspects)
            self._send(member, lambda each, now_s: each.accuse(name, accused, suspects, now_s))
        at = member.at
        if member.is_heard and not self.is_down[at] and (member.name, at) not in self.cut | self.deaf:
            coordinator, connection = self.coordinators[at], member.num_connections
            order = coordinator.order_for(member.name)
            known = coordinator.decree.ballot if coordinator.decree else BEFORE_ALL
            self.letters.append(lambda: self._hear_order(member, order, known, connection))

    def _hear_order(self, member: Member, order: Order, known: Ballot, connection: int) -> None:
        """It arrives. Whoever went on with others is not put out by a coordinator that does not know of them."""
        was_out, done = member.follower.is_out, member.history.get(member.standing.committed, BEFORE_ALL)
        self.obey(member, order)
        if member.follower.is_out and not was_out and connection == member.num_connections:
            assert known >= done, f"what {member.name} did in {done} is lost to a coordinator that knows {known}"

    def _ask_back(self, member: Member, rejoining: Rejoining) -> None:
        connection = member.num_connections

        def arrive(coordinator: Coordinator, now_s: float) -> None:
            coordinator.rejoin(rejoining, now_s)
            is_answered = (member.name, self.coordinators.index(coordinator)) not in self.cut | self.deaf
            member.is_heard = member.is_heard or (is_answered and connection == member.num_connections)

        self._send(member, arrive)

    def obey(self, member: Member, order: Order) -> None:
        """An order arrives, perhaps late, perhaps again."""
        if not member.can_act:
            return
        epoch = member.follower.epoch
        for action in member.follower.take(order):
            match action:
                case Freeze():
                    member.unstood, member.is_settled = action.ballot, False
                    if action.is_urgent or (member.is_frozen and member.forming is None):
                        member.is_frozen, member.wants_stop, member.forming = True, False, None
                    else:
                        member.wants_stop = True
                case Form():
                    own = next(each for each in action.decree.standings if each.member == member.name)
                    if own.is_following and not member.standing.is_following:  # it began anew since then
                        self._accuse(member, action.decree)
                        continue
                    own = replace(own, is_leaving=member.standing.is_leaving)  # said at any time
                    assert own == member.standing, "it stood still since it said where it stands"
                    member.decree = member.forming = action.decree
                    member.has_come, member.wants_stop, member.unstood = False, False, None
                    member.is_settled = True
                case Out():
                    member.is_frozen, member.forming, member.reason = True, None, action.reason
        assert member.follower.epoch >= epoch, "no member goes back to an earlier epoch"

    def _settle(self, member: Member, decree: Decree) -> None:
        """End what the epoch before left unfinished."""
        if resolve(member.standing, decree) == "take":
            number = decree.committed
            self._count(member, number)
            member.history[number] = member.prepared_in
        member.standing = replace(member.standing, is_prepared=False)

    def _meet(self, member: Member, decree: Decree) -> None:
        """Go on with the others, once all have come; a newcomer with the state of one of them."""
        member.has_come = True
        others = [self.members[name] for name in decree.members]
        if not all(each.decree == decree and each.has_come for each in others):
            return
        self._settle(member, decree)
        if not member.standing.has_state and not member.standing.is_following:
            if decree.holders:
                member.history = dict(self.members[decree.holders[0]].history)
            is_following = bool(decree.holders) and decree.committed > 0
            member.standing = replace(
                member.standing, has_state=not is_following, is_following=is_following, committed=decree.committed
            )
        member.forming, member.is_frozen = None, False

    def work(self, member: Member) -> None:
        """The next thing that happens in it: it forms its epoch, leaves the border, says that all sums are there, or
        takes them over."""
        if not member.can_act:
            return
        if member.forming is not None:
            self._meet(member, member.forming)
            return
        if member.is_stuck:
            return
        self._end_training(member)
        if member.is_frozen or member.decree is None or member.through_s is not None:
            return
        member.num_signs += 1
        standing, ballot = member.standing, member.follower.epoch
        number = standing.committed + 1
        together = self.entered.setdefault((ballot, number), set())
        if standing.is_following:
            self._follow(member, member.decree, number, together)
        elif standing.at_border:
            member.standing = replace(standing, at_border=False)
        elif not standing.is_prepared:
            self._prepare(member, together)
        elif together == set(member.decree.members):
            self._count(member, number)
            if self._all_want(member.decree, number):
                member.is_frozen = True

    def start_over(self, member: Member) -> None:
        """Who follows could not read the state: it is a newcomer again, and lets the coordinator know."""
        if not (member.can_act and member.standing.is_following and member.decree is not None):
            return
        member.standing = Standing(member=member.name, is_leaving=member.standing.is_leaving)
        member.history, member.is_frozen, member.forming = {}, True, None
        self._accuse(member, self.decrees[member.follower.epoch])

    def accuse(self, member: Member, suspects: Collection[str]) -> None:
        """It could not reach these members of its epoch, or believes so: what it does there is broken."""
        if member.can_act and member.decree is not None and member.decree.ballot == member.follower.epoch:
            self._accuse(member, member.decree, suspects)

    def _accuse(self, member: Member, decree: Decree, suspects: Collection[str] = ()) -> None:
        name, ballot, told = member.name, decree.ballot, list(suspects)
        member.accused, member.suspects = ballot, tuple(told)
        self._send(member, lambda each, now_s: each.accuse(name, ballot, told, now_s))

    def _end_training(self, member: Member) -> None:
        """Its script is through once it has done the last reduction; then it says so."""
        standing = member.standing
        knows = standing.has_state or standing.is_following
        if knows and standing.committed == self.limit and standing.at_border and member.through_s is None:
            member.through_s = self.now_s

    def _say_through(self, member: Member) -> None:
        """Until somebody has heard it, for a while; then its process ends."""
        standing, at = member.standing, member.at

        def arrive(coordinator: Coordinator, now_s: float) -> None:
            coordinator.leave(standing, now_s, is_finished=True)
            if member.can_act and (member.name, at) not in self.cut | self.deaf:
                self._finish(member)

        self._send(member, arrive)
        if member.through_s is not None and self.now_s - member.through_s > SAYS_S:
            self._finish(member)

    def _finish(self, member: Member) -> None:
        member.has_finished = True
        self.kill(member)

    def look_around(self) -> None:
        """What members notice by themselves: who of their epoch is gone, and that no coordinator answers for long."""
        for member in self.members.values():
            if not member.can_act:
                continue
            known = member.decree.members if member.decree else ()
            gone = [each for each in known if self.members[each].is_dead]
            if gone and member.through_s is None and member.accused != member.follower.epoch:
                self.accuse(member, gone)
            if (member.is_heard and self.is_led(member)) or (
                known and member.is_settled and member.accused != member.follower.epoch
            ):
                member.alone_s = self.now_s
            elif self.now_s - member.alone_s > SEARCH_S:
                member.reason = "no coordinator"
                self.kill(member)

    def _follow(self, member: Member, decree: Decree, number: int, together: set[str]) -> None:
        """It takes part with nothing, wherever its script is; every third reduction finds it level."""
        if not member.standing.is_prepared:
            self._prepare(member, together)
        elif together == set(decree.members):
            self._count(member, number)
            if self._all_want(decree, number):
                member.is_frozen = True

    def _prepare(self, member: Member, together: set[str]) -> None:
        """It has all sums, and says so."""
        member.standing = replace(member.standing, is_prepared=True)
        member.prepared_in = member.follower.epoch
        together.add(member.name)

    def _count(self, member: Member, number: int) -> None:
        is_level = member.standing.is_following and number % 3 == 0
        member.history[number] = member.follower.epoch
        member.standing = replace(
            member.standing,
            committed=number,
            is_prepared=False,
            at_border=True,
            has_state=member.standing.has_state or is_level,
            is_following=member.standing.is_following and not is_level,
        )

    def _all_want(self, decree: Decree, number: int) -> bool:
        """What the rows said: fixed by the first who takes the reduction over."""
        self.stops = getattr(self, "stops", {})
        key = (decree.ballot, number)
        if key not in self.stops:
            self.stops[key] = all(self.members[each].wants_stop for each in decree.members)
        return self.stops[key]

    def kill(self, member: Member) -> None:
        """SIGKILL: the kernel hangs up, which the coordinator that it talked to hears of, sooner or later."""
        member.is_dead = True
        self._send(member, lambda each, now_s: each.lose(member.name, now_s), is_kernel=True)

    def lose_node(self, index: int, slots: Collection[int]) -> None:
        """A node dies with its coordinator and its workers, and is replaced: others begin in their places."""
        self.coordinators[index] = Coordinator(self.wanted, now_s=self.now_s, index=index, is_standby=True)
        for slot in slots:
            lives = [each for name, each in self.members.items() if slot_of(name)[0] == slot]
            for member in lives:
                if not member.is_dead:
                    self.kill(member)
            self.coordinators[index].announce(f"{slot}.{len(lives)}", self.now_s)
        for slot in slots:
            self.enter(f"{slot}.{sum(1 for name in self.members if slot_of(name)[0] == slot)}")
        for member in self.members.values():
            if member.at == index and member.can_act and member.rejoining is None and member.decree is not None:
                self.rejoin(member)

    def leave(self, member: Member) -> None:
        """SIGTERM: it wants to go, and says so at once, and whenever it says where it stands."""
        name, member.standing = member.name, replace(member.standing, is_leaving=True)
        self._send(member, lambda each, now_s: each.leave(Standing(member=name), now_s, is_finished=False))

    def hear(self, index: int) -> None:
        """A coordinator asks the other one which term it decides in."""
        process, other = self.coordinators[index], self.coordinators[1 - index]
        if self.is_down[0] or self.is_down[1]:
            return
        is_active, term = other.is_active, other.term

        def arrive() -> None:
            if self.is_down[index] or self.coordinators[index] is not process:
                return
            process.hear_active(term) if is_active else process.hear_idle(self.now_s)
            self.note_decrees()

        self.letters.append(arrive)

    def rejoin(self, member: Member, *, is_other: bool = True) -> None:
        """It has lost its coordinator, or believes so, takes its leave of it, and asks the other one or it again."""
        self._send(member, lambda each, _now_s: each.part(member.name))
        member.at = 1 - member.at if is_other else member.at
        name = member.name
        member.num_connections += 1
        if member.decree is None:
            self._send(member, lambda each, now_s: each.join(name, now_s))
            return
        promised = member.follower.promised
        member.follower.forget_coordinator()
        member.is_heard = False
        member.rejoining = Rejoining(
            standing=member.standing, decree=member.decree, promised=promised, is_settled=member.is_settled
        )

    def heal(self) -> None:
        """Nothing fails any more."""
        for each in (self.cut, self.mute, self.deaf):
            each.clear()
        self.is_down = [False, False]
        for member in self.members.values():
            member.is_paused = member.is_stuck = False

    def is_led(self, member: Member) -> bool:
        """The coordinator that it asks decides, and it can know that."""
        is_reached = (member.name, member.at) not in self.cut | self.mute | self.deaf
        return is_reached and self.coordinators[member.at].is_active and not self.is_down[member.at]

    @property
    def is_over(self) -> bool:
        """Somebody has done all there was to do: nobody is started any more."""
        return any(each.has_finished for each in self.members.values())

    # What must never be.

    @property
    def live_epochs(self) -> list[Ballot]:
        """Epochs that all of their members are in, and none has stood for another: only those can take a step."""
        found = []
        for ballot, decree in self.decrees.items():
            members = [self.members[name] for name in decree.members]
            if all(each.follower.epoch == ballot and not each.is_frozen and not each.is_dead for each in members):
                found.append(ballot)
        return found

    def check(self) -> None:
        """The invariants, in words."""
        assert len(self.live_epochs) <= 1, "at most one epoch can take a step"
        newest = max((each.follower.epoch for each in self.members.values()), default=BEFORE_ALL)
        if newest == BEFORE_ALL:
            return
        there = [each for each in self.members.values() if each.follower.epoch == newest and each.forming is None]
        numbers = {number for each in there for number in each.history}
        for number in numbers:
            sets = {each.history[number] for each in there if number in each.history}
            assert len(sets) <= 1, "members of one epoch took over the same gradients in every reduction"
        for member in self.members.values():
            for number, ballot in member.history.items():
                known = self.taken.setdefault(number, ballot)
                assert known == ballot, f"{member.name} took over {number} of {ballot}, others of {known}"
        # Who begins anew knows nothing yet.
        knowing = [each for each in there if each.standing.has_state or each.standing.is_following]
        committed = {each.standing.committed for each in knowing}
        assert not committed or max(committed) - min(committed) <= 1, (
            "members of one epoch are at most one reduction apart"
        )
        assert all(set(each.history) == set(range(1, each.standing.committed + 1)) for each in there), "none is skipped"

    def describe(self) -> str:
        """For the text of a failure."""
        coordinators = [
            f"term {each.term} decree {each.decree and (each.decree.ballot, each.decree.members)} "
            f"present {each.present} proposal {each._proposal} ended {each.ended!r}"
            for each in self.coordinators
        ]
        members = [
            f"{each.name} at {each.at} epoch {each.follower.epoch} promised {each.follower.promised} "
            f"out {each.follower.is_out} dead {each.is_dead} frozen {each.is_frozen} stop {each.wants_stop} "
            f"unstood {each.unstood} {each.standing} {each.reason}"
            for each in self.members.values()
        ]
        return "\n".join([*coordinators, *members])
