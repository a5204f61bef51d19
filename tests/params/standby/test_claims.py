"""The register: of claims with one number the first counts."""

import threading

import pytest

from ringweave.errors import NotLeaderError
from ringweave.param_server.failover import LeadershipLog
from ringweave.param_server.leadership import LeadershipRecord


def claim(number: int, leader: int) -> LeadershipRecord:
    return LeadershipRecord(number=number, term=number, leader=leader, members=(leader,))


def test_the_first_of_a_number_counts(tmp_path):
    register = LeadershipLog(tmp_path / "claims")
    assert register.latest() is None
    assert register.append(claim(0, 0))
    assert not LeadershipLog(tmp_path / "claims").append(claim(0, 1))
    assert register.latest() == claim(0, 0)
    assert register.append(claim(1, 1))
    assert register.latest() == claim(1, 1)
    assert len(list((tmp_path / "claims").iterdir())) == 2  # nothing else is left behind


def test_of_many_at_the_same_time_one_is_made(tmp_path):
    made, start = [], threading.Barrier(8)

    def race(leader: int) -> None:
        register = LeadershipLog(tmp_path)
        start.wait()
        if register.append(claim(0, leader)):
            made.append(leader)

    threads = [threading.Thread(target=race, args=(leader,)) for leader in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert LeadershipLog(tmp_path).latest() == claim(0, made[0])


def test_a_register_that_cannot_be_used_is_said(tmp_path):
    register = LeadershipLog(tmp_path / "claims")
    for rubbish in (b"{", b"[]", b"{}", b"\xff\xfe", b"[" * 10_000, b" " * 70_000):
        (tmp_path / "claims" / "claim-00000000.json").write_bytes(rubbish)
        with pytest.raises(NotLeaderError, match=r"^leadership log: .*, expected a folder that both servers"):
            register.latest()
    (tmp_path / "claims" / "claim-00000000.json").unlink()
    (tmp_path / "claims").rmdir()
    with pytest.raises(NotLeaderError, match=r"^leadership log: .*No such file"):
        register.append(claim(0, 0))
