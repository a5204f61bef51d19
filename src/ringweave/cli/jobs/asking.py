"""What all verbs on jobs share: where they ask, and how they answer."""

import functools
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import click
from click.shell_completion import CompletionItem

from ringweave.errors import RingweaveError
from ringweave.files import yaml_text
from ringweave.launch.services import finding
from ringweave.launch.services.placing import HERE, PlacedService
from ringweave.launch.services.service import Service


def answering(*, wide: bool = False) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Give a command `--on`, `-o` and `--json`; it gets `place` and `output`.

    Args:
        wide: It has a wide table of its own; the others answer wide as they do table.
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
                help="How to answer.",
            ),
            ON,
        ):
            call = option(call)
        return call

    return decorate


ON = click.option(
    "--on",
    "place",
    metavar="PLACE",
    default=HERE,
    show_default=True,
    help="Where jobs run: local, slurm, kubernetes, an installed service's name, or the address of one elsewhere.",
)


def service(place: str) -> Service:
    """The service of a place, for whoever runs this process; the commands that it names can be typed as they stand."""
    found = finding.open_service(place, os.environ)
    return found if place == HERE else PlacedService(found, place)


def _names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of jobs that are there, for the shell; none where the place cannot be asked."""
    try:
        found = service(ctx.params.get("place") or HERE).jobs()
    except RingweaveError:
        return []
    return [CompletionItem(job.name, help=str(job.state)) for job in found if job.name.startswith(incomplete)]


NAME = click.argument("name", metavar="JOB", shell_complete=_names)


def show(output: str, content: Mapping[str, Any], lines: Callable[[], list[str]]) -> None:
    """Print an answer: as a document, or as the lines that people read."""
    if output == "json":
        click.echo(json.dumps(content))
    elif output == "yaml":
        click.echo(yaml_text.dumps(content), nl=False)
    else:
        click.echo("\n".join(lines()))
