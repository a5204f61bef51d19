"""`ringweave submit`: a job from a file and flags; its plan, a question, and what comes of it."""

import shlex
import sys
from pathlib import Path
from typing import Any

import click

from ringweave.cli.jobs import asking, following, plans
from ringweave.errors import UsageError, explain
from ringweave.jobs.requests import job_file
from ringweave.jobs.requests.job_file import Flag
from ringweave.jobs.requests.request import Request
from ringweave.launch.services import views
from ringweave.launch.services.placing import placed
from ringweave.launch.services.service import Submission


@click.command
@asking.answering()
@click.option("--name", metavar="NAME", help="Name of the job.")
@click.option("--gpus", type=int, metavar="N", help="GPUs in all.")
@click.option("--cpu-workers", type=int, metavar="N", help="Workers without a GPU in all.")
@click.option("--capacity", metavar="A,B,..", help="Nodes n0, n1, .. that may run so many each.")
@click.option("--max-retries", type=int, metavar="N", help="How often each node of --capacity is replaced.")
@click.option("--deletion", metavar="POLICY", help="What becomes of each: delete, keep or keep-on-failure.")
@click.option("--min-per-node", type=int, metavar="N", help="The least that a used node gets.")
@click.option("--script", metavar="FILE", help="The program.")
@click.option("--directory", metavar="DIR", help="The folder that the script needs around it.")
@click.option("--arguments", metavar="WORDS", help="What the script is called with, as a shell would split it.")
@click.option("--env", "environment", multiple=True, metavar="NAME=VALUE", help="A variable of the workers.")
@click.option("--data", metavar="WHERE", help="Where the training data is.")
@click.option("--image", metavar="IMAGE", help="Container image.")
@click.option("--claim", metavar="NAME", help="PersistentVolumeClaim that all Pods have as /claim, on Kubernetes.")
@click.option("--mode", metavar="NAME", help="How to train: auto, sync, balanced, ps-hra or ps.")
@click.option(
    "--elastic", type=int, metavar="MIN", help="With so many workers at least the others go on without a lost node."
)
@click.option("--lab", metavar="NAME", help="Put the nodes into those of a lab that is up on this machine.")
@click.option("--ttl", metavar="TIME", help="Remove the job so long after its end, such as 3600s.")
@click.option("--suspend", is_flag=True, default=None, help="Do not start it before it is resumed.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option("--detach", is_flag=True, help="Return when it is submitted, and do not follow it.")
@click.option(
    "--dry-run",
    is_flag=False,
    flag_value="plan",
    type=click.Choice(["plan", "full"]),
    help="Check all and change nothing; full also prints what the job becomes in its place.",
)
@click.argument("path", metavar="[FILE]", required=False, type=click.Path(dir_okay=False))
def command(
    place: str, output: str, yes: bool, detach: bool, dry_run: str | None, path: str | None, **flags: Any
) -> int:
    """Submit the job that FILE describes. Flags go over the file, key by key; without a file they are the job.

    Its plan is shown first: how workers are shared out over the nodes and why, rings, leaders. Relative paths start
    from the file's folder; those of flags from the current one. The job runs on when this command or its terminal ends.
    Followed, the exit code is the job's: 0 if it succeeded, else 1.
    """
    request, base = _request(path, flags)
    service = asking.service(place)
    tried = service.submit(request, base=base, dry_run=True)
    plan = plans.plan(request, tried.job)
    if output == "table":
        click.echo("\n".join(plans.lines(plan, request, tried.job)), err=dry_run is None)
    if dry_run is not None:
        _show_dry(output, tried, plans.document(plan), full=dry_run == "full")
        return 0
    if not yes and not _may_submit(request.name):
        click.echo("ringweave: nothing was submitted", err=True)
        return 1
    made = service.submit(request, base=base)
    if output != "table":
        asking.show(output, {"plan": plans.document(plan), "job": views.document(made.job)}, list)
        return 0
    if detach:
        text = f"{request.name}: submitted. ringweave status {request.name}; ringweave logs -f {request.name}"
        click.echo(placed(text, request.name, place))
        return 0
    return following.follow(request.name, place, lambda: asking.service(place))


def _show_dry(output: str, tried: Submission, plan: dict[str, Any], *, full: bool) -> None:
    objects = {each.name: each.text for each in tried.objects} if full else {}
    content = {"plan": plan, "job": views.document(tried.job), "objects": objects}
    parts = [f"--- {name}\n{text.rstrip()}" for name, text in objects.items()]
    asking.show(output, content, lambda: [*parts, "nothing was submitted"])


def _may_submit(name: str) -> bool:
    if not sys.stdin.isatty():
        do = "Add -y to submit without being asked, or --dry-run to see the plan only"
        raise UsageError(explain("answer", got="no terminal", expected="somebody who can be asked", do=do))
    return click.confirm(f"Submit {name}?", err=True)


def _request(path: str | None, flags: dict[str, Any]) -> tuple[Request, Path]:
    """The request, and the folder that its relative paths start from."""
    given = _flags(flags, in_file=path is not None)
    if path is None:
        return job_file.from_flags(given), Path()
    return job_file.load(path, given), Path(path).parent


def _flags(flags: dict[str, Any], *, in_file: bool) -> dict[str, Flag]:
    flags = dict(flags)
    given = _of_nodes(flags.pop("capacity"), flags.pop("max_retries"), flags.pop("deletion"))
    for key, value in flags.items():
        if value is None or value == ():
            continue
        name = f"--{key.replace('_', '-')}"
        if key == "arguments":
            given[key] = Flag(name=name, value=_words(value))
        elif key == "environment":
            given[key] = Flag(name="--env", value=dict(map(_variable, value)))
        elif key == "directory" or (key == "script" and in_file and flags["directory"] is None):
            given[key] = Flag(name=name, value=str(Path(value).absolute()))
        else:
            given[key] = Flag(name=name, value={"min": value} if key == "elastic" else value)
    return given


def _of_nodes(capacity: str | None, max_retries: int | None, deletion: str | None) -> dict[str, Flag]:
    """The nodes that the flags make; none where the file says them."""
    each = {"max_retries": max_retries, "deletion": deletion}
    given = {key: value for key, value in each.items() if value is not None}
    if capacity is None:
        if given:
            do = "Write them into the nodes of the file, or give --capacity too"
            got = ", ".join(f"--{key.replace('_', '-')}" for key in given)
            raise UsageError(explain("flags", got=got, expected="--capacity, whose nodes they are about", do=do))
        return {}
    try:
        nodes = [{"capacity": int(word), **given} for word in capacity.split(",")]
    except ValueError as error:
        expected = "whole numbers with commas between, one a node"
        raise UsageError(explain("--capacity", got=capacity, expected=expected, do="Write it like 10,5")) from error
    return {"nodes": Flag(name="--capacity, --max-retries, --deletion" if given else "--capacity", value=nodes)}


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        do = "Close what is quoted"
        raise UsageError(explain("--arguments", got=text, expected="words as a shell reads them", do=do)) from error


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(explain("--env", got=text, expected="NAME=VALUE", do="Write it like SEED=1"))
    return name, value
