"""torch's store of a run keeps no descriptor of connections that say nothing."""

import os
import socket
import struct
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from ringweave.comm import autoload

NUM_CALLS = 500


@pytest.mark.slow
def test_callers_that_say_nothing_cost_the_store_no_descriptor() -> None:
    listener = autoload._listen_at("127.0.0.1", 0)
    assert listener is not None
    port = listener.getsockname()[1]
    store = TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=True
    )
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(NUM_CALLS):
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(NUM_CALLS)]
    other = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    other.set("key", "value")
    assert store.get("key") == b"value"
    held = len(os.listdir("/proc/self/fd")) - before - len(idle)  # noqa: PTH208
    assert held <= 4, "the other store, and what it is connected by"
    for sock in idle:
        sock.close()
