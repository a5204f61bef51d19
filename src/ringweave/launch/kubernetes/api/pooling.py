"""A pool of connections to the API server of which nothing is left when it is closed."""

import asyncio
import socket
import weakref
from typing import Any

import aiohttp
import kopf

_GOODBYE_S = 2.0
_LOOK_S = 0.005


class Pool:
    """An HTTP session, and the sockets that it has opened; to be made and used inside one event loop."""

    def __init__(self, connection: kopf.ConnectionInfo, *, limit: int, **options: Any) -> None:
        """Connects when the first request is made.

        Args:
            connection: Where to, through which proxy, and whom to trust.
            limit: Connections at the same time; 0: any number.
            options: Of `aiohttp.ClientSession`.
        """
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        is_tls = connection.server.startswith("https:")
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=limit, ssl=connection.as_ssl_context() if is_tls else False, socket_factory=self._open
            ),
            proxy=connection.proxy_url,
            **options,
        )
        """Of aiohttp."""

    async def close(self) -> None:
        """Ends with all sockets closed.

        A connection that is closed in the midst of an answer, as watches are, takes leave of the server first. The
        session does not wait for that, and an event loop that ends meanwhile would leave the socket open.
        """
        await self.session.close()
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + _GOODBYE_S
        while any(each.fileno() >= 0 for each in self._sockets) and loop.time() < deadline_s:
            await asyncio.sleep(_LOOK_S)

    def _open(self, address: tuple[Any, ...]) -> socket.socket:
        family, kind, protocol, *_ = address
        opened = socket.socket(family=family, type=kind, proto=protocol)
        self._sockets.add(opened)
        return opened
