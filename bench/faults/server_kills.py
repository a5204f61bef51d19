"""Stalls of rings when a parameter server dies, its standby dies, or it is stopped.

    python bench/faults/server_kills.py --kills 9                 # a minute

The servers alone, on this machine, without a job around them: ring_servers.py has that. Two servers in processes of
their own, over TLS, and rings in threads that push known gradients and pull the parameters, again and again. In turn
the leading server is killed (SIGKILL), its standby is killed, and the leading one is stopped (SIGSTOP) until the other
has taken over, and resumed. A dead server is started again, and the next fault waits until it is up to date. For each
fault: the longest round of any ring from the fault on (measured). In the end every push must have been applied once:
parameters are compared with the sum of all gradients. Exit code 1 if they differ, or a ring stalled for more than 3 s.
"""

import argparse
import itertools
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import lab_jobs
import torch

from ringweave.param_server.client import RingClient, RingPush
from ringweave.param_server.flat import FlatTensors
from ringweave.param_server.leadership import LEASE_S
from ringweave.param_server.messages import ParameterGroup, ServerSetup, TensorSpec
from tests.fakes.parameter_servers import ReplicatedServers

BAR_S = 3.0
OPTIONS = {"lr": 0.125}
FAULTS = ("kill leader", "kill standby", "stop leader")


class Ring:
    """One ring; `total` is the sum of its pushed gradients."""

    def __init__(self, client: RingClient, index: int, specs: list[TensorSpec]) -> None:
        self.client, self._index, self._specs = client, index, specs
        self.total = torch.zeros(specs[0].num_elements, dtype=torch.float64)
        self.num_pushed = 0
        self.done: list[float] = []
        self._began_s = time.monotonic()
        self.stop = threading.Event()

    def run(self) -> None:
        """Push and pull until told to stop."""
        room, draw = FlatTensors(self._specs), torch.Generator().manual_seed(self._index)
        version = self.client.pull(0, room.buffers())
        while not self.stop.is_set():
            found = torch.randint(-1000, 1000, self.total.shape, generator=draw).double()
            self.num_pushed += 1
            round_ = RingPush(
                sequence=self.num_pushed,
                base_version=version,
                content="gradient",
                num_samples=1,
                batch_share=1.0,
                options=[OPTIONS],
            )
            version = self.client.push_and_pull(round_, FlatTensors(self._specs, [found]).buffers(), room.buffers())[
                1
            ].version
            self.total += found
            self.done.append(time.monotonic())
        self.client.leave_ring(is_for_good=False)

    def longest_s(self, since_s: float) -> float:
        """Return its longest round that ended after that time, or has not ended."""
        spans = itertools.pairwise([self._began_s, *self.done, time.monotonic()])
        return max(after - before for before, after in spans if after > since_s)


def strike(pair: ReplicatedServers, fault: str, claim: int) -> tuple[float, int]:
    """Inject the fault, and wait until both servers are up again; return its time, and the newest claim then."""
    leader = pair.wait_leader()
    at_s = time.monotonic()
    if fault == "stop leader":
        pair.send_signal(leader, signal.SIGSTOP)
        pair.wait_leader(besides=leader)
        time.sleep(0.5)  # the others continue while it is stopped
        pair.send_signal(leader, signal.SIGCONT)
    else:
        pair.send_signal(leader if fault == "kill leader" else 1 - leader, signal.SIGKILL)
    return at_s, pair.wait_leadership(2, after=claim).number


def measure(num_rings: int, num_elements: int, faults: list[str], pause_s: float, lease_s: float) -> dict[str, Any]:
    """Run the rings under the faults; return the measurements."""
    specs = [TensorSpec(name="weight", shape=[num_elements], dtype="float64")]
    groups = [ParameterGroup(parameters=[0], options=OPTIONS)]
    alone = [[ring] for ring in range(num_rings)]
    setup = ServerSetup(tensors=specs, optimizer="SGD", groups=groups, rings=alone, overlaps=False, compensation=0.0)
    stalls: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder, ReplicatedServers(Path(folder), num_rings, lease_s=lease_s) as pair:
        claim = pair.wait_leadership(2).number
        rings = [Ring(pair.ring_client(index), index, specs) for index in range(num_rings)]
        rings[0].client.start_job(setup, FlatTensors(specs, [torch.zeros(num_elements, dtype=torch.float64)]).buffers())
        threads = [threading.Thread(target=ring.run) for ring in rings]
        for thread in threads:
            thread.start()
        for fault in faults:
            time.sleep(pause_s)
            at_s, claim = strike(pair, fault, claim)
            time.sleep(pause_s)
            stalls.setdefault(fault, []).append(max(ring.longest_s(at_s) for ring in rings))
        for ring in rings:
            ring.stop.set()
        for thread in threads:
            thread.join()
        room, total = FlatTensors(specs), sum(ring.total for ring in rings)
        version = rings[0].client.pull(rings[0].num_pushed, room.buffers())
        pushes = [ring.num_pushed for ring in rings]
        error = float((room.pieces[0] + OPTIONS["lr"] * total).abs().max())
        for ring in rings:
            ring.client.close()
    done = {"pushes": sum(pushes), "fewest_pushes": min(pushes)}
    return {"stalls_s": stalls, **done, "version": version, "error": error}


def missed(said: dict[str, Any], num_faults: int) -> list[str]:
    """Return the missed requirements, in words."""
    is_once = said["version"] == said["pushes"] and said["error"] < 1e-6
    once = f"{said['pushes']} pushes made {said['version']} versions, parameters off by {said['error']:.1e}"
    found = [] if is_once else [once]
    found += [] if said["fewest_pushes"] else ["a ring pushed nothing"]
    stalls = list(itertools.chain(*said["stalls_s"].values()))
    found += [f"{len(stalls)} faults happened, not {num_faults}"] if len(stalls) != num_faults else []
    return [*found, *lab_jobs.over("longest round in s", max(stalls, default=None), BAR_S)]


def main() -> int:
    """Run the faults; return 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=9, help="faults, of the three kinds in turn")
    parser.add_argument("--rings", type=int, default=4)
    parser.add_argument("--elements", type=int, default=500_000, help="parameters, of 8 bytes each")
    parser.add_argument("--pause-s", type=float, default=1.0, help="of undisturbed work before and after each fault")
    parser.add_argument("--lease-s", type=float, default=LEASE_S)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    faults = list(itertools.islice(itertools.cycle(FAULTS), asked.kills))
    said = measure(asked.rings, asked.elements, faults, asked.pause_s, asked.lease_s)
    for fault, found in said["stalls_s"].items():
        most = f"{statistics.median(found):.2f} s median, {max(found):.2f} s most, n={len(found)}"
        print(f"{fault}: longest round {most}")
    print(f"{said['pushes']} pushes, version {said['version']}, parameters off by {said['error']:.1e}")
    print("All of it is measured.")
    lab_jobs.leave(asked.out, "server-kills", {"rings": asked.rings, "lease_s": asked.lease_s, **said})
    return lab_jobs.verdict(missed(said, asked.kills))


if __name__ == "__main__":
    sys.exit(main())
