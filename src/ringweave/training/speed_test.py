"""The speed test at the start: every rank trains on as many test samples, and the order in which they finish counts.

Source: Huang & Yang (2022), algorithm 1; the central node is rank 0. All begin together, once each has its samples.
Completions are counted by the store's atomic counter, so the order of arrival is what the store saw.

No rank can be left out of a process group of torch: a script that calls `dist.barrier()` would wait for it. So one that
never reports ends the wait of the others, by an error that names it. Under `ringweave run --elastic` rings are formed
without it (`rings/elastic/lobby.py`).
"""

import functools
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed import PrefixStore, Store, distributed_c10d

from ringweave.comm import hearing
from ringweave.errors import PeerError, explain

PATIENCE_S = 300.0
"""How long the first to be ready waits for the last: ranks may load their data meanwhile."""
TEST_S = 0.5
"""How long the fastest rank computes before it reports, about: a dozen periods of a CPU quota."""
_DIFFERENT = 1.25
"""Ranks that finish closer together than so many times the shorter time arrive together: a test is no more exact."""
_GRACE_S = 10.0
"""How much longer than rank 0 the others wait for what it says."""
_LOOK_S = 0.01
_MOST_TRIALS = 1_000_000
"""Twice as many as `Referee.start` ever says."""

_Found = TypeVar("_Found")


@contextmanager
def leaving_no_trace(model: nn.Module) -> Iterator[None]:
    """Put gradients, buffers, mode and torch's random numbers back to what they were."""
    gradients = {parameter: parameter.grad for parameter in model.parameters()}
    buffers = {buffer: buffer.detach().clone() for buffer in model.buffers()}
    was_training = model.training
    for parameter in gradients:
        parameter.grad = None
    devices = {parameter.device.index for parameter in gradients if parameter.device.type == "cuda"}
    try:
        with torch.random.fork_rng(devices=sorted(index or 0 for index in devices)):
            yield
    finally:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, before in buffers.items():
                buffer.copy_(before)
        model.train(was_training)


class Referee:
    """One rank's part in the test. Every rank has one; those that do not try anything out `withdraw`."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        patience_s: float = PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`store` is the test's own; `patience_s` is how long those who are ready wait for who is not."""
        self._store, self._rank, self._world_size = store, rank, world_size
        self._patience_s, self._clock, self._sleep = patience_s, clock, sleep
        self._is_ready = self._has_reported = False
        self._began_s = 0.0

    def start(self, trial_s: float) -> int:
        """This rank has its test samples: wait until all have, and begin together.

        Args:
            trial_s: Seconds of one trial of this rank, about.

        Returns:
            How many trials each rank makes: the same number on all of them.

        Raises:
            PeerError: A rank does not come.
            DisagreementError: What one has said is something else.
        """
        self._be_ready(trial_s)
        if self._rank == 0:
            found = self._collect("ready")
            fastest_s = min((each_s for _, each_s in found if each_s is not None), default=TEST_S)
            self._say("go", found, math.ceil(TEST_S / max(fastest_s, 1e-6)))
        num_trials = self._hear("go", _num_trials)
        self._began_s = self._clock()
        return num_trials

    def report(self) -> None:
        """This rank has made its trials."""
        self._arrive(self._clock() - self._began_s)

    def withdraw(self) -> None:
        """This rank cannot be tried out, or need not be: nobody waits for it. Nothing, if it has reported."""
        if not self._is_ready:
            self._be_ready(None)
            if self._rank == 0:  # the others need not wait for one that has nothing to say of itself
                self._store.set("go", json.dumps({"absent": [], "content": 1}))
        if not self._has_reported:
            self._arrive(None)

    def arrivals(self) -> tuple[int, ...] | None:
        """The queue of completions: ranks in the order in which they have finished; None if one was not tried out.

        Ranks that arrive together are in the order of ranks, so that those of a node stay together.

        Raises:
            PeerError: A rank has not reported in time; the same on all ranks, and on that one when it does after all.
        """
        if self._rank == 0:
            found = self._collect("arrived")
            self._say("order", found, in_order(found))
        return self._hear("order", functools.partial(_order, world_size=self._world_size))

    def _be_ready(self, trial_s: float | None) -> None:
        self._is_ready = True
        self._put("ready", trial_s)

    def _arrive(self, seconds: float | None) -> None:
        self._has_reported = True
        self._put("arrived", seconds)

    def _put(self, what: str, seconds: float | None) -> None:
        place = self._store.add(what, 1)
        self._store.set(f"{what}/{place}", json.dumps([self._rank, seconds]))

    def _collect(self, what: str) -> list[tuple[int, float | None]]:
        """Who came in time, in the order in which they came, with what each said."""
        found: list[tuple[int, float | None]] = []
        deadline_s = self._clock() + self._patience_s
        for place in range(1, self._world_size + 1):
            if not self._wait(f"{what}/{place}", deadline_s):
                break
            value, expected = self._store.get(f"{what}/{place}"), "a rank and the seconds that something took it"
            take = functools.partial(_seconds_of, world_size=self._world_size)
            found.append(hearing.read(value, "speed test", take, expected=expected, where=f"{what}/{place}"))
        return found

    def _say(self, key: str, found: list[tuple[int, float | None]], content: object) -> None:
        absent = sorted(set(range(self._world_size)) - {rank for rank, _ in found})
        self._store.set(key, json.dumps({"absent": absent, "content": content}))

    def _hear(self, key: str, take: Callable[[Any], _Found]) -> _Found:
        """What rank 0 says; an error if it, or another rank, does not come."""

        def read(said: Any) -> tuple[list[int], list[_Found]]:
            absent = [_rank(each, self._world_size) for each in said["absent"]]
            return absent, [] if absent else [take(said["content"])]

        absent, waited_s = [0], 2 * self._patience_s + _GRACE_S
        if self._wait(key, self._clock() + waited_s):
            value, expected = self._store.get(key), "what rank 0 says of it"
            absent, contents = hearing.read(value, "speed test", read, expected=expected, where=key)
            if contents:
                return contents[0]
            waited_s = self._patience_s
        names = ", ".join(map(str, absent))
        raise PeerError(
            explain(
                f"speed test of {self._world_size} workers",
                got=f"nothing from worker {names} within {waited_s:g} s",
                expected="a report of each",
                do="Look into the log of that worker; give slow ones longer by Asynchronous(speed_test_s=...); "
                "ringweave run --elastic goes on without it",
            )
        )

    def _wait(self, key: str, deadline_s: float) -> bool:
        """Whether it is there by then. Looks again and again: a wait inside the store would keep others from it."""
        while not self._store.check([key]):
            if self._clock() >= deadline_s:
                return False
            self._sleep(_LOOK_S)
        return True


def _rank(value: Any, world_size: int) -> int:
    if type(value) is not int or not 0 <= value < world_size:
        raise ValueError(f"{value!r} is no rank")
    return value


def _seconds_of(entry: Any, world_size: int) -> tuple[int, float | None]:
    rank, seconds = entry
    if seconds is not None and not 0 <= seconds < math.inf:
        raise ValueError(f"{seconds} seconds")
    return _rank(rank, world_size), None if seconds is None else float(seconds)


def _num_trials(content: Any) -> int:
    if type(content) is not int or not 1 <= content <= _MOST_TRIALS:
        raise ValueError(f"{content!r} trials")
    return content


def _order(content: Any, world_size: int) -> tuple[int, ...] | None:
    if content is None:
        return None
    order = tuple(_rank(each, world_size) for each in content)
    if sorted(order) != list(range(world_size)):
        raise ValueError("an order of other ranks")
    return order


def in_order(found: list[tuple[int, float | None]]) -> list[int] | None:
    """Ranks in the order in which they arrived; those together that finished at about the same time.

    Args:
        found: (rank, seconds that it took, None if it was not tried out) in the order of arrival.
    """
    order: list[int] = []
    together: list[int] = []
    first_s = 0.0
    for rank, seconds in found:
        if seconds is None:
            return None
        if together and seconds >= first_s * _DIFFERENT:
            order += sorted(together)
            together = []
        if not together:
            first_s = seconds
        together.append(rank)
    return order + sorted(together)


def referee_of_all(patience_s: float, rank: int, world_size: int) -> Referee:
    """A rank's part in a test among all ranks of the default group; each has to come to as many tests."""
    store = distributed_c10d._get_default_store()
    number = store.add(f"ringweave-speed-test/rank-{rank}", 1)
    return Referee(PrefixStore(f"ringweave-speed-test/{number}", store), rank, world_size, patience_s=patience_s)
