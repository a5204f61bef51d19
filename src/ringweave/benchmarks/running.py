"""A whole benchmark: lab up, comparison, and nothing left behind, however it ends."""

import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ringweave import lab
from ringweave.benchmarks.comparing import Report, compare
from ringweave.benchmarks.places.place import InLab, OnThisMachine, Place
from ringweave.benchmarks.progress import Progress
from ringweave.benchmarks.requests import Request
from ringweave.benchmarks.sessions.channels import Listener
from ringweave.benchmarks.sessions.opening import Hall
from ringweave.errors import LaunchError
from ringweave.launch.local import leftovers

LAB_PREFIX = "bench-"
_MOST_LAB_NAME = 40
LEAVE_S, TERM_S = 1.0, 1.0


def run(request: Request, progress: Progress, keep: Callable[[Report], None]) -> Report:
    """Make the comparison that is asked for.

    All processes of it are descendants of this one, also those whose parents end early; they are gone afterwards.
    `keep` gets the report after each size of each order.

    Raises:
        LabError: The cluster could not be brought up here.
        LaunchError: None of the systems is here, or something could not be started.
        CommunicationError: A sum was wrong, or a rank failed.
        KeyboardInterrupt: Interrupted by Ctrl-C, SIGTERM or SIGHUP.
    """
    with ExitStack() as stack:
        stack.enter_context(_interruptible())
        stack.enter_context(_no_leftovers())
        folder = Path(tempfile.mkdtemp(prefix="ringweave-bench-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        place = stack.enter_context(_place(request, progress))
        listener = stack.enter_context(Listener(folder / "control"))
        return compare(request, Hall(place, listener, folder, request.schedule), progress, keep)


@contextmanager
def _place(request: Request, progress: Progress) -> Iterator[Place]:
    if request.is_local:
        yield OnThisMachine(request.cluster)
        return
    name = (LAB_PREFIX + request.cluster.name)[:_MOST_LAB_NAME]
    progress.step(f"bringing up lab {name}")
    # No quotas: the benchmark is about networks, and a library that starts its own ranks could not be given any.
    up = lab.up(request.cluster, name, quotas="never")
    try:
        yield InLab(up)
    finally:
        lab.down(name)


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP end the benchmark as Ctrl-C does: everything is taken down."""

    def interrupt(number: int, _frame: object) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = {how: signal.signal(how, interrupt) for how in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for how, handler in before.items():
            signal.signal(how, handler)


@contextmanager
def _no_leftovers() -> Iterator[None]:
    leftovers.adopt_orphans()
    spared = leftovers.descendants()
    try:
        yield
    finally:
        left = leftovers.end_descendants(spared, leave_s=LEAVE_S, term_s=TERM_S)
    if left:
        pids = ", ".join(str(process.pid) for process in left)
        raise LaunchError(f"processes {pids} do not end, even after SIGKILL. Look at them with ps. [benchmarks]")
