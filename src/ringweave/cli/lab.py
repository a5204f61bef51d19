"""`ringweave lab`: a cluster file brought up on this machine, as namespaces with limited links."""

import json
import os
import shutil
import time
from typing import Any, cast

import click

from ringweave import lab, topology, units
from ringweave.cli import run_options
from ringweave.cli.run_options import RUN_SETTINGS, ProgramCommand, RunOptions
from ringweave.errors import LabError, UsageError, explain
from ringweave.lab import Lab, status
from ringweave.launch import workers
from ringweave.launch.local.sites import InLab

_LAB_OPTION = click.option("--lab", "name", metavar="NAME", help="Which lab. Default: the only one that is up.")
_JSON_OPTION = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


@click.group
def command() -> None:
    """Bring a cluster file up on this Linux machine, and work in it.

    Every node gets its own network, host name and /dev/shm; every link is limited to its rate; devices of unequal speed
    get CPU quotas. Needs root. What latency the file gives cannot be played here.
    """


@command.command
@click.argument("cluster_path", metavar="CLUSTER")
@click.option("--name", metavar="NAME", help="Name of the lab. Default: name of the cluster.")
@click.option(
    "--quotas",
    type=click.Choice(["auto", "always", "never"]),
    default="auto",
    help="CPU quotas by the devices' speeds; auto (default): only if these differ.",
)
@_JSON_OPTION
def up(cluster_path: str, name: str | None, quotas: str, as_json: bool) -> int:
    """Bring CLUSTER up. What an earlier attempt of that name has left is cleared away first."""
    started_s = time.monotonic()
    cluster = topology.load(cluster_path)
    made = lab.up(cluster, name, quotas=cast("Any", quotas), progress=lambda what: _say(f"{what} ..."))
    wall_s = round(time.monotonic() - started_s, 3)
    if as_json:
        click.echo(json.dumps({"name": made.name, "addresses": made.addresses, "wall_s": wall_s}))
    else:
        click.echo(f"lab {made.name} is up after {wall_s:.1f} s: {len(made.addresses)} nodes")
    return 0


@command.command("exec", context_settings=RUN_SETTINGS)
@_LAB_OPTION
@click.option("--device", type=int, metavar="N", help="Compute on this device of the node, with its CPU quota.")
@click.argument("node")
@click.argument("argv", nargs=-1, type=click.UNPROCESSED, required=True, metavar="-- CMD [ARGS]...")
def execute(name: str | None, device: int | None, node: str, argv: tuple[str, ...]) -> int | None:
    """Run CMD in NODE. It takes the place of this command: streams, signals and exit code are its own."""
    argv = argv[1:] if argv[0] == "--" else argv
    if not argv:
        raise UsageError("command: none given, expected one after --. For example: ringweave lab exec a0 -- hostname.")
    command_line = _find(name).command(node, argv, device=device)
    if shutil.which(argv[0]) is None:
        return _refuse_command(argv[0], node)
    return os.execv(command_line[0], command_line)


@command.command("run", cls=ProgramCommand, context_settings=RUN_SETTINGS)
@_LAB_OPTION
@click.option("--no-cluster-file", is_flag=True, help="Let workers find out by themselves what the network is like.")
@run_options.shared
def run(name: str | None, no_cluster_file: bool, options: RunOptions) -> int:
    """Run SCRIPT, or any command after --, on all devices of the lab, every worker in its node.

    Otherwise the same as ringweave run.
    """
    place = _find(name)
    tells = not no_cluster_file
    return options.run(place.cluster, topology.dumps(place.cluster), None, InLab(place), tells_cluster=tells)


@command.command("set")
@_LAB_OPTION
@click.argument("link")
@click.argument("rate")
@_JSON_OPTION
def set_rate(name: str | None, link: str, rate: str, as_json: bool) -> int:
    """Give LINK another RATE while it is in use.

    For example "a0->r0" 100Mbit/s; or "a0<->r0" for both directions. The shell needs the quotes.
    """
    rate_bytes_per_s = units.parse_rate(rate)
    place = _find(name)
    links = _directions(link)
    for each in links:
        place.rate(each)  # refuses one that is not there before anything is changed
    for each in links:
        place.set_rate(each, rate_bytes_per_s)
    rates = {each: place.rate(each) for each in links}
    if as_json:
        click.echo(json.dumps({"lab": place.name, "rate_bytes_per_s": rates}))
    else:
        click.echo("\n".join(f"{each}: {units.format_rate(now)}" for each, now in rates.items()))
    return 0


@command.command("cut")
@_LAB_OPTION
@click.option("--in", "way", flag_value="in", help="It gets nothing; what it sends arrives.")
@click.option("--out", "way", flag_value="out", help="Nobody gets anything from it; it gets what is sent to it.")
@click.argument("node")
@_JSON_OPTION
def cut(name: str | None, way: str | None, node: str, as_json: bool) -> int:
    """Cut NODE off from the network, both ways, silently: packets vanish, and nobody gets an error."""
    place = _find(name)
    place.cut(node, way or "both")
    return _show_cut(place, node, as_json=as_json)


@command.command("mend")
@_LAB_OPTION
@click.argument("node")
@_JSON_OPTION
def mend(name: str | None, node: str, as_json: bool) -> int:
    """Connect NODE again after lab cut."""
    place = _find(name)
    place.mend(node)
    return _show_cut(place, node, as_json=as_json)


@command.command("status")
@_LAB_OPTION
@_JSON_OPTION
def show(name: str | None, as_json: bool) -> int:
    """Say what labs there are, and how they are.

    Nodes with their addresses, CPU quotas and processes; links with their rates, now and in the cluster file, and the
    bytes sent on them since the lab is up.
    """
    if name is not None and name not in lab.names():
        lab.find(name)  # says what there is
    documents = [status.describe(name)] if name is not None else _all_described()
    click.echo(json.dumps({"labs": documents}) if as_json else status.to_text(documents), nl=as_json)
    return 0


def _all_described() -> list[dict[str, Any]]:
    """All labs but those that go down meanwhile."""
    documents = []
    for each in lab.names():
        try:
            documents.append(status.describe(each))
        except (UsageError, LabError):
            if each in lab.names():
                raise
    return documents


@command.command("down")
@_LAB_OPTION
@click.option("--all", "is_all", is_flag=True, help="All labs of this machine.")
@_JSON_OPTION
def down(name: str | None, is_all: bool, as_json: bool) -> int:
    """Take a lab down, complete or not, and end all that runs in it. It may be gone already."""
    if is_all and name is not None:
        raise UsageError("--lab and --all: both given, expected one of them. Leave --lab out to take all down.")
    there = lab.names()
    wanted = there if is_all else [name] if name is not None else [_only(there)] if there else []
    gone = [each for each in wanted if lab.down(each)]
    if as_json:
        click.echo(json.dumps({"down": gone}))
    else:
        click.echo(f"down: {', '.join(gone)}" if gone else "nothing to take down")
    return 0


def _show_cut(place: Lab, node: str, *, as_json: bool) -> int:
    now = place.cut_of(node)
    if as_json:
        click.echo(json.dumps({"lab": place.name, "node": node, "cut": now or None}))
    else:
        click.echo(
            f"{node}: " + ({"both": "cut off", "in": "gets nothing", "out": "is not heard"}.get(now, "connected"))
        )
    return 0


def _find(name: str | None) -> Lab:
    if name is not None:
        return lab.find(name)
    return lab.find(_only([each for each in lab.names() if lab.is_up(each)]))


def _directions(link: str) -> list[str]:
    """`a0<->r0` means a0->r0 and r0->a0; anything else is the name of one link, or of none."""
    src, both, dst = link.partition("<->")
    return [topology.link_name(src, dst), topology.link_name(dst, src)] if both else [link]


def _only(names: list[str]) -> str:
    """The one lab that there is.

    Raises:
        UsageError: There is none, or more than one.
    """
    if len(names) == 1:
        return names[0]
    do = "Name it: --lab NAME" if names else "Bring one up first: ringweave lab up CLUSTER"
    raise UsageError(explain("labs", got=", ".join(names) or "none", expected="one that is up", do=do))


def _refuse_command(name: str, node: str) -> int:
    """127 or 126, as a shell has them."""
    click.echo(f"ringweave: error: {workers.refuse_command(name, where=f'node {node}')}", err=True)
    return 126 if workers.is_unexecutable(name) else 127


def _say(text: str) -> None:
    click.echo(f"ringweave: {text}", err=True)
