"""Random collectives on random groups for a long time: every value checked, nothing may grow, nothing may hang.

    ringweave run --workers 3,2 bench/soak.py --minutes 30 --seed 7

All ranks walk the same random script, drawn from the seed: sizes from one element to 30 MB, every dtype and operation
that ringweave reduces, tensors that are not contiguous, several collectives in flight on groups that overlap, groups
that end and are made again, some of them with a forced schedule. The inputs follow from (seed, collective, rank), so
each rank computes what must come out; now and then all members compare their results bit by bit. Memory, descriptors,
threads and shared mappings are sampled whenever all groups but the world's are gone.

Ends with 1 at a wrong value, a hang or growth, and with one JSON document on rank 0 otherwise.
"""

import argparse
import ctypes
import faulthandler
import gc
import itertools
import json
import os
import random
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

import soak_values
from ringweave import environment, schedules
from ringweave.errors import UsageError
from soak_values import Case

_MAX_GROUPS = 5
_BATCHES_PER_LAP = 10
_HUGE_BYTES = 30 * 10**6
_USUAL_BYTES = 8 * 10**6
_BATCH_BYTES = 64 * 10**6
_GROUP_TIMEOUT = timedelta(seconds=60)
_PROGRESS_S = 10.0
_WARM_UP_LAPS = 3
_SPARE_BYTES = 48 * 2**20
"""Allowed variation of each kind of resident memory: the allocator's, and torch's for each group."""
_SPARE_DESCRIPTORS = 4
_SPARE_THREADS = 8
"""Allowed threads that resolve futures: as many as were ever busy at once."""


class SoakError(AssertionError):
    """A wrong value, or growth."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Duration and intensity of the soak."""

    seconds: float
    seed: int
    max_bytes: int = _HUGE_BYTES
    """Largest message; 30 MB are drawn now and then, if this allows them."""
    hang_s: float = 120.0
    """A batch that takes longer is a hang: every thread's stack is printed, and the process ends."""
    batches_per_lap: int = _BATCHES_PER_LAP
    """Batches between two samples of memory."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Resources of this process."""

    private_bytes: int
    """Resident, of this process alone."""
    shared_bytes: int
    """All mapped shared memory, touched by this process or not."""
    descriptors: int
    threads: int
    mappings: int
    """Mappings of ringweave's shared memory."""


@dataclass
class Group:
    """A process group of the script; `handle` means nothing on ranks that are not in it."""

    ranks: list[int]
    forced: str | None
    handle: Any


@dataclass
class Flight:
    """A collective under way on this rank."""

    case: Case
    tensor: torch.Tensor
    work: dist.Work


@dataclass
class Tally:
    """Counts so far, on this rank."""

    collectives: int = 0
    checked_bytes: int = 0
    groups: int = 0
    refused: int = 0
    """Collectives that a forced schedule could not run on their group."""
    compared: int = 0
    """Results compared bit by bit among all members."""
    operations: Counter[str] = field(default_factory=Counter)
    by_schedule: Counter[str] = field(default_factory=Counter)


class Soak:
    """One rank's walk through the script."""

    def __init__(self, settings: Settings) -> None:
        """The world's process group is there already."""
        self._settings = settings
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._script = random.Random(settings.seed)
        self._control = dist.new_group(backend="gloo", timeout=_GROUP_TIMEOUT)
        nodes: list[Any] = [None] * self._world_size
        dist.all_gather_object(nodes, os.environ.get(environment.NODE, "n"), group=self._control)
        self._nodes = [str(node) for node in nodes]
        self._groups = [Group(list(range(self._world_size)), None, dist.group.WORLD)]
        self._numbers = itertools.count(1)
        self._in_shm = set(Path("/dev/shm").iterdir())
        self.tally = Tally()
        self.samples: list[Sample] = []

    def run(self) -> None:
        """Soak until time is up.

        Raises:
            SoakError: A wrong value, or growth.
        """
        started = reported = time.monotonic()
        is_over = False
        while not is_over:
            for _ in range(self._settings.batches_per_lap):
                faulthandler.dump_traceback_later(self._settings.hang_s, exit=True)
                self._change_groups()
                self._run_batch()
                now = time.monotonic()
                if self._rank == 0 and now - reported >= _PROGRESS_S:
                    reported = now
                    self._report(now - started)
                is_over = self._agree(now - started >= self._settings.seconds)
                if is_over:
                    break
            self._end_lap()
        faulthandler.cancel_dump_traceback_later()
        self._check_growth()

    def _change_groups(self) -> None:
        """Now and then end a group, or make another one."""
        if len(self._groups) > 1 and self._script.random() < 0.15:
            self._destroy(self._script.randrange(1, len(self._groups)))
        if len(self._groups) < _MAX_GROUPS and self._script.random() < 0.3:
            ranks = self._draw_ranks()
            forced = self._script.choice(schedules.SCHEDULE_NAMES) if self._script.random() < 0.5 else None
            with _forcing(forced):
                made = dist.new_group(ranks, backend="ringweave", timeout=_GROUP_TIMEOUT)
            self._groups.append(Group(ranks, forced, made))
            self.tally.groups += 1

    def _draw_ranks(self) -> list[int]:
        everybody = list(range(self._world_size))
        kind = self._script.choice(["all", "some", "node", "across"])
        by_node = {node: [r for r in everybody if self._nodes[r] == node] for node in sorted(set(self._nodes))}
        if kind == "node":
            ranks = by_node[self._script.choice(list(by_node))]
        elif kind == "across":
            ranks = sorted(self._script.choice(members) for members in by_node.values())
        elif kind == "some":
            ranks = sorted(self._script.sample(everybody, self._script.randint(1, self._world_size)))
        else:
            ranks = everybody
        return ranks if len(ranks) > 1 or self._script.random() < 0.1 else everybody

    def _run_batch(self) -> None:
        cases = self._draw_batch()
        flights = [flight for case, group in cases if (flight := self._begin_step(case, group)) is not None]
        random.Random(self._rank).shuffle(flights)  # no rank waits in the order of the others
        for flight in flights:
            flight.work.wait()
            wrong = soak_values.find_wrong(flight.case, flight.tensor)
            if wrong:
                raise SoakError(f"{flight.case}: {wrong} [rank {self._rank}, seed {self._settings.seed}]")
            self.tally.collectives += 1
            self.tally.checked_bytes += flight.tensor.nbytes
            self.tally.operations[flight.case.operation] += 1
        if self._script.random() < 0.2:
            self._compare(cases, flights)

    def _draw_batch(self) -> list[tuple[Case, Group]]:
        cases, num_bytes = [], 0
        for _ in range(self._script.choice([1, 1, 2, 3, 5, 8, 12])):
            group = self._script.choice(self._groups)
            largest = min(self._settings.max_bytes, _USUAL_BYTES)
            if self._script.random() < 0.02:
                largest = self._settings.max_bytes
            case = soak_values.draw(self._script, self._settings.seed, next(self._numbers), group.ranks, largest)
            num_bytes += case.num_bytes
            if num_bytes > _BATCH_BYTES:
                break
            cases.append((case, group))
        return cases

    def _begin_step(self, case: Case, group: Group) -> Flight | None:
        if self._rank not in group.ranks:
            return None
        tensor = soak_values.laid_out(case, self._rank)
        operation = soak_values.reduce_op(case)
        try:
            work = dist.all_reduce(tensor, operation, group=group.handle, async_op=True)
        except UsageError:
            if group.forced is None:
                raise
            self.tally.refused += 1  # on all members alike: the others would wait for ever
            return None
        assert work is not None
        return Flight(case, tensor, work)

    def _compare(self, cases: list[tuple[Case, Group]], flights: list[Flight]) -> None:
        """Return True if every member has the same bits."""
        own = {flight.case.number: zlib.crc32(soak_values.bits(flight.tensor)) for flight in flights}
        mine = torch.tensor([own.get(case.number, -1) for case, _ in cases])
        theirs = [torch.empty_like(mine) for _ in range(self._world_size)]
        dist.all_gather(theirs, mine, group=self._control)
        for place, (case, group) in enumerate(cases):
            found = {r: theirs[r][place].item() for r in group.ranks}
            if len(set(found.values())) > 1:
                raise SoakError(f"{case}: members hold different bits: {found}, expected the same everywhere")
            self.tally.compared += 1

    def _destroy(self, index: int) -> None:
        group = self._groups.pop(index)
        if self._rank in group.ranks:
            self._count_schedules(group)
            dist.destroy_process_group(group.handle)  # at once, while others may still be at its last collective

    def _count_schedules(self, group: Group) -> None:
        for name, counts in group.handle.collectives_by_schedule().items():
            self.tally.by_schedule[name] += counts["collectives"]

    def _agree(self, is_over: bool) -> bool:
        """Return True if rank 0's time is up."""
        word = torch.tensor([is_over], dtype=torch.int32)
        dist.broadcast(word, 0, group=self._control)
        return bool(word.item())

    def _end_lap(self) -> None:
        """Sample resources while only the world's group exists, whose memory is all in use."""
        while len(self._groups) > 1:
            self._destroy(len(self._groups) - 1)
        if len(self.samples) < _WARM_UP_LAPS:
            for _ in range(4):  # in each channel twice: its memory has two regions
                dist.all_reduce(torch.ones(self._settings.max_bytes // 4))
        dist.barrier(group=self._control)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        own = psutil.Process()
        maps = Path("/proc/self/maps").read_text()
        memory = own.memory_info()
        held = memory.rss - memory.shared, _shared_bytes(maps), own.num_fds(), own.num_threads()
        self.samples.append(Sample(*held, maps.count("memfd:ringweave")))

    def _check_growth(self) -> None:
        left = set(Path("/dev/shm").glob("*ringweave*")) - self._in_shm
        if left:
            raise SoakError(f"/dev/shm: {sorted(left)} left behind, expected nothing [rank {self._rank}]")
        if len(self.samples) <= _WARM_UP_LAPS:
            return
        first, last = self.samples[_WARM_UP_LAPS - 1], self.samples[-1]
        spare = Sample(_SPARE_BYTES, _SPARE_BYTES, _SPARE_DESCRIPTORS, _SPARE_THREADS, 0)
        for name, now in asdict(last).items():
            allowed = getattr(first, name) + getattr(spare, name)
            if now > allowed:
                was = getattr(first, name)
                raise SoakError(
                    f"{name}: {was} after the warm-up, {now} now, expected <= {allowed} [rank {self._rank}]"
                )

    def _report(self, elapsed_s: float) -> None:
        held = f", {asdict(self.samples[-1])}" if self.samples else ""
        done, megabytes = self.tally.collectives, self.tally.checked_bytes / 1e6
        text = f"{elapsed_s:6.0f} s: {done} collectives, {megabytes:.0f} MB checked, {self.tally.groups} groups made"
        print(text + held, flush=True)

    def summary(self) -> dict[str, Any]:
        """Return this rank's counts and findings."""
        self._count_schedules(self._groups[0])
        samples = [asdict(sample) for sample in (*self.samples[:_WARM_UP_LAPS], self.samples[-1])]
        return {**vars(self.tally), "seed": self._settings.seed, "laps": len(self.samples), "held": samples}


def _shared_bytes(maps: str) -> int:
    """Sum the mappings of shared memory in /proc/self/maps: `START-END PERMISSIONS OFFSET DEVICE INODE PATH`."""
    lines = [line.split(maxsplit=5) for line in maps.splitlines() if "/memfd:" in line or "/dev/shm/" in line]
    spans = [[int(end, 16) for end in line[0].split("-")] for line in lines if line[1].endswith("s")]
    return sum(end - start for start, end in spans)


@contextmanager
def _forcing(schedule: str | None) -> Iterator[None]:
    before = os.environ.pop(environment.SCHEDULE, None)
    if schedule is not None:
        os.environ[environment.SCHEDULE] = schedule
    try:
        yield
    finally:
        os.environ.pop(environment.SCHEDULE, None)
        if before is not None:
            os.environ[environment.SCHEDULE] = before


def main() -> None:
    """Run one worker's part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="how long")
    parser.add_argument("--seed", type=int, default=1, help="of the script")
    parser.add_argument("--max-bytes", type=int, default=_HUGE_BYTES, help="of the largest message")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("ringweave", timeout=_GROUP_TIMEOUT)
    soak = Soak(Settings(seconds=60 * options.minutes, seed=options.seed, max_bytes=options.max_bytes))
    try:
        soak.run()
    except SoakError as error:
        print(f"soak: {error}", file=sys.stderr, flush=True)
        os._exit(1)  # the others get to know it from the connections
    summary = soak.summary()
    if dist.get_rank() == 0:
        print(json.dumps({"kind": "measured", "workers": dist.get_world_size(), **summary}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
