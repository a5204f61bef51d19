"""`ringweave lab`: brings a cluster file up on this machine, as network namespaces with limited links."""

import json
import os
import shutil
import sys
import time
from typing import Any, cast

import click

from ringweave import lab, topology, units
from ringweave.cli.echo import echo
from ringweave.errors import UsageError
from ringweave.lab import Lab, cpu_quotas, user_namespace
from ringweave.lab import lab as lab_lab

PROGRAM_CONTEXT_SETTINGS = {"allow_interspersed_args": False}
"""Settings of commands that end with a program and its arguments."""
LAB_OPTION = click.option("--lab", "name", metavar="NAME", help="Name of the lab. Default: the only one that is up.")
_JSON_OPTION = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


class LabGroup(click.Group):
    """Group that imports `run` when it is called: the launcher takes longer to load than all other commands need."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return all commands by name."""
        return sorted([*self.commands, "run"])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of that name; None if there is none."""
        if cmd_name == "run":
            from ringweave.cli import run

            return run.lab_run_command
        return super().get_command(ctx, cmd_name)


@click.group(cls=LabGroup)
def command() -> None:
    """Bring a cluster file up on this Linux machine, and work in it.

    Every node gets its own network, host name and /dev/shm; every link is limited to its rate; devices of unequal speed
    get CPU quotas. Needs root, or a kernel that gives ordinary users namespaces: each user has labs of their own then.
    Latencies of the file are not emulated.
    """


def enter_user_namespace(*, starts: bool = False) -> None:
    """Run this very command again in the user's namespaces, unless it is there already, or root."""
    user_namespace.enter([sys.executable, *sys.orig_argv[1:]], starts=starts)


@command.command("unshare", context_settings=PROGRAM_CONTEXT_SETTINGS)
@click.argument("argv", nargs=-1, type=click.UNPROCESSED, required=True, metavar="-- CMD [ARGS]...")
def unshare(argv: tuple[str, ...]) -> int | None:
    """Run CMD where this user's labs are: in the user's namespaces, or for root on the machine itself.

    For programs that make labs by themselves, and jobs in a lab. CMD takes the place of this command.
    """
    path = shutil.which(argv[0])
    if path is None:
        return _refuse_lab_command(argv[0], "this machine")
    user_namespace.enter([path, *argv[1:]], starts=True)
    return os.execv(path, list(argv))


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
    """Bring CLUSTER up. Remains of an earlier lab of that name are removed first."""
    started_s = time.monotonic()
    cluster = topology.load(cluster_path)
    enter_user_namespace(starts=True)
    made = lab.up(cluster, name, quotas=cast("Any", quotas), progress=lambda what: _write_note(f"{what} ..."))
    wall_s = round(time.monotonic() - started_s, 3)
    if as_json:
        document = {"name": made.name, "addresses": made.addresses, "quotas": made.quota_kind, "wall_s": wall_s}
        echo(json.dumps(document))
    else:
        stand_in = f"; {cpu_quotas.DUTY_CYCLE_NOTE}" if made.quota_kind == cpu_quotas.DUTY_CYCLE else ""
        echo(f"lab {made.name} is up after {wall_s:.1f} s: {len(made.addresses)} nodes{stand_in}")
    return 0


@command.command("exec", context_settings=PROGRAM_CONTEXT_SETTINGS)
@LAB_OPTION
@click.option("--device", type=int, metavar="N", help="Compute on this device of the node, with its CPU quota.")
@click.argument("node")
@click.argument("argv", nargs=-1, type=click.UNPROCESSED, required=True, metavar="-- CMD [ARGS]...")
def execute(name: str | None, device: int | None, node: str, argv: tuple[str, ...]) -> int | None:
    """Run CMD in NODE. It takes the place of this command: streams, signals and exit code are its own."""
    argv = argv[1:] if argv[0] == "--" else argv
    if not argv:
        raise UsageError("command: none given, expected one after --. For example: ringweave lab exec a0 -- hostname.")
    enter_user_namespace()
    command_line = find_lab(name).command(node, argv, device=device)
    if shutil.which(argv[0]) is None:
        return _refuse_lab_command(argv[0], node)
    return os.execv(command_line[0], command_line)


@command.command("set")
@LAB_OPTION
@click.argument("link")
@click.argument("rate")
@_JSON_OPTION
def set_rate(name: str | None, link: str, rate: str, as_json: bool) -> int:
    """Give LINK another RATE while it is in use.

    For example "a0->r0" 100Mbit/s; or "a0<->r0" for both directions. The shell needs the quotes.
    """
    rate_bytes_per_s = units.parse_rate(rate)
    enter_user_namespace()
    target_lab = find_lab(name)
    links = _link_directions(link)
    for each in links:
        target_lab.rate(each)  # refuses an unknown link before any change
    for each in links:
        target_lab.set_rate(each, rate_bytes_per_s)
    rates = {each: target_lab.rate(each) for each in links}
    if as_json:
        echo(json.dumps({"lab": target_lab.name, "rate_bytes_per_s": rates}))
    else:
        echo("\n".join(f"{each}: {units.format_rate(now)}" for each, now in rates.items()))
    return 0


@command.command("cut")
@LAB_OPTION
@click.option("--in", "way", flag_value="in", help="Drop incoming packets only.")
@click.option("--out", "way", flag_value="out", help="Drop outgoing packets only.")
@click.argument("node")
@_JSON_OPTION
def cut(name: str | None, way: str | None, node: str, as_json: bool) -> int:
    """Cut NODE off from the network in both directions: packets vanish without an error."""
    enter_user_namespace()
    target_lab = find_lab(name)
    target_lab.cut(node, way or "both")
    return _print_cut(target_lab, node, as_json=as_json)


@command.command("mend")
@LAB_OPTION
@click.argument("node")
@_JSON_OPTION
def mend(name: str | None, node: str, as_json: bool) -> int:
    """Connect NODE again after lab cut."""
    enter_user_namespace()
    target_lab = find_lab(name)
    target_lab.reconnect(node)
    return _print_cut(target_lab, node, as_json=as_json)


@command.command("status")
@LAB_OPTION
@_JSON_OPTION
def show(name: str | None, as_json: bool) -> int:
    """List labs with their nodes and links.

    Nodes have addresses, CPU quotas and processes; links have rates, now and in the cluster file, and the bytes sent
    since the lab is up.
    """
    enter_user_namespace()
    if name is not None and name not in lab.names():
        lab.find(name)  # its error lists the labs
    documents = [lab_lab.lab_document(name)] if name is not None else _describe_all()
    echo(json.dumps({"labs": documents}) if as_json else lab_lab.labs_text(documents), nl=as_json)
    return 0


def _describe_all() -> list[dict[str, Any]]:
    """Return the status of all labs, without those that go down meanwhile."""
    documents = [lab_lab.lab_document(each) for each in lab.names()]
    there = lab.names()
    return [each for each in documents if each["state"] == "up" or each["name"] in there]


@command.command("down")
@LAB_OPTION
@click.option("--all", "is_all", is_flag=True, help="All labs of this machine.")
@_JSON_OPTION
def down(name: str | None, is_all: bool, as_json: bool) -> int:
    """Take a lab down, complete or not, and end its processes. It may be gone already."""
    if is_all and name is not None:
        raise UsageError("--lab and --all: both given, expected one of them. Leave --lab out to take all down.")
    enter_user_namespace()
    there = lab.names()
    wanted = there if is_all else [name] if name is not None else [_only_lab(there)] if there else []
    gone = [each for each in wanted if lab.down(each)]
    if as_json:
        echo(json.dumps({"down": gone}))
    else:
        echo(f"down: {', '.join(gone)}" if gone else "nothing to take down")
    return 0


def _print_cut(target_lab: Lab, node: str, *, as_json: bool) -> int:
    now = target_lab.current_cut(node)
    if as_json:
        echo(json.dumps({"lab": target_lab.name, "node": node, "cut": now or None}))
    else:
        echo(
            f"{node}: " + ({"both": "cut off", "in": "receives nothing", "out": "sends nothing"}.get(now, "connected"))
        )
    return 0


def find_lab(name: str | None) -> Lab:
    """Return the lab of that name; without one, the only lab that is up."""
    if name is not None:
        return lab.find(name)
    return lab.find(_only_lab([each for each in lab.names() if lab.is_up(each)]))


def _link_directions(link: str) -> list[str]:
    """Return the links of a text: `a0<->r0` means a0->r0 and r0->a0; anything else is the name of one link."""
    src, both, dst = link.partition("<->")
    return [topology.link_name(src, dst), topology.link_name(dst, src)] if both else [link]


def _only_lab(names: list[str]) -> str:
    """Return the only lab that is up."""
    if len(names) == 1:
        return names[0]
    do = "Name it: --lab NAME" if names else "Bring one up first: ringweave lab up CLUSTER"
    raise UsageError("labs", got=", ".join(names) or "none", expected="one that is up", do=do)


def _refuse_lab_command(name: str, node: str) -> int:
    """Report the command that cannot be run; return 127 or 126, like a shell."""
    from ringweave.launcher import workers

    echo(f"ringweave: error: {workers.unrunnable_command_text(name, where=f'node {node}')}", err=True)
    return 126 if workers.is_not_executable(name) else 127


def _write_note(text: str) -> None:
    echo(f"ringweave: {text}", err=True)
