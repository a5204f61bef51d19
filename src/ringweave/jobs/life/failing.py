"""Which failures of a round are a node's own, and which only follow from another's. Pure.

When a node dies the others die of it, often earlier and with an exit code. So a failure of the place goes before one of
the script, as in `launch/causes.py`, and one of the script is believed only when no other cause has shown up in time.
A lost machine may look alive for a minute. So where all blame another and one has said nothing, nobody pays yet: all
are called back to the gate, and who does not come turns out to be the one.
In an elastic job the others go on without a node that was lost; who cannot after all follows from that. There a script
that fails on some nodes while others train on is taken for a broken device, which raises an exception too.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ringweave.jobs.life import going_on, hanging
from ringweave.jobs.life.observing import Cause, Group, Observed, Phase
from ringweave.jobs.life.records import Blame, Ended, Job, Loss, Record

SETTLE_S = 2.0
"""How long the first cause may trail its consequences; `ringweave run` waits 1.5 s for workers of one node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """An attempt that ended badly and was not judged yet."""

    node: int
    attempt: int
    cause: Cause
    text: str
    group: Group | None
    """None where it vanished."""

    @property
    def ended_s(self) -> float:
        """When it ended; at no time at all where nobody knows, so that nothing is waited for."""
        known = self.group.ended_s if self.group else None
        return float("-inf") if known is None else known

    def judged(self, cause: Cause, *, charged: bool) -> Ended:
        """The end of the attempt, as recorded."""
        exit_code = self.group.exit_code if self.group else None
        return Ended(attempt=self.attempt, cause=cause, charged=charged, text=self.text, exit_code=exit_code)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What the failures of a round come to."""

    ends: dict[int, Ended]
    """Node -> how its attempt ended, for those that are to be replaced or that failed for good."""
    program_failed: tuple[int, ...] = ()
    """Nodes whose script failed; the job fails with them, unless it is elastic and others train on."""
    blame: Blame | None = None
    """All blame another, and one that could be it has not answered: another round, for which nobody has paid yet."""
    follows: Loss | None = None
    """What members of an elastic job went on without before they could not: another round, for which nobody pays."""
    wait_until_s: float | None = None
    """Nothing is decided before this time, unless more is seen."""


def to_judge(job: Job, record: Record, groups: dict[tuple[int, int], Group], now: float) -> list[Failure]:
    """What ended badly, hangs, or is gone, and was not judged yet.

    Once a node of an elastic job has finished only the script's failures count: nobody has to be replaced any more.
    """
    found = [failure for node in job.used_nodes if (failure := _failure(node, record, groups)) is not None]
    found += _hung(job, record, groups, now)
    is_through = going_on.is_through(job, record, groups)
    return [failure for failure in found if failure.cause is Cause.PROGRAM or not is_through]


def _failure(node: int, record: Record, groups: dict[tuple[int, int], Group]) -> Failure | None:
    known = record.nodes[node]
    group = groups.get((node, known.attempt))
    if known.ended is not None:
        return None
    if group is None:
        if not known.seen:
            return None
        text = "its worker group vanished"
        return Failure(node=node, attempt=known.attempt, cause=Cause.PLACE, text=text, group=None)
    if group.phase is Phase.STOPPED:
        cause = Cause.PLACE
    elif group.phase is Phase.FAILED:
        cause = group.cause or Cause.PLACE
    elif group.phase is Phase.INTERRUPTED and group.round == record.round:
        cause = Cause.PEER
    else:
        return None
    text = group.text or (f"exit code {group.exit_code}" if group.exit_code is not None else "nobody knows why")
    return Failure(node=node, attempt=known.attempt, cause=cause, text=text, group=group)


def _hung(job: Job, record: Record, groups: dict[tuple[int, int], Group], now: float) -> Iterator[Failure]:
    for node, text in hanging.hung(job, record, groups, now).items():
        attempt = record.nodes[node].attempt
        group = groups[node, attempt]
        if group.phase is not Phase.INTERRUPTED or group.round < record.round:
            yield Failure(node=node, attempt=attempt, cause=Cause.PLACE, text=text, group=group)


def judge(found: list[Failure], record: Record, observed: Observed, now: float) -> Verdict:
    """Who failed, and who only followed.

    Args:
        found: What ended badly and was not judged yet.
        record: What is known; a failure in an earlier round than its own follows from what ended that round.
        observed: Whether anything still runs that could turn out to be the first cause.
        now: Time on the clock of the groups' `ended_s`.
    """
    ends = {failure.node: failure.judged(Cause.PLACE, charged=True) for failure in _own(found)}
    late = [failure for failure in found if failure.node not in ends and _round(failure, record) < record.round]
    fresh = [failure for failure in found if failure.node not in ends and failure not in late]
    shaken = [failure for failure in fresh if _is_shaken(failure, record)]
    fresh = [failure for failure in fresh if failure not in shaken]
    ends |= _followers(late) | _followers(shaken)
    if any(end.charged for end in ends.values()):
        return Verdict(ends=ends | _followers(fresh))
    if not fresh:
        return Verdict(ends=ends)
    decide_at_s = min(failure.ended_s for failure in fresh) + SETTLE_S
    if now < decide_at_s and _may_explain(observed):
        return Verdict(ends=ends, wait_until_s=decide_at_s)
    programs = [failure for failure in fresh if failure.cause is Cause.PROGRAM]
    if programs:
        ends |= {failure.node: failure.judged(Cause.PROGRAM, charged=False) for failure in programs}
        return Verdict(ends=ends, program_failed=tuple(failure.node for failure in programs))
    if record.loss is not None:
        return Verdict(ends=ends | _followers(fresh), follows=record.loss)
    first = min(fresh, key=lambda failure: (failure.ended_s, failure.node))
    if _is_somebody_silent(record, observed):
        return Verdict(ends=ends | _followers(fresh), blame=Blame(node=first.node, text=first.text))
    # All blame another, and no other failed: the first one pays, so that this cannot go on for ever.
    ends[first.node] = first.judged(Cause.PLACE, charged=True)
    return Verdict(ends=ends | _followers([failure for failure in fresh if failure is not first]))


def _own(found: list[Failure]) -> Iterator[Failure]:
    return (failure for failure in found if failure.cause is Cause.PLACE)


def _followers(found: list[Failure]) -> dict[int, Ended]:
    """The ends of those whose group is over; what is only interrupted goes back to the gate, its attempt goes on."""
    over = [failure for failure in found if failure.group and not failure.group.phase.is_alive]
    return {failure.node: failure.judged(Cause.PEER, charged=False) for failure in over}


def _is_shaken(failure: Failure, record: Record) -> bool:
    """A script that failed within moments of a lost place which the others go on without: of that, most likely."""
    loss = record.loss
    if failure.cause is not Cause.PROGRAM or loss is None or loss.scripts:
        return False
    return abs(failure.ended_s - loss.at_s) < SETTLE_S


def _round(failure: Failure, record: Record) -> int:
    return failure.group.round if failure.group else record.round


def _is_somebody_silent(record: Record, observed: Observed) -> bool:
    """A group has not ended in this round, alone among those that did: it trains or starts, or is being removed."""
    past_gate = (Phase.READY, Phase.RUNNING) if observed.gate >= record.round else (Phase.RUNNING,)
    return any(
        (group.phase in past_gate or (group.leaving and group.phase.is_alive))
        and group.round == record.round
        and group.attempt == record.nodes[group.node].attempt
        and record.nodes[group.node].ended is None
        for group in observed.groups
        if group.node < len(record.nodes)
    )


def _may_explain(observed: Observed) -> bool:
    return any(group.phase in (Phase.PENDING, Phase.READY, Phase.RUNNING) for group in observed.groups)
