"""Who may go on when others do not answer. At most one part of what was an epoch can."""

from collections.abc import Callable, Collection, Sequence

from ringweave.membership.rules.records import Decree, Standing, slot_of


def is_lost(before: Decree | None, standings: Sequence[Standing]) -> bool:
    """Whether nobody has the job's state any more, of those who stand for the epoch after that one.

    At the begin nobody has, and the first member's becomes it: no step was done without the others.
    """
    if before is None or any(each.has_state for each in standings):
        return False
    return bool(before.holders) or not {each.member for each in standings} & set(before.members)


def is_majority(before: Collection[str], holders: Sequence[Standing], silent: Collection[str]) -> bool:
    """Whether those who go on outnumber those who may be going on elsewhere; of two halves, who has the first member.

    Args:
        before: Members of the epoch that held.
        holders: Those of them who go on.
        silent: Who was not heard of in time, and may live. Whoever is known to be gone does not
            count, nor does whoever's slot another process has by now.
    """
    here = {each.member for each in holders} & set(before)
    away = set(before) & set(silent) - here
    if len(here) != len(away):
        return len(here) > len(away)
    return not here or min(here | away, key=slot_of) in here


def is_met(decree: Decree, standings: Sequence[Standing]) -> bool:
    """Whether all members have been in that epoch, by where some of them stand: else none takes a step over in it."""
    return any(each.member in decree.members and each.committed > decree.committed for each in standings)


def forerunners(
    before: Decree | None, standings: Sequence[Standing], staying: Collection[str], may_live: Callable[[str], bool]
) -> tuple[tuple[str, ...], ...]:
    """See `Decree.forerunners`, of an epoch of those who stay that follows on one in which these stood.

    One with the very same members says nothing more.
    """
    if before is None:
        return ()
    epochs = (before.members, *(() if is_met(before, standings) else before.forerunners))
    living = dict.fromkeys(tuple(filter(may_live, each)) for each in epochs)
    return tuple(each for each in living if each and set(each) != set(staying))


def term_after(term: int, *, is_even: bool) -> int:
    """A greater term; even ones are coordinator 1's and odd ones 0's, so that no two decide in the same."""
    return term + 1 + ((term + 1) % 2 != (0 if is_even else 1))
