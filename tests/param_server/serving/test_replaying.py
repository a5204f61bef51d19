"""A standby of a job whose rings lose members: it has the leader's books, and answers as the leader would have."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringweave import rpc
from ringweave.errors import DeadlineError, ExpiredGrantError
from ringweave.param_server import job as param_server_job
from ringweave.param_server import sessions, snapshots
from ringweave.param_server.barrier import BarrierResult
from ringweave.param_server.data_shards import DataPosition, DataShard
from ringweave.param_server.flat import FlatTensors
from ringweave.param_server.messages import (
    BarrierArrival,
    DataStart,
    LeaveRing,
    OfferCheckpoint,
    PauseRing,
    Pull,
    Push,
    RestoreSnapshot,
    RingAssignmentReply,
    RingAssignmentRequest,
    StartJob,
    TakeShard,
)
from ringweave.param_server.replication import ReplicatedFact, ReplicateFact
from ringweave.param_server.service import ParameterService
from ringweave.param_server.standby import LeaderReplay
from ringweave.rpc import RpcCall
from ringweave.rpc import RpcReply as Answered
from tests.param_server.serving import two_rings
from tests.param_server.serving.two_rings import LONG_S, RINGS, SPECS, Representatives

MOMENTS = ("before the standby is told", "when the standby has it", "when it is booked, and not answered yet")


class ServerDiedError(Exception):
    """The server that leads is dead: what it was about to answer nobody hears."""


class Mirror:
    """A replica that tells another service at once, over messages as they are on the wire; its server may die."""

    def __init__(self, dies: Callable[[], str]) -> None:
        """`dies` gives the moment of this telling at which the server dies; empty if it does not."""
        self.standby: ParameterService | None = None
        self.own: ParameterService | None = None
        self._dies = dies
        self.dies_soon = False

    def check_term(self, term: int) -> None:
        assert term == 0

    def replicate_start(self) -> None:
        self._tell(lambda _: self.copy())

    def replicate_push(self, push: Push, buffers: Sequence[memoryview]) -> None:
        self._tell(lambda replay: replay.replay_push(push, [memoryview(bytearray(each)) for each in buffers]))

    def replicate_grant(self, ring: int, version: int, ahead: float, *, is_between_pushes: bool) -> None:
        self._tell(lambda replay: replay.replay_grant(ring, version, ahead))

    def replicate_fact(self, fact: ReplicatedFact) -> None:
        told = ReplicateFact.model_validate_json(ReplicateFact(fact=fact).model_dump_json())
        assert told.fact == fact
        self._tell(lambda replay: replay.replay_fact(told.fact))

    def copy(self) -> None:
        """The standby reads the whole state."""
        assert self.own is not None
        assert self.standby is not None
        with self.own.paused_state() as state:
            if state:
                self.standby.resume(snapshots.snapshot_from_bytes(state))

    def _tell(self, book: Callable[[LeaderReplay], object]) -> None:
        moment = self._dies()
        if moment != MOMENTS[0] and self.standby is not None:
            book(LeaderReplay(self.standby))
        if moment in MOMENTS[:2]:
            raise ServerDiedError
        self.dies_soon = moment == MOMENTS[2]


class PairJob(two_rings.Job):
    """A job on a server with a standby, which takes over when the one that leads dies; another one follows it then."""

    def __init__(self, deaths: Sequence[tuple[int, str]] = ()) -> None:
        """`deaths` are (which telling among all, moment)."""
        self.now_s = 0.0
        self._deaths, self._num_told, self.num_deaths = dict(deaths), 0, 0
        self.here: set[str] = set()
        self.service, self._mirror = self._made()
        self.standby, self._next_mirror = self._made()
        self._mirror.standby = self.standby
        self._handlers = {each.message: each for each in self.service.handlers()}

    def call(self, who: str, message: rpc.RpcMessage, buffers: Any = (), limit_s: float = LONG_S) -> Any:
        """As a ring's client calls: again at the server that leads by then."""
        self.here.add(who)
        while True:
            peer = rpc.Identity(job="test", role="worker", name=who)
            content = [memoryview(bytearray(each)) for each in buffers]
            call = RpcCall(peer=peer, message=message, buffers=content, deadline_s=time.monotonic() + limit_s)
            try:
                answer = self._handlers[type(message)].handle(call)
            except ServerDiedError:
                self.fail_over()
                continue
            if not self._mirror.dies_soon:
                return answer.message if isinstance(answer, Answered) else answer
            self.fail_over()

    def hang_up(self, who: str) -> None:
        """Both servers notice."""
        self.here.discard(who)
        for each in (self.service, self.standby):
            each.ring_sessions.note_disconnect(rpc.Identity(job="test", role="worker", name=who))

    def fail_over(self) -> None:
        """The server that leads is dead: its standby takes over, and gets one of its own."""
        self.num_deaths += 1
        self.service, self._mirror = self.standby, self._next_mirror
        self._mirror.dies_soon = False
        self._handlers = {each.message: each for each in self.service.handlers()}
        self.service.ring_sessions.note_takeover(rpc.Identity(job="test", role="worker", name=who) for who in self.here)
        self.standby, self._next_mirror = self._made()
        self._mirror.standby = self.standby
        self._mirror.copy()

    def _made(self) -> tuple[ParameterService, Mirror]:
        mirror = Mirror(self._dies)
        mirror.own = ParameterService(replicator=mirror, clock=lambda: self.now_s)
        return mirror.own, mirror

    def _dies(self) -> str:
        self._num_told += 1
        return self._deaths.get(self._num_told, "")


def meet(job: PairJob, number: int, names: Sequence[str]) -> list[dict[str, str]]:
    """All rings meet, one after the other as far as this thread goes; what each of them hears."""
    words = [BarrierArrival(term=0, ring=ring, number=number, text=f"{number} by {ring}") for ring in range(len(names))]
    for who, message in zip(names[:-1], words[:-1], strict=True):
        with pytest.raises(DeadlineError):
            job.call(who, message, limit_s=0.0)
    return [job.call(who, message).texts for who, message in zip(names[::-1], words[::-1], strict=True)]


@settings(deadline=None, max_examples=60)
@given(
    deaths=st.dictionaries(st.integers(2, 120), st.sampled_from(MOMENTS), max_size=8),
    members=st.lists(st.integers(1, 60), max_size=8),
    num_samples=st.integers(1, 40),
)
def test_whichever_servers_and_members_die_each_push_counts_once_and_all_hear_the_same(
    deaths: dict[int, str], members: list[int], num_samples: int
) -> None:
    job = PairJob(list(deaths.items()))
    job.start()
    rings = [Representatives(job, ring, members[ring::2]) for ring in range(2)]
    for index, ring in enumerate(rings):
        ring.run(num_samples)
        job.call(ring.name, LeaveRing(term=0, ring=index, is_for_good=False))
    heard = [meet(job, number, [ring.name for ring in rings]) for number in (1, 2)]
    tickets = [ticket for ring in rings for ticket in ring.shards]
    drawn = [sample for first, count in tickets for sample in range(first, first + count)]
    assert sorted(drawn) == list(range(num_samples))
    assert job.service.version == len(tickets)
    assert all(each == [{"0": f"{number} by 0", "1": f"{number} by 1"}] * 2 for number, each in enumerate(heard, 1))
    assert job.service.job is not None
    assert job.standby.job is not None
    assert job.standby.job.live_state == job.service.job.live_state
    assert job.standby.job.ledger.pushed == job.service.job.ledger.pushed
    assert job.standby.job.position == job.service.job.position


@pytest.fixture
def job() -> PairJob:
    found = PairJob()
    found.start()
    return found


def test_whatever_rings_say_a_standby_and_one_that_reads_all_later_have_the_same_books(job: PairJob) -> None:
    base = job.call("0.0", Pull(term=0, ring=0, after_sequence=0)).version
    job.call("0.0", TakeShard(term=0, ring=0, number=1, epoch=0, num_samples=3, least=1, epoch_samples=30))
    job.push("0.0", 0, 1, base, epoch=2, spans=[(6, 3)])
    job.call("1.0", Pull(term=0, ring=1, after_sequence=0))
    job.call("1.0", PauseRing(term=0, ring=1))
    with pytest.raises(DeadlineError):
        job.call("0.0", BarrierArrival(term=0, ring=0, number=1, text="a"), limit_s=0.0)
    assert job.service.job is not None
    assert job.standby.job is not None
    expected, position = job.service.job.live_state, job.service.job.position
    assert expected.barrier.last == [1, 0]
    assert position == DataPosition(epoch=2, done=((6, 3),))
    assert [each.is_paused for each in expected.ring_grants] == [False, True]
    assert (job.standby.job.live_state, job.standby.job.position) == (expected, position)
    job.fail_over()
    assert (job.standby.job.live_state, job.standby.job.position) == (expected, position), "read as a whole"


def test_a_checkpoint_that_rings_go_on_from_is_the_standby_s_as_well(job: PairJob) -> None:
    assert job.service.job is not None
    content = snapshots.snapshot_to_bytes(param_server_job.take_job_snapshot(job.service.job))
    start = DataStart(pass_number=4, epoch=2, done=[(0, 7)], seed=5)
    restore = RestoreSnapshot(
        term=0, ring=0, num_bytes=len(content), first_byte=0, train_step=9, check="c", start=start
    )
    job.call("0.0", restore, [content])
    position = DataPosition(pass_number=4, epoch=2, done=((0, 7),))
    for _ in range(2):  # told, and then read as a whole
        job.fail_over()
        seated = job.call("0.0", RingAssignmentRequest(term=0, slot=0))
        assert (seated.resumed, seated.epoch, seated.resumed_seed) == ([(0, 7)], 2, 5)
        assert job.service.job.position == position
        ruled = job.call("0.0", OfferCheckpoint(term=0, ring=0))
        assert (ruled.verdict, ruled.train_step, ruled.check) == ("resumed", 9, "c")


def test_what_comes_with_a_push_is_heard_from_the_server_that_took_over(job: PairJob) -> None:
    base = job.call("0.0", Pull(term=0, ring=0, after_sequence=0)).version
    job.push("0.0", 0, 1, base, ring_progress="left by ring 0")
    for _ in range(2):  # told, and then read as a whole
        job.fail_over()
        assert job.call("3.1", RingAssignmentRequest(term=0, slot=3)).ring_progress == "left by ring 0"
    job.hang_up("0.0")
    job.hang_up("3.1")
    job.now_s += sessions.RING_ABSENT_S + 1.0
    assert job.call("1.0", BarrierArrival(term=0, ring=1, number=1, text="b")).texts == {
        "0": "left by ring 0",
        "1": "b",
    }


def test_a_ring_that_was_passed_over_may_not_push_to_the_server_that_took_over_either(job: PairJob) -> None:
    base = job.call("0.0", Pull(term=0, ring=0, after_sequence=0)).version
    job.hang_up("0.0")
    job.now_s += sessions.RING_ABSENT_S + 1.0
    assert job.call("1.0", BarrierArrival(term=0, ring=1, number=1, text="b")).texts == {"1": "b"}
    for _ in range(2):  # told, and then read as a whole
        job.fail_over()
        with pytest.raises(ExpiredGrantError, match="push 1 of ring 0: 'no grant'"):
            job.push("0.0", 0, 1, base)
    base = job.call("0.0", Pull(term=0, ring=0, after_sequence=0)).version
    assert job.call("1.0", BarrierArrival(term=0, ring=1, number=1, text="again")).texts == {"1": "b"}
    job.fail_over()
    assert job.push("0.0", 0, 1, base).version == 1, "an answer that is told again takes nothing from it"


def test_rings_that_died_with_the_server_hold_nobody_up_and_are_not_waited_for(job: PairJob) -> None:
    job.call("0.0", Pull(term=0, ring=0, after_sequence=0))
    job.here.discard("0.0")  # nobody was left to notice
    job.call("1.0", Pull(term=0, ring=1, after_sequence=0))
    job.fail_over()
    for sequence in range(1, 30):
        version = job.call("1.0", Pull(term=0, ring=1, after_sequence=sequence - 1)).version
        job.push("1.0", 1, sequence, version)
    with pytest.raises(DeadlineError, match="barrier 1 of the rings"):
        job.call("1.0", BarrierArrival(term=0, ring=1, number=1, text="b"), limit_s=0.0)
    job.now_s += sessions.RING_ABSENT_S + 1.0
    assert job.call("1.0", BarrierArrival(term=0, ring=1, number=1, text="b")).texts == {"1": "b"}


def test_a_ring_that_lives_is_waited_for_though_its_connection_to_the_standby_had_broken(job: PairJob) -> None:
    job.call("0.0", Pull(term=0, ring=0, after_sequence=0))
    job.standby.ring_sessions.note_disconnect(rpc.Identity(job="test", role="worker", name="0.0"))
    job.now_s += sessions.RING_ABSENT_S + 1.0
    job.fail_over()
    with pytest.raises(DeadlineError, match="barrier 1 of the rings"):
        job.call("1.0", BarrierArrival(term=0, ring=1, number=1, text="b"), limit_s=0.0)


def test_nobody_hears_of_rings_that_the_standby_does_not_know_yet() -> None:
    job = PairJob()
    seen: list[RingAssignmentReply] = []
    job._mirror.replicate_start = lambda: seen.append(job.call("2.0", RingAssignmentRequest(term=0, slot=2)))  # type: ignore[method-assign]
    job.start()
    assert seen == [RingAssignmentReply(rings=[])]
    assert job.call("2.0", RingAssignmentRequest(term=0, slot=2)).rings == RINGS


def test_a_job_that_was_begun_on_a_server_that_died_is_begun_on_the_next_one() -> None:
    job = PairJob([(1, MOMENTS[0])])
    job.start()
    assert job.num_deaths == 1
    assert job.call("2.0", RingAssignmentRequest(term=0, slot=2)).rings == RINGS
    assert job.standby.job is not None


@pytest.mark.parametrize(
    "fact",
    [
        DataShard(ring=1, number=2, epoch=0, first=3, num_samples=4),
        DataShard(ring=1, number=2, epoch=4, first=3, num_samples=4, ended_epoch=7),
        LeaveRing(term=0, ring=1, is_for_good=True),
        PauseRing(term=0, ring=1),
        BarrierArrival(term=0, ring=1, number=1, text="b"),
        BarrierResult(number=3, texts={0: "a", 2: ""}, passed_over=(1,)),
    ],
)
def test_every_fact_is_read_as_what_it_is(fact: ReplicatedFact) -> None:
    told = ReplicateFact.model_validate_json(ReplicateFact(fact=fact).model_dump_json())
    assert (type(told.fact), told.fact) == (type(fact), fact)


def test_a_start_that_is_said_again_is_the_same_job(job: PairJob) -> None:
    assert job.service.job is not None
    setup = job.service.job.setup
    job.call("0.0", StartJob(term=0, setup=setup), FlatTensors(SPECS, [torch.zeros(4, dtype=torch.float64)]).buffers())
    assert job.call("2.0", RingAssignmentRequest(term=0, slot=2)).rings == RINGS
