"""The process of a coordinator, or of its standby: `python -m ringweave.membership.serving.main`."""

import argparse
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from ringweave import wire
from ringweave.errors import RingweaveError
from ringweave.membership.messages import LOBBY
from ringweave.membership.rules import reasons, settings
from ringweave.membership.rules.records import Ballot, Decree
from ringweave.membership.rules.settings import Settings
from ringweave.membership.serving import parts
from ringweave.membership.serving.notes import Notes
from ringweave.membership.serving.rivals import Rival
from ringweave.telemetry import EventLog, say

TICK_S = 0.05
ROLE = "coordinator"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments of the process."""
    parser = argparse.ArgumentParser(prog="ringweave coordinator")
    parser.add_argument("--credentials", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--elastic", required=True)
    parser.add_argument("--expected", type=int, required=True)
    parser.add_argument("--patience-s", type=float, default=60.0)
    parser.add_argument("--index", type=int, choices=(0, 1), required=True)
    parser.add_argument("--standby", action="store_true")
    parser.add_argument("--other", help="HOST:PORT of the other coordinator")
    parser.add_argument("--successors", default="", help="members that are about to start in the place of others")
    parser.add_argument("--run-dir", type=Path)
    return parser.parse_args(argv)


class Said(Notes):
    """What the process says of what is decided, in its log and in the events of the run."""

    def __init__(self, log: EventLog | None) -> None:
        self._log = log

    def begun(self, part: str, decree: Decree, term: int) -> None:
        """Who is in it, and who is new."""
        of_term, number = decree.ballot
        members = list(decree.members)
        where = f"{part}: " if part else ""
        say(f"coordinator: {where}epoch {number} of term {of_term}: {', '.join(members)}")
        if self._log and part != LOBBY:
            newcomers = [each.member for each in decree.standings if not (each.has_state or each.is_following)]
            self._log.write(
                "epoch_begun",
                term=of_term,
                said_in=term,
                number=number,
                members=members,
                newcomers=newcomers,
                committed=decree.committed,
                part=part,
            )

    def lost(self, part: str, member: str, reason: str, term: int) -> None:
        """Who, and why; who waits for the members of a ring to be formed is nobody's concern."""
        if part == LOBBY:
            return
        say(f"coordinator: {member} is no member any more: {reason or reasons.FINISHED}")
        if self._log:
            self._log.write("member_lost", member=member, reason=reason or reasons.FINISHED, term=term)

    def back(self, part: str, member: str, term: int) -> None:
        """Who."""
        if part == LOBBY:
            return
        say(f"coordinator: {member} is back")
        if self._log:
            self._log.write("member_back", member=member, term=term)

    def woken(self, part: str, ballot: Ballot) -> None:
        """Which epoch stood still."""
        term, number = ballot
        say(f"coordinator: in epoch {number} of term {term} all wait for each other, and none gets on: another begins")
        if self._log:
            self._log.write("standstill", term=term, number=number)


class Process:
    """Serves until it is told to end: who comes after the end of the job hears of it too."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self._asked = asked
        self._log = EventLog(asked.run_dir / "events.jsonl") if asked.run_dir else None
        self._stop = threading.Event()
        wanted = Settings(bounds=settings.parse(asked.elastic), expected=asked.expected, patience_s=asked.patience_s)
        self.service = parts.coordinators(
            wanted,
            index=asked.index,
            is_standby=asked.standby,
            notes=Said(self._log),
        )
        self.service.announce([each for each in asked.successors.split(",") if each])
        trust = wire.Tls(wire.Credentials.load_from(asked.credentials))
        self._rival: AbstractContextManager[object] = nullcontext()
        if asked.other:
            host, _, port = asked.other.rpartition(":")
            self._rival = Rival((host, int(port)), trust, self.service.hear_of)
        self.server = wire.Server(
            trust,
            self.service.handlers(),
            roles=("worker", "launcher", ROLE),
            record=self._log.write if self._log else None,
            complain=_complain,
            hung_up=self.service.hung_up,
        )

    def stop(self, *_: object) -> None:
        """End soon; also what signals call."""
        self._stop.set()

    def run(self) -> None:
        """Until the end."""
        with self.server.start(self._asked.host, self._asked.port), self._rival:
            say(f"coordinator listens on {self._asked.host}:{self.server.port}")
            ended = ""
            while not self._stop.wait(TICK_S):
                self.service.tick(self.server.names)
                if self.service.ended != ended:
                    ended = self.service.ended
                    say(f"coordinator: the job is over: {ended}" if ended else "coordinator: it goes on elsewhere")


def _complain(peer: wire.Identity, kind: str, error: Exception) -> None:
    say(f"coordinator: {kind} of {peer.name}: {type(error).__name__}: {error}", is_error=True)


def main(argv: Sequence[str]) -> int:
    """Exit code of the process."""
    try:
        process = Process(parse(argv))
        for how in (signal.SIGTERM, signal.SIGINT):
            signal.signal(how, process.stop)
        process.run()
    except RingweaveError as error:
        say(f"{type(error).__name__}: {error}", is_error=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
