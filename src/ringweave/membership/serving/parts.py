"""Memberships of the parts of one job: each part has a coordinator of its own, and what happens in one stops no other.

A job whose workers train in rings has one for each ring: only the ring that loses a member stands still. All of them
are in one process, and a member speaks to that of the part which it has entered last.
"""

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from ringweave.errors import RefusedError, explain
from ringweave.membership.messages import JOB, LOBBY, Accuse, Ask, Count, Enter, Heartbeat, Leave, Listen, Stand
from ringweave.membership.rules.coordinator import Coordinator
from ringweave.membership.rules.records import BEFORE_ALL
from ringweave.membership.rules.settings import Bounds, Settings
from ringweave.membership.serving.notes import Notes
from ringweave.membership.serving.service import CoordinatorService
from ringweave.wire import Call, Handler, Identity

_MOST_PARTS = 4096
"""More are refused: each costs memory, and whoever has the credentials may ask for one."""


class Parts:
    """The coordinators of a job and of its parts; those of parts are made when somebody enters."""

    def __init__(
        self,
        job: CoordinatorService,
        make: Callable[[str, Settings], CoordinatorService],
        wanted: Settings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Knows no part yet.

        Args:
            job: That of the whole job.
            make: Gives the coordinator of a part, by its name and what it goes by.
            wanted: What the job's goes by.
            clock: Gives seconds.
        """
        self._make, self._wanted, self._clock = make, wanted, clock
        self._lock = threading.Lock()
        self._services = {JOB: job}
        self._part_of: dict[str, str] = {}
        self._too_few_since_s: float | None = None

    def handlers(self) -> list[Handler]:
        """What the server has to know."""
        passed = [Handler(message=each, handle=self._pass_on) for each in (Listen, Stand, Accuse, Leave)]
        passed.append(Handler(message=Heartbeat, handle=self._pass_on, is_quick=True))
        return [Handler(message=Enter, handle=self._enter), Handler(message=Ask, handle=self._ask), *passed]

    @property
    def ended(self) -> str:
        """Why the job, or all of its parts, are over; empty as long as one is not."""
        parts = [each for name, each in self._all() if name not in (JOB, LOBBY)]
        reasons = [each.ended for each in parts] or [self._services[JOB].ended]
        return reasons[0] if all(reasons) else ""

    def announce(self, members: Collection[str]) -> None:
        """These are about to be started as members of the whole job; see `Coordinator.announce`."""
        self._services[JOB].announce(members)

    def tick(self, connected: Callable[[], Collection[str]]) -> None:
        """Time has passed; `connected` gives the names of those that hold a connection, when each part asks."""
        for _, each in self._all():
            each.tick(connected)
        self._consider_all()

    def hung_up(self, peer: Identity) -> None:
        """A process has hung up without a goodbye; see `wire.Server`."""
        self._of(peer.name).hung_up(peer)

    def hear_of(self, count: Count) -> None:
        """What the other coordinator says of itself."""
        terms = {**count.parts, JOB: count.term if count.is_active else 0}
        for name, each in self._all():
            term, ballot = terms.get(name, 0), count.ballot if name == JOB else count.epochs.get(name, BEFORE_ALL)
            if name == LOBBY and not term:  # nothing is lost with it: who finds it gone starts anew
                continue
            each.hear_of(count.model_copy(update={"term": term, "is_active": term > 0, "ballot": ballot}))

    def _consider_all(self) -> None:
        """End the job where too few are left in all rings together, and no others come."""
        rings = [each for name, each in self._all() if name not in (JOB, LOBBY)]
        counts = [each.num_here for each in rings]
        least, now_s = self._wanted.bounds.least, self._clock()
        num_here = sum(each for each in counts if each is not None)
        if not rings or self.ended or None in counts or num_here >= least or any(each.has_finished for each in rings):
            self._too_few_since_s = None
            return
        self._too_few_since_s = since_s = self._too_few_since_s or now_s
        if now_s - since_s > self._wanted.patience_s:
            waited = f"{self._wanted.patience_s:g} s"
            for each in rings:
                each.give_up(
                    f"workers left: {num_here} in {len(rings)} rings, expected at least {least}, "
                    f"and no other came within {waited}"
                )

    def _all(self) -> list[tuple[str, CoordinatorService]]:
        with self._lock:
            return list(self._services.items())

    def _of(self, member: str) -> CoordinatorService:
        with self._lock:
            return self._services[self._part_of.get(member, JOB)]

    def _enter(self, call: Call) -> Any:
        message: Enter = call.message
        with self._lock:
            service = self._services.get(message.part) or self._add(message)
            self._part_of[call.peer.name] = message.part
        return service.call(call)

    def _add(self, message: Enter) -> CoordinatorService:
        """The coordinator of a part, for those who enter it first; with the lock held."""
        if len(self._services) > _MOST_PARTS:
            raise RefusedError(
                explain("part of the job", got=message.part, expected=f"one of {_MOST_PARTS}", do="Look who called")
            )
        if message.part == LOBBY:
            wanted = replace(self._wanted, expected=message.expected)
        else:
            bounds = Bounds(least=1, most=message.expected)
            wanted = replace(self._wanted, bounds=bounds, expected=message.expected, is_kept_elsewhere=True)
        service = self._make(message.part, wanted)
        self._services[message.part] = service
        return service

    def _pass_on(self, call: Call) -> Any:
        return self._of(call.peer.name).call(call)

    def _ask(self, call: Call) -> Count:
        del call
        counts = {name: each.count() for name, each in self._all()}
        active = {name: count for name, count in counts.items() if name != JOB and count.is_active}
        terms = {name: count.term for name, count in active.items()}
        epochs = {name: count.ballot for name, count in active.items()}
        return counts[JOB].model_copy(update={"parts": terms, "epochs": epochs, "ended": self.ended})


def coordinators(
    wanted: Settings,
    *,
    index: int,
    is_standby: bool,
    notes: Notes,
    clock: Callable[[], float] = time.monotonic,
) -> Parts:
    """Those of one process.

    Args:
        wanted: What the job's goes by.
        index: Which of the job's two processes it is.
        is_standby: It decides nothing until it is asked to.
        notes: Is told what is decided.
        clock: Gives seconds.
    """

    def make(part: str, settings: Settings) -> CoordinatorService:
        return CoordinatorService(
            Coordinator(settings, now_s=clock(), index=index, is_standby=is_standby),
            clock=clock,
            part=part,
            notes=notes,
        )

    return Parts(make(JOB, wanted), make, wanted, clock)
