"""One member's part in an elastic job: reductions that are kept until they count, through one epoch after another.

Three threads meet here. The one that trains hands in buckets and stops at borders; the agent's brings orders; the
session's own sums, forms groups and decides nothing. The lock is held for moments only, never while something waits.
Here is what the first two call; what it comes to is in `standing`.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ringweave.comm.regrouping import EpochGroups
from ringweave.membership.agent import Agent
from ringweave.membership.rules import reasons
from ringweave.membership.rules.follower import Out
from ringweave.membership.rules.records import Decree, Standing
from ringweave.membership.rules.signs import Beat
from ringweave.training.elastic import seams
from ringweave.training.elastic.kept import Said
from ringweave.training.elastic.seams import Crew
from ringweave.training.elastic.standing.counting import Counting
from ringweave.training.elastic.standing.following import Following
from ringweave.training.elastic.standing.footing import Footing
from ringweave.training.elastic.standing.serving import Serving

_CLOSE_S = 5.0
_NUM_FIRST = 4
"""Reductions after which a member has imported, planned and allocated what its training needs."""


class Session:
    """Where this member stands. It is the agent's participant."""

    def __init__(
        self,
        member: str,
        groups: EpochGroups,
        crew: Crew,
        *,
        buffers: Callable[[], list[Tensor]],
        is_mean: bool,
        num_parameters: int = 0,
    ) -> None:
        """`buffers` are tensors of the model that become those of the first member with every reduction."""
        self._footing = Footing(member, groups, crew)
        self._counting = Counting(self._footing, buffers, is_mean=is_mean, num_parameters=num_parameters)
        self._following = Following(self._footing, is_mean=is_mean)
        self._serving = Serving(self._footing, self._counting, self._following)

    # The thread that trains.

    def start(self, agent: Agent) -> Decree:
        """Become a member; returns with the first epoch, once this member has the job's state.

        From here to its first border the script prepares its training. Nobody joins then: who came would have no part
        in what the others do together meanwhile, and read a state that changes.

        Raises:
            MembershipError: It was not let in, or the job is over.
        """
        footing = self._footing
        footing.agent = agent
        self._serving.start()
        agent.start()
        with footing.lock:
            footing.lock.wait_for(self._may_start)
            footing.raise_reason()
            if footing.catching is not None:
                footing.catching.is_behind()
            assert footing.decree is not None
            footing.where = replace(footing.where, at_border=False)
            return footing.decree

    def _may_start(self) -> bool:
        footing = self._footing
        if footing.has_ended:
            return True
        return footing.catching.is_loaded if footing.catching else not footing.is_frozen

    @property
    def decree(self) -> Decree:
        """The epoch that holds."""
        assert self._footing.decree is not None, "after start"
        return self._footing.decree

    @property
    def is_teller(self) -> bool:
        """This member tells for all what counts: it is the first with the state of the newest epoch that was ordered.

        What an epoch left unfinished is ended before the next one is formed, and its own first member may be gone.
        """
        ordered = self._footing.ordered
        return ordered is not None and ordered.teller == self._footing.member

    @property
    def save_last(self) -> Callable[[], str] | None:
        """Saves the state when the job ends and this member is to do so; says what came of it."""
        return self._footing.save_last

    @save_last.setter
    def save_last(self, save: Callable[[], str] | None) -> None:
        self._footing.save_last = save

    def reduce(self, bucket: Tensor) -> torch.futures.Future[Tensor]:
        """One more bucket of this backward pass; the future has the mean once all of them count."""
        return self._counting.add(bucket)

    def end_pass(self, used: int) -> torch.futures.Future[int]:
        """That was all of this backward pass.

        Args:
            used: Bit i: this member has used parameter i.

        Returns:
            The parameters that any member has used, once the reduction counts.
        """
        return self._counting.end_pass(used)

    def spread(self, fetch: Callable[[], Said], tensors: Sequence[Tensor] = ()) -> Said:
        """What the first member fetches, on all members; `tensors` are filled as `fetch` fills the first member's.

        All members call it at the same place of their script. It counts like a reduction, and has a number as one has.

        Raises:
            MembershipError: This member was put out, or the job is over.
            RingweaveError: It could not be fetched.
        """
        spread = self._counting.begin_spread(fetch, tensors)
        self.wait_counted()
        return spread.said

    def change(self, change: Callable[[], None]) -> None:
        """Do something that what this member says of itself depends on, while it is asked nothing.

        Raises:
            MembershipError: This member was put out, or the job is over.
        """
        footing = self._footing
        with footing.bequeathing(), footing.lock:
            footing.wait_thawed()
            change()

    @property
    def num_committed(self) -> int:
        """Reductions that count, from the begin of the job on, and that the script has done."""
        footing = self._footing
        return footing.catching.number if footing.catching else footing.where.committed

    def wait_counted(self) -> None:
        """Until what was reduced counts; called at the end of a backward pass, before DDP reads the sums.

        Raises:
            MembershipError: It never will: this member was put out, or the job is over.
        """
        if self._footing.catching is not None:
            self._following.redo(self._footing.catching)
            return
        self._counting.wait_counted()

    def border(self, draw: Callable[[], None]) -> None:
        """Between two train steps: where members come and go. `draw` notes that the next batch is taken.

        Raises:
            MembershipError: This member was put out, or the job is over.
            SystemExit: It has left, as it wanted to.
        """
        footing, standing = self._footing, None
        agent = footing.agent
        if footing.catching is not None:
            self._following.pass_border(footing.catching, draw)
            return
        with footing.lock:
            footing.num_signs += 1
            is_border = footing.reduction is None and footing.crew.is_between_steps
            footing.where = replace(footing.where, at_border=is_border)
            if footing.stops and is_border and not footing.is_frozen:  # else nobody could come or go yet
                footing.freeze()
                standing = footing.standing()
        if agent is not None and standing is not None:
            agent.stand(standing)
        with footing.bequeathing(), footing.lock:
            footing.wait_thawed()
            footing.where = replace(footing.where, at_border=False)
            draw()

    def sign(self) -> None:
        """The thread that trains gets on."""
        self._footing.num_signs += 1

    def ask_to_leave(self) -> None:
        """This member goes at the next border; at once where it follows, while the others have nothing of it."""
        footing = self._footing
        with footing.lock:
            footing.where = replace(footing.where, is_leaving=True)
            catching = footing.catching
            is_following = catching is not None and footing.where.is_following and not catching.is_counted_on
        if footing.agent is not None:
            footing.agent.leave(is_finished=False)
        if is_following:
            self.end(Out(reason=reasons.LEFT, is_end=False))

    def leave(self) -> None:
        """As `ask_to_leave`, but returns at once, also in a signal handler: the thread beneath it may hold the lock."""
        threading.Thread(target=self.ask_to_leave, name="ringweave leaving", daemon=True).start()

    @property
    def is_frozen(self) -> bool:
        """This member stands still until the next epoch begins."""
        return self._footing.is_frozen and self._footing.decree is not None

    @property
    def is_out(self) -> bool:
        """This member changes nothing any more: it was put out, or the job is over."""
        return self._footing.out is not None

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """End the session's thread, so that none is in native code when the interpreter ends."""
        footing = self._footing
        with footing.lock:
            footing.out = footing.out or Out(reason="it has ended", is_end=True)
            self._following.stop_reading()
            footing.lock.notify_all()
        footing.groups.abort()
        self._serving.wait_stopped(timeout_s)
        if footing.catching is not None:
            footing.catching.wait_stopped(timeout_s)

    def beat(self, cpu_s: float) -> Beat:
        """A sign of life. Who reads the state waits for its donor, and is not stuck."""
        footing = self._footing
        is_reading = footing.catching is not None and not footing.catching.is_loaded
        return Beat(
            progress=footing.num_signs,
            is_waiting=footing.is_waiting or is_reading,
            cpu_s=cpu_s,
            is_starting=footing.catching is not None or footing.num_counted < _NUM_FIRST,
            is_reading=is_reading,
            num_counted=footing.num_counted,
            num_epochs=footing.num_epochs,
        )

    # The agent's thread.

    def freeze(self, *, is_urgent: bool) -> Standing | None:
        """Stand still; see `agent.Participant`.

        An epoch that was ordered and is not formed yet is formed first, and its step ended: members that gave it up
        for the next one, in which they are to stop at a border, would do so for ever and get nowhere.
        """
        footing = self._footing
        with footing.lock:
            if not is_urgent and (footing.is_ordered or not footing.is_frozen):
                footing.wants_stop = True
                return None
            footing.freeze()
        footing.groups.abort()
        with footing.lock:
            return footing.standing()  # after the abort: a store that a group was being formed in is not told again

    def standing(self) -> Standing:
        """Where this member stands just now."""
        with self._footing.lock:
            return self._footing.standing()

    def form(self, decree: Decree) -> None:
        """Go on in this epoch."""
        footing = self._footing
        with footing.lock:
            footing.next = footing.ordered = decree
            footing.is_ordered, footing.wants_stop = True, False
            footing.lock.notify_all()

    def end(self, out: Out) -> None:
        """Change nothing any more."""
        footing = self._footing
        with footing.lock:
            footing.out = out
            footing.freeze()
            self._following.stop_reading()
            if footing.reduction is not None:
                footing.reduction.fail(seams.error_of(out))
            footing.lock.notify_all()
        footing.groups.abort()
