"""100,000 messages with something wrong, read by the code that reads them on every connection of our own.

Half of them are damaged by chance. The other half is made by somebody who knows the format: lengths, numbers and JSON
are wrong, and all checks are right.
"""

import json
import random
import socket
import tracemalloc

import pytest

from ringweave import rpc
from ringweave.errors import RpcError
from ringweave.rpc import framing
from ringweave.rpc.channel import RpcChannel
from ringweave.rpc.framing import FrameKind
from tests import effort
from tests.rpc.mutations import damaged
from tests.rpc.parts import Add

NUM_MESSAGES = effort.share_of(100_000)
LIMITS = rpc.RpcLimits(max_message_bytes=1 << 16, max_body_bytes=4096, max_bytes_in_flight=1 << 20, patience_s=60.0)
VALUES = (0, 1, -1, 2**63, 1e308, "x", "\0", None, True, [], {}, [[]] * 50, "9" * 400, {"number": 1})
GOOD_NUMBER = 77_777_777
BUFFERS = (b"parameters" * 20, b"", b"\x01")
GOOD = Add(number=GOOD_NUMBER, words=("a", "b"))
SENT = (GOOD, b"".join(BUFFERS))


def packed(
    body: bytes, *, name: str = "test.add", sizes: list[int] | None = None, kind: FrameKind = FrameKind.CALL
) -> bytes:
    """A whole frame with right checks, whatever is in it."""
    head = framing.pack_frame(
        kind, call=1, name=name, body=body, sizes=[len(each) for each in BUFFERS] if sizes is None else sizes
    )
    return head + b"".join(BUFFERS) + framing.pack_checksum(framing.checksum(*map(memoryview, BUFFERS)))


def cunning(rng: random.Random) -> bytes:
    """A frame whose checks are right, and something else is not."""
    body = {"number": GOOD_NUMBER, "words": ["a", "b"]}
    match rng.randrange(5):
        case 0:
            body[rng.choice(["number", "words", "more"])] = rng.choice(VALUES)
            return packed(json.dumps(body).encode())
        case 1:
            return packed(
                rng.choice([b"[" * 4000, b"{" * 4000, b"\xff" * 9, b"", b"null", b'{"number":' + b"9" * 3000 + b"}"])
            )
        case 2:
            return packed(json.dumps(body).encode(), sizes=[rng.randrange(2**16) for _ in range(rng.randrange(40))])
        case 3:
            return packed(json.dumps(body).encode(), name=rng.choice(["test.ad", "", "\x00" * 64, "test.add " * 7]))
        case _:
            return packed(rng.randbytes(rng.randrange(4096)), kind=rng.choice(list(FrameKind)))


def received(data: bytes) -> tuple[Add, bytes] | None:
    """What a server makes of these bytes: the message and its buffers; None if it refuses them."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data)
        theirs.close()
        channel = RpcChannel(ours, LIMITS, "test")
        try:
            head = channel.receive_head()
            if head.prefix.kind != FrameKind.CALL or head.name != Add.kind:
                return None
            message = framing.decode_message(Add, head.body)
            rooms = [memoryview(bytearray(size)) for size in head.sizes]
            channel.receive_content(head.prefix, rooms)
        except RpcError:
            return None
        return message, b"".join(rooms)


def attack(num_messages: int, seed: int) -> int:
    """Read so many wrong messages; how many were refused. Damage by chance is never taken for a message, and nothing at
    all for the one that was sent."""
    rng, num_refused = random.Random(seed), 0
    good = packed(framing.encode_message(GOOD))
    assert received(good) == SENT
    for number in range(num_messages):
        is_chance = number % 2 == 0
        data = damaged(rng, good) if is_chance else cunning(rng)
        found = received(data)
        num_refused += found is None
        assert found is None if is_chance else found != SENT, data
    return num_refused


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_mutated_messages_are_refused() -> None:
    assert attack(NUM_MESSAGES, seed=11) > 0.9 * NUM_MESSAGES


def test_no_bit_of_a_frame_can_be_another_one_and_no_byte_be_left_out() -> None:
    good = packed(framing.encode_message(GOOD))
    assert received(good) == SENT
    for position in range(8 * len(good)):
        changed = bytearray(good)
        changed[position // 8] ^= 1 << position % 8
        assert received(bytes(changed)) is None, position
    for position in range(len(good)):
        assert received(good[:position] + good[position + 1 :]) is None, position


def test_none_of_them_takes_more_memory_than_the_limits_say() -> None:
    tracemalloc.start()
    try:
        attack(2000, seed=12)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 8 * LIMITS.max_message_bytes
