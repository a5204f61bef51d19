"""How jobs ended that are gone by their TTL, for whoever followed them: with a TTL of 0 there is no time to look.

Who follows a job opens a file in its folder; what removes the job writes its record there first. A file that is open
can be read when it is removed, so nothing is left, and no end is missed.
"""

import contextlib
import os
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

from ringweave.jobs.life import records
from ringweave.jobs.life.records import Job, Record

NAME = "farewell.json"
"""In the job's folder; there if somebody listens."""
MAX_HEARD = 64
"""Jobs that one service listens to; of more the first is let go."""


def say(folder: Path, record: Record) -> None:
    """Tell whoever listens how the job of this folder ended; nothing happens if nobody does."""
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(folder / NAME, os.O_WRONLY | os.O_CLOEXEC)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(records.dump_record(record))


class Farewells:
    """Of the jobs that a service was asked about."""

    def __init__(self) -> None:
        self._heard: OrderedDict[str, tuple[Job, int]] = OrderedDict()

    def listen(self, folder: Path, job: Job) -> None:
        """Hear how it ends, if it is going to be removed by itself. `job` is as it was just seen."""
        name = job.request.name
        known = self._heard.pop(name, None)
        if known is not None and known[0].created_s == job.created_s:
            self._heard[name] = (job, known[1])
            return
        if known is not None:
            os.close(known[1])
        if job.request.ttl_s is None:
            return
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(folder / NAME, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._heard[name] = (job, descriptor)
        if len(self._heard) > MAX_HEARD:
            os.close(self._heard.popitem(last=False)[1][1])

    def last(self, name: str) -> Job | None:
        """The job of this name in its end state, if it is gone by its TTL and was seen before; once."""
        job, descriptor = self._heard.pop(name, (None, -1))
        if job is None:
            return None
        with os.fdopen(descriptor, encoding="utf-8") as file:
            text = file.read()
        record = records.parse_record(text) if text else job.record
        if record.outcome is None:
            return None
        why = record.outcome_reason
        return replace(job, record=replace(record, state=record.outcome, reason=why, deleting=False))

    def close(self) -> None:
        """Listen no more."""
        while self._heard:
            os.close(self._heard.popitem()[1][1])
