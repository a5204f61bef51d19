import asyncio
import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ringweave import rpc
from ringweave.errors import ConnectionLostError, DeadlineError, MessageError, RemoteError, RpcError, UsageError
from tests.fakes.plaintext import PlaintextAuthentication
from tests.polling import wait_until
from tests.rpc.parts import Add, Echo, Fail, Gate, Wait, add, connect, serving, trust


def echo(call: rpc.RpcCall) -> rpc.RpcReply:
    return rpc.RpcReply(Echo(), call.buffers)


def fail(call: rpc.RpcCall) -> rpc.Ack:
    raise RpcError("version: 3, expected 4. Pull first.") if call.message.ours else ZeroDivisionError("secret")


ECHO, FAIL = rpc.RpcHandler(message=Echo, handle=echo), rpc.RpcHandler(message=Fail, handle=fail)


def test_buffers_arrive_as_they_were_sent_empty_ones_too(authority: rpc.CertificateAuthority) -> None:
    arrays = [np.random.default_rng(0).random((300, 1000)), np.zeros(0), np.arange(7, dtype=np.int8)]
    with (
        serving(trust(authority, "server", "0"), ECHO) as server,
        connect(server, trust(authority, "worker", "0")) as client,
    ):
        answer = client.call(Echo(), arrays, timeout_s=60)
        for array, buffer in zip(arrays, answer.buffers, strict=True):
            assert np.array_equal(np.frombuffer(buffer, array.dtype).reshape(array.shape), array)
        wait_until(lambda: server.held_bytes == 0)


def test_an_answer_lands_in_the_callers_memory(authority: rpc.CertificateAuthority) -> None:
    sent, room = np.arange(500_000, dtype=np.float32), np.zeros(500_000, np.float32)
    with (
        serving(trust(authority, "server", "0"), ECHO) as server,
        connect(server, trust(authority, "worker", "0")) as client,
    ):
        client.call(Echo(), [sent], timeout_s=60, into=[room])
        assert np.array_equal(room, sent)
        with pytest.raises(
            MessageError, match=r"buffers in the answer to test\.echo: \(8,\), expected bytes \(2000000,\)"
        ):
            client.call(Echo(), [b"12345678"], timeout_s=60, into=[room])
        assert client.call(Add(), [b"\x05"], timeout_s=60).message.total == 5


def test_what_is_quick_is_handled_by_the_thread_that_reads_and_its_failures_arrive(
    authority: rpc.CertificateAuthority,
) -> None:
    threads: list[threading.Thread] = []

    def note(call: rpc.RpcCall) -> rpc.Ack:
        threads.append(threading.current_thread())
        return fail(call)

    handlers = [rpc.RpcHandler(message=Fail, handle=note, is_quick=True), ECHO]
    with (
        serving(trust(authority, "server", "0"), *handlers) as server,
        connect(server, trust(authority, "worker", "0")) as client,
    ):
        for _ in range(2):
            with pytest.raises(RemoteError, match=r"version: 3, expected 4\. Pull first\."):
                client.call(Fail(ours=True), [b"12345"], timeout_s=60)
        with pytest.raises(RemoteError, match=r"test\.fail: ZeroDivisionError in the handler; see its log\."):
            client.call(Fail(ours=False), timeout_s=60)
        assert client.call(Echo(), [b"12"], timeout_s=60).buffers[0] == b"12"
        assert len(threads) == 3
        assert len(set(threads)) == 1, "one for all of them"
        assert server.peer_names() == {"0"}
        wait_until(lambda: server.held_bytes == 0)


def test_a_call_lands_in_the_memory_that_the_handler_gives(authority: rpc.CertificateAuthority) -> None:
    room = np.zeros(1000, np.uint8)
    kept = rpc.RpcHandler(message=Echo, handle=lambda call: Echo(), allocate=lambda incoming: [memoryview(room)])
    with (
        serving(trust(authority, "server", "0"), kept) as server,
        connect(server, trust(authority, "worker", "0")) as client,
    ):
        client.call(Echo(), [np.full(1000, 9, np.uint8)], timeout_s=60)
    assert (room == 9).all()


def test_four_peers_at_once_each_get_their_own_answers(authority: rpc.CertificateAuthority) -> None:
    def push(index: int) -> None:
        content = np.random.default_rng(index).integers(0, 256, 2_000_000, np.uint8)
        with connect(server, trust(authority, "worker", str(index))) as client:
            for _ in range(5):
                answer = client.call(Echo(), [content], timeout_s=60)
                assert np.array_equal(np.frombuffer(answer.buffers[0], np.uint8), content)
            assert client.traffic["calls"] == 5

    with serving(trust(authority, "server", "0"), ECHO) as server, ThreadPoolExecutor(4) as pool:
        list(pool.map(push, range(4)))


def test_threads_share_a_client(authority: rpc.CertificateAuthority) -> None:
    with (
        serving(trust(authority, "server", "0")) as server,
        ThreadPoolExecutor(8) as pool,
        connect(server, trust(authority, "worker", "0")) as client,
    ):
        sums = pool.map(lambda n: client.call(Add(), [bytes([n]) * 1000], timeout_s=60).message.total, range(64))
        assert list(sums) == [n * 1000 for n in range(64)]
        wait_until(lambda: server.peers()[0].traffic["calls"] == 64)  # counted once the answer has left


def test_async_callers_use_a_thread(authority: rpc.CertificateAuthority) -> None:
    async def calls(client: rpc.RpcClient) -> list[int]:
        pending = (asyncio.to_thread(client.call, Add(), [bytes([n])], timeout_s=60) for n in range(10))
        return [answer.message.total for answer in await asyncio.gather(*pending)]

    with (
        serving(trust(authority, "server", "0")) as server,
        connect(server, trust(authority, "worker", "0")) as client,
    ):
        assert asyncio.run(calls(client)) == list(range(10))


def test_a_handlers_own_error_reaches_the_caller_and_a_bug_does_not(authority: rpc.CertificateAuthority) -> None:
    told: list[object] = []
    with (
        serving(trust(authority, "server", "0"), FAIL, on_handler_error=lambda *each: told.append(each)) as server,
        connect(server, trust(authority, "worker", "0")) as client,
    ):
        with pytest.raises(RemoteError, match=r"^version: 3, expected 4\. Pull first\.$") as ours:
            client.call(Fail(ours=True), timeout_s=60)
        assert ours.value.error == "RpcError"
        with pytest.raises(RemoteError, match=r"^test\.fail: ZeroDivisionError in the handler; see its log\.$"):
            client.call(Fail(ours=False), timeout_s=60)
        assert client.call(Add(), timeout_s=60).message.total == 0
        assert client.traffic["failures"] == 2
    assert "ZeroDivisionError('secret')" in repr(told)


def test_unknown_messages_are_answered_by_an_error_and_their_buffers_skipped(
    authority: rpc.CertificateAuthority,
) -> None:
    with (
        serving(trust(authority, "server", "0")) as server,
        connect(server, trust(authority, "worker", "0")) as client,
    ):
        with pytest.raises(
            RemoteError, match=r"kind of message: 'test\.echo', expected one of test\.add\. Look whether"
        ):
            client.call(Echo(), [bytes(3_000_000)], timeout_s=60)
        assert client.call(Add(), [b"\x01"], timeout_s=60).message.total == 1


def test_a_call_that_takes_too_long_ends_in_time_and_the_handler_is_told(authority: rpc.CertificateAuthority) -> None:
    gate = Gate()
    with (
        serving(trust(authority, "server", "0"), gate.handler) as server,
        connect(server, trust(authority, "worker", "0")) as client,
    ):
        began_s = time.monotonic()
        pending = client.start(Wait(), timeout_s=0.3)
        with pytest.raises(DeadlineError, match=r"call test\.wait: 'no answer', expected an answer in the time"):
            pending.wait()
        assert time.monotonic() - began_s >= 0.29
        assert gate.entered.acquire(timeout=60)
        assert gate.calls[0].left_s() <= 0.3, "counted from when it came"
        assert gate.calls[0].cancelled.wait(60)
        assert client.call(Add(), timeout_s=60).message.total == 0, "the connection is still good"


def test_a_dead_client_cancels_its_calls(authority: rpc.CertificateAuthority) -> None:
    gate = Gate()
    with serving(trust(authority, "server", "0"), gate.handler) as server:
        client = connect(server, trust(authority, "worker", "0"))
        client.start(Wait(), timeout_s=60)
        assert gate.entered.acquire(timeout=60)
        client._channel.abort()
        assert gate.calls[0].cancelled.wait(60)
        wait_until(lambda: not server.peers())


def test_the_end_of_a_peer_with_two_connections_is_told_once_while_its_calls_are_in_the_making(
    authority: rpc.CertificateAuthority,
) -> None:
    entered, done, gone = threading.Semaphore(0), threading.Event(), []

    def stubborn(call: rpc.RpcCall) -> rpc.Ack:
        entered.release()
        done.wait(60)
        return rpc.Ack()

    handler = rpc.RpcHandler(message=Wait, handle=stubborn)
    with serving(trust(authority, "server", "0"), handler, on_peer_exit=gone.append) as server:
        worker = trust(authority, "worker", "0")
        clients = [connect(server, worker) for _ in range(2)]
        for client in clients:
            client.start(Wait(), timeout_s=60)
            assert entered.acquire(timeout=60)
        for client in clients:
            client.abort()
        wait_until(lambda: gone)
        assert gone == [worker.identity]
        done.set()
        wait_until(lambda: not server.peers())
    assert gone == [worker.identity]


def test_a_peer_whose_connection_ends_neither_by_its_end_nor_with_a_goodbye_is_lost(
    authority: rpc.CertificateAuthority,
) -> None:
    gone, lost = [], []
    with serving(trust(authority, "server", "0"), on_peer_exit=gone.append, on_peer_lost=lost.append) as server:
        polite, dead, _ = (connect(server, trust(authority, "worker", name)) for name in "012")
        wait_until(lambda: len(server.peers()) == 3)
        polite.close()
        dead.abort()
        wait_until(lambda: gone)
        (session,) = (each for each in server._sessions if each.peer.name == "2")
        session.channel.abort(": nothing was heard of it")
        wait_until(lambda: lost)
        wait_until(lambda: not server.peers())
    assert [each.name for each in gone] == ["1"]
    assert [each.name for each in lost] == ["2"]


def test_closing_a_server_lets_calls_finish_and_tells_the_peers(authority: rpc.CertificateAuthority) -> None:
    gate = Gate()
    with serving(trust(authority, "server", "0"), gate.handler) as server:
        client, idle = (connect(server, trust(authority, "worker", name)) for name in "01")
        wait_until(lambda: len(server.peers()) == 2)
        pending = client.start(Wait(), timeout_s=60)
        assert gate.entered.acquire(timeout=60)
        closing = threading.Thread(target=server.close, args=(60,))
        closing.start()
        wait_until(lambda: idle.failure is not None)
        with pytest.raises(ConnectionLostError, match="closed by the server"):
            idle.call(Add(), timeout_s=60)
        gate.open.set()
        assert isinstance(pending.wait().message, rpc.Ack)
        closing.join(60)
        assert not closing.is_alive()
        with pytest.raises(
            ConnectionLostError, match=r"connection: 'closed by the server', .*Connect again when it is back"
        ):
            client.call(Add(), timeout_s=60)
        with pytest.raises(
            ConnectionLostError, match=r"connection: .*expected a server that listens\. Check whether it runs"
        ):
            connect(server, trust(authority, "worker", "0"))


def test_closing_does_not_wait_longer_than_it_may(authority: rpc.CertificateAuthority) -> None:
    gate = Gate()
    with serving(trust(authority, "server", "0"), gate.handler) as server:
        client = connect(server, trust(authority, "worker", "0"))
        client.start(Wait(), timeout_s=60)
        assert gate.entered.acquire(timeout=60)
        server.close(timeout_s=0.3)  # returns, though the handler does not
        assert gate.calls[0].cancelled.wait(60)
        client.close()


def test_a_closed_client_says_so(authority: rpc.CertificateAuthority) -> None:
    with serving(trust(authority, "server", "0")) as server:
        client = connect(server, trust(authority, "worker", "0"))
        client.close()
        with pytest.raises(ConnectionLostError, match=r"connection: 'closed by this end', expected an open one\."):
            client.call(Add(), timeout_s=60)


def test_a_call_that_failed_keeps_none_of_its_buffers(authority: rpc.CertificateAuthority) -> None:
    """A server that replicates a push would else keep its memory until a garbage collection, and others would wait."""
    gate = Gate()
    with serving(trust(authority, "server", "0"), gate.handler) as server:
        client = connect(server, trust(authority, "worker", "0"))

        def call() -> weakref.ref[np.ndarray]:
            array = np.zeros(100_000)
            with pytest.raises(ConnectionLostError):
                client.call(Wait(), [array], timeout_s=60)
            return weakref.ref(array)

        def cut() -> None:
            assert gate.entered.acquire(timeout=60)
            client._channel.abort()

        cutting = threading.Thread(target=cut)
        cutting.start()
        gc.disable()
        try:
            for _ in range(2):  # an answer that does not come, and a message that is not sent
                assert call()() is None
        finally:
            gc.enable()
        cutting.join()


def test_two_handlers_of_one_kind_are_refused(authority: rpc.CertificateAuthority) -> None:
    with pytest.raises(
        UsageError, match=r"handlers: 'test\.add', expected one for each kind of message\. Rename one\."
    ):
        rpc.RpcServer(trust(authority, "server", "0"), [rpc.RpcHandler(message=Add, handle=add)] * 2)


def test_plain_connections_on_one_machine_work_the_same() -> None:
    here, there = (
        PlaintextAuthentication(rpc.Identity(job="j", role=role, name="0"), "token") for role in ("server", "worker")
    )
    with serving(here, ECHO) as server, connect(server, there) as client:
        assert bytes(client.call(Echo(), [b"abc"], timeout_s=60).buffers[0]) == b"abc"


def test_peers_are_counted_when_they_come_and_no_more_once_they_have_hung_up(
    authority: rpc.CertificateAuthority,
) -> None:
    with serving(trust(authority, "server", "0"), ECHO, FAIL) as server:
        for name in ("0", "1", "2"):
            peer = trust(authority, "worker", name)
            for client in (connect(server, peer), connect(server, peer)):
                client.close(is_awaited=True)
        assert (server.max_peers("worker"), server.max_peers("server")) == (1, 0)
        with connect(server, trust(authority, "worker", "0")), connect(server, trust(authority, "worker", "1")) as last:
            last.call(Echo(), [b""], timeout_s=60)  # so that the server has heard of it
            assert server.max_peers("worker") == 2
            last.close(is_awaited=True)
            server.reset_max_peers("worker")
            assert server.max_peers("worker") == 1


def test_what_a_peer_has_said_is_added_up_over_its_connections(authority: rpc.CertificateAuthority) -> None:
    with serving(trust(authority, "server", "0"), ECHO, FAIL) as server:
        for _ in range(3):
            with connect(server, trust(authority, "worker", "0")) as client:
                client.call(Echo(), [b"12"], timeout_s=60)
                with pytest.raises(RemoteError):
                    client.call(Fail(ours=True), timeout_s=60)
        peer = rpc.Identity(job="job1", role="worker", name="0")
        wait_until(lambda: server.traffic_by_peer()[peer].calls == 3)
        found = server.traffic_by_peer()[peer]
        assert found.failures == 3
        assert found.latency_max_s <= found.latency_sum_s
