"""`ringweave chaos`: faults that happen to a job in a lab, and what they cost."""

import json
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import click
from click.core import ParameterSource

from ringweave import topology
from ringweave.benchmarks.chaos import drawing, faults, session
from ringweave.benchmarks.chaos.accounts import Report
from ringweave.benchmarks.chaos.doing import jobs
from ringweave.benchmarks.chaos.elastic import Elastic
from ringweave.benchmarks.chaos.faults import Fault, Targets
from ringweave.benchmarks.chaos.session import Plan
from ringweave.errors import UsageError, explain
from ringweave.topology import Cluster

_OF_RANDOM = {
    "moments": "--moments",
    "services": "--services",
    "every_s": "--every",
    "lasts_s": "--lasts",
    "calm_s": "--calm",
    "seed": "--seed",
}
"""Parameter -> option: what says nothing beside --script."""


@click.command
@click.argument("cluster_path", metavar="CLUSTER")
@click.option("--script", "script_path", metavar="FILE", help='Faults, one a line: "at 20s pause worker 2 for 30s".')
@click.option("--random", "kinds", metavar="KINDS", help="Faults at random: some of kill,pause,cut,slow,clock,fill.")
@click.option("--moments", metavar="NAMES", help="Kill at these moments of a step: some of forward,backward,bucket,...")
@click.option(
    "--services",
    metavar="NAMES",
    help="Kill and pause these too, each as often as a worker: some of coordinator,standby,server,server-standby.",
)
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
    services: str | None,
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
    its arguments is a folder of its own, which may be filled up. Needs root. Exit code 1 says that a promise was
    broken: an elastic job lost steps, samples are missing from the books, or training did not go on.
    """
    jobs.check_system(system)
    drawing.check_seconds("for", until_s)
    drawing.check_seconds("restart-after", restart_s)
    cluster = topology.load(cluster_path)
    if script_path and kinds is not None:
        raise UsageError("--script and --random: both given, expected one of them. Leave one out.")
    if script_path:
        _refuse_options_of_random()
        happens = faults.parse(_read(script_path), session.targets(cluster))
    else:
        hit = replace(session.targets(cluster), moments=_names(moments), services=_names(services))
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
    click.echo(json.dumps(_document(plan, cluster, found)) if as_json else _to_text(found))
    return 1 if found.broken else 0


def _drawn(hit: Targets, kinds: str | None, seed: int, **times: float) -> tuple[Fault, ...]:
    if kinds is None:
        raise UsageError("faults: none given, expected some. Give --script FILE, or --random kill,pause.")
    return drawing.draw(_names(kinds), hit, seed=seed, **times)


def _refuse_options_of_random() -> None:
    """Refuse those that were typed beside --script."""
    source_of = click.get_current_context().get_parameter_source
    typed = [option for name, option in _OF_RANDOM.items() if source_of(name) is ParameterSource.COMMANDLINE]
    if typed:
        do = "Leave them out, or give --random in the place of --script"
        text = explain("options of --random", got=", ".join(typed), expected="none of them beside --script", do=do)
        raise UsageError(text)


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in text.split(",")] if text and text.strip() else []


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"script of faults: {error}, expected a text file. Give the path of one. [{path}]") from error


def _document(plan: Plan, cluster: Cluster, found: Report) -> dict[str, object]:
    script = [str(each) for each in plan.faults]
    return {"run": _run(plan, cluster), "system": plan.system, "script": script, **found.to_document()}


def _run(plan: Plan, cluster: Cluster) -> dict[str, object]:
    """What was asked for: enough to run the same again."""
    given = click.get_current_context().params
    random = {name: given[name] for name in _OF_RANDOM}
    random |= {name: _names(given[name]) for name in ("kinds", "moments", "services")}
    return {
        "cluster_path": given["cluster_path"],
        "cluster": topology.dumps(cluster),
        "system": plan.system,
        "script": list(plan.script),
        "options": list(plan.options),
        "for_s": plan.until_s,
        "restart_after_s": plan.restart_s,
        "out": str(plan.out),
        "faults_path": given["script_path"],
        "random": None if given["script_path"] else random,
    }


def _to_text(found: Report) -> str:
    rows = [
        ("train steps that count", _shown(found.steps)),
        ("train steps lost", _shown(found.steps_lost)),
        ("samples lost", _shown(found.samples_lost)),
        ("samples unaccounted", _shown(found.samples_unaccounted)),
        ("attempts", _shown(found.attempts)),
        ("faults", _shown(found.faults)),
        *(("killed during " + moment, _shown(often)) for moment, often in found.moments.items()),
        ("time to recover, median", _shown(found.recover_p50_s, " s")),
        ("time to recover, p95", _shown(found.recover_p95_s, " s")),
        ("fault-free rate", _shown(found.fault_free_steps_per_s, " steps/s")),
        ("goodput", _shown(found.goodput)),
        *(_rows_of_members(found.elastic) if found.elastic else ()),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:{width}} {value}" for name, value in rows]
    lines += [f"{each.fault}: longest wait {_shown(each.stall_s, ' s')}" for each in found.recoveries]
    lines += [f"{fault}: never began" for fault in found.never_began]
    lines += found.at_other_moments
    lines += [f"broken: {promise}" for promise in found.broken]
    return "\n".join([*lines, "All of it is measured."])


def _rows_of_members(found: Elastic) -> list[tuple[str, str]]:
    return [
        ("survivors' stall, median", _shown(found.stall_p50_s, " s")),
        ("survivors' stall, p95", _shown(found.stall_p95_s, " s")),
        ("new epoch after, median", _shown(found.epoch_p50_s, " s")),
        ("service replaced after, median", _shown(found.taken_over_p50_s, " s")),
        ("service replaced after, p95", _shown(found.taken_over_p95_s, " s")),
        ("stall by it, median", _shown(found.takeover_stall_p50_s, " s")),
        ("stall by it, p95", _shown(found.takeover_stall_p95_s, " s")),
        ("steps of zombies", _shown(found.steps_as_zombie)),
        ("put out without a fault", _shown(found.put_out)),
        ("joins", _shown(found.joins)),
        ("peers' stall at joins, median", _shown(found.join_stall_steps_p50, " steps")),
        ("peers' stall at joins, p95", _shown(found.join_stall_steps_p95, " steps")),
    ]


def _shown(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{round(value, 3):g}{unit}"
