"""Members, two coordinators and a bad network, on a virtual clock: what the random tests of the protocol play with."""

import math
from collections.abc import Callable, Collection
from dataclasses import replace

from ringweave.membership.coordinator import Coordinator
from ringweave.membership.election import Rejoin
from ringweave.membership.membership_records import (
    NO_GENERATION,
    BeginGeneration,
    GenerationId,
    MemberDirective,
    Membership,
    MemberStatus,
    PauseTraining,
    StopTraining,
    parse_member_name,
    resolve_reduction,
)
from ringweave.membership.settings import MemberBounds, MembershipSettings
from tests.membership.members import MOST_KEPT, Member
from tests.membership.verdicts import Accusation, Join, Part, Said, Stand, Verdicts

# Longer than a file should be: one world, whose events change what the others look at.


TICK_S = 0.1
SAYS_S = 5.0
"""How long a member that is through tries to say so."""
SEARCH_S = 30.0
"""How long one that cannot go on looks for a coordinator."""
PATIENCE_S = 0.8
"""After which a member takes its coordinator for lost."""
Letter = Callable[[], None]


class World:
    """Everything that there is."""

    # Longer than a constructor should be: it only says what there is, and that nothing has happened yet.
    def __init__(self, num_members: int, *, least: int = 1, is_kept_elsewhere: bool = False) -> None:
        """Where the state is kept elsewhere, members are those of a ring: its size is the most that it may have."""
        self.now_s, self.healed_s = 0.0, math.inf
        self.wanted = MembershipSettings(
            bounds=MemberBounds(min_members=least, max_members=num_members if is_kept_elsewhere else 16),
            expected=num_members,
            member_wait_s=20.0,
            has_external_state=is_kept_elsewhere,
        )
        self.coordinators = [
            Coordinator(self.wanted, now_s=0.0),
            Coordinator(self.wanted, now_s=0.0, index=1, is_standby=True),
        ]
        self.is_down = [False, False]
        self.is_divided = False
        """Coordinators do not hear of each other."""
        self.unheard: set[int] = set()
        """Those that have heard nothing of the other one since the world was divided. No process is started meanwhile.

        They would hear of it that the one before has ended, and not with whom it had gone on: where all have ended so
        that did, others would go on without what those had done.
        """
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
        self.memberships: dict[GenerationId, Membership] = {}
        self.entered: dict[tuple[GenerationId, int], set[str]] = {}
        self.taken: dict[tuple[GenerationId, int], GenerationId] = {}
        """(life, number) of a reduction -> the epoch of the gradients that whoever has ever taken it over took over."""
        self._checked: dict[str, tuple[GenerationId, dict[int, GenerationId]]] = {}
        """Member -> its life and history when they were compared with that last."""
        self.lives: dict[GenerationId, GenerationId] = {}
        """Epoch -> the one in which members began with a state that is kept elsewhere; where none has, the first life.

        Whatever members had taken over before, and nobody has any more, is lost: reductions are counted anew.
        """
        self.offsets: dict[GenerationId, int] = {NO_GENERATION: 0}
        """Life -> reductions that had counted before it, and are in the state that is kept elsewhere."""
        self.newest_life = NO_GENERATION
        """In which a reduction has counted."""
        self.pauses_at_boundary: dict[tuple[GenerationId, int], bool] = {}
        self.shared: dict[tuple[GenerationId, int], GenerationId] = {}
        """(life, number) of a batch that counts -> the epoch whose members shared it."""
        self.verdicts = Verdicts(self.members, self.coordinators, self.wanted)
        for slot in range(num_members):
            self.enter(f"{slot}.0")

    def enter(self, name: str) -> None:
        self.members[name] = Member(name, alone_s=self.now_s, heard_s=self.now_s)
        self._send(self.members[name], lambda each, now_s: each.join(name, now_s), Join())

    def _send(
        self,
        member: Member,
        event: Callable[[Coordinator, float], None],
        said: Said = None,
        *,
        is_kernel: bool = False,
    ) -> None:
        """Put a letter of a member to its coordinator on its way."""
        at, process = member.at, self.coordinators[member.at]

        def arrive() -> None:
            if self.coordinators[at] is not process:
                return  # its connection broke with that one
            if not self.is_down[at] and (is_kernel or (member.name, at) not in self.cut | self.mute):
                event(self.coordinators[at], self.now_s)
                self.verdicts.note(at, member.name, Part() if is_kernel else said, self.now_s)
                self.note_decrees()

        self.letters.append(arrive)

    def note_decrees(self) -> None:
        """Epochs that have begun are remembered, and whatever else was decided is judged."""
        for each in self.coordinators:
            if each.membership is not None and each.membership.generation_id not in self.memberships:
                self._note_life(each.membership)
            if each.membership is not None:
                known = self.memberships.setdefault(each.membership.generation_id, each.membership)
                assert known == each.membership, "no two epochs have the same term and number"
        try:
            self.verdicts.judge(self.now_s)
        except AssertionError as fault:
            raise AssertionError(f"{fault}\n{self.describe()}") from None

    def _note_life(self, membership: Membership) -> None:
        """Of an epoch in which nobody has the state a new one begins, with what is kept elsewhere."""
        if membership.state_owners or not self.wanted.has_external_state:
            self.lives[membership.generation_id] = (
                self.members[membership.primary].life if membership.state_owners else NO_GENERATION
            )
            return
        self.lives[membership.generation_id] = membership.generation_id
        done = max((self.offsets[life] + number for life, number in self.taken), default=0)
        self.offsets[membership.generation_id] = done - membership.last_committed

    # What may happen.

    def tick(self) -> None:
        """A tenth of a second: who lives beats and asks for orders; what is asked is on its way."""
        self.now_s += TICK_S
        for index, each in enumerate(self.coordinators):
            if not self.is_down[index]:
                self.verdicts.look(index, self.now_s)
                each.tick(self.now_s)
        self.note_decrees()
        for member in self.members.values():
            if member.can_act:
                self._live(member)

    def _live(self, member: Member) -> None:
        if member.membership is None:
            self._send(member, lambda each, now_s: each.join(member.name, now_s), Join())
        if member.rejoining is not None and not member.is_heard:
            self._ask_back(member, member.rejoining)
        beat = member.look(self.now_s)
        self._send(member, lambda each, now_s: each.record_heartbeat(member.name, beat, now_s), beat)
        if member.through_s is not None and member.is_heard:
            self._say_through(member)
        if member.unstood is not None and member.is_training_paused and member.forming is None:
            generation_id, status = member.unstood, member.status
            stand = Stand(generation_id, status)
            self._send(member, lambda each, now_s: each.report_status(generation_id, status, now_s), stand)
        if (
            member.accused is not None and member.accused == member.follower.generation_id
        ):  # said again until there is another
            self._say_accused(member, member.accused)
        at = member.at
        if member.is_heard and not self.is_down[at] and (member.name, at) not in self.cut | self.deaf:
            coordinator, connection = self.coordinators[at], member.num_connections
            order = coordinator.directive_for(member.name)
            known = coordinator.membership.generation_id if coordinator.membership else NO_GENERATION
            self.letters.append(lambda: self._hear_order(member, order, known, connection))
            decides, told_s = coordinator.is_active, self.now_s
            self.letters.append(lambda: self._hear_whether_it_decides(member, connection, told_s, decides=decides))

    def _hear_whether_it_decides(self, member: Member, connection: int, told_s: float, *, decides: bool) -> None:
        """Who hears that its coordinator decides no more goes to the other one, and comes back if that does not."""
        if connection != member.num_connections:
            return
        if decides:
            member.knows_it_decides, member.heard_s = True, max(member.heard_s, told_s)
        elif member.knows_it_decides and member.can_act:
            self.rejoin(member)

    def _hear_order(self, member: Member, order: MemberDirective, known: GenerationId, connection: int) -> None:
        """It arrives, unless the member has gone to another coordinator, or has come anew: one thread does both there.

        Whoever went on with others is not put out by a coordinator that does not know of them.
        """
        if connection != member.num_connections:
            return
        was_out, done = member.follower.is_stopped, member.history.get(member.status.committed, NO_GENERATION)
        self.obey(member, order)
        if member.follower.is_stopped and not was_out:
            assert known >= done, f"what {member.name} did in {done} is lost to a coordinator that knows {known}"

    def _ask_back(self, member: Member, rejoining: Rejoin) -> None:
        connection, lost_s = member.num_connections, self.now_s - member.heard_s
        asks = replace(rejoining, lost_s=lost_s, patience_s=PATIENCE_S, heartbeat=member.look(self.now_s))

        def arrive(coordinator: Coordinator, now_s: float) -> None:
            coordinator.rejoin(asks, now_s)
            is_answered = (member.name, self.coordinators.index(coordinator)) not in self.cut | self.deaf
            member.is_heard = member.is_heard or (is_answered and connection == member.num_connections)

        self._send(member, arrive, asks)

    def obey(self, member: Member, order: MemberDirective) -> None:
        """An order arrives, perhaps late, perhaps again."""
        if not member.can_act:
            return
        epoch = member.follower.generation_id
        for action in member.follower.apply_directive(order):
            match action:
                case PauseTraining():
                    member.unstood, member.is_settled = action.generation_id, False
                    if action.is_urgent or (member.is_training_paused and member.forming is None):
                        member.is_training_paused, member.wants_pause, member.forming, member.pauses_at_boundary = (
                            True,
                            False,
                            None,
                            False,
                        )
                    else:
                        member.wants_pause = True
                case BeginGeneration():
                    own = next(each for each in action.membership.statuses if each.member == member.name)
                    if own.is_recovering and not member.status.is_recovering:  # it began anew since then
                        self._accuse(member, action.membership)
                        continue
                    own = replace(own, is_leaving=member.status.is_leaving)  # said at any time
                    own = replace(own, batch_shares=member.status.batch_shares)  # of one only
                    assert own == member.status, "it stood still since it said where it stands"
                    member.membership = member.forming = action.membership
                    member.has_come, member.wants_pause, member.unstood, member.pauses_at_boundary = (
                        False,
                        False,
                        None,
                        False,
                    )
                    member.is_settled = True
                case StopTraining():
                    member.is_training_paused, member.forming, member.reason = True, None, action.reason
        assert member.follower.generation_id >= epoch, "no member goes back to an earlier epoch"

    def _settle(self, member: Member, membership: Membership) -> None:
        """End what the epoch before left unfinished."""
        if resolve_reduction(member.status, membership) == "commit":
            number = membership.last_committed
            self._count(member, number)
            member.history[number] = member.prepared_in
        member.status = replace(member.status, is_prepared=False)
        member.begin_roster(membership)

    def _meet(self, member: Member, membership: Membership) -> None:
        """Go on with the others, once all have come; a newcomer with the state of one of them."""
        member.has_come = True
        others = [self.members[name] for name in membership.members]
        if not all(each.membership == membership and each.has_come for each in others):
            return
        self._settle(member, membership)
        if not member.status.has_state and not member.status.is_recovering:
            self._learn(member, membership)
        member.forming, member.is_training_paused = None, False

    def _learn(self, member: Member, membership: Membership) -> None:
        """It has what another one has, or what is kept elsewhere; or begins to follow.

        Where the state is kept elsewhere as well nobody follows: the others wait until a newcomer has read it.
        """
        member.life = self.lives[membership.generation_id]
        member.history = dict.fromkeys(range(1, membership.last_committed + 1), membership.generation_id)
        if membership.state_owners:
            member.history = dict(self.members[membership.state_owners[0]].history)
        is_recovering = (
            bool(membership.state_owners) and membership.last_committed > 0 and not self.wanted.has_external_state
        )
        done = membership.last_committed
        member.status = replace(
            member.status, has_state=not is_recovering, is_recovering=is_recovering, committed=done, num_drawn=done
        )

    def work(self, member: Member) -> None:
        """The next thing that happens in it: it forms its epoch, leaves the border, says that all sums are there, or
        takes them over. Where its script hangs, its session still ends what it was handed in."""
        if not member.can_act:
            return
        if member.forming is not None:
            self._meet(member, member.forming)
            return
        if member.has_missed_it:
            return
        if not member.is_stuck:
            self._end_training(member)
        if member.is_training_paused or member.membership is None or member.through_s is not None:
            return
        status, generation_id = member.status, member.follower.generation_id
        number = status.committed + 1
        together = self.entered.setdefault((generation_id, number), set())
        if status.is_prepared:
            if together == set(member.membership.members):
                self._count(member, number)
                member.pauses_at_boundary = self._all_want(member.membership, number)
                member.is_training_paused = member.pauses_at_boundary and (
                    not member.is_stuck or member.status.is_recovering
                )
        elif status.is_recovering:
            self._follow(member, together)
        elif not member.is_stuck:
            self._train(member, together)

    def _follow(self, member: Member, together: set[str]) -> None:
        """Its script draws the batch that it is level with; else it takes part, as long as it may be behind."""
        number = member.status.committed + 1
        if self._is_level_at(member, number) and number not in member.drawn:
            member.record_batch(number)
        elif member.num_retained < MOST_KEPT or not member.is_stuck:
            self._prepare(member, together)

    def _train(self, member: Member, together: set[str]) -> None:
        """What the script does: it stops at a border, leaves it, and has all its gradients summed."""
        if member.pauses_at_boundary:
            member.is_training_paused = True
        elif member.status.at_step_boundary:
            member.record_batch(member.status.committed + 1)
            self._get_on(member)
        else:
            self._prepare(member, together)

    def _get_on(self, member: Member) -> None:
        member.num_progress += 1

    def start_over(self, member: Member) -> None:
        """Who follows could not read the state: it is a newcomer again, and lets the coordinator know."""
        if not (member.can_act and member.status.is_recovering and member.membership is not None):
            return
        member.status = MemberStatus(member=member.name, is_leaving=member.status.is_leaving)
        member.history, member.is_training_paused, member.forming = {}, True, None
        self._accuse(member, self.memberships[member.follower.generation_id])

    def report_failure(self, member: Member, suspects: Collection[str]) -> None:
        """It could not reach these members of its epoch, or believes so: what it does there is broken."""
        if (
            member.can_act
            and member.membership is not None
            and member.membership.generation_id == member.follower.generation_id
        ):
            self._accuse(member, member.membership, suspects)

    def _accuse(self, member: Member, membership: Membership, suspects: Collection[str] = ()) -> None:
        member.accused, member.suspects = membership.generation_id, tuple(suspects)
        self._say_accused(member, membership.generation_id)

    def _say_accused(self, member: Member, generation_id: GenerationId) -> None:
        name, suspects = member.name, list(member.suspects)
        said = Accusation(generation_id, member.suspects)
        self._send(member, lambda each, now_s: each.report_failure(name, generation_id, suspects, now_s), said)

    def _end_training(self, member: Member) -> None:
        """Its script is through once it has done the last reduction; then it says so."""
        status = member.status
        knows = status.has_state or status.is_recovering
        is_through = self.limit is not None and self.done_by(member) >= self.limit
        if knows and is_through and status.at_step_boundary and member.through_s is None:
            member.through_s = self.now_s

    def done_by(self, member: Member) -> int:
        """Reductions in the state that it has."""
        return self.offsets.get(member.life, 0) + member.status.committed

    def _say_through(self, member: Member) -> None:
        """Until somebody has heard it, for a while; then its process ends."""
        status, at = member.status, member.at

        def arrive(coordinator: Coordinator, now_s: float) -> None:
            coordinator.request_leave(status, now_s, is_finished=True)
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
            is_there = member.membership is not None and member.is_heard and self.is_led(member)
            if is_there and not self.coordinators[member.at].knows_member(member.name):
                self.rejoin(member, is_other=False)  # what it missed of that one's stepping down arrives at last
            known = member.membership.members if member.membership else ()
            gone = [each for each in known if self.members[each].is_dead]
            if gone and member.through_s is None and member.accused != member.follower.generation_id:
                self.report_failure(member, gone)
            if (member.is_heard and self.is_led(member)) or (
                known and member.is_settled and member.accused != member.follower.generation_id
            ):
                member.alone_s = self.now_s
            elif self.now_s - member.alone_s > SEARCH_S:
                try:
                    self.verdicts.judge_search(member, self.healed_s, self.now_s)
                except AssertionError as fault:
                    raise AssertionError(f"{fault}\n{self.describe()}") from None
                member.reason = "no coordinator"
                self.kill(member)

    def _prepare(self, member: Member, together: set[str]) -> None:
        """It has all sums, and says so; of its own there is nothing in them while it follows."""
        member.status = replace(member.status, is_prepared=True)
        member.prepared_in = member.follower.generation_id
        together.add(member.name)
        self._get_on(member)

    def _count(self, member: Member, number: int) -> None:
        """It counts."""
        assert member.life >= self.newest_life, "nobody goes on with what was before others began again"
        self.newest_life = member.life
        was_following = member.status.is_recovering
        is_level = was_following and self._is_level_at(member, number)
        member.history[number] = member.follower.generation_id
        self._compare(member, number)
        member.status = replace(
            member.status,
            committed=number,
            num_drawn=number,
            batch_shares="",
            is_prepared=False,
            at_step_boundary=True,
            has_state=member.status.has_state or is_level,
            is_recovering=was_following and not is_level,
        )
        member.num_reductions += not was_following
        member.num_retained = member.num_retained + 1 if member.status.is_recovering else 0
        self._get_on(member)

    def _is_level_at(self, member: Member, number: int) -> bool:
        """Every third reduction finds a script level that follows and does not hang: it has drawn that batch too."""
        return number % 3 == 0 and not member.is_stuck

    def _compare(self, member: Member, number: int) -> None:
        """Whose gradients are in one sum have drawn the batch alike: else samples are in it twice, or not at all."""
        if number in member.drawn:
            shared = self.shared.setdefault((member.life, number), member.drawn[number])
            assert shared == member.drawn[number], f"{member.name} drew {number} as of {member.drawn[number]}: {shared}"

    def _all_want(self, membership: Membership, number: int) -> bool:
        """What the rows said: fixed by the first who takes the reduction over."""
        key = (membership.generation_id, number)
        if key not in self.pauses_at_boundary:
            self.pauses_at_boundary[key] = all(self.members[each].wants_pause for each in membership.members)
        return self.pauses_at_boundary[key]

    def kill(self, member: Member) -> None:
        """SIGKILL: the kernel hangs up, which the coordinator that it talked to hears of, sooner or later."""
        member.is_dead = True
        self._send(member, lambda each, now_s: each.note_process_exit(member.name, now_s), is_kernel=True)

    def lose_node(self, index: int, slots: Collection[int]) -> None:
        """A node dies with its coordinator and its workers, and is replaced: others begin in their places."""
        self.coordinators[index] = Coordinator(self.wanted, now_s=self.now_s, index=index, is_standby=True)
        self.verdicts.restart(index, self.now_s)
        for slot in slots:
            lives = [each for name, each in self.members.items() if parse_member_name(name)[0] == slot]
            for member in lives:
                if not member.is_dead:
                    self.kill(member)
            if not self.wanted.has_external_state:  # a ring's hears of no such thing
                self.coordinators[index].announce_start(f"{slot}.{len(lives)}", self.now_s)
        for slot in slots:
            self.enter(f"{slot}.{sum(1 for name in self.members if parse_member_name(name)[0] == slot)}")
        for member in self.members.values():
            if member.at == index and member.can_act and member.rejoining is None and member.membership is not None:
                self.rejoin(member)

    def leave(self, member: Member) -> None:
        """SIGTERM: it wants to go, and says so at once, and whenever it says where it stands."""
        name, member.status = member.name, replace(member.status, is_leaving=True)
        self._send(member, lambda each, now_s: each.request_leave(MemberStatus(member=name), now_s, is_finished=False))

    def hear(self, index: int) -> None:
        """A coordinator asks the other one which term it decides in."""
        process, other = self.coordinators[index], self.coordinators[1 - index]
        if self.is_down[0] or self.is_down[1] or self.is_divided:
            return
        is_active, term, generation_id = (
            other.is_active,
            other.term,
            other.membership.generation_id if other.membership else NO_GENERATION,
        )

        def arrive() -> None:
            if self.is_down[index] or self.coordinators[index] is not process:
                return
            self.unheard.discard(index)
            if is_active:
                process.note_other_active(term, generation_id)
            elif not self.wanted.has_external_state:  # where a ring begins again for it, ballots may come a second time
                process.note_other_idle(self.now_s)
            self.note_decrees()

        self.letters.append(arrive)

    def rejoin(self, member: Member, *, is_other: bool = True) -> None:
        """It has lost its coordinator, or believes so, takes its leave of it, and asks the other one or it again."""
        self._send(member, lambda each, _now_s: each.note_disconnect(member.name), Part())
        member.at = 1 - member.at if is_other else member.at
        name = member.name
        member.num_connections, member.knows_it_decides = member.num_connections + 1, False
        if member.membership is None:
            member.follower.forget_coordinator()
            member.unstood = None
            self._send(member, lambda each, now_s: each.join(name, now_s), Join())
            return
        promised = member.follower.promised_id
        member.follower.forget_coordinator()
        member.is_heard = False
        member.rejoining = Rejoin(
            status=member.status, membership=member.membership, promised=promised, is_settled=member.is_settled
        )

    def wake(self, member: Member) -> None:
        """It runs again. If its coordinator has stepped down meanwhile, and decides again, it asks anew.

        On a connection that has lasted it would not hear of that, and nobody there knows of it.
        """
        was_paused, member.is_paused = member.is_paused, False
        if was_paused and member.can_act and member.name not in self.coordinators[member.at].present:
            self.rejoin(member, is_other=False)

    def divide(self, others: Collection[str]) -> None:
        """These members reach only one coordinator, and all but them only the other one."""
        self.is_divided, self.unheard = True, {0, 1}
        self.cut = {(name, 0 if name in others else 1) for name in self.members}

    def mend(self) -> None:
        """What is sent arrives."""
        self.is_divided = False
        for each in (self.cut, self.mute, self.deaf):
            each.clear()

    def heal(self, *, mends_scripts: bool = True) -> None:
        """Nothing fails any more, unless scripts that hang go on doing so."""
        self.healed_s = self.now_s
        self.mend()
        self.is_down = [False, False]
        for member in self.members.values():
            self.wake(member)
            member.is_stuck = member.is_stuck and not mends_scripts

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
    def live_epochs(self) -> list[GenerationId]:
        """Epochs that all of their members are in, and none has stood for another: only those can take a step."""
        found = []
        entered = {each.follower.generation_id for each in self.members.values() if not each.is_training_paused}
        for generation_id in [each for each in self.memberships if each in entered]:
            members = [self.members[name] for name in self.memberships[generation_id].members]
            if all(
                each.follower.generation_id == generation_id and not each.is_training_paused and not each.is_dead
                for each in members
            ):
                found.append(generation_id)
        return found

    def check(self) -> None:
        """The invariants, in words."""
        assert len(self.live_epochs) <= 1, "at most one epoch can take a step"
        newest = max((each.follower.generation_id for each in self.members.values()), default=NO_GENERATION)
        if newest == NO_GENERATION:
            return
        there = [
            each for each in self.members.values() if each.follower.generation_id == newest and each.forming is None
        ]
        histories: list[dict[int, GenerationId]] = []  # each once: mostly they are equal
        for each in there:
            if each.history not in histories:
                histories.append(each.history)
        for number in {number for history in histories[1:] for number in history}:
            sets = {history[number] for history in histories if number in history}
            assert len(sets) <= 1, "members of one epoch took over the same gradients in every reduction"
        for member in self.members.values():
            if (member.life, member.history) == self._checked.get(member.name):
                continue
            self._checked[member.name] = member.life, dict(member.history)
            for number, generation_id in member.history.items():
                known = self.taken.setdefault((member.life, number), generation_id)
                assert known == generation_id, f"{member.name} took over {number} of {generation_id}, others of {known}"
        # Who begins anew knows nothing yet.
        knowing = [each for each in there if each.status.has_state or each.status.is_recovering]
        committed = {each.status.committed for each in knowing}
        assert not committed or max(committed) - min(committed) <= 1, (
            "members of one epoch are at most one reduction apart"
        )
        for each in there:
            ends = (min(each.history, default=1), max(each.history, default=0), len(each.history))
            assert ends == (1, each.status.committed, each.status.committed), "none is skipped"

    def describe(self) -> str:
        """For the text of a failure."""
        coordinators = [
            f"term {each.term} decree {each.membership and (each.membership.generation_id, each.membership.members)} "
            f"present {each.present} proposal {each._proposal} ended {each.end_reason!r}"
            for each in self.coordinators
        ]
        members = [
            f"{each.name} at {each.at} epoch {each.follower.generation_id} promised {each.follower.promised_id} "
            f"out {each.follower.is_stopped} dead {each.is_dead} frozen {each.is_training_paused} "
            f"stop {each.wants_pause} "
            f"stuck {each.is_stuck} unstood {each.unstood} {each.status} {each.reason}"
            for each in self.members.values()
        ]
        return "\n".join([*coordinators, *members])
