"""Pieces that a rank of this node reads in the sender's memory: real sockets, threads as ranks, one process."""

import mmap
import os
import platform
import re
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from ringweave.comm.transport import shared_memory
from ringweave.comm.transport.interface import ReceivedContent, TransferFailedError
from ringweave.comm.transport.shared_memory import MIN_CROSS_MEMORY_BYTES, HugePages, ShmConnection, ShmRecv
from ringweave.comm.transport.sockets import SocketTransport
from tests.comm.transport.test_shared import TAG, WAIT_S, Node, layout, message, take
from tests.comm.transport.test_sockets import in_thread

SIZE = MIN_CROSS_MEMORY_BYTES // 4
PATIENCE_S = 60.0
HUGE_BYTES = 2 * 2**20


def connection_of(end: SocketTransport, peer: int) -> ShmConnection:
    connection = end._connections[peer]
    assert isinstance(connection, ShmConnection)
    return connection


def exchange(node: Node) -> None:
    """Move the frames that say who can read whose memory."""
    for _ in range(2):
        for connection in (connection_of(node.ends[0], 1), connection_of(node.ends[1], 0)):
            connection.write()
            connection.read()


def is_reached(end: SocketTransport, peer: int) -> bool:
    known = connection_of(end, peer)._cross_memory
    assert known is not None
    return known.peer_can_read


def take_all_for_huge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HugePages, "contain", lambda *_: True)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    take_all_for_huge(monkeypatch)
    made = Node("n", "n", lends=True)
    deadline = time.monotonic() + PATIENCE_S
    while not (is_reached(made.ends[0], 1) and is_reached(made.ends[1], 0)):
        assert time.monotonic() < deadline
        exchange(made)
    yield made
    made.close()


def lend(pair: Node, sent: torch.Tensor) -> object:
    pair.ends[0].begin_collective(layout(1, size=sent.numel()), 4)
    return pair.ends[0].send(SocketTransport.expose(sent), 1, TAG, 0)


def borrow(pair: Node, size: int = SIZE) -> tuple[ShmRecv, ReceivedContent]:
    handle = pair.ends[1].receive(SocketTransport.expose(torch.empty(size)), 0, TAG)
    content = pair.ends[1].wait(handle, WAIT_S)
    assert content is not None
    assert isinstance(handle, ShmRecv)
    return handle, content


def test_a_large_piece_is_read_where_it_is_and_has_left_when_its_reader_says_so(pair: Node) -> None:
    sent, arrived = message(1, size=SIZE), torch.empty(SIZE)
    handle = lend(pair, sent)
    seen, content = borrow(pair)
    sent.fill_(2)  # nobody may, before it has left: shows that nothing was copied
    content.copy_to(arrived)
    assert torch.equal(arrived, message(2, size=SIZE))
    with pytest.raises(TransferFailedError, match=r"nothing for 0\.05 s"):
        pair.ends[0].wait(handle, 0.05)
    pair.ends[1].release(seen)
    pair.ends[0].wait(handle, WAIT_S)


def test_small_pages_are_copied(pair: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HugePages, "contain", lambda *_: False)
    sent = message(1, size=SIZE)
    assert pair.ends[0].wait(lend(pair, sent), WAIT_S) is None
    sent.zero_()
    assert torch.equal(take(pair.ends[1], 0, SIZE), message(1, size=SIZE))


def test_a_small_piece_is_copied_and_has_left_at_once(pair: Node) -> None:
    sent = message(1, size=SIZE - 1)
    handle = lend(pair, sent)
    assert pair.ends[0].wait(handle, WAIT_S) is None
    sent.zero_()
    assert torch.equal(take(pair.ends[1], 0, SIZE - 1), message(1, size=SIZE - 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int8, torch.bfloat16, torch.complex128])
def test_a_lent_piece_is_combined_slice_by_slice(dtype: torch.dtype) -> None:
    size = 3 * shared_memory._READ_SLICE_BYTES // dtype.itemsize + 5
    theirs = torch.arange(size).remainder(50).to(dtype)
    mine, scratch = torch.arange(size).remainder(7).to(dtype), torch.empty(size, dtype=dtype)
    expected = mine + theirs
    content = shared_memory.CrossMemoryContent(1, os.getpid(), theirs.data_ptr())
    content.combine_into(mine, scratch, lambda region, piece: region.add_(piece))
    assert torch.equal(mine, expected)


def test_what_was_lent_by_a_peer_that_has_hung_up_is_not_taken(pair: Node) -> None:
    lend(pair, message(1, size=SIZE))
    seen, content = borrow(pair)
    pair.ends[0].abort()  # from here on it may write what it has lent
    content.copy_to(torch.empty(SIZE))
    with pytest.raises(TransferFailedError, match="connection closed by peer"):
        pair.ends[1].release(seen)


def test_a_peer_that_leaves_without_having_read_what_was_lent_is_a_fault(pair: Node) -> None:
    handle = lend(pair, message(1, size=SIZE))
    pair.ends[1].close()
    with pytest.raises(TransferFailedError, match=r"[Cc]onnection (closed|reset) by peer|Broken pipe"):
        pair.ends[0].wait(handle, WAIT_S)


def test_pieces_are_copied_where_the_kernel_forbids_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbid(*_: object) -> None:
        raise PermissionError("Operation not permitted")

    take_all_for_huge(monkeypatch)
    monkeypatch.setattr(shared_memory, "read_memory", forbid)
    node = Node("n", "n", lends=True)
    exchange(node)
    sent = message(1, size=SIZE)
    handle = lend(node, sent)
    assert node.ends[0].wait(handle, WAIT_S) is None
    sent.zero_()
    assert torch.equal(take(node.ends[1], 0, SIZE), message(1, size=SIZE))
    assert not is_reached(node.ends[0], 1)
    node.close()


def test_who_finds_something_else_than_the_secret_may_not_read(pair: Node) -> None:
    known = connection_of(pair.ends[0], 1)._cross_memory
    assert known is not None
    address, low, high = known.token
    assert known.can_read_peer(address, low, high)
    assert not known.can_read_peer(address, low, high ^ 1)
    assert not known.can_read_peer(8, low, high)


def huge_bytes_at(address: int) -> int:
    """Bytes in huge pages of the region of this process's memory that an address is in, as /proc/self/smaps says."""
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_inside = int(found[1], 16) <= address < int(found[2], 16)
        elif is_inside and line.startswith("AnonHugePages:"):
            return 1024 * int(line.split()[1])
    raise AssertionError(f"nothing is at {address:#x}")


@pytest.mark.parametrize("advice", [mmap.MADV_HUGEPAGE, mmap.MADV_NOHUGEPAGE])
def test_huge_pages_are_told_from_small_ones(advice: int) -> None:
    area = mmap.mmap(-1, 3 * HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(advice)
    area[:] = bytes(len(area))
    whole = shared_memory.array_address(np.frombuffer(area, dtype=np.uint8))
    page, pages, has_huge = -(-whole // HUGE_BYTES) * HUGE_BYTES, HugePages(), huge_bytes_at(whole) > 0
    if has_huge and huge_bytes_at(whole) < (whole + 3 * HUGE_BYTES - page) // HUGE_BYTES * HUGE_BYTES:
        pytest.skip("the kernel had not enough huge pages for all of the memory")
    if has_huge and not says_where_huge_pages_are():
        pytest.skip("Linux before 6.7 does not say where huge pages are")
    assert pages.contain(page, HUGE_BYTES) == has_huge
    assert pages.contain(page + 5, HUGE_BYTES // 3) == has_huge
    assert not pages.contain(8, mmap.PAGESIZE)


def says_where_huge_pages_are() -> bool:
    major, minor = map(int, platform.release().split(".")[:2])
    return (major, minor) >= (6, 7)


def test_memory_that_the_kernel_does_not_read_is_not_lent() -> None:
    memory = torch.zeros(10, dtype=torch.uint8)
    assert shared_memory.is_readable_by_peers(memory.data_ptr(), 10)
    assert not shared_memory.is_readable_by_peers(8, 10)


def test_memory_that_is_not_there_is_the_peers_fault() -> None:
    content = shared_memory.CrossMemoryContent(3, os.getpid(), 8)
    with pytest.raises(TransferFailedError, match=rf"memory of process {os.getpid()} cannot be read: Bad address"):
        content.copy_to(torch.empty(4))


def test_a_place_is_not_taken_from_a_reader_by_a_piece_that_came_after_one_that_was_lent(pair: Node) -> None:
    small, large = SocketTransport.expose(message(1, size=10)), SocketTransport.expose(message(2, size=SIZE))
    pair.ends[0].begin_collective(layout(1, 1, 1, size=SIZE, same_place=True), 4)
    assert pair.ends[0].send(small, 1, TAG, 0).done
    pair.ends[0].send(large, 1, TAG, 1)
    assert not pair.ends[0].send(SocketTransport.expose(message(3, size=10)), 1, TAG, 2).done
    assert torch.equal(take(pair.ends[1], 0, 10), message(1, size=10))


def test_ends_that_were_told_nothing_have_nothing_to_wait_for(pair: Node) -> None:
    pair.ends[0].end_collective(0.0)
    reading = in_thread(lambda: take(pair.ends[1], 0, SIZE))
    pair.ends[0].wait(lend(pair, message(4, size=SIZE)), WAIT_S)
    assert torch.equal(reading.result(WAIT_S), message(4, size=SIZE))
    pair.ends[1].end_collective(WAIT_S)
