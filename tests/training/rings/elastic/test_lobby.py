"""Workers get their places in rings, though the first of them may die before it has begun the job."""

from collections.abc import Sequence
from typing import Any

import pytest

from ringweave.errors import ConnectionLostError, MembershipError, RemoteError
from ringweave.membership.membership_records import Membership, StopTraining
from ringweave.param_server.messages import RingAssignmentReply
from ringweave.training.rings import startup_rendezvous
from ringweave.training.rings.startup_rendezvous import StartupRendezvous


class Server:
    """The part of the parameter server that is asked, as its client."""

    def __init__(self, rings: list[list[int]] | None = None) -> None:
        self.rings = rings or []
        self.is_closed = False

    def request_assignment(self, _slot: int) -> RingAssignmentReply:
        return RingAssignmentReply(rings=self.rings, shares=[[1] * len(ring) for ring in self.rings])

    def close(self) -> None:
        self.is_closed = True


class Agent:
    """Says what it is told to, and nothing of its own."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def start(self) -> None:
        self.heard.append("start")

    def leave_membership(self, *, is_finished: bool) -> None:
        self.heard.append(f"leave {is_finished}")

    def close(self, *, is_graceful: bool) -> None:
        self.heard.append(f"close {is_graceful}")


def epoch(number: int, *rooms: StartupRendezvous) -> Membership:
    return Membership(generation_id=(1, number), statuses=tuple(each.current_status() for each in rooms))


def take(hall: StartupRendezvous, agent: Agent, server: Server, member: str, begin: Any, sleep: Any) -> Any:
    anything: Any = (hall, agent, server)
    return startup_rendezvous.wait_ring_assignment(*anything, member, begin, sleep=sleep)  # pyrefly: ignore[bad-argument-count]


def nobody(_slots: Sequence[int], _said: Sequence[dict[str, Any]]) -> None:
    raise AssertionError("it is not for this worker to begin")


def test_the_first_one_begins_with_what_everybody_says_of_itself() -> None:
    first, other = StartupRendezvous("2.0", {"speed": 1.0}), StartupRendezvous("5.0", {"speed": 0.5})
    first.begin_generation(epoch(1, first, other))
    server, agent, begun = Server(), Agent(), []

    def begin(slots: Sequence[int], said: Sequence[dict[str, Any]]) -> None:
        begun.append((list(slots), list(said)))
        server.rings = [[5], [2]]

    seat, num_rings = take(first, agent, server, "2.0", begin, sleep=None)
    assert begun == [([2, 5], [{"speed": 1.0}, {"speed": 0.5}])]
    assert (seat.ring, num_rings) == (1, 2)
    assert agent.heard == ["start", "leave True", "close True"]
    assert server.is_closed


def test_the_next_one_begins_when_the_first_has_died_and_nobody_waits_for_a_decree_it_has_missed() -> None:
    first, other = StartupRendezvous("0.0", {}), StartupRendezvous("1.0", {})
    other.begin_generation(epoch(1, first, other))
    server, num_looks = Server(), 0

    def sleep(_s: float) -> None:
        nonlocal num_looks
        num_looks += 1
        if num_looks == 3:
            other.begin_generation(epoch(2, other))

    def begin(slots: Sequence[int], _said: Sequence[dict[str, Any]]) -> None:
        server.rings = [list(slots)]

    seat, _ = take(other, Agent(), server, "1.0", begin, sleep)
    assert (seat.slots, num_looks) == ((1,), 3)


def test_who_comes_later_asks_the_server_alone() -> None:
    agent = Agent()
    seat, _ = take(StartupRendezvous("3.4", {}), agent, Server([[0, 1], [2, 3]]), "3.4", nobody, sleep=None)
    assert (seat.ring, agent.heard) == (1, [])


def test_a_job_that_another_one_was_faster_to_begin_is_taken() -> None:
    hall, server, begun = StartupRendezvous("0.0", {}), Server(), []
    hall.begin_generation(epoch(1, hall))

    def begin(slots: Sequence[int], _said: Sequence[dict[str, Any]]) -> None:
        begun.append(slots)
        server.rings = [[0, 1]]
        raise RemoteError("job on the parameter server: another one", error="TrainingError")

    seat, _ = take(hall, Agent(), server, "0.0", begin, sleep=None)
    assert (seat.slots, len(begun)) == ((0, 1), 1)


def test_what_the_server_refuses_is_said() -> None:
    hall, server = StartupRendezvous("0.0", {}), Server()
    hall.begin_generation(epoch(1, hall))

    def begin(_slots: Sequence[int], _said: Sequence[dict[str, Any]]) -> None:
        raise RemoteError("optimizer: LBFGS, expected one of SGD", error="TrainingError")

    with pytest.raises(RemoteError, match=r"^optimizer: LBFGS"):
        take(hall, Agent(), server, "0.0", begin, sleep=None)


def test_a_job_that_has_begun_without_this_worker_is_over_for_it() -> None:
    text = r"job is over for worker: 4, expected one of \[0, 1\]\. Nothing: the job goes on without it"
    with pytest.raises(MembershipError, match=text):
        take(StartupRendezvous("4.1", {}), Agent(), Server([[1], [0]]), "4.1", nobody, sleep=None)


def test_who_is_put_out_of_the_lobby_hears_why_and_leaves_nothing_behind() -> None:
    hall, agent, server = StartupRendezvous("0.0", {}), Agent(), Server()
    hall.stop_training(StopTraining(reason="too few came", is_end=True))
    with pytest.raises(MembershipError, match="job is over: too few came"):
        take(hall, agent, server, "0.0", nobody, sleep=None)
    assert agent.heard[-1] == "close True"
    assert server.is_closed


class Ended(Server):
    """That answers nobody any more."""

    def request_assignment(self, _slot: int) -> RingAssignmentReply:
        raise ConnectionLostError("connection refused")


def test_a_worker_that_comes_after_the_end_of_the_job_hears_so() -> None:
    room: Any = (StartupRendezvous("1.1", {}), Agent(), Ended())
    with pytest.raises(MembershipError, match=r"job is over: all workers are done\. Nothing is left to do\."):
        startup_rendezvous.wait_ring_assignment(*room, "1.1", nobody, read_end_reason=lambda: "all workers are done")  # pyrefly: ignore[bad-argument-count]
    unreached = "this worker is no member: no parameter server answers: connection refused"
    with pytest.raises(MembershipError, match=unreached):
        startup_rendezvous.wait_ring_assignment(*room, "1.1", nobody, read_end_reason=lambda: "")  # pyrefly: ignore[bad-argument-count]
