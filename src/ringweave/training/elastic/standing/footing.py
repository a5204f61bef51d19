"""What all parts of a session share: one lock, and behind it where this member stands."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from ringweave.comm.regrouping import EpochGroups
from ringweave.errors import CapacityError, MembershipError, RingweaveError
from ringweave.membership.agent import Agent
from ringweave.membership.rules.follower import Out
from ringweave.membership.rules.records import Decree, Standing
from ringweave.training.elastic import seams
from ringweave.training.elastic.joining import layouts
from ringweave.training.elastic.joining.catching import Catching
from ringweave.training.elastic.kept import Reduction, Spread
from ringweave.training.elastic.seams import Crew

LEFT_CODE = 143
"""128 + SIGTERM: what a process ends with that has left on request."""


class Footing:
    """Of one member.

    Whatever is here is changed with the lock held, by whichever thread has a reason to; the lock is held for moments
    only, and whoever waits for the network or tells others something does so without it. An order may come meanwhile:
    who takes the lock again looks first whether `generation` is still the one that it began with.

    Without the lock are read: `decree` and `where` on the session's own thread; `catching` and `out`, by which the
    thread that trains goes one way or the other; and what only tells how far this member is, such as `num_counted`,
    which may be a moment old.
    `num_signs` is counted without it too, and may miss one; `agent` and `save_last` are set once.
    """

    def __init__(self, member: str, groups: EpochGroups, crew: Crew) -> None:
        self.member, self.groups, self.crew = member, groups, crew
        self.lock = threading.Condition()
        self.agent: Agent | None = None
        self.decree: Decree | None = None
        """The epoch that holds."""
        self.next: Decree | None = None
        self.ordered: Decree | None = None
        """The newest epoch, whether it is formed or not."""
        self.out: Out | None = None
        self.refusal: RingweaveError | None = None
        self.where = Standing(member=member)
        self.generation = 0
        self.is_frozen, self.is_ordered, self.is_up = True, False, False
        self.wants_stop, self.stops = False, False
        self.reduction: Reduction | Spread | None = None
        self.layout: list[list[object]] = []
        self.catching: Catching | None = None
        """Until the script has done all that was kept for it; it alone ends that."""
        self.num_signs, self.is_waiting = 0, False
        self.num_epochs = 0
        """That it has begun."""
        self.num_counted = 0
        """Reductions that its script has had the results of when they counted."""
        self.save_last: Callable[[], str] | None = None

    # With the lock held.

    @property
    def has_ended(self) -> bool:
        """This member was put out, or the job is over, or it cannot go on."""
        return self.out is not None or self.refusal is not None

    def freeze(self) -> None:
        """Stand still."""
        self.is_frozen, self.is_up = True, False
        self.next, self.is_ordered = None, False  # ordered before: it is over
        self.generation += 1

    def wait_thawed(self) -> None:
        """Until an epoch is formed; this member waits for the others meanwhile.

        Raises:
            MembershipError: This member was put out, or the job is over.
            SystemExit: It has left, as it wanted to.
        """
        self.is_waiting = True
        self.lock.wait_for(lambda: not self.is_frozen or self.has_ended)
        self.raise_reason()
        self.is_waiting = False

    def standing(self) -> Standing:
        """What the others hear of it."""
        note = {"store": self.groups.store_place, **self.crew.note()}
        layout = layouts.to_text(self.layout) if self.crew.can_be_followed else ""
        where = self.where
        if where.is_following and self.catching is not None:
            where = replace(where, at_border=self.catching.is_at_border)
        num_drawn, sharing = self.crew.drawn()
        where = replace(where, place=self.crew.state_place, num_drawn=num_drawn, sharing=sharing)
        return replace(where, note=json.dumps(note), layout=layout)

    def raise_reason(self) -> None:
        """Why this member cannot go on, if it cannot.

        Raises:
            RingweaveError: Its session has failed, or it was put out, or the job is over.
            SystemExit: It has left, as it wanted to.
        """
        if self.refusal is not None:
            raise self.refusal
        if self.out is not None:
            if self.where.is_leaving:  # as it wanted to, alone or with all others
                raise SystemExit(LEFT_CODE)
            raise seams.error_of(self.out)

    def start_buckets(self) -> RuntimeError | None:
        """Begin to sum what is there; what went wrong, if the group is broken."""
        if self.is_up and self.reduction is not None:
            try:
                self.reduction.start(self.groups.reducing)
            except RuntimeError as error:
                return error
        return None

    # Without it.

    def tell_broken(self, error: Exception | None, generation: int, decree: Decree | None = None) -> None:
        """The group of that generation does not work: if that is not known already, let the coordinator know."""
        if error is None:
            return
        with self.lock:
            if generation != self.generation:
                return
            decree = decree or self.decree
            self.is_up = False
            self.generation += 1
        if self.agent is not None and decree is not None:
            self.agent.accuse(decree.ballot, seams.suspects(error, decree))

    def refuse(self, error: Exception) -> None:
        """This member cannot go on: its script raises, and the others hear that it is gone when its process ends."""
        with self.lock:
            self.refusal = seams.refusal_of(error)
            if self.reduction is not None:
                self.reduction.fail(self.refusal)
            self.lock.notify_all()
        self.groups.abort()

    @contextmanager
    def bequeathing(self) -> Iterator[None]:
        """Saves the state where the job's end is raised, if this member is to."""
        try:
            yield
        except CapacityError as reason:  # all who are left raise it, in the same epoch
            if self.ordered is None or self.ordered.teller != self.member or self.save_last is None:
                raise
            raise CapacityError(f"{reason} {self.save_last()}") from None
        except (MembershipError, SystemExit) as reason:
            if self.out is None or self.out.heir != self.member or self.save_last is None:
                raise
            said = self.save_last()
            if isinstance(reason, SystemExit):
                raise
            raise MembershipError(f"job is over: {self.out.reason}. {said}") from reason
