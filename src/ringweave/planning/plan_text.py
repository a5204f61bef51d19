"""A plan as JSON text, and back. Leaders are written in runs, domains as a list that begins with the whole group."""

import itertools
import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from ringweave.cost import Demand
from ringweave.errors import ScheduleError, explain, shorten
from ringweave.files import json_text
from ringweave.planning.plans import Plan
from ringweave.schedules import Domain, Stripe

FORMAT = "ringweave-plan-2"
"""First key of the document."""
MAX_BYTES = json_text.MAX_BYTES
"""Of a text that is read; plans of ten thousand ranks have some hundred thousand."""
_MAX_LEADERS = 1 << 24
"""Runs are short where the leaders that they stand for are many. Plans are made of four millions at most."""
_MAX_DEPTH = 128
"""Of domains in domains; plans have 64 at most."""


def write(plan: Plan) -> str:
    """One line of JSON."""
    document: dict[str, Any] = {FORMAT: True}
    for field in fields(plan):
        document[field.name] = getattr(plan, field.name)
    document["stripes"] = [{"shares": stripe.shares, "domains": _flattened(stripe.domain)} for stripe in plan.stripes]
    document["demands"] = {name: asdict(asked) for name, asked in plan.demands}
    document["left_out"] = dict(plan.left_out)
    return json.dumps(document, separators=(",", ":"))


def read(text: str) -> Plan:
    """The plan of a text.

    Raises:
        ScheduleError: The text is no plan.
    """
    try:
        document = json_text.loads(text, MAX_BYTES)
        del document[FORMAT]
        for name in ("nodes", "ring_order", "direct_shares"):
            document[name] = tuple(document[name])
        for name in ("groups", "tiers"):
            document[name] = tuple(map(tuple, document[name]))
        document["stripes"] = tuple(
            Stripe(_domain(stripe["domains"], len(stripe["shares"])), tuple(stripe["shares"]))
            for stripe in _affordable(document["stripes"])
        )
        document["demands"] = tuple((name, Demand(**asked)) for name, asked in document["demands"].items())
        document["left_out"] = tuple(document["left_out"].items())
        return Plan(**document)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as cause:
        do = f"Pass on what str(plan) gave, from the same version of ringweave ({shorten(cause)})"
        raise ScheduleError(explain("plan", got=text, expected=f"the text of a plan ({FORMAT})", do=do)) from cause


def _flattened(top: Domain) -> list[dict[str, Any]]:
    """Domains from the whole group down; a member is a rank, or "#3" for the third entry after the first."""
    listed, entries = [top], []
    for domain in listed:
        members: list[int | str] = []
        for member in domain.members:
            if isinstance(member, Domain):
                members.append(f"#{len(listed)}")
                listed.append(member)
            else:
                members.append(member)
        runs = [[rank, len(list(run))] for rank, run in itertools.groupby(domain.leaders)]
        entries.append({"members": members, "leaders": runs})
    return entries


def _affordable(stripes: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The same, if their leaders are not too many to be written out."""
    num_leaders = sum(len(stripe["domains"]) * len(stripe["shares"]) for stripe in stripes)
    if num_leaders > _MAX_LEADERS:
        raise ValueError(f"{num_leaders} leaders")
    return stripes


def _domain(entries: list[Mapping[str, Any]], num_chunks: int) -> Domain:
    built: dict[str, Domain] = {}
    depths: dict[str, int] = {}
    for index in range(len(entries) - 1, -1, -1):
        listed, runs, name = entries[index]["members"], entries[index]["leaders"], f"#{index}"
        if sum(count for _, count in runs) != num_chunks or any(count < 1 for _, count in runs):
            raise ValueError(f"leaders of domain {name} are not one for each of {num_chunks} shares")
        depths[name] = 1 + max((depths[member] for member in listed if isinstance(member, str)), default=0)
        if depths[name] > _MAX_DEPTH:
            raise ValueError(f"domains in domains, more than {_MAX_DEPTH}")
        # Out of the table: a domain that were in several would be walked as often.
        members = tuple(built.pop(member) if isinstance(member, str) else member for member in listed)
        built[name] = Domain(members, tuple(rank for rank, count in runs for _ in range(count)))
    if list(built) != ["#0"]:
        raise ValueError("domains that are in no other")
    return built["#0"]
