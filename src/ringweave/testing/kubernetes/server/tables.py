"""Lists as tables, as kubectl shows them: the printer columns of a custom resource, name and age of everything else."""

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from ringweave.testing.kubernetes.server.resources import Resource

_NAME = {"name": "Name", "type": "string", "format": "name", "description": "Name", "priority": 0}
_AGE = {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}


def is_wanted(accept: str) -> bool:
    """The client asks for a table first."""
    return "as=Table" in accept


def table(resource: Resource, bodies: Sequence[Mapping[str, Any]], version: str) -> dict[str, Any]:
    """The objects as a table."""
    columns = resource.columns or (_AGE,)
    definitions = [
        {
            "name": column["name"],
            "type": column["type"],
            "format": "",
            "description": column.get("description", ""),
            "priority": column.get("priority", 0),
        }
        for column in columns
    ]
    rows = [
        {
            "cells": [body["metadata"]["name"], *(_cell(column, body) for column in columns)],
            "object": {
                "kind": "PartialObjectMetadata",
                "apiVersion": "meta.k8s.io/v1",
                "metadata": body["metadata"],
            },
        }
        for body in bodies
    ]
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": {"resourceVersion": version},
        "columnDefinitions": [_NAME, *definitions],
        "rows": rows,
    }


def _cell(column: Mapping[str, Any], body: Mapping[str, Any]) -> Any:
    value: Any = body
    for key in re.findall(r"[A-Za-z0-9]+", column["jsonPath"]):
        value = value.get(key) if isinstance(value, Mapping) else None
    return _age(value) if column["type"] == "date" and value else value


def _age(text: str) -> str:
    seconds = int((datetime.now(UTC) - datetime.fromisoformat(text.replace("Z", "+00:00"))).total_seconds())
    for unit_s, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= 2 * unit_s:
            return f"{seconds // unit_s}{unit}"
    return f"{max(0, seconds)}s"
