"""Collectives as plain data: generated, verified on symbolic contributor sets, rendered, parsed, then run elsewhere."""

from ringweave.schedules.catalogue import HOST, NAMES, check_name, generate
from ringweave.schedules.projection import Transfer, project
from ringweave.schedules.schedule import Collective, How, Round, Rounds, Schedule
from ringweave.schedules.text import parse, render
from ringweave.schedules.proof.verification import verify

__all__ = [
    "HOST",
    "NAMES",
    "Collective",
    "How",
    "Round",
    "Rounds",
    "Schedule",
    "Transfer",
    "check_name",
    "generate",
    "parse",
    "project",
    "render",
    "verify",
]
