"""How a connection begins: the handshake, then hello and welcome; from it on both ends know whom they talk to."""

import contextlib
import hmac
import socket
import ssl
from collections.abc import Collection
from dataclasses import replace

from ringweave.errors import ConnectionLostError, MessageError, RefusedError, UsageError, WireError, explain
from ringweave.wire.framing import messages
from ringweave.wire.framing.channels import Channel
from ringweave.wire.framing.frames import FrameKind
from ringweave.wire.framing.limits import Limits
from ringweave.wire.framing.messages import Failure, Hello, M, Welcome
from ringweave.wire.security import trust as trusting
from ringweave.wire.security.identities import Identity
from ringweave.wire.security.trust import Trust

_HELLO_BYTES = 2048


class TurnedAwayError(RefusedError):
    """A refusal by this end, with one word for its reason."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


def admit(
    raw: socket.socket, where: str, trust: Trust, limits: Limits, roles: Collection[str]
) -> tuple[Channel, Identity]:
    """The server's side: who has called, once that is proved.

    Until then the other end can make this one hold no more than a handshake and a hello of two kilobytes.

    Args:
        raw: The connection as it was accepted.
        where: Its other end, for errors.
        trust: How this end makes sure.
        limits: What the other end may ask for from now on.
        roles: Which roles are let in; empty means all.

    Raises:
        WireError: It is not let in; the connection is closed.
    """
    raw.settimeout(limits.handshake_s)
    sock = _shake(raw, trust)
    strict = replace(
        limits, max_body_bytes=_HELLO_BYTES, max_buffers=1, max_message_bytes=1, patience_s=limits.handshake_s
    )
    channel = Channel(sock, strict, where)
    try:
        hello = _first(channel, FrameKind.HELLO, Hello)
        identity = _check_hello(hello, trust, trust.peer(sock), roles)
        channel.limits = limits
        _welcome(channel, trust.identity, limits)
    except WireError as refusal:
        refuse(channel, refusal)
        channel.close()
        raise
    return channel, identity


def _welcome(channel: Channel, identity: Identity, limits: Limits) -> None:
    welcome = Welcome(
        identity=str(identity),
        max_body_bytes=limits.max_body_bytes,
        max_buffers=limits.max_buffers,
        max_message_bytes=limits.max_message_bytes,
        max_calls=limits.max_calls,
    )
    channel.send(FrameKind.WELCOME, body=messages.encode(welcome), timeout_s=limits.handshake_s)


def call(raw: socket.socket, where: str, trust: Trust, limits: Limits, role: str) -> tuple[Channel, Identity, Welcome]:
    """The client's side: the server, once it has proved to be one of that role in this job.

    Raises:
        RefusedError: The server did not let us in, or is not the one that it should be.
        WireError: There was no answer in time, or none that makes sense.
    """
    raw.settimeout(limits.handshake_s)
    sock = trust.wrap(raw, serves=False)
    channel = Channel(sock, limits, where)
    try:
        proved = trust.peer(sock)
        if proved is not None:
            _check_peer(proved, trust.identity.job, (role,))  # before the token leaves
        welcome = _introduce(channel, trust)
        stated = _parse(welcome.identity)
        _check_peer(stated, trust.identity.job, (role,))
    except WireError:
        channel.close()
        raise
    return channel, proved or stated, welcome


def _introduce(channel: Channel, trust: Trust) -> Welcome:
    hello = Hello(token=trust.token, identity=str(trust.identity))
    with contextlib.suppress(ConnectionLostError):  # a server that refused our certificate has hung up, and said why
        channel.send(FrameKind.HELLO, body=messages.encode(hello), timeout_s=channel.limits.handshake_s)
    try:
        return _first(channel, FrameKind.WELCOME, Welcome)
    except ConnectionLostError as lost:
        if isinstance(lost.__cause__, ssl.SSLError):  # with TLS 1.3 a server refuses after the client's handshake
            raise trusting.handshake_error(lost.__cause__) from lost
        raise


def refuse(channel: Channel, error: WireError) -> None:
    """Tell the other end why it is cut off, if it listens."""
    body = messages.encode(Failure(error=type(error).__name__, text=str(error)[:1000]))
    try:
        channel.send(FrameKind.REFUSED, body=body, timeout_s=0.5)
    except WireError:
        return


def refused(body: bytes) -> RefusedError:
    """What the other end said when it cut us off."""
    return RefusedError(f"{messages.decode(Failure, body).text} (said by the other end)")


def _shake(raw: socket.socket, trust: Trust) -> socket.socket:
    try:
        return trust.wrap(raw, serves=True)
    except TimeoutError as cause:
        text = explain("TLS handshake", got="silence", expected="a handshake in time", do="Look who called")
        raise TurnedAwayError("deadline", text) from cause
    except OSError as cause:
        text = explain("TLS handshake", got=str(cause), expected="one that is finished", do="Look who called")
        raise TurnedAwayError("handshake", text) from cause
    except RefusedError as cause:
        raise TurnedAwayError("certificate", str(cause)) from cause


def _first(channel: Channel, kind: FrameKind, model: type[M]) -> M:
    head = channel.receive_head(wait_s=channel.limits.handshake_s)
    if head.prefix.kind == FrameKind.REFUSED and kind == FrameKind.WELCOME:  # what a stranger says is not repeated
        raise refused(head.body)
    if head.prefix.kind != kind or head.prefix.num_buffers:
        raise MessageError(
            explain(
                "first frame", got=head.prefix.kind.name, expected=kind.name, do="Look who called", where=channel.where
            )
        )
    return messages.decode(model, head.body)


def _check_hello(hello: Hello, trust: Trust, proved: Identity | None, roles: Collection[str]) -> Identity:
    if not hmac.compare_digest(hello.token.encode(), trust.token.encode()):
        text = explain(
            "job token",
            got="another one",
            expected=f"that of job {trust.identity.job}",
            do="Use the credentials that this job's authority issued",
        )
        raise TurnedAwayError("token", text)
    if trust.token and trust.token in hello.identity:  # errors show identities
        text = explain(
            "identity", got="the job's token in it", expected="ringweave://JOB/ROLE/NAME", do="Write all three parts"
        )
        raise TurnedAwayError("identity", text)
    stated = _parse(hello.identity)
    if proved is not None and stated != proved:
        text = explain("identity", got=str(stated), expected=f"that of the certificate, {proved}", do="State that one")
        raise TurnedAwayError("identity", text)
    _check_peer(stated, trust.identity.job, roles)
    return stated


def _check_peer(peer: Identity, job: str, roles: Collection[str]) -> None:
    if peer.job != job:
        text = explain("job of the other end", got=peer.job, expected=job, do="Call the processes of your own job")
        raise TurnedAwayError("job", text)
    if roles and peer.role not in roles:
        text = explain(
            "role of the other end", got=peer.role, expected=" or ".join(sorted(roles)), do="Look at the address"
        )
        raise TurnedAwayError("role", text)


def _parse(text: str) -> Identity:
    try:
        return Identity.parse(text)
    except UsageError as cause:
        raise TurnedAwayError("identity", str(cause)) from cause
