"""Cluster DNS for processes that run as Pods; Python imports this module at its start.

The host table is a file that changes as Pods come and go. A Service name that is not in the table is unknown."""

import os
import socket
from pathlib import Path
from typing import Any

HOSTS_VARIABLE = "RINGWEAVE_TEST_HOSTS"
_real_getaddrinfo = socket.getaddrinfo


def _getaddrinfo(host: Any, *rest: Any, **more: Any) -> Any:
    if not (isinstance(host, str) and host.endswith(".svc")):
        return _real_getaddrinfo(host, *rest, **more)
    lines = [line.split() for line in Path(os.environ[HOSTS_VARIABLE]).read_text(encoding="utf-8").splitlines()]
    address = next((line[0] for line in lines if line[1] == host), None)
    if address is None:
        raise socket.gaierror(socket.EAI_NONAME, f"no Pod is found at {host}")
    return _real_getaddrinfo(address, *rest, **more)


if HOSTS_VARIABLE in os.environ:
    socket.getaddrinfo = _getaddrinfo
