"""Options that all verbs on jobs share (`--on`, `-o`, `--json`), and how they print an answer."""

import functools
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import click
from click.shell_completion import CompletionItem

from ringweave.errors import RingweaveError
from ringweave.files import yaml_files
from ringweave.platforms import registry
from ringweave.platforms.api import Platform
from ringweave.platforms.registry import LOCAL, QualifiedPlatform


def answer_options(*, wide: bool = False) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Give a command `--on`, `-o` and `--json`; it gets the arguments `place` and `output`.

    Args:
        wide: The command has a wide table; others print their table for `-o wide`.
    """

    def decorate(command: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(command)
        def call(*, as_json: bool, output: str, **given: Any) -> int:
            output = "table" if output == "wide" and not wide else output
            return command(output="json" if as_json else output, **given)

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
    default=LOCAL,
    show_default=True,
    help="Platform of jobs: local, slurm, kubernetes, the name of an installed one, or the address of a remote one.",
)


def open_user_platform(platform: str) -> Platform:
    """Open a platform for the user of this process; commands in its texts can be typed as they stand."""
    found = registry.open_platform(platform, os.environ)
    return found if platform == LOCAL else QualifiedPlatform(found, platform)


def _complete_job_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete names of existing jobs for the shell; none if the platform does not answer."""
    try:
        found = open_user_platform(ctx.params.get("place") or LOCAL).jobs()
    except RingweaveError:
        return []
    return [CompletionItem(job.name, help=str(job.state)) for job in found if job.name.startswith(incomplete)]


JOB_ARGUMENT = click.argument("name", metavar="JOB", shell_complete=_complete_job_names)


def print_answer(output: str, content: Mapping[str, Any], lines: Callable[[], list[str]]) -> None:
    """Print an answer as a document, or as lines for people."""
    if output == "json":
        click.echo(json.dumps(content))
    elif output == "yaml":
        click.echo(yaml_files.dump_yaml(content), nl=False)
    else:
        click.echo("\n".join(lines()))
