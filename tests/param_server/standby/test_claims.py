"""The register: of claims with one number the first counts."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from ringweave.errors import NotLeaderError, UsageError
from ringweave.param_server.leadership import (
    MAX_RECORDS,
    FolderLeadershipLog,
    LeadershipLog,
    LeadershipRecord,
    LogAnswer,
    LogServer,
    RoundLeadership,
    SocketLeadershipLog,
    append_to,
    open_log,
)


def claim(number: int, leader: int) -> LeadershipRecord:
    return LeadershipRecord(number=number, term=number, leader=leader, members=(leader,))


OpenLog = Callable[[Path], LeadershipLog]


@pytest.fixture(params=["folder", "socket"])
def opened(request: pytest.FixtureRequest) -> Iterator[OpenLog]:
    """Opens the log in a folder: there, or as the server of a job's node does, over a socket to its agent."""
    with ExitStack() as stack:

        def open_remotely(folder: Path) -> LeadershipLog:
            found = open_log(f"fd:{LogServer(FolderLeadershipLog(folder)).open()}")
            assert isinstance(found, SocketLeadershipLog)
            return stack.enter_context(closing(found))

        yield open_remotely if request.param == "socket" else lambda folder: open_log(str(folder))


def test_the_first_of_a_number_counts(tmp_path: Path, opened: OpenLog) -> None:
    register = opened(tmp_path / "claims")
    assert register.latest() is None
    assert register.append(claim(0, 0))
    assert register.append(claim(0, 0)), "made by an earlier attempt, whose answer was lost"
    assert not opened(tmp_path / "claims").append(claim(0, 1))
    assert register.latest() == claim(0, 0)
    assert register.append(claim(1, 1))
    assert register.latest() == claim(1, 1)
    assert len(list((tmp_path / "claims").iterdir())) == 2  # nothing else is left behind


def test_the_newest_records_are_kept_and_a_superseded_one_stays_refused(tmp_path: Path, opened: OpenLog) -> None:
    register = opened(tmp_path)
    for number in range(1000):
        assert register.append(claim(number, number % 2))
        assert len(list(tmp_path.iterdir())) <= MAX_RECORDS
    assert register.latest() == claim(999, 1)
    assert not register.append(claim(3, 1)), "its file is gone, and it is superseded all the same"
    assert not register.append(claim(990, 1))
    assert register.append(claim(990, 0)), "made by an earlier attempt, whose answer was lost"
    assert len(list(tmp_path.iterdir())) == MAX_RECORDS


def test_of_many_at_the_same_time_one_is_made(tmp_path: Path, opened: OpenLog) -> None:
    made: list[int] = []
    start = threading.Barrier(8)

    def race(leader: int) -> None:
        register = opened(tmp_path)
        start.wait()
        if register.append(claim(0, leader)):
            made.append(leader)

    threads = [threading.Thread(target=race, args=(leader,)) for leader in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert opened(tmp_path).latest() == claim(0, made[0])


def test_a_register_that_cannot_be_used_is_said(tmp_path: Path, opened: OpenLog) -> None:
    register = opened(tmp_path / "claims")
    for rubbish in (b"{", b"[]", b"{}", b"\xff\xfe", b"[" * 10_000, b" " * 70_000):
        (tmp_path / "claims" / "claim-00000000.json").write_bytes(rubbish)
        with pytest.raises(NotLeaderError, match=r"^leadership log: .*expected a folder that both servers"):
            register.latest()
    (tmp_path / "claims" / "claim-00000000.json").unlink()
    (tmp_path / "claims").rmdir()
    with pytest.raises(NotLeaderError, match=r"^leadership log: .*No such file"):
        register.append(claim(0, 0))


class StuckLog:
    """Answers nothing until it may."""

    def __init__(self) -> None:
        self.may = threading.Event()
        self.claims: list[LeadershipRecord] = []

    def latest(self) -> LeadershipRecord | None:
        self.may.wait(60.0)
        return self.claims[-1] if self.claims else None

    def append(self, record: LeadershipRecord) -> bool:
        self.may.wait(60.0)
        self.claims.append(record)
        return True


def test_a_late_answer_is_not_taken_for_the_next_one() -> None:
    stuck = StuckLog()
    with closing(SocketLeadershipLog(socket.socket(fileno=LogServer(stuck).open()), timeout_s=0.1)) as log:
        with pytest.raises(NotLeaderError, match=r"^leadership log: .*expected an answer of the node agent"):
            log.append(claim(0, 0))
        stuck.may.set()
        assert log.latest() == claim(0, 0), "the record exists although its answer came too late"


def test_a_server_whose_agent_is_gone_has_no_log() -> None:
    own, other = socket.socketpair()
    own.close()
    with (
        closing(SocketLeadershipLog(socket.socket(fileno=os.dup(other.fileno())))) as log,
        pytest.raises(NotLeaderError, match=r"^leadership log: .*expected an answer of the node agent"),
    ):
        log.latest()
    other.close()


def test_a_log_of_the_latest_record_alone_takes_the_next_one_or_the_same_again() -> None:
    def takes(latest: LeadershipRecord | None, record: LeadershipRecord) -> bool:
        known = None if latest is None else RoundLeadership(round=2, record=latest)
        answer = append_to(known, 2, record)
        assert answer.latest == (record if answer.is_appended else latest)
        return answer.is_appended

    assert takes(None, claim(0, 0))
    assert not takes(None, claim(1, 0)), "one before it was lost"
    assert takes(claim(3, 0), claim(4, 1))
    assert takes(claim(3, 0), claim(3, 0))
    assert not takes(claim(3, 0), claim(3, 1))
    assert not takes(claim(3, 0), claim(2, 0)), "another one has superseded it"
    assert not takes(claim(3, 0), claim(5, 0))
    known = RoundLeadership(round=2, record=claim(3, 0))
    assert append_to(known, 3, claim(0, 1)).is_appended, "another round begins"
    assert append_to(known, 1, claim(0, 1)) == LogAnswer(latest=None, is_appended=False)
    assert append_to(known, 2, None) == LogAnswer(latest=claim(3, 0), is_appended=False)


@pytest.mark.parametrize("where", ["fd:", "fd:x", "fd:-1"])
def test_a_wrong_descriptor_is_said(where: str) -> None:
    with pytest.raises(UsageError, match=rf"^leadership log: '{where}', expected a folder, or fd:N\."):
        open_log(where)
