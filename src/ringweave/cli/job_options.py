"""Options that verbs on jobs share (`--on`, `-o`, `--json`), how they print an answer, and following of a job.

And the options of workers, which a job shares with a run.
"""

import functools
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import click
from click.shell_completion import CompletionItem

from ringweave.cli.echo import echo
from ringweave.environment import WIRES
from ringweave.errors import LaunchError, RingweaveError, UnknownJobError, printable
from ringweave.files import yaml_files
from ringweave.jobs import worker_options
from ringweave.platforms import registry
from ringweave.platforms.api import JobView, LogLine, LogQuery, Platform
from ringweave.platforms.registry import FOUND_PLATFORMS, HOSTS, LOCAL, RUNS, QualifiedPlatform, with_platform_option

WORKER_OPTIONS = (
    click.option("--schedule", metavar="NAME", help="Use this schedule for allreduces from 64 KiB up."),
    click.option(
        "--tuning/--no-tuning",
        default=None,
        help="Try the best schedules and follow the network's rates, or keep the first plan: then the same bits result "
        "from run to run. Default: among several nodes.",
    ),
    click.option(
        "--mode",
        metavar="NAME",
        help="Training mode of scripts with ringweave.prepare: auto, sync, balanced, ps-hra, ps or local.",
    ),
    click.option(
        "--wire",
        type=click.Choice(WIRES),
        help="Format of gradients on the links that bind: exact (default), bf16, int8, int4, or auto, which takes bf16 "
        "or int8 where the forecast gains 10 % or more. Of tensors between the stages of a pipeline: bf16 or int8.",
    ),
    click.option(
        "--max-loss-increase",
        metavar="PERCENT",
        help="Loss at equal samples, such as 0.5%, that mode auto and --wire auto may give up for speed, by a measured "
        "table: they may take wire formats and mode local. Default: nothing that costs loss but ps-hra.",
    ),
    click.option(
        "--leader-per-nic",
        is_flag=True,
        default=None,
        help="Plan with a leader for each NIC of a node, not one for all.",
    ),
    click.option(
        "--replace-backend", is_flag=True, default=None, help='Let a script\'s "gloo" or "nccl" be ringweave too.'
    ),
    click.option(
        "--order", metavar="ORDER", help="Order of ranks on devices: block (default), round-robin or shuffled[:SEED]."
    ),
    click.option(
        "--encrypt",
        type=click.Choice(worker_options.ENCRYPT_CHOICES),
        help="Encrypt what travels between nodes: on, off, or auto (default): between hosts, not in a lab.",
    ),
)
"""Options of runs and jobs; None if not given: the default of `WorkerOptions` holds, or the key of the job file."""


def with_options(options: Iterable[Callable[..., Any]], command: Callable[..., int]) -> Callable[..., int]:
    """Give a command these options, in this order."""
    return functools.reduce(lambda inner, option: option(inner), reversed(tuple(options)), command)


def answer_options(
    *, wide: bool = False, is_new_job: bool = False
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Give a command `--on`, `-o` and `--json`; it gets the arguments `place` and `output`.

    Args:
        wide: The command has a wide table; others print their table for `-o wide`.
        is_new_job: The command makes a job, so that its name is not looked for among the runs on hosts.
    """

    def decorate(command: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(command)
        def call(*, as_json: bool, output: str, place: str | None, **given: Any) -> int:
            output = "table" if output == "wide" and not wide else output
            place = place or (LOCAL if is_new_job else find_place(given.get("name")))
            return command(output="json" if as_json else output, place=place, **given)

        for option in (
            click.option("--json", "as_json", is_flag=True, help="Print one JSON document, as -o json."),
            click.option(
                "-o",
                "--output",
                type=click.Choice(("table", "wide", "json", "yaml")),
                default="table",
                show_default=True,
                help="Format of the answer.",
            ),
            ON_OPTION,
        ):
            call = option(call)
        return call

    return decorate


ON_OPTION = click.option(
    "--on",
    "place",
    metavar="PLATFORM",
    help="Platform of jobs: local, hosts, runs, slurm, kubernetes, the name of an installed one, or the address of a "
    "remote one. Default: hosts for the name of a run on hosts, runs for a run directory, else local.",
)


def find_place(name: str | None) -> str:
    """Return the platform of a job whose platform is not named: that of a run with this name, else `local`."""
    from ringweave.platforms import run_directory
    from ringweave.platforms.hosts import run_entry

    if name is None:
        return LOCAL
    if run_entry.is_run_on_hosts(name):
        return HOSTS
    return RUNS if run_directory.find_run_dir(name) is not None else LOCAL


def open_user_platform(platform: str) -> Platform:
    """Open a platform for the user of this process; commands in its texts can be typed as they stand."""
    found = registry.open_platform(platform, os.environ)
    return found if platform in FOUND_PLATFORMS else QualifiedPlatform(found, platform)


def _complete_job_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete names of existing jobs for the shell; none if the platform does not answer."""
    try:
        places = [ctx.params["place"]] if ctx.params.get("place") else FOUND_PLATFORMS
        found = [job for place in places for job in open_user_platform(place).jobs()]
    except RingweaveError:
        return []
    return [CompletionItem(job.name, help=str(job.state)) for job in found if job.name.startswith(incomplete)]


JOB_ARGUMENT = click.argument("name", metavar="JOB", shell_complete=_complete_job_names)


def print_answer(output: str, content: Mapping[str, Any], lines: Callable[[], list[str]]) -> None:
    """Print an answer as a document, or as lines for people: one for each string, whatever its text is."""
    if output == "json":
        echo(json.dumps(content))
    elif output == "yaml":
        click.echo(yaml_files.dump_yaml(content), nl=False)
    else:
        echo("\n".join(map(printable, lines())))


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

    `platform`: value of `--on`.
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
