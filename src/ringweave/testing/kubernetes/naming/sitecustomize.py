"""Host names as the DNS of a cluster knows them, for processes that play Pods: Python imports this when it starts.

The table is a file that changes as Pods come and go; a name that ends as those of Services do, and is not in it, is
unknown.
"""

import os
import socket
from pathlib import Path
from typing import Any

TABLE = "RINGWEAVE_TEST_HOSTS"
_ask = socket.getaddrinfo


def _found(host: Any, *rest: Any, **more: Any) -> Any:
    if not (isinstance(host, str) and host.endswith(".svc")):
        return _ask(host, *rest, **more)
    lines = [line.split() for line in Path(os.environ[TABLE]).read_text(encoding="utf-8").splitlines()]
    address = next((line[0] for line in lines if line[1] == host), None)
    if address is None:
        raise socket.gaierror(socket.EAI_NONAME, f"no Pod is found at {host}")
    return _ask(address, *rest, **more)


if TABLE in os.environ:
    socket.getaddrinfo = _found
