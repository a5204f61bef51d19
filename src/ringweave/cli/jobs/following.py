"""Following a job: its states, what its workers print, its end."""

import threading
import time
from collections.abc import Callable, Iterator

import click

from ringweave.errors import LaunchError, RingweaveError, UnknownJobError
from ringweave.launch.services.placing import placed
from ringweave.launch.services.service import LogLine, LogQuery, Service
from ringweave.launch.services.views import JobView

LOOK_S = 0.3
"""Between two looks at a job."""
MOST_SILENT = 100
"""So often in a row a place may not answer before who follows a job in it is told: half a minute and more."""


def watch(service: Service, name: str, sleep: Callable[[float], None] = time.sleep) -> Iterator[JobView]:
    """The job now, and whenever something of it has changed, until it has ended or is gone."""
    before, job = None, service.job(name)
    while job is not None:  # else removed by its TTL, or by somebody
        if job != before:
            yield job
        if job.state.is_end:
            return
        sleep(LOOK_S)
        before, job = job, _look(service, name, sleep)


def wait_gone(service: Service, job: JobView, sleep: Callable[[float], None] = time.sleep) -> None:
    """Return when the job is gone, or another one has its name."""
    while (found := _look(service, job.name, sleep)) is not None and found.created_s == job.created_s:
        sleep(LOOK_S)


def _look(service: Service, name: str, sleep: Callable[[float], None]) -> JobView | None:
    """A job that was there; None once it is gone. A place that does not answer is asked again for a while."""
    silent = 0
    while True:
        try:
            return service.job(name)
        except UnknownJobError:
            return None
        except LaunchError:
            silent += 1
            if silent > MOST_SILENT:
                raise
            sleep(LOOK_S)


def follow(
    name: str, place: str, open_service: Callable[[], Service], sleep: Callable[[float], None] = time.sleep
) -> int:
    """Show states and what workers print until the job has ended; the exit code that says how.

    Ctrl-C ends the showing, not the job.

    Args:
        name: Of the job.
        place: Where it is, as `--on` says it.
        open_service: Makes a service of that place; states and logs are asked for by one each.
        sleep: Between two looks.
    """
    printing = threading.Thread(target=_print_logs, args=(open_service(), name), daemon=True)
    told = None
    try:
        printing.start()
        for job in watch(open_service(), name, sleep):
            if _story(job) != told:
                told = _story(job)
                said = f": {job.reason.text}" if job.reason else ""
                click.echo(f"ringweave: {name} is {job.state}{said}", err=True)
        printing.join()
    except KeyboardInterrupt:
        text = f"{name} goes on; ringweave logs -f {name}, ringweave stop {name}"
        click.echo(f"\nringweave: {placed(text, name, place)}", err=True)
        return 1
    if job.state == "Succeeded":
        return 0
    if not job.state.is_end:
        click.echo(f"ringweave: {name} was removed, and nobody saw how it ended (last seen: {job.state})", err=True)
        return 1
    if job.reason:
        click.echo(f"ringweave: {job.reason.helps}.", err=True)
    return 1


def _story(job: JobView) -> tuple[str, str]:
    """What is worth a line when it changes: the state, and what the others of an elastic job go on without."""
    return str(job.state), job.reason.text if job.reason and job.state == "Running" else ""


def shown(line: LogLine, *, many: bool) -> str:
    """`[3] loss 2.1`; with many attempts node, attempt and round too, as for what no worker printed."""
    group = f"{line.node}.{line.attempt}/{line.round}"
    if line.rank is None:
        return f"[{group}] {line.text}"
    return f"[{group} {line.rank}] {line.text}" if many else f"[{line.rank}] {line.text}"


def _print_logs(service: Service, name: str) -> None:
    try:
        for line in service.logs(name, LogQuery(follow=True)):
            click.echo(shown(line, many=line.attempt > 1 or line.round > 1))
    except RingweaveError as error:
        click.echo(f"ringweave: what {name} prints is not shown any more: {error}", err=True)
