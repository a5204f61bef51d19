"""Calls that are late before they begin, and halfway."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ringweave import rpc
from ringweave.errors import ConnectionLostError, DeadlineError
from tests.polling import wait_until
from tests.rpc.parts import Add, Gate, Wait, connect, serving, trust


def test_a_call_that_cannot_even_begin_costs_nobody_the_connection(authority: rpc.CertificateAuthority) -> None:
    """The server reads nothing while its room is held by another; the kernel's buffers fill up."""
    gate = Gate()
    limits = rpc.RpcLimits(max_message_bytes=50_000_000, max_bytes_in_flight=50_000_000)
    with (
        serving(trust(authority, "server", "0"), gate.handler, limits=limits) as server,
        connect(server, trust(authority, "worker", "0")) as holder,
        connect(server, trust(authority, "worker", "1")) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        holder.start(Wait(), [bytes(50_000_000)], timeout_s=60)
        assert gate.entered.acquire(timeout=60)
        large = pool.submit(client.call, Add(), [np.ones(20_000_000, np.uint8)], timeout_s=60)
        wait_until(lambda: client.traffic["messages_sent"] == 1 and bool(client._pending))
        with pytest.raises(DeadlineError, match=r"call test\.add: 'waiting for messages before it'"):
            client.call(Add(), timeout_s=0.2)
        gate.open.set()
        assert large.result().message.total == 20_000_000
        assert client.failure is None


def test_a_call_that_is_late_halfway_cuts_the_connection_and_says_so(authority: rpc.CertificateAuthority) -> None:
    gate = Gate()
    limits = rpc.RpcLimits(max_message_bytes=50_000_000, max_bytes_in_flight=50_000_000)
    with (
        serving(trust(authority, "server", "0"), gate.handler, limits=limits) as server,
        connect(server, trust(authority, "worker", "0")) as holder,
        connect(server, trust(authority, "worker", "1")) as client,
    ):
        holder.start(Wait(), [bytes(50_000_000)], timeout_s=60)
        assert gate.entered.acquire(timeout=60)
        with pytest.raises(DeadlineError, match="in the middle of a frame; the connection is cut"):
            client.call(Add(), [np.ones(20_000_000, np.uint8)], timeout_s=0.8)
        with pytest.raises(ConnectionLostError, match="cut by this end: a message was late halfway"):
            client.call(Add(), timeout_s=60)
        gate.open.set()
        assert isinstance(holder.call(Wait(), timeout_s=60).message, rpc.Ack)
