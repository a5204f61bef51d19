"""The process of a parameter server: `python -m ringweave.params.serving.main`, which `ringweave server` becomes."""

import argparse
import gc
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from ringweave import wire
from ringweave.errors import RingweaveError, UsageError, explain
from ringweave.params.messages import Status
from ringweave.params.rules.succession import LEASE_S, Claim
from ringweave.params.serving import optimizers, snapshots
from ringweave.params.serving.attending import ring_of
from ringweave.params.serving.replicas import Alone
from ringweave.params.serving.service import ParameterService
from ringweave.params.standby.pair import Pair
from ringweave.telemetry import EventLog, say
from ringweave.wire.metrics import Traffic

_TICK_S = 0.1
_COUNT_EVERY_S = 5.0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments of the process; `ringweave server --help` explains them."""
    parser = argparse.ArgumentParser(prog="ringweave server")
    parser.add_argument("--credentials", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--node", default="")
    parser.add_argument("--run-dir", type=Path)
    parser.add_argument("--snapshots", type=Path)
    parser.add_argument("--snapshot-every-s", type=float, default=60.0)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--term", type=int, default=0)
    parser.add_argument("--other", metavar="HOST:PORT")
    parser.add_argument("--index", type=int, choices=(0, 1), default=0)
    parser.add_argument("--claims", type=Path)
    parser.add_argument("--lease-s", type=float, default=LEASE_S)
    return parser.parse_args(argv)


class Process:
    """Serves until it is told to end, or all rings have left."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self._asked = asked
        self._log = EventLog(asked.run_dir / "events.jsonl") if asked.run_dir else None
        self._stop = threading.Event()
        torch.set_num_threads(1)  # the memory is the limit; and threads that wait for each other stall on a busy node
        optimizers.warm_up()
        trust = wire.Tls(wire.Credentials.load_from(asked.credentials))
        self.pair = Pair(asked, trust, self._note_claim) if asked.other else None
        replica = self.pair.leadership if self.pair else Alone(asked.term)
        self.service = ParameterService(
            replica=replica,
            most_peers=self._most_workers,
            count_peers_anew=lambda: self.server.count_peers_anew("worker"),
            shelf=self.pair.leadership.shelf if self.pair else None,
        )
        if asked.resume:
            self.service.resume(snapshots.load(asked.resume))
        self.server = wire.Server(
            trust,
            [*self.service.handlers(), *(self.pair.handlers(self.service) if self.pair else ())],
            roles=("worker", "server") if self.pair else ("worker",),
            record=self._log.write if self._log else None,
            complain=_complain,
            hung_up=self.service.attendance.missed,
            lost=self.service.attendance.missed,
        )

    def stop(self, *_: object) -> None:
        """End soon; also what signals call."""
        self._stop.set()

    def run(self) -> None:
        """Until the end."""
        with self.server.start(self._asked.host, self._asked.port):
            say(f"parameter server listens on {self._asked.host}:{self.server.port}")
            if self.pair:
                self.pair.begin(self.service, self._stop)
            counted_s = saved_s = time.monotonic()
            while not self._stop.wait(_TICK_S) and not self.service.is_done:
                if self.pair:
                    self.pair.tick(self.server.peers(), self.service)
                if self._leads:
                    for ring in sorted(self.service.attendance.listen(self.server.peers())):
                        say(f"parameter server: ring {ring} is not heard of: nobody waits for it until it is")
                now_s = time.monotonic()
                if now_s - counted_s >= _COUNT_EVERY_S and self.service.version:
                    counted_s = now_s
                    self._count(is_last=False)
                if self._asked.snapshots and now_s - saved_s >= self._asked.snapshot_every_s:
                    saved_s = now_s
                    self._save()
            if self._asked.snapshots:
                self._save()
        self._count(is_last=True)

    @property
    def _leads(self) -> bool:
        return self.pair is None or self.pair.leadership.leads

    def _most_workers(self) -> int:
        return self.server.most_peers("worker")

    def _calls(self) -> dict[str, dict[str, float]]:
        """Ring -> calls of its ranks, over all their connections; ranks as they are in rings by now."""
        job = self.service.job
        found: dict[int, Traffic] = {}
        for peer, traffic in self.server.traffic().items():
            ring = ring_of(job, peer) if job and peer.role == "worker" else None
            if ring is not None:
                found[ring] = found.get(ring, Traffic()) + traffic
        return {
            str(ring): {
                "calls": each.calls,
                "failures": each.failures,
                "latency_mean_s": each.latency_sum_s / max(1, each.calls),
                "latency_max_s": each.latency_max_s,
            }
            for ring, each in sorted(found.items())
        }

    def _note_claim(self, claim: Claim, why: str) -> None:
        others = "with a standby" if len(claim.members) > 1 else "alone"
        say(f"parameter server: server {claim.leader} leads in term {claim.term}, {others}: {why}")
        if self._log:
            self._log.write(
                "params_led",
                node=self._asked.node,
                server=claim.leader,
                term=claim.term,
                claim=claim.number,
                members=list(claim.members),
                reason=why,
            )

    def _count(self, *, is_last: bool) -> None:
        if not self._leads:
            return
        status = self.service.status()
        if self._log:
            said = status.model_dump()
            self._log.write("params_counted", node=self._asked.node, last=is_last, **said, wire=self._calls())
        if is_last and status.version:
            say(to_text(status))

    def _save(self) -> None:
        path = self._asked.snapshots / "server.safetensors"
        started_s = time.monotonic()
        try:
            version = self.service.snapshot(path)
        except OSError as error:
            text = f"snapshot of the parameter server: {error}. Training goes on. [{path.name}]"
            say(text, is_error=True)
            return
        if self._log and version is not None:
            seconds = round(time.monotonic() - started_s, 3)
            self._log.write("params_saved", node=self._asked.node, version=version, path=str(path), seconds=seconds)


def to_text(status: Status) -> str:
    """The counts, for people."""
    ages = ", ".join(f"{age}: {number}" for age, number in status.staleness.items())
    rings = ", ".join(f"{ring}: {number}" for ring, number in status.pushes.items())
    return (
        f"parameter server: {status.version} pushes applied (ring: pushes {rings}), {status.repeats} repeated not; "
        f"staleness in versions: pushes {ages}; {status.received_bytes / 1e6:.1f} MB received and "
        f"{status.sent_bytes / 1e6:.1f} MB sent, never more than {status.most_peers} peers, "
        f"{status.memory_bytes / 1e6:.1f} MB of tensors held (measured)"
    )


def _complain(peer: wire.Identity, kind: str, error: Exception) -> None:
    say(f"parameter server: {kind} of {peer.name}: {type(error).__name__}: {error}", is_error=True)


def main(argv: Sequence[str]) -> int:
    """Exit code of the process."""
    try:
        process = Process(parse(argv))
        for how in (signal.SIGTERM, signal.SIGINT):
            signal.signal(how, process.stop)
        gc.collect()
        gc.freeze()  # whole collections keep all rings waiting, and would go through all of torch: see decision 0064
        process.run()
    except RingweaveError as error:
        say(f"ringweave server: error: {error}", is_error=True)
        return error.exit_code
    except OSError as error:
        do = "Look at --host, --port, --credentials, --resume and --run-dir"
        text = explain("parameter server", got=str(error), expected="an address, and files that it can use", do=do)
        say(f"ringweave server: error: {text}", is_error=True)
        return UsageError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
