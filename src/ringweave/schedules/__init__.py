"""Collectives as plain data: generated, verified on symbolic contributor sets, rendered, parsed, then run elsewhere."""

from ringweave.schedules.catalogue import HOST, NAMES, check_name, generate
from ringweave.schedules.generators.broadcasting import binomial_broadcast, binomial_reduce, broadcast, reduce
from ringweave.schedules.generators.direct import direct, direct_allgather, direct_reduce_scatter
from ringweave.schedules.generators.domains import Domain, Stripe
from ringweave.schedules.generators.halving_doubling import halving_doubling
from ringweave.schedules.generators.hierarchical import hierarchical
from ringweave.schedules.generators.leader_matrix import leader_matrix, matrix
from ringweave.schedules.generators.multi_level import (
    multi_level,
    multi_level_allgather,
    multi_level_broadcast,
    multi_level_reduce_scatter,
    multi_level_striped,
)
from ringweave.schedules.generators.parameter_server import parameter_server
from ringweave.schedules.generators.ring import ring, ring_allgather, ring_reduce_scatter
from ringweave.schedules.joining import beside, then
from ringweave.schedules.projection import Transfer, project, project_all
from ringweave.schedules.proof.verification import verify
from ringweave.schedules.schedule import Collective, How, Phase, Round, Rounds, Schedule
from ringweave.schedules.text import parse, render

__all__ = [
    "HOST",
    "NAMES",
    "Collective",
    "Domain",
    "How",
    "Phase",
    "Round",
    "Rounds",
    "Schedule",
    "Stripe",
    "Transfer",
    "beside",
    "binomial_broadcast",
    "binomial_reduce",
    "broadcast",
    "check_name",
    "direct",
    "direct_allgather",
    "direct_reduce_scatter",
    "generate",
    "halving_doubling",
    "hierarchical",
    "leader_matrix",
    "matrix",
    "multi_level",
    "multi_level_allgather",
    "multi_level_broadcast",
    "multi_level_reduce_scatter",
    "multi_level_striped",
    "parameter_server",
    "parse",
    "project",
    "project_all",
    "reduce",
    "render",
    "ring",
    "ring_allgather",
    "ring_reduce_scatter",
    "then",
    "verify",
]
