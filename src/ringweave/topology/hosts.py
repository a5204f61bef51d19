"""Hosts as nodes: the node's name that a host's name gives, and whether two ranks are on the same host."""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ringweave import errors
from ringweave.environment import NODE
from ringweave.errors import PlacementError
from ringweave.topology.rules import CORE

_BOOT_ID, _NETWORK = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
_NOT_IN_LABELS = re.compile(r"[^A-Za-z0-9-]+")
_LABEL, _NAME = 63, 253
"""Characters that a label, and a host name, may have (RFC 1035)."""
_DIGITS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """Where a rank says that it is."""

    global_rank: int
    node: str
    """Name of its node."""
    host: str
    """Its `host_id`; empty where it is not known."""
    address: str


def node_name(host_name: str) -> str:
    """The name that the node of a host has in cluster files, the same wherever one is made of a host's name.

    What no host name may have (RFC 1123: `gpu_node_1`) becomes a hyphen. Labels of more than 63 characters, and names
    of more than 253, are cut and end in digits of a digest, since machines of one kind often differ at the end only. A
    host that is called as the root switch gets a suffix. A node's name stays as it is.
    """
    labels = [_NOT_IN_LABELS.sub("-", label).strip("-") for label in host_name.split(".")]
    name = ".".join(_cut(label, _LABEL) for label in labels if label)
    if not name:
        return f"node-{_digest(host_name)}"
    if len(name) > _NAME:
        return _cut(name.replace(".", "-"), _LABEL)
    return f"{name}-node" if name.casefold() == CORE else name


def host_id() -> str:
    """What all processes share that could be ranks of one node, and no others: the boot of a machine, and a network.

    Two machines may have the same name, as two containers on one machine may. Empty where the system does not say.
    """
    try:
        return _digest(f"{_BOOT_ID.read_text(encoding='ascii').strip()} {_NETWORK.stat().st_ino}")
    except OSError:
        return ""


def refuse_namesakes(seats: Iterable[Seat]) -> None:
    """Raise an error where ranks on different hosts say that they are on the same node.

    Raises:
        PlacementError: Two are; the text names both.
    """
    first: dict[str, Seat] = {}
    for seat in seats:
        if not seat.host:
            continue
        other = first.setdefault(seat.node.casefold(), seat)
        if other.host != seat.host:
            both = " and ".join(f"rank {each.global_rank} at {each.address}" for each in (other, seat))
            raise PlacementError(
                errors.explain(
                    f"hosts of node {seat.node}",
                    got=f"two: {both}",
                    expected="one host for each name of a node",
                    do=f"Give the hosts names that differ, or set {NODE} to another name on each",
                )
            )


def _cut(text: str, most: int) -> str:
    kept = text[: most - _DIGITS - 1].rstrip("-")
    return text if len(text) <= most else f"{kept}-{_digest(text)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:_DIGITS]
