"""Which of two servers may answer, when what they tell each other is lost and the register fails."""

import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringweave.errors import NotLeaderError
from ringweave.param_server.leadership import (
    FolderLeadershipLog,
    LeadershipRecord,
    LogServer,
    Reachability,
    SocketLeadershipLog,
)
from tests import effort
from tests.param_server.standby.worlds import LEASE_S, World


class Register:
    """In memory; fails as it is told to."""

    def __init__(self) -> None:
        self.claims: list[LeadershipRecord] = []
        self.fails = ""
        """`make`: nothing can be written; `answer`: it is written, and said not to be; `all`: nor can it be read."""

    def latest(self) -> LeadershipRecord | None:
        if self.fails == "all":
            raise NotLeaderError("no register")
        return self.claims[-1] if self.claims else None

    def append(self, claim: LeadershipRecord) -> bool:
        if self.fails in ("make", "all"):
            raise NotLeaderError("no register")
        if claim.number == len(self.claims):
            self.claims.append(claim)
        if self.fails == "answer":
            raise NotLeaderError("no answer")
        return self.claims[claim.number] == claim


FAILURES = {"register fails": "make", "register is out of reach": "all", "register answers nothing": "answer"}
LINES = {"cut": "cut", "answers are lost": "answers lost", "mended": ""}
REACHES = {
    "rings are heard": Reachability.MOST,
    "few rings are heard": Reachability.SOME,
    "no ring is heard": Reachability.NONE,
}
MOVES = st.tuples(
    st.sampled_from(
        [
            *("join", "join", "push", "push", "push", "push again", "short silence", "long silence", "tick", "restart"),
            *FAILURES,
            *("register is repaired", "register is repaired", "mended", "rings are heard"),
            *LINES,
            *REACHES,
        ]
    ),
    st.integers(0, 1),
)


def move(world: World, register: Any, what: str, own: int, push: int) -> None:
    if what in FAILURES or what == "register is repaired":
        register.fails = FAILURES.get(what, "")
    elif what in LINES:
        world.lines = LINES[what]
    elif what in REACHES:
        world.servers[own].reachability = REACHES[what]
    elif what in ("push", "push again"):
        world.push(own, push if what == "push" else push - 1)
    elif what in ("short silence", "long silence"):
        world.now_s += LEASE_S * (0.4 if what == "short silence" else 1.3)
        world.tick(own)
    elif what == "tick":
        world.tick(own)
    elif what == "join":
        world.join(own)
    elif not (register.fails and own == 0):  # that one would try to be the first
        world.restart(own)


def play(world: World, register: Any, moves: list[tuple[str, int]]) -> None:
    """Let it all happen to both servers; at every moment whoever may go on has all that was acknowledged.

    `register` is at the end of the world's: it fails as it is told to, and has all claims.
    """
    try:
        world.join(1)
        for number, (what, own) in enumerate(moves):
            move(world, register, what, own, number + 2)
            world.check(register.claims[-1])
    finally:
        world.close()


@settings(max_examples=effort.share_of(1000))
@given(st.lists(MOVES, min_size=20, max_size=60))
def test_whoever_may_go_on_has_all_that_was_acknowledged(moves: list[tuple[str, int]]) -> None:
    register = Register()
    play(World(register), register, moves)


@settings(max_examples=effort.share_of(300))
@given(st.lists(MOVES, min_size=20, max_size=60))
def test_so_it_is_with_a_register_beyond_a_socket(moves: list[tuple[str, int]]) -> None:
    register = Register()
    with closing(SocketLeadershipLog(socket.socket(fileno=LogServer(register).open()))) as remote:
        play(World(remote), register, moves)


class Disk:
    """A folder for the register, on a disk that is full or gone for a while."""

    def __init__(self, folder: Path, fill: Callable[[], object], free: Callable[[], object]) -> None:
        self.folder, self.fill, self.free = folder, fill, free


@pytest.fixture(params=["full", "gone"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    at = tmp_path / "disk"
    at.mkdir()
    if request.param == "gone":
        away = tmp_path / "away"
        yield Disk(at / "claims", lambda: at.rename(away), lambda: away.rename(at))
        return
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(at)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("a small disk can be mounted by root only")
    try:
        yield Disk(at / "claims", lambda: _fill(at / "filler"), (at / "filler").unlink)
    finally:
        subprocess.run(["umount", "--lazy", str(at)], check=True)


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


@pytest.fixture
def pair(disk: Disk) -> Iterator[World]:
    """A leader with a standby, which have applied one push."""
    world = World(FolderLeadershipLog(disk.folder))
    world.join(1)
    assert world.push(0, 1)
    assert world.servers[1].log == [1]
    yield world
    world.close()


def test_a_leader_whose_claim_fails_acknowledges_nothing(pair: World, disk: Disk) -> None:
    disk.fill()
    pair.lines = "cut"
    for number in range(2, 6):
        assert not pair.push(0, number), "the standby does not have it"
        pair.now_s += 0.4 * LEASE_S
        pair.tick(0)
    disk.free()
    pair.tick(1)  # the standby has slept: it looks twice before it believes that
    pair.now_s += 0.4 * LEASE_S
    pair.tick(1)
    pair.now_s += 1.3 * LEASE_S
    pair.tick(1)
    assert pair.servers[1].leadership.may_answer
    assert not pair.push(0, 6)
    assert "server 1 leads without it in term 1" in pair.servers[0].leadership.superseded
    assert pair.push(1, 2)
    pair.check(pair.register.latest())


def test_it_goes_on_alone_once_the_register_can_be_written(pair: World, disk: Disk) -> None:
    disk.fill()
    pair.lines = "cut"
    assert not pair.push(0, 2)
    pair.now_s += 1.1 * LEASE_S
    pair.tick(0)
    assert not pair.push(0, 2)
    disk.free()
    assert pair.push(0, 2)
    pair.now_s += 5 * LEASE_S
    pair.tick(1)
    pair.now_s += 5 * LEASE_S
    pair.tick(1)
    assert "server 0 leads without it in term 0" in pair.servers[1].leadership.superseded
    pair.check(pair.register.latest())


def test_why_nothing_is_answered_is_said(pair: World, disk: Disk) -> None:
    leader = pair.servers[0]
    pair.lines, leader.reachability = "cut", Reachability.NONE
    pair.now_s += 1.1 * LEASE_S
    with pytest.raises(NotLeaderError, match=r"^parameter server: 'one that hears neither its standby nor"):
        leader.leadership.check_leading()
    leader.reachability = Reachability.MOST
    disk.fill()
    with pytest.raises(NotLeaderError, match=r"^leadership log: .*(No space left|No such file)"):
        leader.leadership.check_leading()
    disk.free()
    leader.leadership.check_leading()


def test_a_register_that_has_lost_its_claims_is_not_believed(pair: World, disk: Disk) -> None:
    pair.lines = "cut"
    pair.now_s += 1.1 * LEASE_S
    for path in disk.folder.iterdir():
        path.unlink()
    with pytest.raises(NotLeaderError, match=r"^parameter server: 'one whose leadership log is empty', exp"):
        pair.servers[0].leadership.check_leading()


def test_the_standby_waits_for_rings_unless_the_other_one_begins_anew() -> None:
    world = World(Register())
    world.join(1)
    standby = world.servers[1]
    standby.reachability = Reachability.NONE
    world.restart(0)
    world.tick(1)
    assert standby.leadership.is_following
    world.join(0)
    world.tick(1)
    assert standby.leadership.may_answer
    world.join(0)
    assert world.servers[0].leadership.is_following
    world.close()


def test_a_leader_waits_for_rings_unless_its_standby_begins_anew() -> None:
    world = World(Register())
    world.join(1)
    leader = world.servers[0]
    leader.reachability = Reachability.NONE
    world.restart(1)
    assert not world.push(0, 1)
    world.tick(0)
    assert not leader.leadership.may_answer
    world.join(1)
    assert leader.leadership.may_answer
    assert world.servers[1].leadership.is_following
    assert world.push(0, 1)
    assert world.servers[1].log == [1]
    world.close()
