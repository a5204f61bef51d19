"""Unevenness of TCP streams from one NIC: `python bench/simulation/outcast.py --out FILE` (root).

The counterpart of incast.py: in a lab one node sends to all others at the same time, each over a connection of its own
that was used before, and they throw it away. With `--duplex` they send as much back meanwhile. The numbers of each
round are those of incast.py, of what the sender's kernel knows to be acknowledged.
"""

import streams

GIVE = """
import json, select, socket, struct, sys, time
address, port, count, size, rounds, duplex = sys.argv[1], *map(int, sys.argv[2:])
piece, room = bytes(1 << 18), bytearray(1 << 20)
def acknowledged(peer):
    return struct.unpack_from("Q", peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192), 120)[0]
with socket.create_server((address, port), backlog=count) as server:
    print("ready", flush=True)
    peers = [server.accept()[0] for _ in range(count)]
by_number = {peer.fileno(): peer for peer in peers}
for peer in peers:
    peer.setblocking(False)
for _ in range(rounds):
    time.sleep(0.3)  # what the last round left in queues is gone
    poll, progress = select.epoll(), []
    left, due = dict.fromkeys(by_number, size), dict.fromkeys(by_number, size if duplex else 0)
    before = {number: acknowledged(peer) for number, peer in by_number.items()}
    for number in by_number:
        poll.register(number, select.EPOLLOUT | select.EPOLLIN)
    begun_s = time.monotonic()
    while True:
        for number, events in poll.poll(0.005):
            if events & select.EPOLLIN and due[number]:
                due[number] -= by_number[number].recv_into(room, min(len(room), due[number]))
            if events & select.EPOLLOUT and left[number]:
                left[number] -= by_number[number].send(piece[: min(left[number], len(piece))])
            wanted = (select.EPOLLOUT if left[number] else 0) | (select.EPOLLIN if due[number] else 0)
            poll.modify(number, wanted)
        got = [acknowledged(peer) - before[number] for number, peer in by_number.items()]
        now_s = time.monotonic() - begun_s
        is_over = min(got) >= size and not any(due.values())
        if not progress or now_s > progress[-1][0] + 0.005 or is_over:
            progress.append((now_s, got))
        if is_over:
            break
    print(json.dumps(progress), flush=True)
"""
THROW_AWAY = """
import select, socket, sys
address, port, size, rounds, duplex = sys.argv[1], *map(int, sys.argv[2:])
piece, room = bytes(1 << 18), bytearray(1 << 20)
with socket.create_connection((address, port)) as peer:
    peer.setblocking(False)
    for _ in range(rounds):
        left, due = size, size if duplex else 0
        while left or due:
            begun = left < size  # it sends back once something came
            wanted = (select.POLLIN if left else 0) | (select.POLLOUT if due and begun else 0)
            poll = select.poll()
            poll.register(peer, wanted)
            events = poll.poll()[0][1]
            if events & select.POLLIN and left:
                left -= peer.recv_into(room, min(len(room), left))
            if events & select.POLLOUT and due:
                due -= peer.send(piece[: min(due, len(piece))])
    peer.setblocking(True)
    peer.recv(1)
"""


def main() -> None:
    """Run the bench, as incast.py does."""
    parser = streams.parser(__doc__, "1MB,5MB")
    parser.add_argument("--duplex", action="store_true", help="the others send as much back")
    options = parser.parse_args()
    programs = streams.Programs(hub=GIVE, others=THROW_AWAY)
    streams.measure("outcast", programs, options, duplex=int(options.duplex))


if __name__ == "__main__":
    main()
