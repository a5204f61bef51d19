"""Fraction of its links' rate that a TCP connection in the lab gets: `python bench/lab_rates.py 200Mbit/s 1Gbit/s`.

One sender, one receiver, two links of the same rate between them. Content received per second is counted from one
second after the first byte, and the frames that the sender's link counted are compared with the content. Needs root, or
`ringweave lab unshare --` in front.
"""

import subprocess
import sys

from ringweave import lab, topology, units
from ringweave.lab import Lab

NAME = "rate-trial"
SECONDS = 4
RECEIVE = """
import socket, sys, time
with socket.create_server((sys.argv[1], 5001)) as server:
    print("ready", flush=True)
    peer, _ = server.accept()
room, received, counted, started, first = bytearray(1 << 20), 0, 0, None, time.monotonic()
while size := peer.recv_into(room):
    received, now = received + size, time.monotonic()
    if started is None and now > first + 1:
        started, counted = now, received
print((received - counted) / (time.monotonic() - started), received)
"""
SEND = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 5001)) as peer:
    end, piece = time.monotonic() + float(sys.argv[2]), bytes(1 << 18)
    while time.monotonic() < end:
        peer.sendall(piece)
"""


def main(rates: list[str]) -> None:
    """Measure at every rate, each in a lab of its own."""
    print("rate         content/s    of the rate  frames/content")
    for rate in rates:
        text = f"name: {NAME}\nnodes: [{{name: a, nic: {rate}, devices: 1, count: 2}}]\n"
        try:
            content_bytes_per_s, overhead = measure(lab.up(topology.loads(text)))
        finally:
            lab.down(NAME)
        share = content_bytes_per_s / units.parse_rate(rate)
        print(f"{rate:12} {content_bytes_per_s * 8e-6:6.1f} Mbit/s  {share:10.1%}  {overhead:14.4f}", flush=True)


def measure(pair: Lab) -> tuple[float, float]:
    """Content in bytes per second, and bytes on the sender's link for each byte of content."""
    address = pair.addresses["a-1"][0]
    receive = pair.command("a-1", [sys.executable, "-c", RECEIVE, address])
    with subprocess.Popen(receive, stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "ready\n"
        subprocess.run(pair.command("a-0", [sys.executable, "-c", SEND, address, str(SECONDS)]), check=True)
        content_bytes_per_s, received = receiver.communicate()[0].split()
    return float(content_bytes_per_s), pair.bytes_on_links()["a-0->core"] / int(received)


if __name__ == "__main__":
    main(sys.argv[1:] or ["50Mbit/s", "200Mbit/s", "400Mbit/s", "1Gbit/s", "2.5Gbit/s", "5Gbit/s", "10Gbit/s"])
