"""Listener of a host for hosts that join: TLS without their certificate, and one kind of message."""

import socket
import sys
import threading
import time
from collections.abc import Callable

from ringweave.errors import explain
from ringweave.platforms.hosts.join import AttemptLimiter, JoinRefusedError
from ringweave.platforms.hosts.messages import JOINER_ROLE, JoinAnswer, JoinRequest
from ringweave.rpc import Credentials, Identity, RpcCall, RpcHandler, RpcLimits, RpcServer
from ringweave.rpc.handshake import TurnedAwayError

CONNECTION_LIFETIME_S = 30.0
"""Time after which a joiner's connection is cut, whatever it does; it sends one message."""
LIMITS = RpcLimits(
    max_body_bytes=16 * 1024,
    max_buffers=1,
    max_message_bytes=1024,
    max_bytes_in_flight=16 * 1024,
    max_calls=1,
    max_connections=16,
    max_unauthenticated=16,
)
BURST, ATTEMPTS_PER_S = 20, 1.0
MAX_ADDRESSES = 1024
REFUSAL_DELAY_S = 0.2
"""Time before a refusal is answered, so that one connection cannot ask without end."""


class JoinListener:
    """Listens for joiners, and counts those that it refuses in `refusals`."""

    def __init__(
        self,
        credentials: Credentials,
        admit: Callable[[JoinRequest], JoinAnswer],
        clock: Callable[[], float] = time.monotonic,
        refusal_delay_s: float = REFUSAL_DELAY_S,
    ) -> None:
        """`admit` gives a joiner its seat, or raises `JoinRefusedError`."""
        self._authentication = JoinListenerAuthentication(credentials, clock)
        self._admit = admit
        self._refusal_delay_s = refusal_delay_s
        self._closing = threading.Event()
        self._server = RpcServer(
            self._authentication,
            [RpcHandler(message=JoinRequest, handle=self._handle)],
            limits=LIMITS,
            roles=(JOINER_ROLE,),
            write_event=_print_refusal,
        )
        self.refusals = self._server.refusals

    def start(self, host: str, port: int) -> int:
        """Listen; return the port.

        Raises:
            OSError: Address or port is not available.
        """
        return self._server.start(host, port).port

    def close(self) -> None:
        self._closing.set()
        self._server.close(timeout_s=1.0)

    def cut_late(self) -> None:
        """Cut connections that are older than a joiner needs."""
        self._authentication.cut_late()

    def _handle(self, call: RpcCall) -> JoinAnswer:
        try:
            return self._admit(call.message)
        except JoinRefusedError as error:
            self.refusals.add(error.reason, "joiner", 0, str(error))
            self._closing.wait(self._refusal_delay_s)
            raise


class JoinListenerAuthentication:
    """TLS of a host towards joiners, which have no certificate: they check the host, and show a proof later."""

    token = ""

    def __init__(self, credentials: Credentials, clock: Callable[[], float]) -> None:
        self.identity = credentials.identity
        self._clock = clock
        self._context = credentials.tls_context(is_server=True, requires_certificate=False)
        self._lock = threading.Lock()
        self._limiters: dict[str, AttemptLimiter] = {}
        self._sockets: list[tuple[float, socket.socket]] = []

    def check_address(self, host: str) -> None:
        """Accept any address."""

    def secure_socket(self, raw: socket.socket, *, is_server: bool) -> socket.socket:
        """Run the TLS handshake.

        Raises:
            TurnedAwayError: This address has called too often.
        """
        assert is_server, "a host never joins its own run"
        self._count_attempt(raw.getpeername()[0])
        sock = self._context.wrap_socket(raw, server_side=True, do_handshake_on_connect=False)
        with self._lock:
            self._sockets.append((self._clock(), sock))
        try:
            sock.do_handshake()
        except OSError:
            sock.close()
            raise
        return sock

    def peer_identity(self, sock: socket.socket) -> Identity | None:
        """Return None: nothing is proven yet."""
        del sock

    def cut_late(self) -> None:
        """Cut connections that are older than `CONNECTION_LIFETIME_S`."""
        with self._lock:
            for then_s, sock in self._sockets:
                if sock.fileno() >= 0 and self._clock() - then_s > CONNECTION_LIFETIME_S:
                    socket.socket.shutdown(sock, socket.SHUT_RDWR)
            self._sockets = [each for each in self._sockets if each[1].fileno() >= 0]

    def _count_attempt(self, address: str) -> None:
        now_s = self._clock()
        with self._lock:
            limiter = self._limiters.pop(address, None) or AttemptLimiter(BURST, ATTEMPTS_PER_S, now_s)
            if len(self._limiters) >= MAX_ADDRESSES:
                self._limiters.pop(next(iter(self._limiters)))
            self._limiters[address] = limiter
            is_admitted = limiter.admit(now_s)
        if not is_admitted:
            expected = f"at most {BURST} at once, and {ATTEMPTS_PER_S:g} per second"
            do = "Wait a minute, then type the line again"
            raise TurnedAwayError(
                "busy", explain("attempts to join", got=f"more from {address}", expected=expected, do=do)
            )


def _print_refusal(kind: str, **fields: object) -> None:
    """Write a refusal into the log of the service; the caller limits their number."""
    del kind
    print(f"join refused ({fields['reason']}, {fields['refusals']}): {fields['text']}", file=sys.stderr, flush=True)
