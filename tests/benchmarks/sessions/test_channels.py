import json
import os
import socket
from pathlib import Path

import pytest

from ringweave_bench.worker_channel import WorkerChannel, WorkerChannelError, WorkerListener, request_all


def hello(**changes) -> bytes:
    document = {"session": "s", "rank": 0, "world_size": 2, "version": "v", "pid": os.getpid(), "network": 5}
    return json.dumps(document | changes).encode() + b"\n"


@pytest.fixture
def listener(tmp_path: Path):
    with WorkerListener(tmp_path / "control") as found:
        yield found


@pytest.fixture
def call(listener: WorkerListener):
    """`call(hello())`: a worker that has said this."""
    callers = []

    def begin(said: bytes) -> socket.socket:
        callers.append(socket.socket(socket.AF_UNIX))
        callers[-1].connect(str(listener.path))
        callers[-1].sendall(said)
        return callers[-1]

    yield begin
    for caller in callers:
        caller.close()


def gather(listener: WorkerListener, timeout_s: float = 60.0):
    return listener.wait_for_workers("s", 2, timeout_s, lambda: None)


def test_workers_are_ordered_by_rank_and_strangers_sent_away(listener, call) -> None:
    stranger = call(hello(session="older"))
    call(hello(rank=1))
    call(hello(rank=0))
    greeted = gather(listener)
    assert [each.rank for each, _ in greeted] == [0, 1]
    assert greeted[0][0].process.pid == os.getpid()
    assert stranger.recv(1) == b""
    for _, channel in greeted:
        channel.close()


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ([hello()], "1 of 2 ranks came within 0.3 s"),
        ([hello(), hello()], "two workers say that they are rank 0"),
        ([hello(rank=1, pid=2**22 + 7)], "rank 1 ended"),
        ([b'{"session": "s", "error": "no room"}\n'], "a worker: no room"),
    ],
)
def test_workers_that_do_not_come(listener, call, said: list[bytes], text: str) -> None:
    for each in said:
        call(each)
    with pytest.raises(WorkerChannelError, match=text):
        gather(listener, 0.3 if "within" in text else 60.0)


def test_it_makes_no_sense_to_wait_for_dead_processes(listener) -> None:
    def check() -> None:
        raise WorkerChannelError("a process ended")

    with pytest.raises(WorkerChannelError, match="a process ended"):
        listener.wait_for_workers("s", 2, 60.0, check)


def test_what_a_dead_process_had_said_tells_more(listener, call) -> None:
    call(b'{"session": "s", "error": "no room"}\n')

    def check() -> None:
        raise WorkerChannelError("a process ended")

    with pytest.raises(WorkerChannelError, match="a worker: no room"):
        listener.wait_for_workers("s", 2, 60.0, check)


def pair(rank: int) -> tuple[WorkerChannel, socket.socket]:
    ours, theirs = socket.socketpair()
    channel = WorkerChannel(ours)
    channel.name = f"rank {rank}"
    return channel, theirs


def test_answers_come_in_pieces_and_in_any_order() -> None:
    (first, worker_0), (second, worker_1) = pair(0), pair(1)
    worker_1.sendall(b'{"n": 1}\n')
    worker_0.sendall(b'{"n": ')
    worker_0.sendall(b"0}\n")
    assert request_all([first, second], {"do": "run"}, 60.0) == [{"n": 0}, {"n": 1}]
    assert worker_0.recv(100) == worker_1.recv(100) == b'{"do": "run"}\n'
    for end in (first, second, worker_0, worker_1):
        end.close()


@pytest.mark.parametrize(
    ("said", "is_gone", "text"),
    [
        (b"", False, "rank 1 did not answer within 0.2 s"),
        (b"", True, "rank 1 ended"),
        (b'{"error": "boom"}\n', False, "rank 1: boom"),
    ],
)
def test_a_worker_that_does_not_answer(said: bytes, is_gone: bool, text: str) -> None:
    (first, worker_0), (second, worker_1) = pair(0), pair(1)
    worker_0.sendall(b'{"n": 0}\n')
    worker_1.sendall(said)
    if is_gone:
        worker_1.close()
    with pytest.raises(WorkerChannelError, match=text):
        request_all([first, second], {"do": "run"}, 0.2 if "within" in text else 60.0)
    for end in (first, second, worker_0, worker_1):
        end.close()
