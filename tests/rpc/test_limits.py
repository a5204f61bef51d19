"""What a server takes: how large, how many at once, how many bytes in all; who has to wait and who is cut off."""

import threading

import pytest

from ringweave import rpc
from ringweave.errors import DeadlineError, MessageError, RpcError
from tests.polling import wait_until
from tests.rpc.parts import Add, Events, Gate, Wait, connect, serving, trust


def test_more_than_the_server_takes_is_refused_before_it_is_sent(authority: rpc.CertificateAuthority) -> None:
    limits = rpc.RpcLimits(max_message_bytes=1000, max_body_bytes=100, max_buffers=2)
    with (
        serving(trust(authority, "server", "0"), limits=limits) as server,
        connect(server, trust(authority, "worker", "0")) as client,
    ):
        sent = client.traffic["bytes_sent"]
        for message, buffers, text in [
            (
                Add(),
                [bytes(1001)],
                r"message test\.add, bytes: 1001, expected at most 1000\. .*raise max_message_bytes",
            ),
            (Add(words=("x" * 100,)), [], r"message test\.add, bytes of its body: 1\d\d, expected at most 100"),
            (Add(), [b"", b"", b""], r"message test\.add, buffers: 3, expected at most 2"),
        ]:
            with pytest.raises(MessageError, match=text):
                client.call(message, buffers, timeout_s=60)
        assert client.traffic["bytes_sent"] == sent


def test_a_cancelled_call_frees_its_place(authority: rpc.CertificateAuthority) -> None:
    gate = Gate()
    with (
        serving(trust(authority, "server", "0"), gate.handler, limits=rpc.RpcLimits(max_calls=1)) as server,
        connect(server, trust(authority, "worker", "0")) as client,
    ):
        pending = client.start(Wait(), timeout_s=60)
        with pytest.raises(DeadlineError, match="waiting for earlier calls"):
            client.call(Add(), timeout_s=0.1)
        pending.cancel()
        assert client.call(Add(), timeout_s=60).message.total == 0


def test_a_slow_handler_slows_the_teller_down_and_memory_stays_bounded(authority: rpc.CertificateAuthority) -> None:
    gate = Gate()
    limits = rpc.RpcLimits(max_calls=2, max_message_bytes=1000, max_bytes_in_flight=2000)
    with (
        serving(trust(authority, "server", "0"), gate.handler, limits=limits) as server,
        connect(server, trust(authority, "worker", "0")) as client,
    ):
        for _ in range(2):
            client.start(Wait(), [bytes(1000)], timeout_s=60)
        for _ in range(2):
            assert gate.entered.acquire(timeout=60)
        with pytest.raises(DeadlineError):
            client.start(Wait(), [bytes(1000)], timeout_s=0.1)
        assert server.held_bytes == 2000
        gate.open.set()
        client.start(Wait(), [bytes(1000)], timeout_s=60)
        wait_until(lambda: client.traffic["calls"] == 3)
        wait_until(lambda: server.held_bytes == 0)


def test_a_peer_waits_unread_while_others_hold_the_room(authority: rpc.CertificateAuthority) -> None:
    gate = Gate()
    limits = rpc.RpcLimits(max_message_bytes=1_000_000, max_bytes_in_flight=1_000_000)
    with (
        serving(trust(authority, "server", "0"), gate.handler, limits=limits) as server,
        connect(server, trust(authority, "worker", "0")) as first,
        connect(server, trust(authority, "worker", "1")) as second,
    ):
        first.start(Wait(), [bytes(1_000_000)], timeout_s=60)
        assert gate.entered.acquire(timeout=60)
        later = second.start(Add(), [bytes(500_000)], timeout_s=60)
        assert not later.ended.wait(0.2)
        gate.open.set()
        assert later.wait().message.total == 0


def test_who_disregards_the_number_of_calls_is_cut_off(authority: rpc.CertificateAuthority, events: Events) -> None:
    gate = Gate()
    with (
        serving(
            trust(authority, "server", "0"), gate.handler, write_event=events, limits=rpc.RpcLimits(max_calls=1)
        ) as server,
        connect(server, trust(authority, "worker", "0")) as client,
    ):
        client._call_slots = threading.BoundedSemaphore(100)
        calls = [client.start(Wait(), timeout_s=60) for _ in range(2)]
        with pytest.raises(RpcError, match=r"calls at once: 2, expected at most 1, as the welcome said"):
            calls[1].wait()
        events.wait_reason("message")
        assert gate.calls[0].cancelled.wait(60)
