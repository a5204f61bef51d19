"""Speed test at the start: every rank trains on as many test samples, and the order in which they finish counts.

Source: Huang & Yang (2022), algorithm 1; the central node is rank 0. All ranks begin together, once each has its
samples. The store's atomic counter counts completions, so the order of arrival is the order that the store saw.

No rank can be left out of a process group of torch: a script that calls `dist.barrier()` would wait for it. So a rank
that never reports ends the wait of the others with an error that names it. `ringweave run --elastic` forms rings
without this test (`rings/startup_rendezvous.py`).
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

from ringweave.comm import peer_data
from ringweave.errors import PeerError
from ringweave.training import timing

START_TIMEOUT_S = 300.0
"""Time that the first ready rank waits for the last: ranks may load their data meanwhile."""
TEST_S = 0.5
"""Time that the fastest rank computes before it reports, about: a dozen periods of a CPU quota."""
_SAME_TIME_RATIO = 1.25
"""Ranks whose times differ by less than this ratio finish together: the test is no more exact."""
_GRACE_S = 10.0
"""Time that the others wait for rank 0's answer beyond rank 0's own wait."""
_POLL_S = 0.01
_MAX_TRIALS = 1_000_000
"""Twice the most trials that `wait_start` ever returns."""

_ParsedT = TypeVar("_ParsedT")


@contextmanager
def preserve_model_state(model: nn.Module) -> Iterator[None]:
    """Restore gradients, buffers, mode and torch's random numbers afterwards."""
    gradients = {parameter: parameter.grad for parameter in model.parameters()}
    buffers = {buffer: buffer.detach().clone() for buffer in model.buffers()}
    was_training = model.training
    for parameter in gradients:
        parameter.grad = None
    devices = timing.cuda_devices(model)
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, before in buffers.items():
                buffer.copy_(before)
        model.train(was_training)


class SpeedTestParticipant:
    """One rank's part in the test. Every rank has one; ranks that run no trials call `withdraw`."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        timeout_s: float = START_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Create it; `store` belongs to the test alone, `timeout_s` limits the wait of ready ranks for the others."""
        self._store, self._rank, self._world_size = store, rank, world_size
        self._timeout_s, self._clock, self._sleep = timeout_s, clock, sleep
        self._is_ready = self._has_reported = False
        self._began_s = 0.0

    def wait_start(self, trial_s: float) -> int:
        """Report that this rank has its test samples, wait until all have, and begin together.

        Args:
            trial_s: Seconds of one trial of this rank, about.

        Returns:
            Number of trials of each rank: the same on all ranks.

        Raises:
            PeerError: A rank does not take part.
            DisagreementError: A rank's message is malformed.
        """
        self._report_ready(trial_s)
        if self._rank == 0:
            reports = self._collect("ready")
            fastest_s = min((each_s for _, each_s in reports if each_s is not None), default=TEST_S)
            self._publish("go", reports, math.ceil(TEST_S / max(fastest_s, 1e-6)))
        num_trials = self._wait_published("go", _parse_num_trials)
        self._began_s = self._clock()
        return num_trials

    def report_finished(self) -> None:
        """Report that this rank has run its trials."""
        self._report_arrival(self._clock() - self._began_s)

    def withdraw(self) -> None:
        """Report that this rank runs no trials, so that no rank waits for it; does nothing after a report."""
        if not self._is_ready:
            self._report_ready(None)
            if self._rank == 0:  # the others need not wait for a rank without trials
                self._store.set("go", json.dumps({"absent": [], "content": 1}))
        if not self._has_reported:
            self._report_arrival(None)

    def finish_order(self) -> tuple[int, ...] | None:
        """Return the ranks in the order in which they finished; None if a rank ran no trials.

        Ranks that finish together are in the order of ranks, so that ranks of a node stay together.

        Raises:
            PeerError: A rank has not reported in time; raised on all ranks, and on that one when it reports after all.
        """
        if self._rank == 0:
            reports = self._collect("arrived")
            self._publish("order", reports, order_of_arrival(reports))
        return self._wait_published("order", functools.partial(_parse_order, world_size=self._world_size))

    def _report_ready(self, trial_s: float | None) -> None:
        self._is_ready = True
        self._append_report("ready", trial_s)

    def _report_arrival(self, seconds: float | None) -> None:
        self._has_reported = True
        self._append_report("arrived", seconds)

    def _append_report(self, list_name: str, seconds: float | None) -> None:
        place = self._store.add(list_name, 1)
        self._store.set(f"{list_name}/{place}", json.dumps([self._rank, seconds]))

    def _collect(self, list_name: str) -> list[tuple[int, float | None]]:
        """Return the reports that came in time, in the order of arrival."""
        reports: list[tuple[int, float | None]] = []
        deadline_s = self._clock() + self._timeout_s
        for place in range(1, self._world_size + 1):
            if not self._wait_key(f"{list_name}/{place}", deadline_s):
                break
            value, expected = self._store.get(f"{list_name}/{place}"), "a rank and the seconds that something took it"
            take = functools.partial(_parse_report, world_size=self._world_size)
            reports.append(
                peer_data.decode_peer_data(value, "speed test", take, expected=expected, where=f"{list_name}/{place}")
            )
        return reports

    def _publish(self, key: str, reports: list[tuple[int, float | None]], content: object) -> None:
        absent = sorted(set(range(self._world_size)) - {rank for rank, _ in reports})
        self._store.set(key, json.dumps({"absent": absent, "content": content}))

    def _wait_published(self, key: str, take: Callable[[Any], _ParsedT]) -> _ParsedT:
        """Return rank 0's answer; raise an error if rank 0, or another rank, is missing."""

        def read(said: Any) -> tuple[list[int], list[_ParsedT]]:
            absent = [_check_rank(each, self._world_size) for each in said["absent"]]
            return absent, [] if absent else [take(said["content"])]

        absent, waited_s = [0], 2 * self._timeout_s + _GRACE_S
        if self._wait_key(key, self._clock() + waited_s):
            value, expected = self._store.get(key), "the message of rank 0"
            absent, contents = peer_data.decode_peer_data(value, "speed test", read, expected=expected, where=key)
            if contents:
                return contents[0]
            waited_s = self._timeout_s
        names = ", ".join(map(str, absent))
        raise PeerError(
            f"speed test of {self._world_size} workers",
            got=f"nothing from worker {names} within {waited_s:g} s",
            expected="a report of each",
            do="Look into the log of that worker; give slow ones longer by Asynchronous(speed_test_s=...); "
            "ringweave run --elastic goes on without it",
        )

    def _wait_key(self, key: str, deadline_s: float) -> bool:
        """Wait for a key; return False on a timeout. Polls: a wait inside of the store would block other ranks."""
        while not self._store.check([key]):
            if self._clock() >= deadline_s:
                return False
            self._sleep(_POLL_S)
        return True


def _check_rank(value: Any, world_size: int) -> int:
    if type(value) is not int or not 0 <= value < world_size:
        raise ValueError(f"{value!r} is no rank")
    return value


def _parse_report(entry: Any, world_size: int) -> tuple[int, float | None]:
    rank, seconds = entry
    if seconds is not None and not 0 <= seconds < math.inf:
        raise ValueError(f"{seconds} seconds")
    return _check_rank(rank, world_size), None if seconds is None else float(seconds)


def _parse_num_trials(content: Any) -> int:
    if type(content) is not int or not 1 <= content <= _MAX_TRIALS:
        raise ValueError(f"{content!r} trials")
    return content


def _parse_order(content: Any, world_size: int) -> tuple[int, ...] | None:
    if content is None:
        return None
    order = tuple(_check_rank(each, world_size) for each in content)
    if sorted(order) != list(range(world_size)):
        raise ValueError("an order of other ranks")
    return order


def order_of_arrival(reports: list[tuple[int, float | None]]) -> list[int] | None:
    """Return the ranks in the order of arrival; ranks with about the same time are sorted by rank.

    Args:
        reports: (rank, seconds of its trials, None if it ran none) in the order of arrival.
    """
    order: list[int] = []
    together: list[int] = []
    first_s = 0.0
    for rank, seconds in reports:
        if seconds is None:
            return None
        if together and seconds >= first_s * _SAME_TIME_RATIO:
            order += sorted(together)
            together = []
        if not together:
            first_s = seconds
        together.append(rank)
    return order + sorted(together)


def join_speed_test(timeout_s: float, rank: int, world_size: int) -> SpeedTestParticipant:
    """Join a test among all ranks of the default group; each rank has to join as many tests."""
    store = distributed_c10d._get_default_store()
    number = store.add(f"ringweave-speed-test/rank-{rank}", 1)
    return SpeedTestParticipant(
        PrefixStore(f"ringweave-speed-test/{number}", store), rank, world_size, timeout_s=timeout_s
    )
