"""Who is here, who is gone and how that is known."""

from collections.abc import Callable, Collection, Iterable, Iterator, Set

from ringweave.membership.rules import reasons
from ringweave.membership.rules.records import slot_of
from ringweave.membership.rules.rhythm import SILENCE, WAITS, Tolerance
from ringweave.membership.rules.signs import Beat, Signs

_ENDING_S = 3.0
"""Within it all members finish that end their training with the same step."""


class Presence:
    """Every process that has come so far."""

    def __init__(self, silence: Tolerance = SILENCE) -> None:
        """`silence` is how long one may say nothing."""
        self._silence = silence
        self.here: dict[str, Signs] = {}
        """Those that are connected and beat."""
        self._silent: dict[str, Signs | None] = {}
        self.leaving: set[str] = set()
        """Those that want to go."""
        self._gone: set[str] = set()
        self._finished: dict[str, float] = {}

    @property
    def silent(self) -> Set[str]:
        """Those that were given up because nothing was heard of them: they may live."""
        return self._silent.keys()

    @property
    def has_finished(self) -> bool:
        """Somebody has done all there was to do."""
        return bool(self._finished)

    def knows(self, member: str) -> bool:
        """It is here, or was."""
        return member in self.here or member in self._gone or member in self._finished

    def is_gone(self, member: str) -> bool:
        """It was here, and has not finished."""
        return member in self._gone

    def misses(self, members: Collection[str], now_s: float) -> bool:
        """One of them is gone, or has finished so long ago that others which are still there may be waiting for it."""
        is_left = any(each in self.here for each in members)
        finished_s = [self._finished[each] for each in members if each in self._finished]
        is_waited_for = is_left and any(now_s - at_s > _ENDING_S for at_s in finished_s)
        return is_waited_for or any(self.is_gone(each) for each in members)

    def of_slot(self, slot: int) -> list[str]:
        """Who is here of a slot."""
        return [each for each in self.here if slot_of(each)[0] == slot]

    def newcomers(self, members: Collection[str], most: int) -> list[str]:
        """Who is here beside the members and waits to be let in, as far as there is room for so many in all."""
        room = most - sum(1 for member in members if member in self.here)
        waiting = sorted((each for each in self.here if each not in members), key=slot_of)
        return waiting[: max(0, room)]

    def enter(self, member: str, now_s: float, first_s: float | None = None) -> None:
        """It has come; at most once. Those of its slot before it have ended: only then is another one started.

        And only if they were not through: a script that fails in its own way may have said so. `first_s` is as `Signs`
        has it.
        """
        if not self.knows(member):
            self.here[member] = Signs(now_s, self._silence, first_s)
            self._silent = {each: signs for each, signs in self._silent.items() if not _is_followed(each, [member])}
            failed = [each for each in self._finished if _is_followed(each, [member])]
            self._gone.update(failed)
            for each in failed:
                del self._finished[each]

    def forget(self, member: str) -> None:
        """As if it had never come."""
        self.here.pop(member, None)

    def beat(self, member: str, beat: Beat, now_s: float) -> None:
        """A heartbeat."""
        if member in self.here:
            self.here[member].observe(beat, now_s)

    def may_have_gone(self, member: str, now_s: float) -> bool:
        """One that is here may be with another coordinator by now."""
        return member in self.here and self.here[member].may_have_gone(now_s)

    def stand_still(self, members: Collection[str], least_s: float) -> bool:
        """All of them that are here have waited for others for so long, and none has got on."""
        there = self._of(members)
        return bool(there) and all(signs.still_s >= least_s for signs in there)

    def wait_in_vain(self, members: Collection[str]) -> bool:
        """All of them that are here wait for others, none gets on, and it takes far longer than one of them is used to.

        Who has come a short while ago does not know yet what is usual.
        """
        there = self._of(members)
        is_reading = any(signs.is_reading for signs in there)
        is_in_vain = self.stand_still(members, WAITS.least_s) and any(signs.waits_in_vain for signs in there)
        return is_in_vain and not is_reading

    def _of(self, members: Collection[str]) -> list[Signs]:
        return [signs for member, signs in self.here.items() if member in members]

    def excuse(self, now_s: float) -> None:
        """Nobody is to blame for what was not heard so far."""
        for signs in (*self.here.values(), *self._silent.values()):
            if signs is not None:
                signs.excuse(now_s)

    def is_silent(self, member: str, now_s: float, grace_s: float) -> bool:
        """One that is here ought to have been heard of, even with this grace."""
        return member in self.here and self.here[member].is_silent(now_s, grace_s)

    def may_return(self, member: str, now_s: float, grace_s: float) -> bool:
        """It was given up since nothing was heard of it, and with this grace it would not have been yet."""
        signs = self._silent.get(member)
        return signs is not None and not signs.is_silent(now_s, grace_s)

    def late(self, now_s: float, grace_s: Callable[[str], float]) -> Iterator[tuple[str, str]]:
        """(member, why) of those that ought to have been heard of, even with the grace that each has."""
        somebody_waits = any(signs.is_waiting for signs in self.here.values())
        for member, signs in list(self.here.items()):
            if signs.is_silent(now_s, grace_s(member)):
                yield member, reasons.UNHEARD
            elif somebody_waits and signs.is_stuck(grace_s(member)):
                yield member, "it stood still while others waited for it"

    def lose(self, member: str, *, is_silent: bool) -> None:
        """It is gone."""
        signs = self.here.pop(member, None)
        self.leaving.discard(member)
        self._gone.add(member)
        if is_silent and not _is_followed(member, [*self.here, *self._gone, *self._finished]):
            self._silent[member] = signs

    def take_back(self, member: str, now_s: float, first_s: float | None = None) -> bool:
        """It was lost since it was silent, and is heard of; False if a later process of its slot has come since."""
        if member not in self._silent:
            return False
        self._gone.discard(member)
        self.here[member] = signs = self._silent.pop(member) or Signs(now_s, self._silence, first_s)
        signs.excuse(now_s)
        return True

    def may_live(self, member: str) -> bool:
        """It is not known to have ended: it is here, was given up for its silence, or has never come."""
        is_ended = (member in self._gone and member not in self._silent) or member in self._finished
        return not is_ended and not _is_followed(member, [*self.here, *self._gone, *self._finished])

    def forget_silent(self, others: Collection[str]) -> None:
        """But for these, those who are silent have nothing to do any more with who may go on."""
        self._silent = {each: signs for each, signs in self._silent.items() if each in others}

    def leave(self, member: str, now_s: float, *, is_finished: bool) -> None:
        """It wants to go, or has finished and is of no more concern."""
        if is_finished:
            del self.here[member]
            self.leaving.discard(member)
            self._finished[member] = now_s
        else:
            self.leaving.add(member)


def _is_followed(member: str, others: Iterable[str]) -> bool:
    """One of them is a later incarnation of its slot."""
    slot, incarnation = slot_of(member)
    return any(place == slot and later > incarnation for place, later in map(slot_of, others))
