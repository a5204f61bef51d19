"""Options that all verbs on jobs share (`--on`, `-o`, `--json`), and how they print an answer."""

import functools
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import click
from click.shell_completion import CompletionItem

from ringweave.cli.echo import echo
from ringweave.errors import RingweaveError, printable
from ringweave.files import yaml_files
from ringweave.platforms import registry
from ringweave.platforms.api import Platform
from ringweave.platforms.registry import FOUND_PLATFORMS, HOSTS, LOCAL, RUNS, QualifiedPlatform


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
