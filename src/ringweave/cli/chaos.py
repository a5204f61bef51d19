"""`ringweave chaos`: faults that happen to a job in a lab, and what they cost."""

import json
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import click

from ringweave import topology
from ringweave.benchmarks.chaos import faults, jobs, session
from ringweave.benchmarks.chaos.accounts import Report
from ringweave.benchmarks.chaos.faults import Fault, Targets
from ringweave.benchmarks.chaos.session import Plan
from ringweave.errors import UsageError


@click.command
@click.argument("cluster_path", metavar="CLUSTER")
@click.option("--script", "script_path", metavar="FILE", help='Faults, one a line: "at 20s pause worker 2 for 30s".')
@click.option("--random", "kinds", metavar="KINDS", help="Faults at random: some of kill,pause,cut,slow,clock,fill.")
@click.option("--moments", metavar="NAMES", help="Kill at these moments of a step: some of forward,backward,bucket,...")
@click.option("--every", "every_s", type=float, default=60.0, help="Mean seconds between random faults. Default: 60.")
@click.option("--lasts", "lasts_s", type=float, default=10.0, help="Seconds that each random one lasts. Default: 10.")
@click.option("--calm", "calm_s", type=float, default=20.0, help="Seconds before the first random one. Default: 20.")
@click.option("--seed", type=int, default=0, help="Of random faults; the same seed, the same faults. Default: 0.")
@click.option("--for", "until_s", type=float, default=600.0, help="Seconds after the first train step. Default: 600.")
@click.option(
    "--restart-after", "restart_s", type=float, default=0.0, help="Seconds from a failure to the next attempt."
)
@click.option("--system", default=jobs.RINGWEAVE, help="ringweave (default), torchrun or torchft.")
@click.option(
    "--option", "options", multiple=True, help="One of ringweave run, or torchrun, such as --option=--mode=sync."
)
@click.option("--out", metavar="DIR", help="Where events and logs go. Default: runs/DATE-TIME-chaos.")
@click.option("--dry-run", is_flag=True, help="Print the faults and do nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="-- SCRIPT [ARGS]...")
def command(  # noqa: PLR0913 - one for each option
    *,
    cluster_path: str,
    script_path: str | None,
    kinds: str | None,
    moments: str | None,
    every_s: float,
    lasts_s: float,
    calm_s: float,
    seed: int,
    until_s: float,
    restart_s: float,
    system: str,
    options: tuple[str, ...],
    out: str | None,
    dry_run: bool,
    as_json: bool,
    arguments: tuple[str, ...],
) -> int:
    """Let faults happen to a job in a lab of CLUSTER, and count what they cost.

    The job is a script that goes on from its last checkpoint by itself; it is started again when it fails. {disk} in
    its arguments is a folder of its own, which may be filled up. Needs root.
    """
    jobs.check_system(system)
    cluster = topology.load(cluster_path)
    if script_path:
        happens = faults.parse(_read(script_path), session.targets(cluster))
    else:
        hit = replace(session.targets(cluster), moments=_names(moments))
        happens = _drawn(hit, kinds, seed, every_s=every_s, until_s=until_s, lasts_s=lasts_s, calm_s=calm_s)
    if dry_run:
        click.echo(
            json.dumps({"faults": [str(each) for each in happens]}) if as_json else faults.to_text(happens), nl=as_json
        )
        return 0
    words = arguments[1:] if arguments[:1] == ("--",) else arguments
    if not words:
        raise UsageError("script: none given, expected one after --. For example: ringweave chaos C.yaml -- train.py.")
    where = Path(out or f"runs/{datetime.now():%Y%m%d-%H%M%S}-chaos").absolute()
    plan = Plan(
        system=system,
        script=words,
        faults=happens,
        out=where,
        options=options,
        until_s=until_s,
        restart_s=restart_s,
    )
    found = session.run(plan, cluster, lambda text: click.echo(f"ringweave: {text}", err=True))
    click.echo(json.dumps(_document(plan, happens, found)) if as_json else _to_text(found))
    return 0


def _drawn(hit: Targets, kinds: str | None, seed: int, **times: float) -> tuple[Fault, ...]:
    if kinds is None:
        raise UsageError("faults: none given, expected some. Give --script FILE, or --random kill,pause.")
    return faults.draw(_names(kinds), hit, seed=seed, **times)


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in text.split(",")] if text else []


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"script of faults: {error}, expected a text file. Give the path of one. [{path}]") from error


def _document(plan: Plan, happens: tuple[Fault, ...], found: Report) -> dict[str, object]:
    return {"system": plan.system, "script": [str(each) for each in happens], **found.to_document()}


def _to_text(found: Report) -> str:
    def shown(value: float | None, unit: str = "") -> str:
        return "-" if value is None else f"{value:g}{unit}"

    rows = [
        ("train steps that count", shown(found.steps)),
        ("train steps lost", shown(found.steps_lost)),
        ("samples lost", shown(found.samples_lost)),
        ("faults", shown(found.faults)),
        ("time to recover, median", shown(found.recover_p50_s, " s")),
        ("time to recover, p95", shown(found.recover_p95_s, " s")),
        ("fault-free rate", shown(found.fault_free_steps_per_s and round(found.fault_free_steps_per_s, 3), " steps/s")),
        ("goodput", shown(found.goodput)),
    ]
    lines = [f"{name:24} {value}" for name, value in rows]
    lines += [f"{each.fault}: longest wait {shown(each.stall_s, ' s')}" for each in found.recoveries]
    return "\n".join([*lines, "All of it is measured."])
