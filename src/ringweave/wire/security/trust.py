"""How the two ends of a connection make sure of each other before a message passes: by TLS, or not at all."""

import contextlib
import ipaddress
import socket
import ssl
from typing import Protocol, runtime_checkable

from ringweave.errors import RefusedError, UsageError, WireError, explain
from ringweave.wire.security.credentials import Credentials
from ringweave.wire.security.identities import Identity


@runtime_checkable
class Trust(Protocol):
    """One end's side of it."""

    @property
    def identity(self) -> Identity:
        """Who this end is."""
        ...

    @property
    def token(self) -> str:
        """The job's token."""
        ...

    def check_place(self, host: str) -> None:
        """Refuse to talk with, or to listen at, an address that this kind of trust is not for."""
        ...

    def wrap(self, raw: socket.socket, *, serves: bool) -> socket.socket:
        """The connection as messages use it; blocks no longer than the time-out of `raw` at each step."""
        ...

    def peer(self, sock: socket.socket) -> Identity | None:
        """Who the other end has proved to be; None where nothing is proved."""
        ...


class Tls:
    """Mutual TLS 1.3 under the authority of the job."""

    def __init__(self, credentials: Credentials) -> None:
        self.identity = credentials.identity
        self.token = credentials.token
        self._server, self._client = credentials.context(serves=True), credentials.context(serves=False)

    def check_place(self, host: str) -> None:
        """Any address will do."""

    def wrap(self, raw: socket.socket, *, serves: bool) -> socket.socket:
        """Shake hands.

        Raises:
            RefusedError: No certificate, or one that does not count here.
        """
        context = self._server if serves else self._client
        sock = context.wrap_socket(raw, server_side=serves, do_handshake_on_connect=False)
        try:
            sock.do_handshake()
        except OSError as cause:
            _hang_up(sock)
            if isinstance(cause, ssl.SSLError):
                raise handshake_error(cause) from cause
            raise
        return sock

    def peer(self, sock: socket.socket) -> Identity | None:
        """The name in the other end's certificate.

        Raises:
            RefusedError: The certificate names no process of a job.
        """
        assert isinstance(sock, ssl.SSLSocket), "wrap made it"
        names = [value for kind, value in (sock.getpeercert() or {}).get("subjectAltName", ()) if kind == "URI"]
        try:
            return Identity.parse(str(names[0]) if len(names) == 1 else "")
        except UsageError as cause:
            raise RefusedError(
                explain(
                    "names in the certificate",
                    got=names,
                    expected="one of the form ringweave://JOB/ROLE/NAME",
                    do="Use a certificate that the job's authority issued",
                )
            ) from cause


class Plain:
    """No encryption, and of a peer's name only its word: for processes of one machine, where the user asks for it."""

    def __init__(self, identity: Identity, token: str, *, between_hosts: bool = False) -> None:
        """`between_hosts` allows other addresses than the loopback's: to measure what TLS costs, not to be used."""
        self.identity = identity
        self.token = token
        self._between_hosts = between_hosts

    def check_place(self, host: str) -> None:
        """Only addresses that no other machine reaches.

        Raises:
            UsageError: The address is not the loopback's.
        """
        if not self._between_hosts and not _is_loopback(host):
            raise UsageError(
                explain(
                    "address of an insecure connection",
                    got=host,
                    expected="one of this machine's loopback",
                    do="Leave insecure out: between machines connections are encrypted",
                )
            )

    def wrap(self, raw: socket.socket, *, serves: bool) -> socket.socket:
        """The socket as it is."""
        del serves
        return raw

    def peer(self, sock: socket.socket) -> Identity | None:
        """Nothing is proved."""
        del sock


def _hang_up(sock: ssl.SSLSocket) -> None:
    """Close, but let the alert that says why arrive first: closing with bytes unread would overtake it."""
    with contextlib.suppress(OSError):
        sock.settimeout(_LINGER_S)
        socket.socket.shutdown(sock, socket.SHUT_WR)
        for _ in range(_LINGER_READS):
            if not socket.socket.recv(sock, 4096):
                break
    sock.close()


_LINGER_S = 0.2
_LINGER_READS = 8


def handshake_error(cause: ssl.SSLError) -> WireError:
    """What a failed handshake says, in words; the other end of a refusal hears of it as an alert of TLS."""
    reason = cause.reason or str(cause)
    detail = getattr(cause, "verify_message", "")
    return RefusedError(
        explain(
            "certificate of the other end" if detail else "TLS handshake",
            got=f"{reason}: {detail}" if detail else reason,
            expected="a valid certificate of this job's authority on both ends, over TLS 1.3",
            do=_MENDS.get(reason, _MENDS["" if "expired" not in detail else "CERTIFICATE_EXPIRED"]),
        )
    )


_MENDS = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "Give the process the credentials that the job's authority issued",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "Issue new credentials, and look at the clocks of both nodes",
    "CERTIFICATE_EXPIRED": "Issue new credentials, and look at the clocks of both nodes",
    "TLSV1_ALERT_UNKNOWN_CA": "Both ends need credentials of the same job",
    "": "Both ends need credentials of the same job, and clocks that agree",
}


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
