"""Which of two servers may answer, when their records are in the entry of a run on hosts, whose commits fail."""

from collections.abc import Callable
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from ringweave.errors import LaunchError, NotLeaderError
from ringweave.param_server import leadership
from ringweave.param_server.leadership import LeadershipRecord
from ringweave.platforms.hosts import host_runtime
from ringweave.platforms.hosts.messages import LeadershipAnswer, LeadershipRequest
from ringweave.platforms.hosts.run_entry import ENTRY_JSON, RunEntry
from tests import effort
from tests.param_server.standby.test_leadership import MOVES, play
from tests.param_server.standby.worlds import World
from tests.platforms.hosts.test_join_protocol import entry_with_seat

ROUND = 2


class EntryLog:
    """Log in an entry, as a leader of the run keeps it; commits fail as they are told to."""

    def __init__(self) -> None:
        self.entry = entry_with_seat()
        self.claims: list[LeadershipRecord] = []
        """All records that the entry has had."""
        self.fails = ""

    def change(self, change: Callable[[RunEntry], RunEntry]) -> None:
        changed = change(self.entry)
        if self.fails in ("make", "all"):
            raise LaunchError("no quorum")
        self.entry = ENTRY_JSON.parse(ENTRY_JSON.dump(changed))
        if changed.leadership and changed.leadership.record not in self.claims[-1:]:
            self.claims.append(changed.leadership.record)
        if self.fails == "answer":
            raise LaunchError("no quorum has answered")

    def ask(self, record: LeadershipRecord | None, round_: int = ROUND) -> LeadershipAnswer:
        text = None if record is None else leadership.dump_record(record)
        try:
            return host_runtime.commit_leadership(LeadershipRequest(round=round_, record=text), self.change)
        except LaunchError as error:
            raise NotLeaderError(str(error)) from error

    def latest(self) -> LeadershipRecord | None:
        found = self.ask(None).record
        return None if found is None else leadership.parse_record(found)

    def append(self, record: LeadershipRecord) -> bool:
        return self.ask(record).is_appended


@settings(max_examples=effort.share_of(500))
@given(st.lists(MOVES, min_size=20, max_size=60))
def test_whoever_may_go_on_has_all_that_was_acknowledged(moves: list[tuple[str, int]]) -> None:
    log = EntryLog()
    play(World(log), log, moves)


def test_each_round_has_a_log_of_its_own_and_an_earlier_one_is_closed() -> None:
    log = EntryLog()
    first = LeadershipRecord(number=0, term=0, leader=0, members=(0,))
    assert log.append(first)
    assert log.append(replace(first, number=1, members=(0, 1)))
    assert not log.append(first), "another one has superseded it"
    assert log.ask(None, ROUND + 1) == LeadershipAnswer(record=None, is_appended=False)
    assert log.ask(first, ROUND + 1).is_appended
    assert not log.ask(replace(first, number=2), ROUND).is_appended
    assert log.latest() is None
