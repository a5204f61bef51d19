"""Who has no business at a server of a job, each with what has to stand in its log about it."""

import contextlib
import re
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from ringweave import rpc, telemetry
from ringweave.errors import RpcError
from ringweave.rpc import framing, handshake
from ringweave.rpc.framing import FrameKind
from ringweave.rpc.tls import utc_now
from tests.fakes.plaintext import PlaintextAuthentication
from tests.polling import wait_until
from tests.rpc.mutations import host
from tests.rpc.parts import read_frame


@dataclass(frozen=True, kw_only=True, slots=True)
class Stranger:
    """Somebody who is turned away."""

    reason: str
    """One word for why."""
    text: str
    """What the refusal says, as a regular expression."""
    call: Callable[[socket.socket], object]
    """What it does with its connection. Raises an error of ours or of the system when it is turned away."""


def authority_and_expired(role: str, name: str) -> tuple[rpc.CertificateAuthority, rpc.Credentials]:
    """The authority of a job, and what it issued so long ago that it counts no more."""
    now = [utc_now() - timedelta(days=2)]
    authority = rpc.CertificateAuthority("job1", timedelta(days=1), clock=lambda: now[0])
    expired = authority.issue(role, name)
    now[0] = utc_now()
    return authority, expired


def strangers(authority: rpc.CertificateAuthority, expired: rpc.Credentials, *, server_role: str) -> list[Stranger]:
    """All kinds of them; whoever says a name says that of the process whose credentials have expired."""
    role, name = expired.identity.role, expired.identity.name
    ours, foreign = authority.issue(role, name), rpc.CertificateAuthority(authority.job).issue(role, name)
    mixed = replace(ours, certificate_pem=foreign.certificate_pem, key_pem=foreign.key_pem)
    guessing, liar = rpc.TlsAuthentication(ours), rpc.TlsAuthentication(ours)
    guessing.token = "guessed"
    liar.identity = replace(ours.identity, name=f"{name}1")

    def by(trusted: rpc.PeerAuthentication) -> Callable[[socket.socket], object]:
        return lambda raw: handshake.connect_handshake(
            raw, "there", trusted, rpc.RpcLimits(handshake_s=60.0), server_role
        )

    found = (
        (
            "certificate",
            "TLS handshake: 'WRONG_VERSION_NUMBER'",
            by(PlaintextAuthentication(ours.identity, ours.token)),
        ),
        ("certificate", "HTTP_REQUEST", _ask_for_a_page),
        ("certificate", "PEER_DID_NOT_RETURN_A_CERTIFICATE", _show_nothing),
        ("certificate", "TLSV1_ALERT_UNKNOWN_CA", by(rpc.TlsAuthentication(foreign))),
        ("certificate", "CERTIFICATE_VERIFY_FAILED", by(rpc.TlsAuthentication(mixed))),
        ("certificate", "certificate has expired", by(rpc.TlsAuthentication(expired))),
        ("token", "job token: 'another one', expected that of job job1", by(guessing)),
        ("identity", f"identity: .*/{name}1', expected that of the certificate", by(liar)),
        ("role", "role of the other end: 'spy', expected ", by(rpc.TlsAuthentication(authority.issue("spy", name)))),
        ("message", "message hello, identity: 'missing'", lambda raw: _say_no_name(raw, rpc.TlsAuthentication(ours))),
    )
    return [Stranger(reason=reason, text=text, call=call) for reason, text, call in found]


def check_turned_away(port: int, everybody: Sequence[Stranger], log: Path) -> None:
    """Have them all call, each from a host of its own: each is turned away, and is in the event log with its reason."""
    for index, stranger in enumerate(everybody):
        address = ("127.0.0.1", port)
        with (
            socket.create_connection(address, timeout=60, source_address=(host(index), 0)) as raw,
            pytest.raises((RpcError, OSError)),
        ):
            stranger.call(raw)
    wait_until(lambda: len(refused(log)) >= len(everybody))
    events = refused(log)
    for index, stranger in enumerate(everybody):
        event = events[host(index)]
        assert (event["reason"], event["refusals"]) == (stranger.reason, 1), event
        assert re.search(stranger.text, event["text"]), event


def refused(log: Path) -> dict[str, dict[str, Any]]:
    """Host -> the last event about somebody from there who was refused."""
    events = [event for event in telemetry.read_events(log) if event["kind"] == "rpc_refused"]
    return {event["peer"].partition(":")[0]: event for event in events}


def _ask_for_a_page(raw: socket.socket) -> None:
    raw.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
    _hear_out(raw)


def _show_nothing(raw: socket.socket) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with context.wrap_socket(raw) as sock:
        _hear_out(sock)


def _say_no_name(raw: socket.socket, trusted: rpc.TlsAuthentication) -> None:
    with contextlib.closing(trusted.secure_socket(raw, is_server=False)) as sock:
        sock.sendall(framing.pack_frame(FrameKind.HELLO, body=f'{{"token":"{trusted.token}"}}'.encode()))
        prefix, body = read_frame(sock)
        assert prefix.kind == FrameKind.REFUSED
        raise handshake.refusal_error(body)


def _hear_out(sock: socket.socket) -> None:
    """Until the other end hangs up."""
    while sock.recv(4096):
        pass
    raise ConnectionResetError("closed")
