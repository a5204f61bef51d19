"""The transport between two ranks, both in this process: real sockets, threads as ranks."""

import contextlib
import functools
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, cast
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringweave.comm.group_info import GroupInfo, RankInfo, RankLocation
from ringweave.comm.transport import sockets
from ringweave.comm.transport.connect import open_listeners
from ringweave.comm.transport.interface import MismatchError, TransferFailedError
from ringweave.comm.transport.sockets import MIN_STREAM_BYTES, SocketTransport, TcpConnection, ThreadedConnection

TAG = 7 << 32 | 5


class Pair:
    """Two transports of a group of two, and a thread for the second rank."""

    def __init__(
        self,
        timeout_s: float = 60.0,
        nodes: Sequence[str] = ("n0", "n1"),
        rates: Sequence[Sequence[float]] = ((1.0,), (1.0,)),
        streams: Sequence[tuple[int, ...]] = ((), ()),
    ) -> None:
        """`rates`: for each rank those of its NICs, played by addresses of the loopback interface."""
        places = [
            RankLocation(node, "127.0.0.1", tuple(f"127.0.0.{nic + 1}" for nic in range(1, len(own))), tuple(own))
            for node, own in zip(nodes, rates, strict=True)
        ]
        self.doors = [open_listeners(place.addresses, 1)[0] for place in places]
        ranks = tuple(RankInfo(rank, places[rank], (door.endpoint,)) for rank, door in enumerate(self.doors))
        members = [GroupInfo(ranks, rank, b"0123456789abcdef", streams=streams[rank]) for rank in range(2)]
        limit = timedelta(seconds=timeout_s)
        self.ends = [SocketTransport(self.doors[r], 0, members[r], limit) for r in range(2)]

    def connect(self) -> None:
        other = in_thread(lambda: self.ends[1].connect([0]))
        self.ends[0].connect([1])
        other.result(60)

    def close(self) -> None:
        for end in self.ends:
            end.abort()
            end.close()


def in_thread(function: Callable[[], object]) -> "Future[object]":
    future: Future[object] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def pieces(tensor: torch.Tensor) -> object:
    return SocketTransport.expose(tensor)[:]


def test_large_messages_both_ways_at_once(pair: Pair) -> None:
    pair.connect()
    exchange_both_ways(pair)


def exchange_both_ways(pair: Pair, rounds: int = 1) -> None:
    """Each rank sends 12 MB while it receives as much, so many times; what arrives is compared."""
    sent = [torch.arange(3_000_000, dtype=torch.float32) * (rank + 1) for rank in range(2)]
    arrived = [torch.zeros(3_000_000) for _ in range(2)]

    def exchange(rank: int) -> None:
        end, peer = pair.ends[rank], 1 - rank
        for _ in range(rounds):
            arrived[rank].zero_()
            receiving = end.receive(pieces(arrived[rank]), peer, TAG)
            sending = end.send(pieces(sent[rank]), peer, TAG)
            end.wait(sending, 60)
            end.wait(receiving, 60)

    other = in_thread(lambda: exchange(1))
    exchange(0)
    other.result(60)
    assert torch.equal(arrived[0], sent[1])
    assert torch.equal(arrived[1], sent[0])


class Pipe:
    """Both ends of a stream in place of sockets; each call moves as many bytes as the next limit, and is counted."""

    def __init__(self, limits: list[int]) -> None:
        self.limits = limits
        self.content = bytearray()
        self.num_calls = 0
        self.low_water = 1

    @property
    def is_readable(self) -> bool:
        """True if the kernel would wake who polls."""
        return len(self.content) >= self.low_water

    def setsockopt(self, _: int, option: int, value: int) -> None:
        if option == socket.SO_RCVLOWAT:
            self.low_water = value

    def setblocking(self, _: bool) -> None:
        pass

    def _limit(self) -> int:
        self.num_calls += 1
        limit = self.limits.pop() if self.limits else 1 << 30
        if not limit:
            raise BlockingIOError
        return limit

    def sendmsg(self, parts: list[memoryview]) -> int:
        taken = b"".join(parts)[: self._limit()]
        self.content += taken
        return len(taken)

    def recvmsg_into(self, parts: list[memoryview]) -> tuple[int]:
        limit = self._limit()
        if not self.content:
            raise BlockingIOError
        num_taken = 0
        for part in parts:
            fits = min(len(part), limit - num_taken, len(self.content))
            part[:fits] = self.content[:fits]
            del self.content[:fits]
            num_taken += fits
        return (num_taken,)


@given(st.lists(st.integers(0, 70), min_size=1, max_size=30), st.lists(st.integers(0, 90), max_size=40))
def test_messages_arrive_whole_and_in_order_whatever_the_kernel_takes_of_them(
    sizes: list[int], limits: list[int]
) -> None:
    pipe = Pipe(limits)
    sender, receiver = TcpConnection(1, cast(Any, pipe)), TcpConnection(0, cast(Any, pipe))
    contents = [bytes([1 + number] * size) for number, size in enumerate(sizes)]
    arrived = [bytearray(size) for size in sizes]
    received = [receiver.receive(piece, TAG + number) for number, piece in enumerate(arrived)]
    sent = [sender.send(content, TAG + number) for number, content in enumerate(contents)]
    while sender.wanted or receiver.wanted:
        sender.write()
        receiver.read()
    assert all(message.done for message in (*sent, *received))
    assert [bytes(piece) for piece in arrived] == contents


few_bytes_wake = functools.partial(mock.patch.multiple, sockets, MIN_WAKEUP_BYTES=20, MAX_WAKEUP_BYTES=100)
"""Messages of tens of bytes are large."""


@few_bytes_wake()
@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=20),
    st.lists(st.sampled_from([0, 16, 50, 100, 150]), max_size=100),
    st.integers(1, 20),
)
def test_no_message_waits_for_more_than_its_own_rest(sizes: list[int], limits: list[int], window: int) -> None:
    pipe = Pipe(limits)
    sender = TcpConnection(1, cast(Any, pipe))
    receiver = TcpConnection(0, cast(Any, pipe))
    handles: list[Any] = []
    num_sent = 0
    while len(handles) < len(sizes) or not handles[-1].done:
        while len(handles) < len(sizes) and sum(not each.done for each in handles) < window:
            handles.append(receiver.receive(bytearray(sizes[len(handles)]), TAG + len(handles)))
        while not pipe.is_readable:
            if sender.wanted:
                sender.write()
            else:
                assert num_sent < len(handles), "it waits for what nobody sends"
                sender.send(bytes(sizes[num_sent]), TAG + num_sent)
                num_sent += 1
        receiver.read()
    assert not pipe.content


@few_bytes_wake()
def test_a_large_message_wakes_for_its_header_and_then_for_large_parts() -> None:
    pipe = Pipe([26])  # the header and ten bytes leave first
    sender, receiver = TcpConnection(1, cast(Any, pipe)), TcpConnection(0, cast(Any, pipe))
    receiver.receive(bytearray(250), TAG)
    assert pipe.low_water == 1
    sender.send(bytes(250), TAG)
    receiver.read()
    assert pipe.low_water == 100
    pipe.limits = [160]
    sender.write()
    pipe.limits = [160]
    receiver.read()
    assert pipe.low_water == 80, "what is left"
    sender.write()
    receiver.read()
    receiver.receive(bytearray(250), TAG + 1)
    assert pipe.low_water == 1, "the next header"


@few_bytes_wake()
def test_a_header_wakes_also_after_a_system_call_that_took_all_that_was_there() -> None:
    pipe = Pipe([100])
    sender, receiver = TcpConnection(1, cast(Any, pipe)), TcpConnection(0, cast(Any, pipe))
    for number in range(9):
        receiver.receive(bytearray(250), TAG + number)
    sender.send(bytes(250), TAG)
    receiver.read()
    assert pipe.low_water == 100
    for number in range(1, 8):
        sender.send(bytes(250), TAG + number)
    sender.write()
    receiver.read()
    assert pipe.low_water == 1


def test_small_messages_that_wait_go_together() -> None:
    pipe = Pipe([0])  # the first call finds the buffer full
    sender = TcpConnection(1, cast(Any, pipe))
    for number in range(17):
        sender.send(bytes(10), TAG + number)
    sender.write()
    assert pipe.num_calls == 1 + 3
    receiver, arrived = TcpConnection(0, cast(Any, pipe)), bytearray(10)
    for number in range(17):
        receiver.receive(arrived, TAG + number)
    receiver.read()
    assert pipe.num_calls == 4 + 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64, torch.int64])
def test_every_dtype_and_empty_messages(pair: Pair, dtype: torch.dtype) -> None:
    pair.connect()
    sent, arrived = torch.ones(1001).to(dtype), torch.zeros(1001).to(dtype)
    handles = [
        (pair.ends[1], pair.ends[1].receive(SocketTransport.expose(arrived)[0:0], 0, TAG)),
        (pair.ends[1], pair.ends[1].receive(SocketTransport.expose(arrived)[1:], 0, TAG)),
    ]
    pair.ends[0].send(SocketTransport.expose(sent)[0:0], 1, TAG)
    pair.ends[0].send(SocketTransport.expose(sent)[1:], 1, TAG)
    for end, handle in handles:
        end.wait(handle, 60)
    assert torch.equal(arrived[1:].view(torch.uint8), sent[1:].view(torch.uint8))
    assert not arrived[:1].view(torch.uint8).any()


@pytest.mark.parametrize(("tag", "size"), [(TAG + (1 << 32), 100), (TAG, 50)], ids=["tag", "size"])
def test_another_message_than_expected_is_refused(pair: Pair, tag: int, size: int) -> None:
    pair.connect()
    pair.ends[0].send(pieces(torch.ones(size)), 1, tag)
    handle = pair.ends[1].receive(pieces(torch.zeros(100)), 0, TAG)
    expected = f"a message of {4 * size} bytes in collective #{tag >> 32} came, expected 400 bytes in #7"
    with pytest.raises(MismatchError, match=expected) as caught:
        pair.ends[1].wait(handle, 60)
    assert caught.value.peer == 0


def test_a_closed_connection_ends_the_wait_at_once(pair: Pair) -> None:
    pair.connect()
    handle = pair.ends[1].receive(pieces(torch.zeros(100)), 0, TAG)
    pair.ends[0].close()
    with pytest.raises(TransferFailedError, match="connection closed by peer") as caught:
        pair.ends[1].wait(handle, 60)
    assert not caught.value.hung


def test_a_silent_peer_is_a_time_out(pair: Pair) -> None:
    pair.connect()
    handle = pair.ends[1].receive(pieces(torch.zeros(100)), 0, TAG)
    with pytest.raises(TransferFailedError, match=r"nothing for 0\.05 s") as caught:
        pair.ends[1].wait(handle, 0.05)
    assert caught.value.hung
    assert caught.value.peer == 0


@pytest.mark.parametrize("what", ["receive", "send"])
def test_abort_ends_a_wait_from_another_thread_and_the_buffer_is_free(pair: Pair, what: str) -> None:
    pair.connect()
    tensor = torch.zeros(50_000_000, dtype=torch.uint8)  # more than the kernel takes of a send that nobody reads
    handle = getattr(pair.ends[1], what)(pieces(tensor), 0, TAG)
    waiting = in_thread(lambda: pair.ends[1].wait(handle, 100))
    pair.ends[1].abort()
    with pytest.raises(TransferFailedError):
        waiting.result(60)  # less than it would wait by itself
    tensor.fill_(1)


def test_a_peer_may_take_as_long_to_come_as_the_collective_may() -> None:
    pair = Pair(timeout_s=0.5)
    try:
        answering = in_thread(lambda: pair.ends[1].connect([0], 100.0))
        time.sleep(1.0)
        pair.ends[0].connect([1], 100.0)
        answering.result(100)
    finally:
        pair.close()


def test_a_peer_that_does_not_come_is_a_time_out(pair: Pair) -> None:
    with pytest.raises(TransferFailedError, match="it did not connect") as caught:
        pair.ends[1].connect([0], 0.05)
    assert (caught.value.peer, caught.value.hung) == (0, True)


def test_a_peer_that_is_gone_before_it_called_is_noticed(pair: Pair) -> None:
    pair.doors[0].close()
    with pytest.raises(TransferFailedError, match="it does not listen any more") as caught:
        pair.ends[1].connect([0])
    assert (caught.value.peer, caught.value.hung) == (0, False)


def test_a_call_to_a_peer_that_is_gone_is_refused_at_once(pair: Pair) -> None:
    pair.doors[1].close()
    with pytest.raises(TransferFailedError, match=r"no connection to 127\.0\.0\.1 port") as caught:
        pair.ends[0].connect([1])
    assert caught.value.peer == 1


@pytest.mark.parametrize(
    "hello", [b"", b"GET / HTTP/1.1\r\n\r\n1234", b"0123456789abcdeX\0\0\0\0", b"0123456789abcdef\x09\0\0\0"]
)
def test_strangers_are_hung_up_on(pair: Pair, hello: bytes) -> None:
    with socket.create_connection(pair.doors[1].tcp_sockets[0].getsockname()) as stranger:
        stranger.sendall(hello)
        stranger.shutdown(socket.SHUT_WR)
        pair.connect()
        stranger.settimeout(60)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    pair.ends[0].send(pieces(torch.ones(10)), 1, TAG)
    arrived = torch.zeros(10)
    pair.ends[1].wait(pair.ends[1].receive(pieces(arrived), 0, TAG), 60)
    assert arrived.sum() == 10


def test_a_process_with_thousands_of_descriptors_is_called() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    taken = [os.dup(0) for _ in range(1100)]
    many = Pair()  # its listeners lie above what select.select takes
    try:
        assert many.doors[1].tcp_sockets[0].fileno() > 1024
        many.connect()
    finally:
        many.close()
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def rails_of(end: SocketTransport, peer: int) -> list[tuple[str, str]]:
    """Own and the peer's address of each rail."""
    rails = end._connections[peer].rails
    return [(rail.sock.getsockname()[0], rail.sock.getpeername()[0]) for rail in rails]


@pytest.mark.parametrize("rates", [[(1.0, 1.0), (1.0, 1.0)], [(3e6, 1e6, 2e6), (1e9, 1e9)], [(1.0, 4.0), (4.0, 1.0)]])
def test_a_rail_for_every_nic_that_both_have(rates: list[tuple[float, ...]]) -> None:
    pair = Pair(rates=rates)
    try:
        pair.connect()
        for rank in range(2):
            same = [f"127.0.0.{nic + 1}" for nic in range(2)]
            assert rails_of(pair.ends[rank], 1 - rank) == list(zip(same, same, strict=True))
        sent = [torch.arange(size, dtype=torch.float64) for size in (1_000_000, 1, 1023, 1025, 77_777)]
        arrived = [torch.zeros_like(tensor) for tensor in sent]
        receiving = [pair.ends[1].receive(pieces(tensor), 0, TAG) for tensor in arrived]
        sending = in_thread(
            lambda: [pair.ends[0].wait(pair.ends[0].send(pieces(tensor), 1, TAG), 60) for tensor in sent]
        )
        assert [pair.ends[1].wait(handle, 60) for handle in receiving] == [None] * len(sent)
        sending.result(60)
        assert all(map(torch.equal, sent, arrived))
    finally:
        pair.close()


@pytest.mark.parametrize(("times", "most"), [(1, 3600), (10, 36_000)])
def test_messages_are_cut_in_proportion_to_the_slower_nic_of_each_two(times: int, most: int) -> None:
    """What the faster NIC alone carries 30 us later at the most it carries alone."""
    pair = Pair(rates=[(10e6 * times, 30e6 * times), (90e6 * times, 90e6 * times)])
    try:
        pair.connect()
        handle = pair.ends[0].send(pieces(torch.zeros(100_000)), 1, TAG)
        assert [part.num_bytes for part in handle.parts] == [100_000, 300_000]
        for num_bytes, num_parts in [(4, 1), (most - 8, 1), (most + 8, 2)]:
            short = pair.ends[0].send(pieces(torch.zeros(num_bytes // 4)), 1, TAG)
            assert len(short.parts) == num_parts
        assert pair.ends[0]._connections[1]._fastest.sock.getsockname()[0] == "127.0.0.2"
    finally:
        pair.close()


@pytest.fixture
def streamed() -> Iterator[Pair]:
    """A pair with two connections."""
    made = Pair(streams=((1, 2), ()))
    try:
        made.connect()
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("rates", [(1.0,), (2e6, 1e6)])
def test_a_link_of_several_streams(rates: tuple[float, ...]) -> None:
    pair = Pair(rates=(rates, rates), streams=((1, 3), (1, 1)))
    try:
        pair.connect()
        kinds = [type(rail) for rail in pair.ends[1]._connections[0].rails]
        assert kinds == [TcpConnection, ThreadedConnection, ThreadedConnection] * len(rates), "as who calls has it"
        exchange_both_ways(pair, rounds=4)
        assert [end.traffic()[1 - rank].sent_bytes > 3 * 12_000_000 for rank, end in enumerate(pair.ends)] == [True] * 2
    finally:
        pair.close()
    assert not [each for each in threading.enumerate() if each.name == "ringweave-connections"]


def test_a_small_message_takes_one_stream(streamed: Pair) -> None:
    rails = streamed.ends[0]._connections[1].rails
    for num, on_second in ((16, False), (MIN_STREAM_BYTES, True)):
        before = len(rails[1]._mover._by_descriptor)
        sent, got = torch.ones(num), torch.zeros(num)
        other = in_thread(lambda got=got: streamed.ends[1].wait(streamed.ends[1].receive(pieces(got), 0, TAG), 60))
        streamed.ends[0].wait(streamed.ends[0].send(pieces(sent), 1, TAG), 60)
        other.result(60)
        assert torch.equal(sent, got)
        assert (len(rails[1]._mover._by_descriptor) > before) == on_second


def test_a_thread_begins_with_its_part_before_the_caller_copies_its_own(
    streamed: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, begun = streamed.ends[0], []
    first, second = sender._connections[1].rails
    own_submit, own_write = second._mover.submit, first.write
    monkeypatch.setattr(
        second._mover, "submit", lambda *args, **options: (begun.append(2), own_submit(*args, **options))
    )
    monkeypatch.setattr(first, "write", lambda: (begun.append(1), own_write()))
    sent, got = torch.rand(2 * MIN_STREAM_BYTES // 4 + 1), torch.zeros(2 * MIN_STREAM_BYTES // 4 + 1)
    other = in_thread(lambda: streamed.ends[1].wait(streamed.ends[1].receive(pieces(got), 0, TAG), 60))
    sender.wait(sender.send(pieces(sent), 1, TAG), 60)
    other.result(60)
    assert begun[:2] == [2, 1]
    assert torch.equal(sent, got)


def test_a_broken_stream_breaks_the_connection(streamed: Pair) -> None:
    receiving = streamed.ends[0].receive(pieces(torch.zeros(1_000_000)), 1, TAG)
    streamed.ends[1]._connections[0].rails[1].sock.shutdown(socket.SHUT_RDWR)
    with pytest.raises(TransferFailedError, match=r"closed by peer|reset") as failed:
        streamed.ends[0].wait(receiving, 60)
    assert failed.value.peer == 1
    assert not failed.value.hung
    streamed.ends[0]._mover._thread.join(60)
    assert not streamed.ends[0]._mover._thread.is_alive()
    later = streamed.ends[0].receive(pieces(torch.zeros(1_000_000)), 1, TAG)
    with pytest.raises(TransferFailedError, match=r"closed by peer|reset"):
        streamed.ends[0].wait(later, 60)


def test_what_does_not_fit_on_a_stream_is_said(streamed: Pair) -> None:
    streamed.ends[1]._connections[0].rails[1].send(pieces(torch.zeros(7)), TAG)
    receiving = streamed.ends[0].receive(pieces(torch.zeros(1_000_000)), 1, TAG)
    with pytest.raises(MismatchError, match=r"a message of 28 bytes in collective #7 came, expected 2000000"):
        streamed.ends[0].wait(receiving, 60)


def test_an_abort_ends_a_wait_for_a_stream(streamed: Pair) -> None:
    receiving = streamed.ends[0].receive(pieces(torch.zeros(1_000_000)), 1, TAG)
    waiting = in_thread(lambda: streamed.ends[0].wait(receiving, 600))
    streamed.ends[0].abort()
    with pytest.raises(TransferFailedError):
        waiting.result(60)


def test_a_broken_rail_breaks_the_connection() -> None:
    pair = Pair(rates=[(1.0, 1.0), (1.0, 1.0)])
    try:
        pair.connect()
        pair.ends[1]._connections[0].rails[1].sock.close()
        handle = pair.ends[0].receive(pieces(torch.zeros(100_000)), 1, TAG)
        with pytest.raises(TransferFailedError, match="closed by peer"):
            pair.ends[0].wait(handle, 60)
    finally:
        pair.close()
