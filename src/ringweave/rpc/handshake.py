"""Handshake of a connection (TLS, then hello and welcome), and the log of refused peers."""

import contextlib
import hmac
import socket
import ssl
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from ringweave.errors import ConnectionLostError, MessageError, RefusedError, RpcError, UsageError, explain
from ringweave.rpc import framing, tls
from ringweave.rpc.channel import RpcChannel
from ringweave.rpc.framing import FrameKind, HandshakeHello, HandshakeWelcome, MessageT, RpcFailure, RpcLimits
from ringweave.rpc.tls import Identity, PeerAuthentication

_MAX_HELLO_BYTES = 2048


class TurnedAwayError(RefusedError):
    """Refusal by this end, with one word for its reason."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


def accept_handshake(
    raw: socket.socket,
    where: str,
    authentication: PeerAuthentication,
    limits: RpcLimits,
    roles: Collection[str],
    is_revoked: Callable[[Identity], bool] = lambda peer: False,
) -> tuple[RpcChannel, Identity]:
    """Run the server's side of the handshake; return the channel and the authenticated peer.

    Until then the other end can make this one hold no more than a TLS handshake and a hello of two kilobytes.

    Args:
        raw: Accepted connection.
        where: Its other end, for errors.
        authentication: Authenticates the peer.
        limits: Limits of the peer from now on.
        roles: Admitted roles; empty means all.
        is_revoked: Whether the certificate of that process counts no more.

    Raises:
        WireError: The peer is refused; the connection is closed.
    """
    raw.settimeout(limits.handshake_s)
    sock = _tls_handshake(raw, authentication)
    handshake_limits = replace(
        limits, max_body_bytes=_MAX_HELLO_BYTES, max_buffers=1, max_message_bytes=1, patience_s=limits.handshake_s
    )
    channel = RpcChannel(sock, handshake_limits, where)
    try:
        hello = _receive_first(channel, FrameKind.HELLO, HandshakeHello)
        identity = _check_hello(hello, authentication, authentication.peer_identity(sock), roles)
        if is_revoked(identity):
            raise TurnedAwayError("revoked", revoked_text(identity))
        channel.limits = limits
        _send_welcome(channel, authentication.identity, limits)
    except RpcError as refusal:
        send_refusal(channel, refusal)
        channel.close()
        raise
    return channel, identity


def _send_welcome(channel: RpcChannel, identity: Identity, limits: RpcLimits) -> None:
    welcome = HandshakeWelcome(
        identity=str(identity),
        max_body_bytes=limits.max_body_bytes,
        max_buffers=limits.max_buffers,
        max_message_bytes=limits.max_message_bytes,
        max_calls=limits.max_calls,
    )
    channel.send(FrameKind.WELCOME, body=framing.encode_message(welcome), timeout_s=limits.handshake_s)


def connect_handshake(
    raw: socket.socket, where: str, authentication: PeerAuthentication, limits: RpcLimits, role: str
) -> tuple[RpcChannel, Identity, HandshakeWelcome]:
    """Run the client's side of the handshake; return the channel, the server and its welcome.

    Raises:
        RefusedError: The server refused this client, or is of another job or role.
        WireError: There was no valid answer in time.
    """
    raw.settimeout(limits.handshake_s)
    sock = authentication.secure_socket(raw, is_server=False)
    channel = RpcChannel(sock, limits, where)
    try:
        proven = authentication.peer_identity(sock)
        if proven is not None:
            _check_peer(proven, authentication.identity.job, (role,))  # before the token leaves
        welcome = _send_hello(channel, authentication)
        claimed = _parse_identity(welcome.identity)
        _check_peer(claimed, authentication.identity.job, (role,))
    except RpcError:
        channel.close()
        raise
    return channel, proven or claimed, welcome


def _send_hello(channel: RpcChannel, authentication: PeerAuthentication) -> HandshakeWelcome:
    hello = HandshakeHello(token=authentication.token, identity=str(authentication.identity))
    with contextlib.suppress(ConnectionLostError):  # a server that refused our certificate has closed, with a reason
        channel.send(FrameKind.HELLO, body=framing.encode_message(hello), timeout_s=channel.limits.handshake_s)
    try:
        return _receive_first(channel, FrameKind.WELCOME, HandshakeWelcome)
    except ConnectionLostError as lost:
        if isinstance(lost.__cause__, ssl.SSLError):  # with TLS 1.3 a server refuses after the client's handshake
            raise tls.handshake_error(lost.__cause__) from lost
        raise


def revoked_text(identity: Identity) -> str:
    """Return the text for a process whose certificate counts no more."""
    return explain(
        "certificate",
        got=f"that of {identity}, which is no member any more",
        expected="one of a member",
        do="End this process: its job goes on without it",
    )


def send_refusal(channel: RpcChannel, error: RpcError) -> None:
    """Send the other end the reason why it is cut off, if it listens."""
    body = framing.encode_message(RpcFailure(error=type(error).__name__, text=str(error)[:1000]))
    try:
        channel.send(FrameKind.REFUSED, body=body, timeout_s=0.5)
    except RpcError:
        return


def refusal_error(body: bytes) -> RefusedError:
    """Return the error for a refusal by the other end."""
    return RefusedError(f"{framing.decode_message(RpcFailure, body).text} (reported by the other end)")


def _tls_handshake(raw: socket.socket, authentication: PeerAuthentication) -> socket.socket:
    try:
        return authentication.secure_socket(raw, is_server=True)
    except TimeoutError as cause:
        text = explain("TLS handshake", got="silence", expected="a handshake in time", do="Check which process called")
        raise TurnedAwayError("deadline", text) from cause
    except OSError as cause:
        text = explain(
            "TLS handshake", got=str(cause), expected="one that is finished", do="Check which process called"
        )
        raise TurnedAwayError("handshake", text) from cause
    except TurnedAwayError:
        raise
    except RefusedError as cause:
        raise TurnedAwayError("certificate", str(cause)) from cause


def _receive_first(channel: RpcChannel, kind: FrameKind, model: type[MessageT]) -> MessageT:
    head = channel.receive_head(wait_s=channel.limits.handshake_s)
    if head.prefix.kind == FrameKind.REFUSED and kind == FrameKind.WELCOME:  # never repeat a client's text
        raise refusal_error(head.body)
    if head.prefix.kind != kind or head.prefix.num_buffers:
        raise MessageError(
            "first frame",
            got=head.prefix.kind.name,
            expected=kind.name,
            do="Check which process called",
            where=channel.where,
        )
    return framing.decode_message(model, head.body)


def _check_hello(
    hello: HandshakeHello, authentication: PeerAuthentication, proven: Identity | None, roles: Collection[str]
) -> Identity:
    if not hmac.compare_digest(hello.token.encode(), authentication.token.encode()):
        text = explain(
            "job token",
            got="another one",
            expected=f"that of job {authentication.identity.job}",
            do="Use the credentials that this job's authority issued",
        )
        raise TurnedAwayError("token", text)
    if authentication.token and authentication.token in hello.identity:  # errors show identities
        text = explain(
            "identity", got="the job's token in it", expected="ringweave://JOB/ROLE/NAME", do="Write all three parts"
        )
        raise TurnedAwayError("identity", text)
    claimed = _parse_identity(hello.identity)
    if proven is not None and claimed != proven:
        text = explain("identity", got=str(claimed), expected=f"that of the certificate, {proven}", do="State that one")
        raise TurnedAwayError("identity", text)
    _check_peer(claimed, authentication.identity.job, roles)
    return claimed


def _check_peer(peer: Identity, job: str, roles: Collection[str]) -> None:
    if peer.job != job:
        text = explain("job of the other end", got=peer.job, expected=job, do="Call the processes of your own job")
        raise TurnedAwayError("job", text)
    if roles and peer.role not in roles:
        text = explain(
            "role of the other end", got=peer.role, expected=" or ".join(sorted(roles)), do="Look at the address"
        )
        raise TurnedAwayError("role", text)


def _parse_identity(text: str) -> Identity:
    try:
        return Identity.parse(text)
    except UsageError as cause:
        raise TurnedAwayError("identity", str(cause)) from cause


_REPEAT_INTERVAL_S = 10.0
_MAX_TRACKED = 256


class EventWriter(Protocol):
    """Writes events: `telemetry.EventLog.write`."""

    def __call__(self, kind: str, **fields: object) -> None: ...


@dataclass(slots=True)
class _RefusalCount:
    last_s: float
    unwritten: int = 0


class RefusalLog:
    """Counts refusals and writes events: each reason and host at once, then at most every ten seconds.

    So a peer that tries to connect a thousand times a second cannot fill the disk or the memory.
    """

    def __init__(
        self, service: str, write_event: EventWriter | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`service` is the identity of the server that refuses."""
        self.total = 0
        self._service = service
        self._write_event = write_event
        self._clock = clock
        self._lock = threading.Lock()
        self._recent: dict[tuple[str, str], _RefusalCount] = {}

    def add(self, reason: str, host: str, port: int, text: str) -> None:
        """Note a refusal.

        `reason`: one word for it: `certificate`, `revoked`, `token`, `job`, `role`, `message`, `deadline`, `full`.
        """
        count = self._count(reason, host)
        if count and self._write_event is not None:
            with contextlib.suppress(OSError):  # a full disk must neither admit nor refuse a peer
                self._write_event(
                    "rpc_refused",
                    service=self._service,
                    peer=f"{host}:{port}",
                    reason=reason,
                    text=text[:1000],
                    refusals=count,
                )

    @contextlib.contextmanager
    def noted(self, sock: socket.socket) -> Iterator[None]:
        """Note why a caller is refused in a block, unless it only ends its connection."""
        try:
            host, port, *_ = sock.getpeername()
        except OSError:
            host, port = "", 0
        try:
            yield
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            raise
        except ssl.SSLError as error:
            self.add("certificate", host, port, str(tls.handshake_error(error)))
            raise
        except TurnedAwayError as error:
            self.add(error.reason, host, port, str(error))
            raise

    def _count(self, reason: str, host: str) -> int:
        """Return how many refusals the event stands for; 0 if none is due."""
        with self._lock:
            self.total += 1
            now_s = self._clock()
            recent = self._recent.get((reason, host))
            if recent is not None and now_s - recent.last_s < _REPEAT_INTERVAL_S:
                recent.unwritten += 1
                return 0
            if recent is None and len(self._recent) >= _MAX_TRACKED:
                self._recent.pop(next(iter(self._recent)))
            self._recent[reason, host] = _RefusalCount(now_s)
            return 1 + (recent.unwritten if recent is not None else 0)
