"""Fraction of a link that `ringweave.rpc` fills, and the cost of TLS: `python bench/wire_rates.py [RATE ...]`.

A lab of a server and four peers, each with a NIC of that rate. *push*: all four call with 22 MB at once, again and
again, and wait for a small answer. *pull*: one peer reads a state of 88 MB. Rates are content per second from the first
call to the last answer, measured, as shares of the rate of the server's NIC before Ethernet, IP and TCP take about 5 %
of it. TLS and plain take turns. Needs root.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import ClassVar

import numpy as np

from ringweave import lab, rpc, topology, units
from ringweave.lab import Lab
from ringweave.rpc import state_transfer
from tests.fakes.plaintext import PlaintextAuthentication

NAME = "wire-trial"
NUM_PEERS, PUSH_BYTES, STATE_BYTES = 4, 22_000_000, 88_000_000


class Push(rpc.RpcMessage):
    """Comes with 22 MB."""

    kind: ClassVar[str] = "bench.push"


def _trust(folder: Path, name: str, how: str) -> rpc.PeerAuthentication:
    credentials = rpc.Credentials.load(folder / name)
    return (
        rpc.TlsAuthentication(credentials)
        if how == "tls"
        else PlaintextAuthentication(credentials.identity, credentials.token)
    )


def serve(folder: Path, how: str, address: str) -> None:
    """The server: says its port, serves until its input ends, says what that cost."""
    shelf = state_transfer.StateServer()
    shelf.publish("model", {"weights": np.random.default_rng(0).integers(0, 256, STATE_BYTES, np.uint8)})
    handlers = [rpc.RpcHandler(message=Push, handle=lambda call: rpc.Ack()), *shelf.handlers()]
    with rpc.RpcServer(_trust(folder, "server", how), handlers).start(address) as server:
        before = resource.getrusage(resource.RUSAGE_SELF)
        print(server.port, flush=True)
        sys.stdin.read()
        after = resource.getrusage(resource.RUSAGE_SELF)
    spent_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(json.dumps({"cpu_s": spent_s, "grew_bytes": (after.ru_maxrss - before.ru_maxrss) * 1024}), flush=True)


def peer(folder: Path, how: str, address: str, port: str, index: str) -> None:
    """A peer: does what each line of its input says, and says when it began and ended."""
    content = np.random.default_rng(int(index)).integers(0, 256, PUSH_BYTES, np.uint8)
    with rpc.RpcClient.connect(address, int(port), _trust(folder, f"peer{index}", how), role="server") as client:
        print("ready", flush=True)
        for line in sys.stdin:
            verb, times = line.split()
            began_s = time.monotonic()
            for _ in range(int(times)):
                if verb == "push":
                    client.call(Push(), [content], timeout_s=60)
                else:
                    state_transfer.fetch_state(client, "model", timeout_s=60)
            print(json.dumps([began_s, time.monotonic()]), flush=True)


class Trial:
    """A server and four peers in a lab, all with TLS or all without."""

    def __init__(self, nodes: Lab, folder: Path, how: str) -> None:
        """Start them."""
        me, address = [sys.executable, __file__], nodes.addresses["server"][0]
        self._server = _start(nodes, "server", [*me, "--serve", str(folder), how, address])
        port = _read(self._server)
        self._peers = [
            _start(nodes, f"peer-{index}", [*me, "--peer", str(folder), how, address, port, str(index)])
            for index in range(NUM_PEERS)
        ]
        for process in self._peers:
            _read(process)

    def measure(self, verb: str, num_peers: int, times: int, num_bytes: int) -> float:
        """Content in bytes per second over all peers that take part."""
        taking_part = self._peers[:num_peers]
        for process in taking_part:
            assert process.stdin is not None
            process.stdin.write(f"{verb} {times}\n")
            process.stdin.flush()
        spans = [json.loads(_read(process)) for process in taking_part]
        return num_peers * times * num_bytes / (max(span[1] for span in spans) - min(span[0] for span in spans))

    def end_benchmarks(self) -> dict[str, float]:
        """Stop them; what the server used."""
        for process in self._peers:
            process.communicate()
        return json.loads(self._server.communicate()[0])


def _start(nodes: Lab, node: str, argv: list[str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(nodes.command(node, argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _read(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def measure(nodes: Lab, rate: str, rounds: int, pushes: int) -> None:
    """Measure both ways in turns; print the medians of their rounds."""
    authority = rpc.CertificateAuthority("bench")
    found: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for role, name in [("server", "server"), *(("worker", f"peer{index}") for index in range(NUM_PEERS))]:
            authority.issue(role, name).save(Path(folder) / name)
        trials = {how: Trial(nodes, Path(folder), how) for how in ("tls", "plain")}
        for how in [*trials, *list(trials) * rounds]:
            found.setdefault((how, "push"), []).append(trials[how].measure("push", NUM_PEERS, pushes, PUSH_BYTES))
            found.setdefault((how, "pull"), []).append(trials[how].measure("pull", 1, 1, STATE_BYTES))
        used = {how: trial.end_benchmarks() for how, trial in trials.items()}
    gigabytes = (rounds + 1) * (NUM_PEERS * pushes * PUSH_BYTES + STATE_BYTES) / 1e9
    for (how, verb), rates in found.items():
        shares = [each / units.parse_rate(rate) for each in rates[1:]]  # the first found the links idle
        extremes = f"{min(shares):.1%} .. {max(shares):.1%}"
        speed = (
            f"{statistics.median(rates[1:]) / 1e6:6.1f} MB/s  {statistics.median(shares):6.1%} of the link ({extremes})"
        )
        cost = f"server {used[how]['cpu_s'] / gigabytes:.2f} s/GB, grew {used[how]['grew_bytes'] / 1e6:.0f} MB"
        print(f"{rate:9} {verb} {how:6} {speed}  {cost}", flush=True)


def main() -> None:
    """Measure at every rate, each in a lab of its own; or be a server or a peer in one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("rates", nargs="*", default=["400Mbit/s", "1Gbit/s"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pushes", type=int, default=2)
    parser.add_argument("--serve", nargs=3)
    parser.add_argument("--peer", nargs=5)
    asked = parser.parse_args()
    if asked.serve:
        serve(Path(asked.serve[0]), *asked.serve[1:])
    elif asked.peer:
        peer(Path(asked.peer[0]), *asked.peer[1:])
    else:
        for rate in asked.rates:
            peers = f"{{name: peer, nic: {rate}, devices: 1, count: {NUM_PEERS}}}"
            text = f"name: {NAME}\nnodes: [{{name: server, nic: {rate}, devices: 1}}, {peers}]\n"
            try:
                measure(lab.up(topology.loads(text)), rate, asked.rounds, asked.pushes)
            finally:
                lab.down(NAME)


if __name__ == "__main__":
    main()
