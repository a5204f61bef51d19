"""The register: of claims with one number the first counts."""

import threading

import pytest

from ringweave.errors import LeadershipError
from ringweave.params.rules.succession import Claim
from ringweave.params.standby.claims import Claims


def claim(number: int, leader: int) -> Claim:
    return Claim(number=number, term=number, leader=leader, members=(leader,))


def test_the_first_of_a_number_counts(tmp_path):
    register = Claims(tmp_path / "claims")
    assert register.newest() is None
    assert register.make(claim(0, 0))
    assert not Claims(tmp_path / "claims").make(claim(0, 1))
    assert register.newest() == claim(0, 0)
    assert register.make(claim(1, 1))
    assert register.newest() == claim(1, 1)
    assert len(list((tmp_path / "claims").iterdir())) == 2  # nothing else is left behind


def test_of_many_at_the_same_time_one_is_made(tmp_path):
    made, start = [], threading.Barrier(8)

    def race(leader: int) -> None:
        register = Claims(tmp_path)
        start.wait()
        if register.make(claim(0, leader)):
            made.append(leader)

    threads = [threading.Thread(target=race, args=(leader,)) for leader in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert Claims(tmp_path).newest() == claim(0, made[0])


def test_a_register_that_cannot_be_used_is_said(tmp_path):
    register = Claims(tmp_path / "claims")
    for rubbish in (b"{", b"[]", b"{}", b"\xff\xfe", b"[" * 10_000, b" " * 70_000):
        (tmp_path / "claims" / "claim-00000000.json").write_bytes(rubbish)
        with pytest.raises(LeadershipError, match=r"^register of servers: .*, expected a folder that both servers"):
            register.newest()
    (tmp_path / "claims" / "claim-00000000.json").unlink()
    (tmp_path / "claims").rmdir()
    with pytest.raises(LeadershipError, match=r"^register of servers: .*No such file"):
        register.make(claim(0, 0))
