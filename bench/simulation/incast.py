"""Unevenness of TCP streams that meet at one NIC: `python bench/simulation/incast.py --out FILE` (root).

In a lab the first node takes, and throws away, what all others send to it at the same time, each over a connection of
its own that was used before. Two numbers of each round:

- unevenness: the standard deviation of the logarithm of what the streams have got at the moment when the first of them
  has everything. Its median over all rounds is what the simulator takes (`sim.scenario.UNEVENNESS`).
- late: how much longer than the streams a link of the same rate would take that passes on what *all* streams have
  delivered, as the root of a star does, as a fraction of their time. Even streams: 0.
"""

import streams

TAKE = """
import json, select, socket, sys, time
address, port, count, size, rounds = sys.argv[1], *map(int, sys.argv[2:])
room = bytearray(1 << 20)
with socket.create_server((address, port), backlog=count) as server:
    print("ready", flush=True)
    peers = [server.accept()[0] for _ in range(count)]
by_number = {peer.fileno(): peer for peer in peers}
for _ in range(rounds):
    time.sleep(0.3)  # what the last round left in queues is gone
    poll, progress = select.epoll(), []
    left = dict.fromkeys(by_number, size)
    for number, peer in by_number.items():
        poll.register(number, select.EPOLLIN)
        peer.sendall(b"!")
    begun_s = time.monotonic()
    while any(left.values()):
        for number, _ in poll.poll():
            left[number] -= by_number[number].recv_into(room, min(len(room), left[number]))
            if not left[number]:
                poll.unregister(number)
        if not progress or time.monotonic() - begun_s > progress[-1][0] + 0.005 or not any(left.values()):
            progress.append((time.monotonic() - begun_s, [size - each for each in left.values()]))
    print(json.dumps(progress), flush=True)
"""
SEND = """
import socket, sys
address, port, size, rounds = sys.argv[1], *map(int, sys.argv[2:])
piece = bytes(1 << 18)
with socket.create_connection((address, port)) as peer:
    for _ in range(rounds):
        peer.recv(1)
        left = size
        while left:
            left -= peer.send(piece[: min(left, len(piece))])
    peer.recv(1)
"""


if __name__ == "__main__":
    streams.measure(
        "incast", streams.Programs(hub=TAKE, others=SEND), streams.parser(__doc__, "1MB,5MB,25MB").parse_args()
    )
