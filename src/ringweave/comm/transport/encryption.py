"""Encryption between nodes: TLS 1.3 on sockets that one thread polls, by certificates of the job's authority.

Both ends show certificates. A rank's entry in the store has the fingerprint of its certificate, and the store itself is
reached by such connections alone (`tunnel.py`): so a certificate stands for one rank of one group.
"""

import contextlib
import functools
import os
import socket
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ringweave.environment import CREDENTIALS, ENCRYPT, WorkerEnvironment
from ringweave.errors import UsageError, explain
from ringweave.rpc import Credentials, tls
from ringweave.rpc.handshake import EventWriter, RefusalLog, TurnedAwayError
from ringweave.telemetry import EventLog

RECORD_BYTES = 2**14
"""Largest record of TLS."""


class TlsSocket(ssl.SSLSocket):
    """TLS connection that moves messages as a plain non-blocking socket does, for `TcpConnection`.

    Nothing ever falls back to plain text: a call after `shutdown` fails.
    """

    _retried: bytes | None = None
    """Bytes that OpenSSL has encrypted and the kernel has not taken; the next call has to begin with them."""

    def sendmsg(self, buffers: Sequence[Any], *_: Any) -> int:  # type: ignore[override]  # pyrefly: ignore
        """Send as much as the kernel takes, and return the number of bytes.

        Raises:
            BlockingIOError: It takes nothing.
        """
        num_sent, parts = 0, [memoryview(each) for each in buffers]
        try:
            while parts:
                if self._retried is None and len(parts) > 1 and parts[0].nbytes < RECORD_BYTES:
                    self._retried = _join_record(parts)
                num = self.send(parts[0] if self._retried is None else self._retried)
                num_sent, self._retried, parts = num_sent + num, None, _skip_bytes(parts, num)
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            if not num_sent:
                raise BlockingIOError from None
        return num_sent

    def recvmsg_into(self, buffers: Sequence[Any], *_: Any) -> tuple[int, list[Any], int, Any]:  # type: ignore[override]
        """Receive as much as there is, and return the number of bytes first; 0 at the end of the connection.

        Raises:
            BlockingIOError: There is nothing.
        """
        num_received = 0
        try:
            for buffer in buffers:
                view = memoryview(buffer)
                while view.nbytes:
                    num: Any = self.read(view.nbytes, view)  # pyrefly: ignore
                    if not num:
                        return num_received, [], 0, None
                    num_received, view = num_received + num, view[num:]
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            if not num_received:
                raise BlockingIOError from None
        return num_received, [], 0, None

    def shutdown(self, how: int) -> None:
        """Shut the connection down, from any thread; the TLS state stays, so that no later call sends plain text."""
        socket.socket.shutdown(self, how)


def _join_record(parts: Sequence[memoryview]) -> bytes:
    """Return the first bytes of the parts, as many as a record holds.

    A header alone would be a record, a system call and a packet of its own.
    """
    joined, num_left = [], RECORD_BYTES
    for part in parts:
        joined.append(part[:num_left])
        num_left -= joined[-1].nbytes
        if not num_left:
            break
    return b"".join(joined)


def _skip_bytes(parts: list[memoryview], num_bytes: int) -> list[memoryview]:
    """Return what is left of the parts after so many bytes."""
    left = []
    for part in parts:
        skipped = min(num_bytes, part.nbytes)
        num_bytes -= skipped
        if skipped < part.nbytes:
            left.append(part[skipped:])
    return left


class LinkEncryption:
    """TLS of this process towards the other nodes of its run."""

    def __init__(self, credentials: Credentials, write_event: EventWriter | None = None) -> None:
        """`write_event` writes events about refused callers."""
        self.refusals = RefusalLog(str(credentials.identity), write_event)
        self.fingerprint = credentials.fingerprint
        self.server_context = credentials.tls_context(is_server=True)
        self.client_context = credentials.tls_context(is_server=False)
        for context in (self.server_context, self.client_context):
            context.sslsocket_class = TlsSocket

    def wrap_socket(self, sock: socket.socket, *, is_server: bool) -> TlsSocket:
        """Return a non-blocking connection whose handshake has not begun; it replaces `sock`; see `tls.wrap_socket`.

        Raises:
            OSError: The connection has ended.
        """
        sock.setblocking(False)
        wrapped = tls.wrap_socket(self.server_context if is_server else self.client_context, sock, is_server=is_server)
        assert isinstance(wrapped, TlsSocket), "the class of this context"
        return wrapped

    def note_stranger(self, sock: socket.socket) -> None:
        """Note a caller whose words do not fit its certificate."""
        with contextlib.suppress(TurnedAwayError), self.refusals.noted(sock):
            do, expected = "Look which process calls", "that of a rank of the group, with its token"
            raise TurnedAwayError("identity", explain("hello", got="another one", expected=expected, do=do))

    @staticmethod
    def peer_fingerprint(sock: socket.socket) -> str:
        """Return the fingerprint of the other end's certificate."""
        assert isinstance(sock, ssl.SSLSocket), "connections between nodes are wrapped"
        return tls.peer_fingerprint(sock)


def encryption_for(environment: WorkerEnvironment) -> LinkEncryption | None:
    """Return the encryption of this process's connections to other nodes; None if they are plain.

    Raises:
        UsageError: This process is to encrypt, and has no credentials.
    """
    if not environment.encrypts:
        return None
    if environment.credentials is None:
        raise UsageError(
            ENCRYPT,
            got="on, without credentials",
            expected=f"a certificate of the job's authority in {CREDENTIALS}",
            do=f"Use ringweave run --encrypt on, or let {CREDENTIALS} name a file that Credentials.save wrote",
        )
    return _load_encryption(environment.credentials, environment.events_path)


@functools.cache  # one for the process: an inherited descriptor may be closed by the time of a later group
def _load_encryption(where: str, events: Path | None) -> LinkEncryption:
    kind, _, number = where.partition(":")
    if kind == "fd" and number.isdecimal():
        os.set_inheritable(int(number), False)
    return LinkEncryption(Credentials.load_from(where, keep_open=True), EventLog(events).write if events else None)
