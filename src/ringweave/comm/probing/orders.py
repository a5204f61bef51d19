"""The first probing rank tells the others what to do, and is told what came of it: JSON lines over TCP."""

import contextlib
import json
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ringweave.comm.members import Members
from ringweave.comm.probing import calls, echoing, flowing
from ringweave.comm.probing.calls import Kind
from ringweave.comm.probing.flowing import Part, Timing
from ringweave.errors import PeerError, explain, shorten
from ringweave.files import json_text

_MAX_LINE_BYTES = 1 << 22
_IDLE_S = 300.0
"""The first rank may think that long between two orders."""

_REACH_S = 3.0
"""An address that a firewall hides answers nothing at all."""


class Line:
    """One end of a connection that carries a JSON document a line."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        """`peer` is the other end in words, for errors."""
        sock.settimeout(_IDLE_S)
        self._sock = sock
        self._file = sock.makefile("rwb")
        self._peer = peer

    def send(self, document: Mapping[str, Any]) -> None:
        """Write a document.

        Raises:
            PeerError: The peer is gone.
        """
        try:
            self._file.write(json.dumps(document).encode() + b"\n")
            self._file.flush()
        except OSError as cause:
            raise self.lost(str(cause)) from cause

    def receive(self) -> dict[str, Any]:
        """Read the next document.

        Raises:
            PeerError: The peer is gone or silent, or sends something else, or says that something failed there.
        """
        try:
            text = self._file.readline(_MAX_LINE_BYTES)
            document = json_text.loads(text, _MAX_LINE_BYTES) if text.endswith(b"\n") else None
        except (OSError, ValueError) as cause:
            raise self.lost(str(cause)) from cause
        if not text.endswith(b"\n"):
            raise self.lost("it hung up" if len(text) < _MAX_LINE_BYTES else f"a line of {len(text)} bytes and more")
        if not isinstance(document, dict):
            raise self.lost(f"something else: {shorten(text)}")
        if "failed" in document:
            raise self.lost(str(document["failed"]))
        return document

    def close(self) -> None:
        """Hang up."""
        with contextlib.suppress(OSError):  # what could not be sent to a peer that is gone
            self._file.close()
        self._sock.close()

    def lost(self, reason: str) -> PeerError:
        """The error that the peer does not measure with us, for that reason."""
        do = "See whether it runs, and whether a firewall lets the nodes of the job reach each other on any TCP port"
        return PeerError(
            explain("probing the network", got=reason, expected=f"{self._peer} to measure its links", do=do)
        )


def obey(probers: Members, door: Sequence[socket.socket]) -> str:
    """Do what the first probing rank says, until it says that this was all.

    Returns:
        What it says that was found; empty where it does not.

    Raises:
        PeerError: It is gone, or silent, or says what is no order.
    """
    first = probers.name(0)
    try:
        line = Line(calls.call(probers, 0, Kind.ORDERS, 0, _IDLE_S), first)
    except OSError as cause:
        raise PeerError(
            explain("probing the network", got=str(cause), expected=f"{first} to answer", do="Look into its log")
        ) from cause
    try:
        while (order := line.receive()).get("do") != "end":
            try:
                line.send(follow(order, probers, door))
            except OSError as cause:
                line.send({"failed": f"{type(cause).__name__}: {cause}"})
            except (LookupError, TypeError, ValueError, OverflowError, struct.error) as cause:
                raise line.lost(f"no order: {shorten(order)}") from cause
        return str(order.get("found", ""))
    finally:
        line.close()


def follow(order: Mapping[str, Any], probers: Members, door: Sequence[socket.socket]) -> dict[str, Any]:
    """Do one thing, and return what is reported of it.

    Raises:
        OSError: It failed.
    """
    if order["do"] == "ask":
        return {"latency_s": echoing.ask(probers, order["peer"], order["number"])}
    if order["do"] == "echo":
        echoing.echo(probers, door, order["peer"], order["number"])
        return {}
    if order["do"] == "reach":
        return {"reached": _reaches(probers, order["peers"], order["rail"])}
    part = Part(
        number=order["number"],
        sends_to=order["sends_to"],
        receives_from=order["receives_from"],
        timing=Timing(**order["timing"]),
        rails=order["rails"],
    )
    return {"rates": {str(peer): rates for peer, rates in flowing.run_part(part, probers, door).items()}}


def _reaches(probers: Members, peers: Sequence[int], rail: int) -> bool:
    """Whether calls from one of our addresses get through to those of the same place; nobody answers them."""
    try:
        for peer in peers:
            calls.call(probers, peer, Kind.REACH, 0, _REACH_S, rail).close()
    except OSError:
        return False
    return True


def end_order(found: str) -> dict[str, Any]:
    """The order to stop, with what came of it; of thousands of nodes that is too long: the first rank alone has it."""
    return {"do": "end", "found": found if len(found) < _MAX_LINE_BYTES // 2 else ""}


def flow_order(part: Part) -> dict[str, Any]:
    """The order to do this part of a batch."""
    return {
        "do": "flow",
        "number": part.number,
        "sends_to": list(part.sends_to),
        "receives_from": list(part.receives_from),
        "timing": asdict(part.timing),
        "rails": list(part.rails),
    }
