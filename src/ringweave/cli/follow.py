"""Following a job: polls its state, prints its workers' output, and waits for its end."""

import threading
import time
from collections.abc import Callable, Iterator

from ringweave.cli.echo import echo
from ringweave.errors import LaunchError, RingweaveError, UnknownJobError, printable
from ringweave.platforms.api import JobView, LogLine, LogQuery, Platform
from ringweave.platforms.registry import with_platform_option

FOLLOW_POLL_S = 0.3
"""Time between two polls of a job."""
MAX_UNANSWERED = 100
"""Number of unanswered polls in a row after which following a job fails: half a minute and more."""


def watch_job(platform: Platform, name: str, sleep: Callable[[float], None] = time.sleep) -> Iterator[JobView]:
    """Yield the job now and after every change, until it has ended or is gone."""
    previous, job = None, platform.job(name)
    while job is not None:  # else removed by its TTL or by a user
        if job != previous:
            yield job
        if job.state.is_end:
            return
        sleep(FOLLOW_POLL_S)
        previous, job = job, _poll_job(platform, name, sleep)


def wait_until_gone(platform: Platform, job: JobView, sleep: Callable[[float], None] = time.sleep) -> None:
    """Wait until the job is gone, or another one has its name."""
    while (found := _poll_job(platform, job.name, sleep)) is not None and found.created_s == job.created_s:
        sleep(FOLLOW_POLL_S)


def _poll_job(platform: Platform, name: str, sleep: Callable[[float], None]) -> JobView | None:
    """Poll a job that existed; None once it is gone. A platform that does not answer is polled again for a while."""
    unanswered = 0
    while True:
        try:
            return platform.job(name)
        except UnknownJobError:
            return None
        except LaunchError:
            unanswered += 1
            if unanswered > MAX_UNANSWERED:
                raise
            sleep(FOLLOW_POLL_S)


def follow_job(
    name: str, platform: str, open_service: Callable[[], Platform], sleep: Callable[[float], None] = time.sleep
) -> int:
    """Print states and output of a job until it has ended; return the exit code for its outcome.

    Ctrl-C ends the output, not the job.

    Args:
        name: Name of the job.
        platform: Value of `--on`.
        open_service: Opens the platform; states and logs use one object each.
        sleep: Waits between two polls.
    """
    printer = threading.Thread(target=_print_job_logs, args=(open_service(), name), daemon=True)
    last_shown = None
    try:
        printer.start()
        for job in watch_job(open_service(), name, sleep):
            if _shown_state(job) != last_shown:
                last_shown = _shown_state(job)
                reason = f": {job.reason.text}" if job.reason else ""
                echo(printable(f"ringweave: {name} is {job.state}{reason}"), err=True)
        printer.join()
    except KeyboardInterrupt:
        text = f"{name} continues; ringweave logs -f {name}, ringweave stop {name}"
        echo(f"\nringweave: {with_platform_option(text, name, platform)}", err=True)
        return 1
    if job.state == "Succeeded":
        return 0
    if not job.state.is_end:
        echo(f"ringweave: {name} was removed before its outcome was read (last state: {job.state})", err=True)
        return 1
    if job.reason:
        echo(printable(f"ringweave: {job.reason.hint}."), err=True)
    return 1


def _shown_state(job: JobView) -> tuple[str, str]:
    """Return the text whose changes are printed: the state, and the reason in a job that runs without some nodes."""
    return str(job.state), job.reason.text if job.reason and job.state == "Running" else ""


def format_log_line(line: LogLine, *, many: bool) -> str:
    """Format a log line, `[3] loss 2.1`; with several attempts it also names node, attempt and round.

    Control characters but the tab are shown escaped, so that a program's output cannot act on the reader's terminal.
    """
    group = f"{printable(line.node)}.{line.attempt}/{line.round}"
    text = printable(line.text, keeps="\t")
    if line.rank is None:
        return f"[{group}] {text}"
    return f"[{group} {line.rank}] {text}" if many else f"[{line.rank}] {text}"


def _print_job_logs(platform: Platform, name: str) -> None:
    try:
        for line in platform.logs(name, LogQuery(follow=True)):
            echo(format_log_line(line, many=line.attempt > 1 or line.round > 1))
    except RingweaveError as error:
        echo(printable(f"ringweave: the output of {name} is no longer shown: {error}"), err=True)
