"""Which jobs are to be looked at, and when: each by one worker at a time, again if poked meanwhile, or later."""

import asyncio
import heapq
import itertools
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from ringweave.errors import LaunchError
from ringweave.launch.kubernetes.operating.controller import Pass, is_worth_a_retry
from ringweave.launch.kubernetes.operating.looking import Key

RESYNC_S = 60.0
"""Every job that is not at its end is looked at so often, though nothing is heard of it: a watch may miss something."""
_STALE_S = 0.02
_FIRST_DELAY_S, _LAST_DELAY_S = 0.25, 60.0


@dataclass(slots=True)
class _Entry:
    is_running: bool = False
    is_poked: bool = False
    num_failures: int = 0
    due_s: float | None = None
    """When a timer of it is set for; later ones are not heard."""


class Queue:
    """Pokes in, passes out. Lives in one event loop."""

    def __init__(
        self, reconcile: Callable[[Key], Awaitable[Pass]], clock: Callable[[], float], num_workers: int
    ) -> None:
        """`clock` tells seconds since 1970, the clock of `Pass.wake_s`."""
        self._reconcile, self._clock, self._num_workers = reconcile, clock, num_workers
        self._entries: dict[Key, _Entry] = {}
        self._ready: asyncio.Queue[Key] = asyncio.Queue()
        self._timers: list[tuple[float, int, Key]] = []
        self._count = itertools.count()
        self._timer_set = asyncio.Event()
        self._log = logging.getLogger(__name__)

    def poke(self, key: Key) -> None:
        """Something of this job may have changed."""
        entry = self._entries.setdefault(key, _Entry())
        if entry.is_poked:
            return
        entry.is_poked = True
        if not entry.is_running:
            self._ready.put_nowait(key)

    async def serve(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch_timers())
            for _ in range(self._num_workers):
                group.create_task(self._work())

    async def _work(self) -> None:
        while True:
            key = await self._ready.get()
            entry = self._entries[key]
            entry.is_running, entry.is_poked, entry.due_s = True, False, None
            try:
                done = await self._reconcile(key)
            except LaunchError as error:
                self._fail(key, entry, error)
            except Exception:
                self._log.exception("job %s/%s: a bug of ours", *key)
                self._fail(key, entry, None)
            else:
                self._finish(key, entry, done)
            entry.is_running = False
            if entry.is_poked:
                self._ready.put_nowait(key)
            elif entry.due_s is None:
                del self._entries[key]

    def _finish(self, key: Key, entry: _Entry, done: Pass) -> None:
        entry.num_failures = 0
        if done.again:
            entry.is_poked = True
        elif done.wake_s is not None:
            self._set_timer(key, entry, min(done.wake_s, self._clock() + RESYNC_S))
        elif done.is_alive:
            self._set_timer(key, entry, self._clock() + RESYNC_S)

    def _fail(self, key: Key, entry: _Entry, error: LaunchError | None) -> None:
        if error is not None and is_worth_a_retry(error):
            self._set_timer(key, entry, self._clock() + _STALE_S)
            return
        delay_s = min(_LAST_DELAY_S, _FIRST_DELAY_S * 2 ** min(entry.num_failures, 10))
        entry.num_failures += 1
        if error is not None:
            self._log.warning("job %s/%s: %s Tried again in %.2g s.", *key, error, delay_s)
        self._set_timer(key, entry, self._clock() + delay_s)

    def _set_timer(self, key: Key, entry: _Entry, at_s: float) -> None:
        entry.due_s = at_s
        heapq.heappush(self._timers, (at_s, next(self._count), key))
        self._timer_set.set()

    async def _watch_timers(self) -> None:
        while True:
            self._timer_set.clear()
            now = self._clock()
            while self._timers and self._timers[0][0] <= now:
                at_s, _, key = heapq.heappop(self._timers)
                entry = self._entries.get(key)
                if entry is not None and entry.due_s == at_s:
                    self.poke(key)
            wait_s = self._timers[0][0] - now if self._timers else None
            try:
                async with asyncio.timeout(wait_s):
                    await self._timer_set.wait()
            except TimeoutError:
                continue
