"""Ranks of one node, all in this process: real sockets and shared memory, threads as ranks."""

import gc
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from ringweave.comm.group_info import GroupInfo, RankEndpoint, RankInfo, RankLocation
from ringweave.comm.transport import shared_memory
from ringweave.comm.transport.connect import open_listeners
from ringweave.comm.transport.interface import MismatchError, TransferFailedError
from ringweave.comm.transport.sockets import SocketTransport
from ringweave.schedules.program import NO_SLOT, StagingLayout, StagingSlot
from tests.comm.transport.test_sockets import in_thread

TAG = 7 << 32 | 5
WAIT_S = 60


def layout(*num_readers: int, size: int, same_place: bool = False) -> StagingLayout:
    """Stages of `size` elements with so many readers; in places of their own, or all in one."""
    stages = [
        StagingSlot(0 if same_place else n * size, readers, n - 1 if same_place else NO_SLOT, is_reused=same_place)
        for n, readers in enumerate(num_readers)
    ]
    return StagingLayout(tuple(stages), size if same_place else size * len(num_readers))


class Node:
    """Transports of a group whose members are on nodes of these names."""

    def __init__(
        self,
        *nodes: str,
        entrance: Callable[[RankEndpoint], RankEndpoint] = lambda entrance: entrance,
        lends: bool = False,
    ) -> None:
        self.doors = open_listeners(["127.0.0.1"], len(nodes))
        entrances = [entrance(door.endpoint) for door in self.doors]
        ranks = tuple(RankInfo(r, RankLocation(node, "127.0.0.1"), (entrances[r],)) for r, node in enumerate(nodes))
        limit = timedelta(seconds=WAIT_S)
        self.ends = [
            SocketTransport(door, 0, GroupInfo(ranks, r, b"0123456789abcdef"), limit, allows_cross_memory=lends)
            for r, door in enumerate(self.doors)
        ]
        others = [in_thread(lambda r=r: self.ends[r].connect(set(range(len(nodes))) - {r})) for r in range(len(nodes))]
        for other in others:
            other.result(WAIT_S)

    def close(self) -> None:
        for end in self.ends:
            end.abort()
            end.close()


@pytest.fixture
def pair() -> Iterator[Node]:
    made = Node("n", "n")
    yield made
    made.close()


def message(*values: float, size: int = 1000) -> torch.Tensor:
    return torch.cat([torch.full((size,), value, dtype=torch.float32) for value in values])


def take(end: SocketTransport, peer: int, size: int = 1000, tag: int = TAG) -> torch.Tensor:
    handle = end.receive(SocketTransport.expose(torch.empty(size)), peer, tag)
    content = end.wait(handle, WAIT_S)
    assert content is not None
    copy = torch.empty(size)
    content.copy_to(copy)
    end.release(handle)
    return copy


def test_a_piece_is_read_where_it_is_shown(pair: Node) -> None:
    sent = message(1, 2)
    pair.ends[0].begin_collective(layout(1, 1, size=1000), 4)
    exposed = SocketTransport.expose(sent)
    for stage in range(2):
        pair.ends[0].send(exposed[1000 * stage : 1000 * (stage + 1)], 1, TAG, stage)
    sent.zero_()  # it has left: what was shown stays
    assert torch.equal(take(pair.ends[1], 0), message(1))
    assert torch.equal(take(pair.ends[1], 0), message(2))


def test_content_for_several_ranks_is_shown_once() -> None:
    node = Node("n", "n", "n")
    sent = message(3)
    node.ends[0].begin_collective(layout(2, size=1000), 4)
    node.ends[0].send(SocketTransport.expose(sent), 1, TAG, 0)
    sent.zero_()
    node.ends[0].send(SocketTransport.expose(sent), 2, TAG, 0)
    assert torch.equal(take(node.ends[1], 0), message(3))
    assert torch.equal(take(node.ends[2], 0), message(3))
    node.close()


def test_a_place_is_used_again_only_when_its_reader_is_through(pair: Node) -> None:
    first, second = SocketTransport.expose(message(1)), SocketTransport.expose(message(2))
    pair.ends[0].begin_collective(layout(1, 1, size=1000, same_place=True), 4)
    assert pair.ends[0].send(first, 1, TAG, 0).done
    waiting = pair.ends[0].send(second, 1, TAG, 1)
    assert not waiting.done
    with pytest.raises(TransferFailedError, match=r"nothing for 0\.05 s"):
        pair.ends[0].wait(waiting, 0.05)
    reading: Future[object] = in_thread(lambda: [take(pair.ends[1], 0), take(pair.ends[1], 0)])
    pair.ends[0].wait(waiting, WAIT_S)
    one, other = reading.result(WAIT_S)
    assert torch.equal(one, message(1))
    assert torch.equal(other, message(2))


def test_memory_grows_with_the_messages_and_collectives_take_turns(pair: Node) -> None:
    def send_all() -> None:
        for number, size in enumerate((10, 3_000_000, 10, 3_000_000, 5_000_000, 20)):
            pair.ends[0].begin_collective(layout(1, size=size), 4)
            handle = pair.ends[0].send(SocketTransport.expose(message(number, size=size)), 1, TAG + number, 0)
            pair.ends[0].wait(handle, WAIT_S)

    sending = in_thread(send_all)
    for number, size in enumerate((10, 3_000_000, 10, 3_000_000, 5_000_000, 20)):
        pair.ends[1].begin_collective(StagingLayout(), 4)
        assert torch.equal(take(pair.ends[1], 0, size, TAG + number), message(number, size=size))
    sending.result(WAIT_S)


def test_nothing_has_a_name_in_the_file_system(pair: Node) -> None:
    def named() -> set[str]:
        """Files that this process has mapped; others have some in the same place."""
        lines = Path("/proc/self/maps").read_text().splitlines()
        return {line[line.index("/dev/shm/") :] for line in lines if "/dev/shm/" in line}

    before = named()
    pair.ends[0].begin_collective(layout(1, size=1_000_000), 4)
    pair.ends[0].send(SocketTransport.expose(message(1, size=1_000_000)), 1, TAG, 0)
    take(pair.ends[1], 0, 1_000_000)
    assert named() <= before


def test_descriptors_and_memory_go_with_the_transport() -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:ringweave")

    gc.collect()  # what earlier tests left must not go in between
    before = mapped()
    node = Node("n", "n")
    for _ in range(2):
        node.ends[0].begin_collective(layout(1, size=10), 4)
        node.ends[0].send(SocketTransport.expose(message(1, size=10)), 1, TAG, 0)
        take(node.ends[1], 0, 10)
    assert mapped() == before + 2  # the sender's, seen by both
    node.close()
    del node
    assert mapped() == before


def test_ranks_of_different_nodes_use_tcp() -> None:
    node = Node("n", "m")
    handle = node.ends[1].receive(SocketTransport.expose(arrived := torch.zeros(1000)), 0, TAG)
    node.ends[0].begin_collective(StagingLayout(), 4)
    node.ends[0].send(SocketTransport.expose(message(5)), 1, TAG)
    assert node.ends[1].wait(handle, WAIT_S) is None
    assert torch.equal(arrived, message(5))
    node.close()


def test_a_node_of_the_same_name_elsewhere_is_reached_over_tcp() -> None:
    node = Node("n", "n", entrance=lambda known: RankEndpoint(known.ports, "ringweave-not-here"))
    handle = node.ends[1].receive(SocketTransport.expose(arrived := torch.zeros(1000)), 0, TAG)
    for _ in range(3):  # content that nobody reads does not hold up the next collective
        node.ends[0].begin_collective(layout(1, size=1000), 4)
    node.ends[0].send(SocketTransport.expose(message(5)), 1, TAG, 0)
    assert node.ends[1].wait(handle, WAIT_S) is None
    assert torch.equal(arrived, message(5))
    node.close()


@pytest.mark.parametrize(("tag", "size"), [(TAG + (1 << 32), 1000), (TAG, 500)], ids=["tag", "size"])
def test_another_piece_than_expected_is_refused(pair: Node, tag: int, size: int) -> None:
    pair.ends[0].begin_collective(layout(1, size=1000), 4)
    pair.ends[0].send(SocketTransport.expose(message(1, size=size)), 1, tag, 0)
    expected = f"a message of {4 * size} bytes in collective #{tag >> 32} came, expected 4000 bytes in #7"
    with pytest.raises(MismatchError, match=expected):
        take(pair.ends[1], 0)


def test_a_peer_that_closes_ends_the_wait_at_once_but_what_it_sent_is_there(pair: Node) -> None:
    pair.ends[0].begin_collective(layout(1, size=1000), 4)
    pair.ends[0].send(SocketTransport.expose(message(4)), 1, TAG, 0)
    pair.ends[0].close()
    assert torch.equal(take(pair.ends[1], 0), message(4))
    with pytest.raises(TransferFailedError, match="connection closed by peer"):
        take(pair.ends[1], 0)


def test_a_peer_that_leaves_before_it_heard_that_its_pieces_were_read_is_no_fault(pair: Node) -> None:
    ahead, behind = pair.ends
    for end, stages in ((ahead, layout(1, 1, size=1000)), (behind, layout(1, size=1000))):
        end.begin_collective(stages, 4)
    ahead.send(SocketTransport.expose(message(0)), 1, TAG, 0)
    take(behind, 0)
    behind.begin_collective(StagingLayout(), 4)
    behind._connections[0].write()  # what has been read: nobody takes it in
    ahead.send(SocketTransport.expose(message(1)), 1, TAG, 1)
    ahead.close()
    assert torch.equal(take(behind, 0), message(1))
    behind.begin_collective(layout(1, size=1000), 4)
    with pytest.raises(TransferFailedError, match=r"[Cc]onnection (closed|reset) by peer|Broken pipe"):
        behind.send(SocketTransport.expose(message(2)), 0, TAG, 0)


def test_a_peer_that_left_is_told_nothing_more(pair: Node) -> None:
    pair.ends[0].begin_collective(layout(1, 1, size=1000), 4)
    for stage in range(2):
        pair.ends[0].send(SocketTransport.expose(message(stage)), 1, TAG, stage)
    take(pair.ends[1], 0)
    pair.ends[0].close()
    pair.ends[1].begin_collective(StagingLayout(), 4)  # tells what has been read, before it waits
    pair.ends[1]._connections[0].write()
    assert torch.equal(take(pair.ends[1], 0), message(1))


def test_who_has_read_all_of_a_peer_that_left_is_through(pair: Node) -> None:
    count = shared_memory._MAX_UNACKNOWLEDGED + 6
    pair.ends[0].begin_collective(layout(*[1] * count, size=10), 4)
    for stage in range(count):
        pair.ends[0].send(SocketTransport.expose(message(stage, size=10)), 1, TAG, stage)
    pair.ends[0].close()
    for stage in range(count):
        assert torch.equal(take(pair.ends[1], 0, 10), message(stage, size=10))
    pair.ends[1].end_collective(WAIT_S)


def test_a_piece_that_a_peer_did_not_wait_for_is_a_fault(pair: Node) -> None:
    pair.ends[1].close()
    pair.ends[0].begin_collective(layout(1, size=1000), 4)
    with pytest.raises(TransferFailedError, match="Broken pipe"):
        pair.ends[0].send(SocketTransport.expose(message(1)), 1, TAG, 0)


def test_a_reader_that_waits_for_nothing_more_frees_the_place() -> None:
    node = Node("n", "n", "n")
    sender, early, late = node.ends
    sender.begin_collective(layout(1, 1, size=1000, same_place=True), 4)
    sender.send(SocketTransport.expose(message(1)), 1, TAG, 0)
    waiting = sender.send(SocketTransport.expose(message(2)), 2, TAG, 1)
    assert torch.equal(take(early, 0), message(1))  # and does nothing from here on
    sender.wait(waiting, WAIT_S)
    assert torch.equal(take(late, 0), message(2))
    node.close()


def test_descriptors_are_not_handed_on_to_other_programs(pair: Node) -> None:
    pair.ends[0].begin_collective(layout(1, size=10), 4)
    pair.ends[0].send(SocketTransport.expose(message(1, size=10)), 1, TAG, 0)
    take(pair.ends[1], 0, 10)
    links = [path for path in Path("/proc/self/fd").iterdir() if "memfd:ringweave" in _target(path)]
    assert links
    assert not [path for path in links if os.get_inheritable(int(path.name))]


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except FileNotFoundError:  # the one that lists the directory
        return ""


def test_abort_ends_a_wait_from_another_thread(pair: Node) -> None:
    waiting = in_thread(lambda: take(pair.ends[1], 0))
    pair.ends[1].abort()
    with pytest.raises(TransferFailedError, match=r"cut|closed"):
        waiting.result(WAIT_S)


def test_frames_that_cannot_be_are_refused(pair: Node) -> None:
    connection = pair.ends[0]._connections[1]
    for frame, text in (
        (b"\1", "a frame of 1 bytes came, expected 32"),
        (bytes([9] + [0] * 31), "a frame of kind 9 came"),
        (bytes([3] + [0] * 7 + [5] + [0] * 23), "5 pieces read of 0 that were sent"),
    ):
        connection.sock.send(frame)
        with pytest.raises(TransferFailedError, match=text):
            take(pair.ends[1], 0)


def test_a_piece_outside_of_the_memory_is_refused(pair: Node) -> None:
    pair.ends[0].begin_collective(layout(1, size=10), 4)
    pair.ends[0].send(SocketTransport.expose(message(1, size=10)), 1, TAG, 0)
    take(pair.ends[1], 0, 10)
    frame = b"".join(n.to_bytes(8, "little") for n in (1, TAG, 4000, 1 << 40))
    pair.ends[0]._connections[1].sock.send(frame)
    with pytest.raises(TransferFailedError, match=r"4000 bytes at 1099511627776 are outside of the peer"):
        take(pair.ends[1], 0)


def test_memory_whose_size_may_change_is_refused(pair: Node) -> None:
    descriptor = os.memfd_create("loose")
    os.ftruncate(descriptor, 4096)
    frame = (4).to_bytes(8, "little") + bytes(24)
    socket.send_fds(pair.ends[0]._connections[1].sock, [frame], [descriptor])
    with pytest.raises(TransferFailedError, match="shared memory whose size is not fixed"):
        take(pair.ends[1], 0)
    os.close(descriptor)
