"""The network between the nodes of a job, measured: `ringweave lab run -m ringweave.comm.probing`, or under torchrun.

    torchrun --nnodes 4 ... -m ringweave.comm.probing --write cluster.yaml

Every rank runs it; the first one prints what was found.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import click
import torch.distributed as dist

from ringweave.comm import members
from ringweave.comm.probing import caching, measuring
from ringweave.comm.probing.caching import Cache
from ringweave.comm.probing.findings import Findings
from ringweave.environment import WorkerEnvironment
from ringweave.errors import RingweaveError
from ringweave.topology.recovery import Effort

_TIMEOUT = timedelta(seconds=120)


@click.command
@click.option("--write", "path", metavar="FILE", type=click.Path(path_type=Path), help="Write the cluster file there.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--rounds", type=click.IntRange(1), help="Rounds of pairs. Default: until every pair has met.")
@click.option("--max-age", "max_age_s", type=float, metavar="SECONDS", help="Take findings of that age, if there are.")
def command(path: Path | None, as_json: bool, rounds: int | None, max_age_s: float | None) -> None:
    """Measure the network between the nodes of this job; every number that is printed is measured."""
    try:
        found = _find(rounds, max_age_s)
    except RingweaveError as error:
        click.echo(f"ringweave: error: {error}", err=True)
        sys.exit(error.exit_code)
    if found is None:
        return
    if path is not None:
        path.write_text(f"# Measured by ringweave: rates are what TCP streams deliver.\n{found.cluster_text}")
    click.echo(found.to_json() if as_json else found.to_text())


def _find(rounds: int | None, max_age_s: float | None) -> Findings | None:
    """What was found, on the first rank."""
    store, rank, world_size = next(iter(dist.rendezvous("env://", timeout=_TIMEOUT)))
    environment = WorkerEnvironment.from_environ(os.environ)
    place = members.own_place(WorkerEnvironment(node=environment.node), os.environ)  # whatever a cluster file says
    space = dist.PrefixStore("probe", store)
    group = members.meet(space, rank, range(world_size), place, [], _TIMEOUT)
    cache, hosts = Cache(caching.default_folder()), measuring.hosts(group)
    if rank == 0:
        known = cache.get(hosts, time.time(), max_age_s) if max_age_s is not None else None
        space.set("known", "1" if known else "0")
    else:
        known = None
    space.wait(["known"], _TIMEOUT)
    if space.get("known") == b"0":
        known = measuring.probe(space, group, _TIMEOUT, effort=Effort(num_rounds=rounds), tell=_tell)
        if known is not None:
            cache.put(hosts, known)
    _leave_together(space, rank, world_size)
    return known


def _leave_together(store: dist.Store, rank: int, world_size: int) -> None:
    """The first rank has the store: it stays until all others are through."""
    store.set(f"done/{rank}", "1")
    if rank == 0:
        store.wait([f"done/{each}" for each in range(world_size)], _TIMEOUT)


def _tell(what: str) -> None:
    if sys.stderr.isatty():
        click.echo(f"\rringweave: measuring {what:<40}", err=True, nl=False)


if __name__ == "__main__":
    command()
