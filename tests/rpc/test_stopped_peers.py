"""A peer that is stopped (SIGSTOP) keeps its connection and takes nothing; the others must not notice."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from ringweave import rpc
from tests.polling import wait_until
from tests.rpc.parts import Echo, Events, connect, serving, trust

PEER = """
import sys, numpy as np
from pathlib import Path
from ringweave import rpc
from tests.rpc.parts import Echo
trusted = rpc.TlsAuthentication(rpc.Credentials.load(Path(sys.argv[2])))
with rpc.RpcClient.connect("127.0.0.1", int(sys.argv[1]), trusted, role="server") as client:
    print("ready", flush=True)
    while True:
        client.call(Echo(), [np.ones(8_000_000, np.uint8)], timeout_s=60)
"""


def stop_within_a_call(pid: int, server: rpc.RpcServer) -> None:
    """Stop a peer that calls without end while the server holds one of its messages: an idle one is cut by nobody."""
    os.kill(pid, signal.SIGSTOP)
    time.sleep(0.2)  # what was complete when it stopped is answered
    while not server.held_bytes and len(server.peers()) > 1:
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.05)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_stopped_peer_is_cut_in_time_and_nobody_else_waits(
    authority: rpc.CertificateAuthority, events: Events, tmp_path: Path
) -> None:
    authority.issue("worker", "stopped").save(tmp_path / "stopped")
    limits = rpc.RpcLimits(patience_s=6.0, slowest_bytes_per_s=20e6)
    echo = rpc.RpcHandler(message=Echo, handle=lambda call: rpc.RpcReply(Echo(), call.buffers))
    with serving(trust(authority, "server", "0"), echo, limits=limits, write_event=events) as server:
        argv = [sys.executable, "-c", PEER, str(server.port), str(tmp_path / "stopped")]
        peer = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        try:
            assert peer.stdout is not None
            assert peer.stdout.readline() == "ready\n"
            with connect(server, trust(authority, "worker", "1")) as honest:
                wait_until(lambda: any(status.traffic["calls"] > 1 for status in server.peers()))
                content, num_answered = np.ones(1_000_000, np.uint8), 0
                while len(server.peers()) > 1:
                    stop_within_a_call(peer.pid, server)
                    honest.call(Echo(), [content], timeout_s=60)
                    num_answered += len(server.peers()) > 1
                assert num_answered >= 3, "while the server had patience with the stopped peer"
                wait_until(lambda: server.held_bytes == 0)
        finally:
            os.kill(peer.pid, signal.SIGCONT)
            peer.kill()
            peer.communicate()
