"""Verbs on runs: `ringweave run`, `attach`, `join` and `scale`. `lab run` shares the options of `run`."""

import dataclasses
import functools
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from ringweave import ports, topology
from ringweave.cli import lab as cli_lab
from ringweave.cli.echo import echo
from ringweave.cli.job_options import WORKER_OPTIONS, with_options
from ringweave.environment import LOG_MAX_FILES, LOG_MAX_SIZE, PORTS, check_max_loss_increase
from ringweave.errors import UsageError
from ringweave.files.rotation import DEFAULT_LIMITS, LogLimits
from ringweave.jobs import modes, worker_options
from ringweave.jobs.request import MAX_SPARES
from ringweave.jobs.worker_options import WorkerOptions
from ringweave.launcher import local_run, run_dir, scale_requests, workers
from ringweave.launcher.local_run import RunOptions, RunRequest
from ringweave.launcher.node_context import HostContext, LabContext
from ringweave.launcher.output import write_notice
from ringweave.launcher.run_dir import RunDir
from ringweave.launcher.workers import WorkerProgram, spread_slots
from ringweave.membership import settings
from ringweave.ports import PortRange
from ringweave.topology import Cluster, cluster


class ProgramCommand(click.Command):
    """Command that runs a program; it records whether the program came after --, which click removes."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as usual, and look for -- right before the words of the program."""
        given = list(args)
        rest = super().parse_args(ctx, args)
        words = [ctx.params.get("script"), *ctx.params.get("arguments", ())]
        ctx.params["is_after_dashes"] = given[-len(words) - 1 :] == ["--", *words]
        return rest


def run_here(request: RunRequest, within: PortRange | None = None) -> int:
    """Run the program on this machine; return the exit code. `within` limits the ports of its listeners."""
    _check_standby(request.options, is_elastic=request.elastic is not None)
    environ = {**os.environ, **request.options.log_environ, **({} if within is None else {PORTS: str(within)})}
    return local_run.run_here(request, environ=environ, stdout=sys.stdout, stderr=sys.stderr).exit_code


def run_program_options(command: Callable[..., int]) -> Callable[..., int]:
    """Give a `ProgramCommand` these options; it gets them as one argument called `options`."""

    @functools.wraps(command)
    def call(**given: Any) -> int:
        script, is_module, is_after_dashes = (given.pop(name) for name in ("script", "is_module", "is_after_dashes"))
        program = WorkerProgram(
            target=script,
            arguments=given.pop("arguments"),
            is_module=is_module,
            is_command=is_after_dashes and not is_module and not workers.is_python_script(script),
        )
        options = RunOptions(
            program=program,
            run_dir=given.pop("run_dir"),
            worker_options=_worker_options(given),
            mode=given.pop("mode"),
            elastic=given.pop("elastic"),
            num_spares=given.pop("spares"),
            has_standby=given.pop("standby"),
            log_environ=_log_environ(given.pop("log_max_size"), given.pop("log_max_files")),
        )
        workers.check_program(program)
        _check_schedule(options.worker_options.schedule)
        if options.mode is not None:
            modes.check_mode(options.mode, where="--mode")
        _check_spares(options)
        return command(options=options, **given)

    return with_options(_RUN_PROGRAM_OPTIONS, call)


_RUN_PROGRAM_OPTIONS = (
    click.option(
        "--run-dir", metavar="DIR", help="Folder of logs, events and run.json. Default: runs/DATE-TIME-SCRIPT."
    ),
    *WORKER_OPTIONS,
    click.option(
        "--elastic",
        metavar="MIN:MAX",
        help="Continue with at least MIN workers when others fail, and restart those; MAX is the upper limit of "
        "ringweave scale. For scripts with ringweave.prepare; other scripts restart from their checkpoint.",
    ),
    click.option(
        "--spares",
        type=click.IntRange(0, MAX_SPARES),
        default=0,
        metavar="N",
        help="Keep N idle processes that have imported what the script needs, on each of several hosts: a worker of an "
        "elastic run that dies is replaced by one of them at once.",
    ),
    click.option(
        "--standby",
        is_flag=True,
        help="A second parameter server, on another node if there is one, that takes over when the first one dies. "
        "Modes auto, ps-hra and ps.",
    ),
    click.option(
        "--log-max-size",
        metavar="SIZE",
        envvar=LOG_MAX_SIZE,
        help="Size from which on a log or the event log goes on in another file. Default: 16MiB.",
    ),
    click.option(
        "--log-max-files",
        metavar="N",
        envvar=LOG_MAX_FILES,
        help="Files of each log, of which the oldest is removed; of old events, those that are not measurements are "
        "kept. Default: 10.",
    ),
    click.option("-m", "is_module", is_flag=True, help="SCRIPT is the name of a module, as with python -m."),
    click.argument("script"),
    click.argument("arguments", nargs=-1, type=click.UNPROCESSED),
)


def _worker_options(given: dict[str, Any]) -> WorkerOptions:
    """Take the options of workers out of those that a command was given."""
    found = {name: given.pop(name) for name in worker_options.OPTION_NAMES}
    if found["order"] is not None:
        found["order"] = worker_options.parse_rank_order(found["order"])
    check_max_loss_increase(found["max_loss_increase"], where="--max-loss-increase")
    return WorkerOptions(**{name: value for name, value in found.items() if value is not None})


def _log_environ(size: str | None, files: str | None) -> dict[str, str]:
    limits = LogLimits.parse(size, files, where=("--log-max-size", "--log-max-files"))
    return {} if limits == DEFAULT_LIMITS else limits.to_environ()


def _check_schedule(name: str | None) -> None:
    if name is not None:
        from ringweave import schedules  # brings numpy, which most runs need not wait for here

        schedules.check_schedule_name(name, where="--schedule")


def _check_spares(options: RunOptions) -> None:
    if options.num_spares and options.elastic is None:
        do = "Add --elastic MIN:MAX, or leave --spares out: only an elastic run replaces workers"
        raise UsageError("--spares", got="no --elastic", expected="an elastic run", do=do)
    if options.num_spares and options.program.is_command:
        do = "Give the script without --, or leave --spares out"
        got = f"the command {options.program.target} after --"
        raise UsageError("--spares", got=got, expected="a Python script or module, which a spare runs", do=do)


def _check_standby(options: RunOptions, *, is_elastic: bool) -> None:
    mode = options.mode
    may_choose = mode == modes.AUTO and not is_elastic  # elastic jobs choose no server themselves
    if options.has_standby and not (may_choose or modes.has_server(mode, is_elastic=is_elastic)):
        do = "Leave --standby out, or say --mode ps-hra"
        expected = "ps-hra, ps or local" if is_elastic else "auto, ps-hra or ps"
        raise UsageError("--standby with --mode", got=mode, expected=expected, do=do)


@click.command(cls=ProgramCommand, context_settings=cli_lab.PROGRAM_CONTEXT_SETTINGS)
@click.option("--workers", "counts", metavar="N[,N...]", help="Workers per node: 4, or 3,2 for two nodes. Default: 1.")
@click.option(
    "--cluster", "cluster_path", metavar="FILE", help="Cluster file: one worker per device, all on this machine."
)
@click.option(
    "--hosts",
    metavar="A:N,B:M,..",
    help="Hosts that ssh reaches, each with its number of workers; or a cluster file with addresses.",
)
@click.option("--python", metavar="PATH", help="Interpreter on the hosts. Default: the same path, or ringweave's own.")
@click.option(
    "--install", is_flag=True, help="Install this ringweave on the hosts first, in an environment of its own."
)
@click.option("--name", metavar="NAME", help="Name of a run on hosts, or with --detach. Default: SCRIPT-DATE-TIME.")
@click.option(
    "--ports",
    "ports_text",
    metavar="FIRST-LAST",
    envvar=PORTS,
    help="Ports of all listeners, for firewalls; Gloo's and NCCL's own stay in net.ipv4.ip_local_port_range.",
)
@click.option(
    "--join-expiry",
    type=click.FloatRange(min=0.1, max=7 * 24 * 60),
    default=10.0,
    metavar="MINUTES",
    help="Minutes for which a host called join in --hosts can join (ringweave join). Default: 10.",
)
@click.option("--detach", is_flag=True, help="Return when the run has started; see ringweave attach.")
@run_program_options
def command(
    counts: str | None, cluster_path: str | None, ports_text: str | None, options: RunOptions, **hosts_options: Any
) -> int:
    """Run SCRIPT on several workers, with the environment that torchrun would give them.

    Options come before SCRIPT; everything after it belongs to the script. After -- it may be any command: hostname, or
    bash -c "...". The output of all workers is merged, with
    the rank in front of each line. When a worker fails the others are ended, and the first cause is reported.
    A run directory that was used before keeps the earlier run's files in its folder attempts/.
    """
    within = ports.parse_ports(ports_text, where="--ports") if ports_text else None
    outlives = next((key for key in ("detach", "name") if hosts_options[key]), None)
    if hosts_options["hosts"] is None and outlives is not None:
        hosts_options["hosts"], counts = _this_machine(counts, outlives), None
    if hosts_options["hosts"] is not None:
        return _run_on_hosts(counts, cluster_path, options, {**hosts_options, "ports": within})
    _refuse_hosts_options(hosts_options)
    cluster, text, places = _read_cluster(counts, cluster_path, options)
    if within is not None:
        _check_ports(within, options, places or cluster)
    request = RunRequest(
        options=options,
        cluster=cluster,
        cluster_text=text,
        cluster_path=cluster_path,
        expanded_cluster=places,
        run_dir=options.resolve_run_dir(),
        node_context=HostContext(within=within),
    )
    return run_here(request, within)


def _check_ports(within: PortRange, options: RunOptions, places: Cluster) -> None:
    """Refuse a range that is too small, and say which listeners stay outside of it."""
    num_workers = sum(node.num_devices for node in places.nodes)
    num_services = 1 + (2 if options.elastic else 0) + (2 if options.has_standby else 0)
    needed = ports.needed_ports(num_workers, is_elastic=options.elastic is not None, num_services=num_services)
    ports.check_size(within, needed, "this machine")
    if notice := ports.outside_text(within, [ports.kernel_ports()]):
        write_notice(notice)


def _read_cluster(
    counts: str | None, path: str | None, options: RunOptions
) -> tuple[topology.Cluster, str, topology.Cluster | None]:
    """Return the cluster, the text of its file, and the cluster with slots for later workers."""
    if counts is not None and path is not None:
        raise UsageError("--workers and --cluster: both given, expected one of them. The cluster file says how many.")
    if path is not None:
        return topology.load(path), Path(path).read_text(encoding="utf-8"), None
    parsed = workers.parse_worker_counts(counts if counts is not None else "1")
    most = settings.parse_bounds(options.elastic).max_members if options.elastic else 0
    places = topology.one_machine(spread_slots(parsed, most, limits=[cluster.MAX_DEVICES] * len(parsed)))
    return topology.one_machine(parsed), topology.dumps(places), places


def _run_on_hosts(
    counts: str | None, cluster_path: str | None, options: RunOptions, hosts_options: Mapping[str, Any]
) -> int:
    from ringweave.platforms.hosts import start  # brings the platform of jobs

    given = [name for name, value in {"--workers": counts, "--cluster": cluster_path}.items() if value]
    if given:
        do = f"Leave {given[0]} out; the hosts and their workers are in --hosts"
        raise UsageError("--hosts", got=f"beside {', '.join(given)}", expected="none of these", do=do)
    if options.has_standby and options.elastic is None:
        do = "Add --elastic MIN:MAX, or leave --standby out: without it the loss of a host ends the run anyway"
        raise UsageError("--standby", got="no --elastic", expected="an elastic run on hosts", do=do)
    _check_standby(options, is_elastic=True)
    return start.run_on_hosts(start.HostsRunOptions(run=options, **hosts_options))


def _this_machine(counts: str | None, option: str) -> str:
    """Return the value of `--hosts` for a run on this machine that goes on without its command."""
    from ringweave.platforms.hosts import host_list

    found = workers.parse_worker_counts(counts if counts is not None else "1")
    if len(found) > 1:
        do = "Give one number of workers, or leave it out"
        raise UsageError(f"--{option}", got=f"--workers {counts}", expected="one node", do=do)
    return f"{host_list.THIS_MACHINE}:{found[0]}"


def _refuse_hosts_options(given: Mapping[str, Any]) -> None:
    for key in ("python", "install"):
        if given[key]:
            do = "Add --hosts, or leave it out"
            raise UsageError(f"--{key}", got="no --hosts", expected="a run on hosts", do=do)


@click.command("run", cls=ProgramCommand, context_settings=cli_lab.PROGRAM_CONTEXT_SETTINGS)
@cli_lab.LAB_OPTION
@click.option(
    "--no-cluster-file", is_flag=True, help="Start workers without a cluster file, so that they probe the network."
)
@run_program_options
def lab_run_command(name: str | None, no_cluster_file: bool, options: RunOptions) -> int:
    """Run SCRIPT, or any command after --, on all devices of the lab, every worker in its node.

    Otherwise the same as ringweave run.
    """
    cli_lab.enter_user_namespace()
    target_lab = cli_lab.find_lab(name)
    request = RunRequest(
        options=options,
        cluster=target_lab.cluster,
        cluster_text=topology.dumps(target_lab.cluster),
        run_dir=options.resolve_run_dir(),
        node_context=LabContext(target_lab),
        shares_cluster_file=not no_cluster_file,
    )
    return run_here(request)


@click.command
@click.argument("name", metavar="RUN")
def attach_command(name: str) -> int:
    """Follow a run on hosts that was started from this machine: its output so far, and all that comes.

    RUN is the name of the run or the folder of its output. Ctrl-C stops the run; when this command is killed, or its
    terminal is closed, the run continues.
    """
    from ringweave.platforms.hosts import attach, run_entry, ssh

    known = run_entry.find_known_run(name)
    return attach.follow_run(known, ssh.HostConnections(known.hosts, known.options, connects=False))


@click.command
@click.argument("line", metavar="ADDRESS")
@click.option(
    "--address",
    metavar="IP",
    help="Address at which the other hosts reach this one. Default: the one from which it reaches them.",
)
def join_command(line: str, address: str | None) -> int:
    """Take part in a run on hosts as one of them, until it ends.

    ADDRESS is HOST:PORT#TOKEN, as ringweave run --hosts a:2,join:1 printed it; - reads it from standard input, so that
    other users of this host do not see it in the list of processes. Ctrl-C leaves the run.
    """
    from ringweave.platforms.hosts import joiner

    return joiner.join_run(sys.stdin.readline() if line == "-" else line, address)


@click.command
@click.option(
    "--workers", type=int, metavar="N", required=True, help="New number of workers, within MIN:MAX of the run."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.argument("run", metavar="RUN")
def scale_command(workers: int, as_json: bool, run: str) -> int:
    """Change a run that was started with --elastic MIN:MAX to N workers, ranks 0 to N-1.

    RUN is the folder of a run on this machine. A run on hosts is named as it is, or by the folder of its output, on the
    machine that started it or on any of its hosts.

    New workers join like restarted ones: they get the state of another worker while the others train. Surplus workers,
    those with the highest ranks, finish their train step and leave. Ranks below N that were given up or had left are
    started again.
    """
    from ringweave.platforms.hosts import run_entry

    folder = RunDir(root=Path(run).absolute())
    if run_entry.is_run_on_hosts(run) and not run_dir.is_run_dir_held(folder):
        from ringweave.platforms.hosts import platform  # brings the platform of jobs

        found = platform.scale_run(run, workers)
    else:
        found = scale_requests.request_workers(folder, workers)
    if as_json:
        document = dataclasses.asdict(found)
        echo(json.dumps({key: document[key] for key in ("workers", "before", "starting", "leaving")}))
    else:
        echo(scale_requests.describe_answer(found))
    return 0
