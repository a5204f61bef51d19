"""Messages with something wrong in them, and what a server owes to each."""

import contextlib
import random
import socket
from collections.abc import Sequence

from ringweave import rpc
from ringweave.errors import ConnectionLostError, MessageError
from ringweave.rpc.channel import RpcChannel
from ringweave.rpc.server import uninitialized_buffers
from tests.rpc.parts import introduce


def mutated(rng: random.Random, good: bytes) -> bytes:
    """The frame with something wrong: bits, bytes, lengths, cut, doubled, shuffled or made up."""
    data = bytearray(good)
    match rng.randrange(7):
        case 0:
            for _ in range(rng.randint(1, 8)):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        case 1:
            at = rng.randrange(len(data))
            data[at : at + rng.randint(1, 64)] = rng.randbytes(rng.randint(0, 64))
        case 2:
            at = rng.choice((6, 8, 10, 12, 16, 20, 28))  # a field of the prefix
            data[at : at + 2] = rng.choice((b"\xff\xff", b"\x00\x80", rng.randbytes(2)))
        case 3:
            del data[rng.randrange(len(data)) :]
        case 4:
            at = rng.randrange(len(data))
            data[at:at] = data[at : at + rng.randint(1, 100)]
        case 5:
            first, second = sorted(rng.sample(range(len(data)), 2))
            data = data[first:second] + data[:first] + data[second:]
        case _:
            data = bytearray(rng.randbytes(rng.randint(1, 300)))
    return bytes(data)


def damaged(rng: random.Random, good: bytes) -> bytes:
    """The same, never with the whole frame at its begin."""
    while (data := mutated(rng, good)).startswith(good):
        pass
    return data


def is_refused(data: bytes, limits: rpc.RpcLimits) -> bool:
    """Whether a server has something to refuse before who sends these bytes hangs up; they hold no whole message."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        channel = RpcChannel(ours, limits, "here")
        try:
            head = channel.receive_head()
            channel.receive_content(head.prefix, uninitialized_buffers(head.sizes))
        except MessageError:
            return True
        except ConnectionLostError:
            return False
    raise AssertionError("a whole message")


def host(index: int) -> str:
    """An address of this machine for each: a server writes the first refusal of a reason and host, whatever else is."""
    return f"127.{1 + index // 65025}.{index // 255 % 255}.{1 + index % 255}"


def raw_peer(port: int, trusted: rpc.PeerAuthentication, source: str | None = None) -> socket.socket:
    """A socket on which the peer has been let in; `source` is the address that it calls from."""
    raw = socket.create_connection(("127.0.0.1", port), timeout=60, source_address=(source, 0) if source else None)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock = trusted.secure_socket(raw, is_server=False)
    introduce(sock, trusted)
    return sock


def send_damaged(
    port: int,
    trusted: rpc.PeerAuthentication,
    goods: Sequence[bytes],
    num_messages: int,
    *,
    seed: int,
    limits: rpc.RpcLimits,
) -> set[str]:
    """Send so many of them, each on a connection of its own, from a host of its own, until the server hangs up.

    Returns:
        The hosts that the server has to have refused. The others have stopped halfway.
    """
    rng, refused = random.Random(seed), set[str]()
    for index in range(num_messages):
        data = damaged(rng, rng.choice(goods))
        with raw_peer(port, trusted, host(index)) as sock, contextlib.suppress(OSError):  # cut off while sending
            sock.sendall(data)
            socket.socket.shutdown(sock, socket.SHUT_WR)
            while sock.recv(65536):
                pass
        if is_refused(data, limits):
            refused.add(host(index))
    return refused
