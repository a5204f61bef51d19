"""Fraction of its link that the parameter server fills, and its memory: `python bench/params_rates.py [RATE ...]`.

A lab of a server (`ringweave server`, over TLS) and four rings of one, each with a NIC of that rate. Every ring pushes
a gradient of 22 MB and takes the parameters, again and again, computing nothing. The rate is gradients received (and
parameters sent) per second, measured, as a share of the server's NIC before Ethernet, IP and TCP take about 5 % of it;
tensors held are the server's own count, and memory is what the process had at most beyond its start. Needs root.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from ringweave import lab, rpc, topology, units
from ringweave.lab import Lab
from ringweave.param_server import flat
from ringweave.param_server.client import RingClient, RingPush
from ringweave.param_server.flat import FlatTensors
from ringweave.param_server.messages import ParameterGroup, ServerSetup, TensorSpec

NAME = "params-trial"
NUM_RINGS, NUM_ELEMENTS = 4, 5_500_000
OPTIONS = {"SGD": {"lr": 1e-4, "momentum": 0.9}, "AdamW": {"lr": 1e-4}}


def ring(folder: str, address: str, port: str, index: str, optimizer: str) -> None:
    """Run one ring: begin the job if it is the first, then run as many rounds as each line of its input says."""
    trust = rpc.TlsAuthentication(rpc.Credentials.load(Path(folder) / index))
    client = RingClient([lambda: rpc.RpcClient.connect(address, int(port), trust, role="server")], int(index))
    specs = [TensorSpec(name="weights", shape=[NUM_ELEMENTS], dtype="float32")]
    if index == "0":
        groups = [ParameterGroup(parameters=[0], options=OPTIONS[optimizer])]
        rings = [[number] for number in range(NUM_RINGS)]
        setup = ServerSetup(
            tensors=specs, optimizer=optimizer, groups=groups, rings=rings, overlaps=False, compensation=0.0
        )
        client.start_job(setup, FlatTensors(specs, [torch.randn(NUM_ELEMENTS)]).buffers())
    print("ready", flush=True)
    sys.stdin.readline()
    gradient, room = FlatTensors(specs, [torch.randn(NUM_ELEMENTS)]), FlatTensors(specs)
    version, sequence = client.pull(0, room.buffers()), 0
    for line in sys.stdin:
        began_s = time.monotonic()
        for _ in range(int(line)):
            sequence += 1
            round_ = RingPush(
                sequence=sequence,
                base_version=version,
                content="gradient",
                num_samples=1,
                batch_share=1 / NUM_RINGS,
                options=[OPTIONS[optimizer]],
            )
            version = client.push_and_pull(round_, gradient.buffers(), room.buffers())[1].version
        print(json.dumps([began_s, time.monotonic()]), flush=True)
    client.leave_ring(is_for_good=True)


def _start(nodes: Lab, node: str, argv: list[str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(nodes.command(node, argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _read(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _say(process: "subprocess.Popen[str]", line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def _peak_bytes(pid: int, field: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def measure(nodes: Lab, rate: str, optimizer: str, rounds: int, repeats: int) -> None:
    """Measure one rate and optimizer, and print a line."""
    authority = rpc.CertificateAuthority("bench")
    specs = [TensorSpec(name="weights", shape=[NUM_ELEMENTS], dtype="float32")]
    num_bytes = flat.buffer_sizes(specs)[0]
    address = nodes.addresses["server"][0]
    with tempfile.TemporaryDirectory() as folder:
        for role, name in [("server", "server"), *(("worker", str(index)) for index in range(NUM_RINGS))]:
            authority.issue(role, name).save(Path(folder) / name)
        serve = [sys.executable, "-m", "ringweave", "server", "--host", address, "--credentials", f"{folder}/server"]
        server = _start(nodes, "server", serve)
        port = _read(server).rpartition(":")[2]
        before = _peak_bytes(server.pid, "VmRSS")
        rings = []
        for index in range(NUM_RINGS):
            argv = [sys.executable, __file__, "--ring", folder, address, port, str(index), optimizer]
            rings.append(_start(nodes, f"ring-{index}", argv))
            _read(rings[-1])
        for process in rings:
            _say(process, "")
        shares = []
        for number in range(repeats + 1):
            for process in rings:
                _say(process, str(rounds))
            spans = [json.loads(_read(process)) for process in rings]
            seconds = max(span[1] for span in spans) - min(span[0] for span in spans)
            if number:  # the first found the links idle
                shares.append(NUM_RINGS * rounds * num_bytes / seconds / units.parse_rate(rate))
        grown = _peak_bytes(server.pid, "VmHWM") - before
        for process in rings:
            process.communicate()
        said = server.communicate()[0].strip().splitlines()[-1]
    states = {"SGD": 2, "AdamW": 3}[optimizer]
    print(
        f"{rate} {optimizer}: {sorted(shares)[len(shares) // 2]:.1%} of the link each way "
        f"({min(shares):.1%} .. {max(shares):.1%}), process grew {grown / 1e6:.0f} MB at most = "
        f"{grown / (states * num_bytes):.2f} x parameters and optimizer state (measured)\n  {said}",
        flush=True,
    )


def main() -> None:
    """Measure at every rate with both optimizers, or be a ring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("rates", nargs="*", default=["400Mbit/s"])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--optimizers", default=",".join(OPTIONS), help="separated by commas")
    parser.add_argument("--ring", nargs=5)
    asked = parser.parse_args()
    if asked.ring:
        ring(*asked.ring)
        return
    for rate in asked.rates:
        rings = f"{{name: ring, nic: {rate}, devices: 1, count: {NUM_RINGS}}}"
        text = f"name: {NAME}\nnodes: [{{name: server, nic: {rate}, devices: 1}}, {rings}]\n"
        try:
            nodes = lab.up(topology.loads(text))
            for optimizer in asked.optimizers.split(","):
                measure(nodes, rate, optimizer, asked.rounds, asked.repeats)
        finally:
            lab.down(NAME)


if __name__ == "__main__":
    main()
