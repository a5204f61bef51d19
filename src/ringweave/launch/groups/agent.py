"""The group agent: leads the workers of one node through the rounds of one attempt.

    gather: end what runs, be READY --gate opens--> RUNNING --all well--> SUCCEEDED, and leave
       ^                                              |-- killed, or the script failed --> FAILED, and leave
       +----- called back to another round -----------+-- another node failed, or the round is over by the time
                                                          that workers start --> INTERRUPTED, and wait for that

In an elastic job the gate of its round may be open already: it takes the place of one that was lost.
It holds no state that has to survive: if it dies, its attempt is over.
"""

import os
import time
from collections.abc import Callable
from dataclasses import replace

from ringweave.errors import RingweaveError
from ringweave.jobs.life.observing import Cause, Phase
from ringweave.launch.groups.crew import Crew, Outcome
from ringweave.launch.groups.handing import RoundOverError
from ringweave.launch.groups.posts import Offer, Opening, Orders, Post, Report

RUNNING_S = 0.05
"""Between two looks at workers."""
IDLE_S = 0.5
"""Between two looks at the orders, where nothing says that they have changed."""
RESULT_S = 0.5
"""Between two reports that differ in nothing but how far the workers are."""
_NO_OFFER = {"meeting": None, "server": None, "coordinator": None}


class Agent:
    """Follows orders until it may leave."""

    def __init__(
        self,
        post: Post,
        *,
        offer: Callable[[Orders], Offer],
        start: Callable[[Opening], Crew],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Needs a post and two hands.

        Args:
            post: Where orders come from and reports go.
            offer: Makes ready for the round of the orders, and finds where workers could meet on this node.
            start: Starts this node's workers for an opening of the gate.
            clock: Seconds since 1970.
        """
        self._post, self._offer, self._start, self._clock = post, offer, start, clock
        self._report = Report(round=0, phase=Phase.PENDING, pid=os.getpid())
        self._crew: Crew | None = None
        self._told_s = 0.0
        self._leave = ""
        self._round = 0

    def leave(self, why: str) -> None:
        """Leave as if ordered to; may be called by a signal's handler."""
        self._leave = why

    def why_stop(self) -> str:
        """Why what is done for the round is not wanted any more, in words; empty while it is. For hands that wait."""
        orders = self._orders()
        if orders.leave:
            return orders.why or "it was told to leave"
        return f"round {orders.round} is called" if orders.round > self._round else ""

    def serve(self) -> Phase:
        """Follow orders to the end; the phase in which it left. Nothing of the workers is left then."""
        while True:
            orders = self._orders()
            self._tend(orders) if self._crew else self._obey(orders)
            if self._is_over:
                return self._report.phase
            self._post.wait(RUNNING_S if self._crew else IDLE_S)

    @property
    def _is_over(self) -> bool:
        return not self._crew and not self._report.phase.is_alive

    def _orders(self) -> Orders:
        orders = self._post.orders()
        return replace(orders, leave=True, why=self._leave) if self._leave else orders

    def _obey(self, orders: Orders) -> None:
        """Of a group whose workers do not run."""
        opening = orders.opening
        if orders.leave:
            self._end(Outcome(phase=Phase.STOPPED, text=orders.why or "it was told to leave"))
        elif orders.round > self._report.round:
            self._gather(orders)
        elif self._report.phase is Phase.READY and opening and opening.round == self._report.round:
            self._begin(opening)

    def _tend(self, orders: Orders) -> None:
        """Of a group whose workers run."""
        assert self._crew is not None
        is_called_back = orders.round > self._report.round
        if orders.leave or is_called_back:
            self._crew.end()
        outcome = self._crew.look()
        if outcome is None:
            self._tell_result()
            return
        self._report = self._with_result()
        self._crew = None
        orders = self._orders()  # again: who ends all processes of a node ends workers a moment before or after us
        if is_called_back and not orders.leave:
            self._gather(orders)
        elif outcome.phase is Phase.STOPPED or (orders.leave and outcome.cause is Cause.PLACE):
            self._end(replace(outcome, phase=Phase.STOPPED, text=orders.why or outcome.text))
        else:
            self._end(outcome)

    def _gather(self, orders: Orders) -> None:
        self._round = orders.round
        try:
            offer = self._offer(orders)
        except RoundOverError:  # the next look at the orders says what is wanted instead
            return
        except (RingweaveError, OSError) as error:
            self._end(Outcome(phase=Phase.FAILED, cause=Cause.PLACE, text=str(error)))
            return
        ready = Report(round=orders.round, phase=Phase.READY, pid=os.getpid(), meeting=offer.meeting)
        places = {"server": offer.server, "coordinator": offer.coordinator}
        self._tell(replace(ready, **places, iterations=self._report.iterations, last_loss=self._report.last_loss))

    def _begin(self, opening: Opening) -> None:
        try:
            self._crew = self._start(opening)
        except RoundOverError as error:
            self._end(Outcome(phase=Phase.INTERRUPTED, text=str(error)))
            return
        except (RingweaveError, OSError) as error:
            self._end(Outcome(phase=Phase.FAILED, cause=Cause.PLACE, text=str(error)))
            return
        self._tell(replace(self._report, phase=Phase.RUNNING, **_NO_OFFER))

    def _end(self, outcome: Outcome) -> None:
        ended = {"phase": outcome.phase, "exit_code": outcome.exit_code, "text": outcome.text}
        cause = outcome.cause if outcome.phase is Phase.FAILED else None
        self._tell(replace(self._report, **ended, cause=cause, ended_s=self._clock(), **_NO_OFFER))

    def _tell_result(self) -> None:
        now_s = self._clock()
        if abs(now_s - self._told_s) < RESULT_S:
            return
        self._told_s = now_s
        report = self._with_result()
        if report != self._report:
            self._tell(report)

    def _with_result(self) -> Report:
        assert self._crew is not None
        result = self._crew.result()
        report = replace(self._report, epoch=result.epoch, members=result.members, out=result.out)
        if result.iterations is None:
            return report
        return replace(report, iterations=result.iterations, last_loss=result.last_loss)

    def _tell(self, report: Report) -> None:
        self._report = report
        self._post.tell(report)
