"""The options that every verb has which runs a program: `ringweave run` and `ringweave lab run`."""

import functools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from ringweave.errors import UsageError, explain
from ringweave.launch import orders, run_dirs, runs, workers
from ringweave.launch.elastic.places import spread
from ringweave.launch.local.sites import Site
from ringweave.launch.orders import Order
from ringweave.launch.run_dirs import RunDir
from ringweave.launch.workers import Program
from ringweave.membership.rules import settings
from ringweave.membership.rules.settings import Bounds
from ringweave.topology import Cluster, rules

RUN_SETTINGS = {"allow_interspersed_args": False}


class ProgramCommand(click.Command):
    """A verb that runs a program. It tells `shared` whether -- stood before it, which click takes away."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as usual, and look for -- right before what is left for the program."""
        given = list(args)
        rest = super().parse_args(ctx, args)
        words = [ctx.params.get("script"), *ctx.params.get("arguments", ())]
        ctx.params["is_after_dashes"] = given[-len(words) - 1 :] == ["--", *words]
        return rest


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """What was asked for, checked."""

    program: Program
    run_dir: str | None
    schedule: str | None
    tuning: bool | None
    mode: str | None
    leader_per_nic: bool
    replace_backend: bool
    order: Order
    elastic: str | None
    has_standby: bool

    def places(self, counts: Sequence[int]) -> list[int]:
        """Places for workers on each node: those of the begin, and of an elastic run those that may come.

        Raises:
            UsageError: The bounds are none.
        """
        most = settings.parse(self.elastic).most if self.elastic else 0
        return spread(counts, most, most=rules.MAX_DEVICES)

    def run(
        self,
        cluster: Cluster,
        cluster_text: str,
        cluster_path: str | None,
        site: Site,
        *,
        tells_cluster: bool = True,
        places: Cluster | None = None,
    ) -> int:
        """Run the program on a cluster, whose file its workers are told or not; the exit code.

        `places` is the cluster with places for workers that may come later.
        """
        request = runs.Request(
            program=self.program,
            cluster=cluster,
            cluster_text=cluster_text,
            cluster_path=cluster_path,
            places=places,
            run_dir=_run_dir(self.run_dir, self.program.target),
            schedule=self.schedule,
            tuning=self.tuning,
            mode=self.mode,
            leader_per_nic=self.leader_per_nic,
            replace_backend=self.replace_backend,
            order=self.order,
            site=site,
            tells_cluster=tells_cluster,
            elastic=_bounds(self.elastic, cluster),
            has_standby=_checked_standby(self.has_standby, self.mode, is_elastic=self.elastic is not None),
        )
        return runs.run(request, environ=os.environ, stdout=sys.stdout, stderr=sys.stderr).exit_code


def shared(command: Callable[..., int]) -> Callable[..., int]:
    """Give a `ProgramCommand` these options; it gets them as one argument called `options`."""

    @functools.wraps(command)
    def call(**given: Any) -> int:
        script, is_module, is_after_dashes = (given.pop(name) for name in ("script", "is_module", "is_after_dashes"))
        program = Program(
            target=script,
            arguments=given.pop("arguments"),
            is_module=is_module,
            is_command=is_after_dashes and not is_module and not workers.is_python(script),
        )
        options = RunOptions(
            program=program,
            run_dir=given.pop("run_dir"),
            schedule=given.pop("schedule"),
            tuning=given.pop("tuning"),
            mode=given.pop("mode"),
            leader_per_nic=given.pop("leader_per_nic"),
            replace_backend=given.pop("replace_backend"),
            order=orders.parse(given.pop("order")),
            elastic=given.pop("elastic"),
            has_standby=given.pop("standby"),
        )
        workers.check_target(program)
        _check_schedule(options.schedule)
        _check_mode(options.mode)
        return command(options=options, **given)

    return functools.reduce(lambda inner, option: option(inner), reversed(_OPTIONS), call)


_OPTIONS = (
    click.option(
        "--run-dir", metavar="DIR", help="Where logs, events and run.json go. Default: runs/DATE-TIME-SCRIPT."
    ),
    click.option("--schedule", metavar="NAME", help="Use this schedule for allreduces from 64 KiB up."),
    click.option(
        "--tuning/--no-tuning",
        default=None,
        help="Try the best schedules and follow the network's rates, or keep the first plan: then the same bits result "
        "from run to run. Default: among several nodes.",
    ),
    click.option(
        "--mode",
        metavar="NAME",
        help="How scripts with ringweave.prepare train: auto, sync, balanced, ps-hra or ps.",
    ),
    click.option("--leader-per-nic", is_flag=True, help="Plan with a leader for each NIC of a node, not one for all."),
    click.option(
        "--elastic",
        metavar="MIN:MAX",
        help="Go on when workers die, as long as MIN are left, and start them again; MAX is the most that there may "
        "be (see ringweave scale). For scripts with ringweave.prepare; others start again from their checkpoint.",
    ),
    click.option(
        "--standby",
        is_flag=True,
        help="A second parameter server, on another node if there is one, that takes over when the first one dies. "
        "Modes auto, ps-hra and ps.",
    ),
    click.option("--replace-backend", is_flag=True, help='Let a script\'s "gloo" or "nccl" be ringweave too.'),
    click.option(
        "--order",
        metavar="ORDER",
        default="block",
        help="How devices get ranks: block (default), round-robin or shuffled[:SEED].",
    ),
    click.option("-m", "is_module", is_flag=True, help="SCRIPT is the name of a module, as with python -m."),
    click.argument("script"),
    click.argument("arguments", nargs=-1, type=click.UNPROCESSED),
)


def _check_schedule(name: str | None) -> None:
    if name is not None:
        from ringweave import schedules  # brings numpy, which most runs need not wait for here

        schedules.check_name(name, where="--schedule")


def _check_mode(name: str | None) -> None:
    if name is not None:
        from ringweave.planning import modes  # brings numpy as well

        modes.check_name(name, where="--mode")


def _bounds(text: str | None, cluster: Cluster) -> Bounds | None:
    if text is None:
        return None
    bounds = settings.parse(text)
    num_workers = sum(node.num_devices for node in cluster.nodes)
    if not bounds.least <= num_workers <= bounds.most:
        do = "Give bounds with the number of workers in them"
        raise UsageError(explain("--elastic", got=text, expected=f"MIN <= {num_workers} workers <= MAX", do=do))
    return bounds


def _checked_standby(is_wanted: bool, mode: str | None, *, is_elastic: bool) -> bool:
    if not is_wanted:
        return False
    from ringweave.planning import modes

    if mode not in (*modes.SERVED, *(() if is_elastic else (modes.AUTO,))):  # elastic jobs choose no server themselves
        do = "Leave --standby out, or say --mode ps-hra"
        expected = "ps-hra or ps" if is_elastic else "auto, ps-hra or ps"
        raise UsageError(explain("--standby with --mode", got=mode, expected=expected, do=do))
    return True


def _run_dir(given: str | None, script: str) -> RunDir:
    if given:
        return RunDir(root=Path(given).absolute())
    return run_dirs.fresh(Path("runs"), script, datetime.now())
