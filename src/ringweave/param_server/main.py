"""Process of a parameter server: `python -m ringweave.param_server.main`, run by `ringweave server`."""

import argparse
import gc
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from ringweave import rpc
from ringweave.errors import RingweaveError, UsageError, explain
from ringweave.files import rotation
from ringweave.param_server import optimizers, snapshots
from ringweave.param_server.leadership import LEASE_S, LeadershipRecord
from ringweave.param_server.messages import ServerStatus
from ringweave.param_server.replication import NoStandby
from ringweave.param_server.service import ParameterService
from ringweave.param_server.sessions import ring_of
from ringweave.param_server.standby import ServerPair
from ringweave.rpc.channel import ConnectionTraffic
from ringweave.telemetry import event_writer, print_line

_SERVER_TICK_S = 0.1
_STATUS_EVERY_S = 5.0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of the process; `ringweave server --help` explains them."""
    parser = argparse.ArgumentParser(prog="ringweave server")
    parser.add_argument("--credentials", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--node", default="")
    parser.add_argument("--run-dir", type=Path)
    parser.add_argument("--snapshots", type=Path)
    parser.add_argument("--snapshot-every-s", type=float, default=60.0)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--other", metavar="HOST:PORT")
    parser.add_argument("--index", type=int, choices=(0, 1), default=0)
    parser.add_argument("--claims")
    parser.add_argument("--lease-s", type=float, default=LEASE_S)
    return parser.parse_args(argv)


class ParameterServerProcess:
    """Process of a parameter server; serves until it is stopped, or all rings have left."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._write = event_writer(args.run_dir / "events.jsonl" if args.run_dir else None)
        self._stopped = threading.Event()
        torch.set_num_threads(1)  # memory-bound; waiting threads stall on a busy node
        optimizers.warm_up_optimizer()
        authentication = rpc.TlsAuthentication(rpc.Credentials.load_from(args.credentials))
        self.pair = ServerPair(args, authentication, self._report_record) if args.other else None
        replicator = self.pair.leadership if self.pair else NoStandby()
        self.service = ParameterService(
            replicator=replicator,
            max_peers=self._max_workers,
            reset_max_peers=lambda: self.server.reset_max_peers("worker"),
            state_server=self.pair.leadership.state_server if self.pair else None,
        )
        if args.resume:
            self.service.resume(snapshots.load_snapshot(args.resume))
        self.server = rpc.RpcServer(
            authentication,
            [*self.service.handlers(), *(self.pair.handlers(self.service) if self.pair else ())],
            roles=("worker", "server") if self.pair else ("worker",),
            is_revoked=self.service.ring_sessions.is_revoked,
            write_event=self._write,
            on_handler_error=_report_handler_error,
            on_peer_exit=self.service.ring_sessions.note_disconnect,
            on_peer_lost=self.service.ring_sessions.note_disconnect,
        )

    def stop(self, *_: object) -> None:
        """Stop soon; also the signal handler."""
        self._stopped.set()

    def run(self) -> None:
        """Serve until the end."""
        with self.server.start(self._args.host, self._args.port):
            print_line(f"parameter server listens on {self._args.host}:{self.server.port}")
            if self.pair:
                self.pair.begin(self.service, self._stopped)
            counted_s = saved_s = time.monotonic()
            while not self._stopped.wait(_SERVER_TICK_S) and not self.service.is_done:
                if self.pair:
                    self.pair.tick(self.server.peers(), self.service)
                if self._is_leading:
                    for ring in sorted(self.service.ring_sessions.check_silence(self.server.peers())):
                        print_line(f"parameter server: ring {ring} is silent: no ring waits for it until it is heard")
                now_s = time.monotonic()
                if now_s - counted_s >= _STATUS_EVERY_S and self.service.version:
                    counted_s = now_s
                    self._report_status(is_last=False)
                if self._args.snapshots and now_s - saved_s >= self._args.snapshot_every_s:
                    saved_s = now_s
                    self._save_snapshot()
            if self._args.snapshots:
                self._save_snapshot()
        self._report_status(is_last=True)

    @property
    def _is_leading(self) -> bool:
        return self.pair is None or self.pair.leadership.is_leading

    def _max_workers(self) -> int:
        return self.server.max_peers("worker")

    def _calls_by_ring(self) -> dict[str, dict[str, float]]:
        """Return ring -> calls of its present ranks, over all their connections."""
        job = self.service.job
        traffic_by_ring: dict[int, ConnectionTraffic] = {}
        for peer, traffic in self.server.traffic_by_peer().items():
            ring = ring_of(job, peer) if job and peer.role == "worker" else None
            if ring is not None:
                traffic_by_ring[ring] = traffic_by_ring.get(ring, ConnectionTraffic()) + traffic
        return {
            str(ring): {
                "calls": each.calls,
                "failures": each.failures,
                "latency_mean_s": each.latency_sum_s / max(1, each.calls),
                "latency_max_s": each.latency_max_s,
            }
            for ring, each in sorted(traffic_by_ring.items())
        }

    def _report_record(self, record: LeadershipRecord, reason: str) -> None:
        others = "with a standby" if len(record.members) > 1 else "alone"
        print_line(f"parameter server: server {record.leader} leads in term {record.term}, {others}: {reason}")
        self._write(
            "params_leader_changed",
            node=self._args.node,
            server=record.leader,
            term=record.term,
            record=record.number,
            members=list(record.members),
            reason=reason,
        )

    def _report_status(self, *, is_last: bool) -> None:
        if not self._is_leading:
            return
        status = self.service.status()
        fields = status.model_dump()
        self._write("params_counted", node=self._args.node, last=is_last, **fields, rpc=self._calls_by_ring())
        if is_last and status.version:
            print_line(status_to_text(status))

    def _save_snapshot(self) -> None:
        path = self._args.snapshots / "server.safetensors"
        started_s = time.monotonic()
        try:
            version = self.service.save_snapshot(path)
        except OSError as error:
            text = f"snapshot of the parameter server: {error}. Training goes on. [{path.name}]"
            print_line(text, is_error=True)
            return
        if version is not None:
            seconds = round(time.monotonic() - started_s, 3)
            self._write("params_saved", node=self._args.node, version=version, path=str(path), seconds=seconds)


def status_to_text(status: ServerStatus) -> str:
    """Return the counters as text for people."""
    ages = ", ".join(f"{age}: {number}" for age, number in status.staleness.items())
    rings = ", ".join(f"{ring}: {number}" for ring, number in status.pushes.items())
    return (
        f"parameter server: {status.version} pushes applied (ring: pushes {rings}), {status.repeats} repeated not; "
        f"staleness in versions: pushes {ages}; {status.received_bytes / 1e6:.1f} MB received and "
        f"{status.sent_bytes / 1e6:.1f} MB sent, never more than {status.most_peers} peers, "
        f"{status.memory_bytes / 1e6:.1f} MB of tensors held (measured)"
    )


def _report_handler_error(peer: rpc.Identity, kind: str, error: Exception) -> None:
    print_line(f"parameter server: {kind} of {peer.name}: {type(error).__name__}: {error}", is_error=True)


def main(argv: Sequence[str]) -> int:
    """Run the process; return its exit code."""
    try:
        rotation.rotate_own_output()
        process = ParameterServerProcess(parse(argv))
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signal_number, process.stop)
        gc.freeze()  # full collections would traverse all of torch and stall all rings: see decision 0027
        process.run()
    except RingweaveError as error:
        print_line(f"ringweave server: error: {error}", is_error=True)
        return error.exit_code
    except OSError as error:
        do = "Look at --host, --port, --credentials, --resume and --run-dir"
        text = explain("parameter server", got=str(error), expected="an address, and files that it can use", do=do)
        print_line(f"ringweave server: error: {text}", is_error=True)
        return UsageError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
