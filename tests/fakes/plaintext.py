"""Connections without encryption, for tests of the protocol above TLS and for measuring what TLS costs."""

import socket

from ringweave.rpc import Identity


class PlaintextAuthentication:
    """Plaintext without proof of a peer's name; the token is still asked for."""

    def __init__(self, identity: Identity, token: str) -> None:
        self.identity, self.token = identity, token

    def secure_socket(self, raw: socket.socket, *, is_server: bool) -> socket.socket:
        del is_server
        return raw

    def peer_identity(self, sock: socket.socket) -> Identity | None:
        """Return None: nothing is proven."""
        del sock
