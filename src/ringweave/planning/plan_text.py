"""A plan as JSON text, and back. Leaders are written in runs, domains as a list that begins with the whole group."""

import itertools
import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from ringweave.cost import Demand
from ringweave.errors import ScheduleError, explain, shorten
from ringweave.planning.plans import Plan
from ringweave.schedules import Domain, Stripe

FORMAT = "ringweave-plan-2"
"""First key of the document."""


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
        document = json.loads(text)
        del document[FORMAT]
        for name in ("nodes", "ring_order", "direct_shares"):
            document[name] = tuple(document[name])
        for name in ("groups", "tiers"):
            document[name] = tuple(map(tuple, document[name]))
        document["stripes"] = tuple(
            Stripe(_domain(stripe["domains"]), tuple(stripe["shares"])) for stripe in document["stripes"]
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


def _domain(entries: list[Mapping[str, Any]]) -> Domain:
    built: dict[str, Domain] = {}
    for index in range(len(entries) - 1, -1, -1):
        members = tuple(built[member] if isinstance(member, str) else member for member in entries[index]["members"])
        leaders = tuple(rank for rank, count in entries[index]["leaders"] for _ in range(count))
        built[f"#{index}"] = Domain(members, leaders)
    return built["#0"]
