"""Schedules of collectives as plain data: generated, verified on symbolic contributor sets, rendered and parsed."""

from ringweave.schedules.compose import compose_allreduce, compose_side_by_side, mirror
from ringweave.schedules.generators import NATIVE, SCHEDULE_NAMES, check_schedule_name, generate, schedule_names
from ringweave.schedules.generators.direct import direct, direct_allgather, direct_broadcast, direct_reduce_scatter
from ringweave.schedules.generators.halving_doubling import halving_doubling
from ringweave.schedules.generators.hierarchical import (
    arrange_leaders,
    binomial_broadcast,
    binomial_reduce,
    chain_broadcast,
    chain_reduce,
    hierarchical,
    leader_matrix,
)
from ringweave.schedules.generators.multi_level import (
    Domain,
    Stripe,
    block_owners,
    multi_level,
    multi_level_allgather,
    multi_level_broadcast,
    multi_level_reduce_scatter,
    multi_level_striped,
)
from ringweave.schedules.generators.parameter_server import parameter_server
from ringweave.schedules.generators.ring import ring, ring_allgather, ring_block_allgather, ring_reduce_scatter
from ringweave.schedules.program import Transfer, project_all_ranks, project_rank
from ringweave.schedules.roundings import RoundingBound
from ringweave.schedules.schedule import (
    Collective,
    CollectiveKind,
    LazyRounds,
    ReceiveOp,
    Round,
    Schedule,
    SchedulePhase,
    WireEncoding,
    parse,
    render,
)
from ringweave.schedules.verification import verify
