"""Putting a group's director together: plan, earlier results, adviser, books."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import Store

from ringweave.comm import choosing
from ringweave.comm.adapting.directing import Director
from ringweave.comm.adapting.remembering import TuningCache
from ringweave.comm.adapting.timings import Timings
from ringweave.comm.choosing import GroupPlan, Sending
from ringweave.comm.members import Members
from ringweave.environment import WorkerEnvironment
from ringweave.planning import Plan
from ringweave.planning.adapting import Adviser, Situation
from ringweave.telemetry.events import EventLog

EPOCH, APART = "epoch ", "apart "
"""How the names of groups begin that an elastic job makes anew (`comm/regrouping.py`): after a loss all stand still and
wait for their first collective, so nothing is simulated before it."""


@dataclass(frozen=True, slots=True)
class Scribe:
    """Who writes about a group, and where; nothing is written without a log."""

    log: EventLog | None
    rank: int
    """Global rank of this process."""
    group: str
    """Name of the group."""


def make_director(
    store: Store,
    members: Members,
    environment: WorkerEnvironment,
    where: Situation,
    timeout: timedelta,
    scribe: Scribe,
) -> Director:
    """The director of a group that runs there. On its first rank that makes the plan, and reads what others found.

    Raises:
        ClusterError: The cluster lacks a member's node.
    """
    cache = TuningCache.of_user(os.environ)

    def load(plan: Plan) -> Mapping[int, str] | None:
        return cache.load(plan) if choosing.may_adapt(members, environment) else None

    def make_adviser(plan: Plan) -> Adviser:
        is_awaited = scribe.group.startswith((EPOCH, APART))
        return Adviser(where, plan, guide.tuned, (lambda *_: {}) if is_awaited else None)

    def tell(adviser: Adviser) -> None:
        for kind, fields in adviser.take_notes():
            if scribe.log is not None:
                scribe.log.write(kind, rank=scribe.rank, group=scribe.group, **fields)
            if kind == "schedule_tuned" and not adviser.rates:
                cache.save(adviser.plan, adviser.tuned)

    sending = Sending(store, members, timeout) if choosing.is_shared(members, environment) else None
    guide = GroupPlan(lambda: where.plan({}), load, sending)
    timings = Timings(scribe.log if members.group_rank == 0 else None, scribe.rank, scribe.group)
    return Director(guide, members, make_adviser, tell, timings)
