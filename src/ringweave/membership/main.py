"""Process of a coordinator or its standby: `python -m ringweave.membership.main`."""

import argparse
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from ringweave import rpc
from ringweave.errors import RingweaveError
from ringweave.files import rotation
from ringweave.membership import membership_records, service, settings
from ringweave.membership.membership_records import GenerationId, Membership
from ringweave.membership.messages import STARTUP_RENDEZVOUS, CoordinatorStatus
from ringweave.membership.service import CoordinatorListener, OtherCoordinatorPoller
from ringweave.membership.settings import MembershipSettings
from ringweave.telemetry import event_writer, print_line

TICK_S = 0.05
COORDINATOR_ROLE = "coordinator"
_NO_OTHER = CoordinatorStatus(
    term=0,
    is_active=False,
    generation_id=membership_records.NO_GENERATION,
    members=[],
    committed=0,
    present=[],
    ended="",
)
"""Status in the place of another coordinator's where there is none: no member can be with it."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of the process."""
    parser = argparse.ArgumentParser(prog="ringweave coordinator")
    parser.add_argument("--credentials", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--elastic", required=True)
    parser.add_argument("--expected", type=int, required=True)
    parser.add_argument("--patience-s", type=float, default=60.0)
    parser.add_argument("--index", type=int, choices=(0, 1), required=True)
    parser.add_argument("--standby", action="store_true")
    parser.add_argument("--other", help="HOST:PORT of the other coordinator; left out if there is none")
    parser.add_argument("--successors", default="", help="members that are about to start in the place of others")
    parser.add_argument("--run-dir", type=Path)
    return parser.parse_args(argv)


class CoordinatorEventReporter(CoordinatorListener):
    """Reports decisions in the log of the process and in the events of the run."""

    def __init__(self, write: Callable[..., None]) -> None:
        self._write = write

    def generation_begun(self, part: str, membership: Membership, term: int) -> None:
        """Report the members, and those of them that are new."""
        of_term, number = membership.generation_id
        members = list(membership.members)
        prefix = f"{part}: " if part else ""
        print_line(f"coordinator: {prefix}generation {number} of term {of_term}: {', '.join(members)}")
        if part != STARTUP_RENDEZVOUS:
            newcomers = [each.member for each in membership.statuses if not (each.has_state or each.is_recovering)]
            self._write(
                "generation_begun",
                term=of_term,
                reported_in_term=term,
                number=number,
                members=members,
                newcomers=newcomers,
                committed=membership.last_committed,
                part=part,
            )

    def member_lost(self, part: str, member: str, reason: str, term: int) -> None:
        """Report the member and the reason; not for the startup rendezvous."""
        if part == STARTUP_RENDEZVOUS:
            return
        reason = reason or membership_records.REASON_FINISHED
        print_line(f"coordinator: {member} is no member any more: {reason}")
        self._write("member_lost", member=member, reason=reason, term=term)

    def member_returned(self, part: str, member: str, term: int) -> None:
        if part == STARTUP_RENDEZVOUS:
            return
        print_line(f"coordinator: {member} is back")
        self._write("member_returned", member=member, term=term)

    def standstill_restarted(self, part: str, generation_id: GenerationId) -> None:
        """Report the generation that made no progress."""
        term, number = generation_id
        print_line(
            f"coordinator: standstill in generation {number} of term {term}: all members wait for each other; "
            "the next generation begins"
        )
        self._write("standstill", term=term, number=number)


class CoordinatorProcess:
    """Process of a coordinator. It serves until it is stopped, so members that come late get an answer."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        write = event_writer(args.run_dir / "events.jsonl" if args.run_dir else None)
        self._stopped = threading.Event()
        membership_settings = MembershipSettings(
            bounds=settings.parse_bounds(args.elastic), expected=args.expected, member_wait_s=args.patience_s
        )
        self.service = service.make_coordinator_set(
            membership_settings,
            index=args.index,
            is_standby=args.standby,
            listener=CoordinatorEventReporter(write),
        )
        self.service.announce_start([each for each in args.successors.split(",") if each])
        authentication = rpc.TlsAuthentication(rpc.Credentials.load_from(args.credentials))
        self._other_poller: AbstractContextManager[object] = nullcontext()
        if args.other:
            host, _, port = args.other.rpartition(":")
            self._other_poller = OtherCoordinatorPoller(
                (host, int(port)), authentication, self.service.update_from_other
            )
        self.server = rpc.RpcServer(
            authentication,
            self.service.handlers(),
            roles=("worker", "launcher", COORDINATOR_ROLE),
            write_event=write,
            on_handler_error=_report_handler_error,
            on_peer_exit=self.service.peer_exited,
        )

    def stop(self, *_: object) -> None:
        """Stop soon; also the signal handler."""
        self._stopped.set()

    def run(self) -> None:
        """Serve until `stop`."""
        with self.server.start(self._args.host, self._args.port), self._other_poller:
            print_line(f"coordinator listens on {self._args.host}:{self.server.port}")
            ended = ""
            while not self._stopped.wait(TICK_S):
                self.service.tick(self.server.peer_names)
                if not self._args.other:
                    self.service.update_from_other(_NO_OTHER)
                if self.service.end_reason != ended:
                    ended = self.service.end_reason
                    print_line(
                        f"coordinator: the job is over: {ended}" if ended else "coordinator: the job is not over"
                    )


def _report_handler_error(peer: rpc.Identity, kind: str, error: Exception) -> None:
    print_line(f"coordinator: {kind} of {peer.name}: {type(error).__name__}: {error}", is_error=True)


def main(argv: Sequence[str]) -> int:
    """Run the process; return its exit code."""
    try:
        rotation.rotate_own_output()
        process = CoordinatorProcess(parse(argv))
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signal_number, process.stop)
        process.run()
    except RingweaveError as error:
        print_line(f"{type(error).__name__}: {error}", is_error=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
