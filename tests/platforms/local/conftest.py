"""Jobs on this machine, in a state folder of the test's own; nothing of them is left after it."""

import contextlib
import os
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from ringweave.errors import JobError
from ringweave.jobs.request import JobRequest, NodeRequest
from ringweave.platforms import submission
from ringweave.platforms.api import JobView
from ringweave.platforms.local.platform import LocalPlatform
from tests.lab import fixtures
from tests.polling import DEADLINE_S, wait_until

lab_name, lab_problems = fixtures.lab_name, fixtures.lab_problems


@dataclass(frozen=True, kw_only=True)
class Running:
    """A process, and what it was when it was seen: it may end at any time."""

    process: psutil.Process
    command: list[str]
    environ: dict[str, str]


def processes_of(state: Path) -> list[Running]:
    """Everything that runs for jobs of this state folder: supervisors, agents, workers."""
    found = []
    psutil.process_iter.cache_clear()  # it would hand out earlier processes that had the same numbers
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            command, environ = process.cmdline(), process.environ()
            told = environ.get("RINGWEAVE_RUN_DIR", "")
            if process.status() != psutil.STATUS_ZOMBIE and str(state) in " ".join([*command, told]):
                found.append(Running(process=process, command=command, environ=environ))
    return found


class Here:
    """A service, and what a test asks of it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.state = folder, folder / "state" / "ringweave"
        environ = {**os.environ, "PYTHONWARNINGS": "default", "OMP_NUM_THREADS": "1"}
        self.service = LocalPlatform(self.state, requester=submission.os_user(), environ=environ)

    def submit(self, script: str, *capacities: int, name: str = "job", **more: object) -> None:
        (self.folder / "script.py").write_text(textwrap.dedent(script))
        options = {key: more.pop(key) for key in ("max_retries", "deletion") if key in more}
        names = more.pop("names", None) or [f"n{index}" for index in range(len(capacities))]
        pairs = zip(names, capacities, strict=True)
        nodes = tuple(NodeRequest(name=name, capacity=capacity, **options) for name, capacity in pairs)
        request = JobRequest(
            name=name,
            num_workers=sum(capacities),
            script="script.py",
            nodes=nodes,
            device="cpu",
            min_per_node=1,
            **more,
        )
        self.service.submit(request, base=self.folder)

    def wait(self, claim: Callable[[JobView], bool], name: str = "job", deadline_s: float = DEADLINE_S) -> JobView:
        """The job as soon as the claim holds."""
        seen: list[JobView] = []

        def holds() -> bool:
            seen.append(self.service.job(name))
            return claim(seen[-1])

        wait_until(holds, lambda: f"the claim about {name}; last seen {seen[-1]}", deadline_s)
        return seen[-1]

    def wait_state(self, state: str, name: str = "job") -> JobView:
        return self.wait(lambda job: job.state == state, name)

    def wait_gone(self, name: str = "job") -> None:
        def is_gone() -> bool:
            with contextlib.suppress(JobError):
                self.service.job(name)
                return False
            return True

        wait_until(is_gone, f"the end of {name}")

    def wait_nothing_left(self) -> None:
        wait_until(lambda: not processes_of(self.state), f"the end of all processes of {self.state}")
        wait_until(lambda: not list((self.state / "jobs").glob("*")), "the end of all files")


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Here]:
    here = Here(tmp_path)
    yield here
    for job in here.service.jobs():
        here.service.act(job.name, "delete")
    here.wait_nothing_left()
