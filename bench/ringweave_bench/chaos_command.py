"""`ringweave chaos`: inject faults into a job in a lab, and measure their cost."""

import json
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import click
from click.core import ParameterSource

from ringweave import topology
from ringweave.errors import UsageError, explain
from ringweave.topology import Cluster
from ringweave_bench.chaos import chaos_job, chaos_session, fault_script
from ringweave_bench.chaos.chaos_report import ChaosReport
from ringweave_bench.chaos.chaos_session import ChaosPlan
from ringweave_bench.chaos.fault_script import Fault, FaultTargets
from ringweave_bench.chaos.member_impacts import ElasticReport

_RANDOM_OPTIONS = {
    "moments": "--moments",
    "services": "--services",
    "every_s": "--every",
    "lasts_s": "--lasts",
    "calm_s": "--calm",
    "seed": "--seed",
}
"""Parameter -> option that has no effect beside --script."""


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
@click.option("--system", default=chaos_job.RINGWEAVE, help="ringweave (default), torchrun or torchft.")
@click.option(
    "--option", "options", multiple=True, help="One of ringweave run, or torchrun, such as --option=--mode=sync."
)
@click.option("--out", metavar="DIR", help="Where events and logs go. Default: runs/DATE-TIME-chaos.")
@click.option("--dry-run", is_flag=True, help="Print the faults and do nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="-- SCRIPT [ARGS]...")
# Long: it has a parameter for each option.
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
    chaos_job.check_system(system)
    fault_script.check_seconds("for", until_s)
    fault_script.check_seconds("restart-after", restart_s)
    cluster = topology.load(cluster_path)
    if script_path and kinds is not None:
        raise UsageError("--script and --random: both given, expected one of them. Leave one out.")
    if script_path:
        _refuse_random_options()
        planned_faults = fault_script.parse_faults(_read_script(script_path), chaos_session.cluster_targets(cluster))
    else:
        fault_targets = replace(
            chaos_session.cluster_targets(cluster), moments=_split_names(moments), services=_split_names(services)
        )
        planned_faults = _random_faults(
            fault_targets, kinds, seed, every_s=every_s, until_s=until_s, lasts_s=lasts_s, calm_s=calm_s
        )
    if dry_run:
        click.echo(
            json.dumps({"faults": [str(each) for each in planned_faults]})
            if as_json
            else fault_script.faults_text(planned_faults),
            nl=as_json,
        )
        return 0
    words = arguments[1:] if arguments[:1] == ("--",) else arguments
    if not words:
        raise UsageError("script: none given, expected one after --. For example: ringweave chaos C.yaml -- train.py.")
    out_folder = Path(out or f"runs/{datetime.now():%Y%m%d-%H%M%S}-chaos").absolute()
    plan = ChaosPlan(
        system=system,
        script=words,
        faults=planned_faults,
        out=out_folder,
        options=options,
        until_s=until_s,
        restart_s=restart_s,
    )
    found = chaos_session.run_chaos(plan, cluster, lambda text: click.echo(f"ringweave: {text}", err=True))
    click.echo(json.dumps(_report_document(plan, cluster, found)) if as_json else _report_text(found))
    return 1 if found.broken else 0


def _random_faults(targets: FaultTargets, kinds: str | None, seed: int, **times: float) -> tuple[Fault, ...]:
    if kinds is None:
        raise UsageError("faults: none given, expected some. Give --script FILE, or --random kill,pause.")
    return fault_script.draw_faults(_split_names(kinds), targets, seed=seed, **times)


def _refuse_random_options() -> None:
    """Refuse options of --random that were given beside --script."""
    source_of = click.get_current_context().get_parameter_source
    typed = [option for name, option in _RANDOM_OPTIONS.items() if source_of(name) is ParameterSource.COMMANDLINE]
    if typed:
        do = "Leave them out, or give --random in the place of --script"
        text = explain("options of --random", got=", ".join(typed), expected="none of them beside --script", do=do)
        raise UsageError(text)


def _split_names(text: str | None) -> list[str]:
    return [name.strip() for name in text.split(",")] if text and text.strip() else []


def _read_script(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"script of faults: {error}, expected a text file. Give the path of one. [{path}]") from error


def _report_document(plan: ChaosPlan, cluster: Cluster, report: ChaosReport) -> dict[str, object]:
    script = [str(each) for each in plan.faults]
    return {"run": _run_document(plan, cluster), "system": plan.system, "script": script, **report.to_document()}


def _run_document(plan: ChaosPlan, cluster: Cluster) -> dict[str, object]:
    """Return the request of the run, with all that is needed to repeat it."""
    given = click.get_current_context().params
    random_options = {name: given[name] for name in _RANDOM_OPTIONS}
    random_options |= {name: _split_names(given[name]) for name in ("kinds", "moments", "services")}
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
        "random": None if given["script_path"] else random_options,
    }


def _report_text(report: ChaosReport) -> str:
    rows = [
        ("train steps that count", _value_text(report.steps)),
        ("train steps lost", _value_text(report.steps_lost)),
        ("samples lost", _value_text(report.samples_lost)),
        ("samples unaccounted", _value_text(report.samples_unaccounted)),
        ("attempts", _value_text(report.attempts)),
        ("faults", _value_text(report.faults)),
        *(("killed during " + moment, _value_text(often)) for moment, often in report.moments.items()),
        ("time to recover, median", _value_text(report.recover_p50_s, " s")),
        ("time to recover, p95", _value_text(report.recover_p95_s, " s")),
        ("fault-free rate", _value_text(report.fault_free_steps_per_s, " steps/s")),
        ("goodput", _value_text(report.goodput)),
        *(_elastic_rows(report.elastic) if report.elastic else ()),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:{width}} {value}" for name, value in rows]
    lines += [f"{each.fault}: longest wait {_value_text(each.stall_s, ' s')}" for each in report.recoveries]
    lines += [f"{fault}: never began" for fault in report.never_began]
    lines += report.at_other_moments
    lines += [f"broken: {promise}" for promise in report.broken]
    return "\n".join([*lines, "All of it is measured."])


def _elastic_rows(elastic: ElasticReport) -> list[tuple[str, str]]:
    return [
        ("survivors' stall, median", _value_text(elastic.stall_p50_s, " s")),
        ("survivors' stall, p95", _value_text(elastic.stall_p95_s, " s")),
        ("next generation after, median", _value_text(elastic.generation_p50_s, " s")),
        ("service replaced after, median", _value_text(elastic.taken_over_p50_s, " s")),
        ("service replaced after, p95", _value_text(elastic.taken_over_p95_s, " s")),
        ("stall by it, median", _value_text(elastic.takeover_stall_p50_s, " s")),
        ("stall by it, p95", _value_text(elastic.takeover_stall_p95_s, " s")),
        ("steps of zombies", _value_text(elastic.steps_as_zombie)),
        ("evicted without a fault", _value_text(elastic.evicted)),
        ("joins", _value_text(elastic.joins)),
        ("peers' stall at joins, median", _value_text(elastic.join_stall_steps_p50, " steps")),
        ("peers' stall at joins, p95", _value_text(elastic.join_stall_steps_p95, " steps")),
    ]


def _value_text(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{round(value, 3):g}{unit}"
