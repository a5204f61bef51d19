"""A way to a coordinator on which, for a while, nothing passes, and nobody hears an error."""

import socket
import threading
from contextlib import suppress


class Tunnel:
    """Passes bytes on, both ways, unless it is silent: then they are kept until it is not."""

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._open = threading.Event()
        self._open.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.num_connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def silence(self) -> None:
        self._open.clear()

    def mend(self) -> None:
        self._open.set()

    def close(self) -> None:
        self.mend()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            far = socket.create_connection(self._target)
            for ends in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=ends, daemon=True).start()

    def _pass(self, src: socket.socket, dst: socket.socket) -> None:
        with src, suppress(OSError):
            while piece := src.recv(65536):
                self._open.wait()
                dst.sendall(piece)
            self._open.wait()
            dst.shutdown(socket.SHUT_WR)
