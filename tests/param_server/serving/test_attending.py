"""What a server makes of rings that lose members: nobody waits for them, and whoever speaks for them is answered."""

import threading
import time
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringweave import rpc
from ringweave.errors import DeadlineError, RefusedError, RpcError, TrainingError
from ringweave.param_server import sessions
from ringweave.param_server.messages import (
    BarrierArrival,
    LeaveRing,
    PauseRing,
    Pull,
    RegisterRingLeader,
    RingAssignmentReply,
    RingAssignmentRequest,
    TakeShard,
)
from ringweave.param_server.versions import StalenessPolicy
from ringweave.rpc import Identity
from tests import polling
from tests.param_server.serving.two_rings import LONG_S, RINGS, SHARES, Job, Representatives


@pytest.fixture
def job() -> Job:
    found = Job()
    found.start()
    return found


def test_a_worker_finds_its_ring_and_where_that_stands() -> None:
    job = Job()
    assert job.call("2.0", RingAssignmentRequest(term=0, slot=2)) == RingAssignmentReply(rings=[])
    job.start()
    base = job.call("1.0", Pull(term=0, ring=1, after_sequence=0)).version
    job.push("1.0", 1, 1, base)
    job.call("1.0", TakeShard(term=0, ring=1, number=1, epoch=3, num_samples=5, least=1, epoch_samples=50))
    job.call("1.0", LeaveRing(term=0, ring=1, is_for_good=False))
    seated = job.call("2.7", RingAssignmentRequest(term=0, slot=2))
    assert seated == RingAssignmentReply(
        rings=RINGS, shares=SHARES, num_pushed=1, num_shards=1, num_barriers=0, epoch=3
    )
    assert job.call("9.0", RingAssignmentRequest(term=0, slot=9)).rings == RINGS, "it is in none, and can see that"


def test_any_incarnation_of_a_ring_s_slots_speaks_for_it_and_nobody_else(job: Job) -> None:
    assert job.call("3.5", Pull(term=0, ring=0, after_sequence=0)).version == 0
    with pytest.raises(RefusedError, match=r"caller for ring 0: '1\.0', expected one of its ranks 0, 3"):
        job.call("1.0", PauseRing(term=0, ring=0))
    with pytest.raises(RefusedError, match="caller for ring 0: 'x', expected one of its ranks 0, 3"):
        job.call("x", PauseRing(term=0, ring=0))


@pytest.mark.parametrize("is_said", [True, False])
def test_nobody_waits_for_a_ring_that_forms_anew(job: Job, is_said: bool) -> None:
    base = job.call("0.0", Pull(term=0, ring=0, after_sequence=0)).version
    if is_said:
        job.call("0.0", PauseRing(term=0, ring=0))
    else:
        job.abort("0.0")
    for sequence in range(1, 30):
        version = job.call("1.0", Pull(term=0, ring=1, after_sequence=sequence - 1)).version
        job.push("1.0", 1, sequence, version)
    late = job.push("3.0", 0, 1, base)
    assert (late.version, late.staleness_versions) == (30, 29)
    assert late.damping < 1.0


def test_a_ring_that_is_heard_of_again_is_waited_for_before_it_pushes(job: Job) -> None:
    base = job.call("0.0", Pull(term=0, ring=0, after_sequence=0)).version
    job.abort("0.0")
    for sequence in range(1, 10):
        version = job.call("1.0", Pull(term=0, ring=1, after_sequence=sequence - 1)).version
        job.push("1.0", 1, sequence, version)
    job.call("3.0", TakeShard(term=0, ring=0, number=1, epoch=0, num_samples=5, least=1, epoch_samples=50))
    with pytest.raises(DeadlineError, match="the slowest ring near enough"):
        job.call("1.0", Pull(term=0, ring=1, after_sequence=9), limit_s=0.0)
    assert job.push("3.0", 0, 1, base).staleness_versions == 9
    assert job.call("1.0", Pull(term=0, ring=1, after_sequence=9)).version == 10


@given(st.lists(st.tuples(st.integers(0, 1), st.sampled_from(["go on", "go on", "hang up"])), max_size=80))
def test_where_no_members_are_lost_no_push_is_older_than_the_bound_whatever_connections_break(events) -> None:
    """A ring pushes what it has computed and asks for parameters, or its connection breaks while it computes."""
    job, base, pushed = Job(), [-1, -1], [0, 0]
    job.start(may_lose_members=False)
    most = StalenessPolicy(num_rings=2).max_versions
    for ring, what in [*events, *[(0, "go on"), (1, "go on")] * 3]:
        who = f"{RINGS[ring][0]}"
        if what == "hang up":
            job.abort(who)
            continue
        if base[ring] >= 0:
            pushed[ring] += 1
            assert job.push(who, ring, pushed[ring], base[ring]).staleness_versions <= most
        try:
            pull = Pull(term=0, ring=ring, after_sequence=pushed[ring])
            base[ring] = job.call(who, pull, limit_s=0.0).version
        except DeadlineError:
            base[ring] = -1
    assert min(base) >= 0, "nobody is left waiting"


def test_a_ring_that_is_whole_is_waited_for(job: Job) -> None:
    job.call("0.0", Pull(term=0, ring=0, after_sequence=0))
    for sequence in range(1, 9):
        version = job.call("1.0", Pull(term=0, ring=1, after_sequence=sequence - 1)).version
        job.push("1.0", 1, sequence, version)
    with pytest.raises(DeadlineError, match="parameters for ring 1"):
        job.call("1.0", Pull(term=0, ring=1, after_sequence=8), limit_s=0.05)


def test_rings_meet_without_one_of_which_nobody_is_heard_for_long(job: Job) -> None:
    job.abort("0.0")
    met: list[Any] = []
    asking = threading.Thread(
        target=lambda: met.append(job.call("1.0", BarrierArrival(term=0, ring=1, number=1, text="b")))
    )
    asking.start()
    with job.service.changed:
        assert job.service.job is not None
        assert job.service.job.barrier.result_of(1, ()) is None
    job.now_s += sessions.RING_ABSENT_S + 1.0
    with job.service.changed:
        job.service.changed.notify_all()
    asking.join(LONG_S)
    assert met[0].texts == {"1": "b"}


def test_a_ring_that_is_heard_of_again_is_waited_for(job: Job) -> None:
    job.abort("0.0")
    job.call("3.0", Pull(term=0, ring=0, after_sequence=0))
    job.now_s += sessions.RING_ABSENT_S + 1.0
    with pytest.raises(DeadlineError, match="barrier 1 of the rings: 'not all of them', expected all that are there"):
        job.call("1.0", BarrierArrival(term=0, ring=1, number=1, text=""), limit_s=0.05)
    job.call("3.0", BarrierArrival(term=0, ring=0, number=1, text="a"))
    assert job.call("2.0", BarrierArrival(term=0, ring=1, number=1, text="other words")).texts == {"0": "a", "1": ""}


def test_a_ring_that_is_begun_again_is_not_held_to_a_push_that_never_came(job: Job) -> None:
    base = job.call("0.0", Pull(term=0, ring=0, after_sequence=0)).version
    job.push("0.0", 0, 1, base)
    with pytest.raises(DeadlineError, match="its push 2 applied"):
        job.call("0.0", Pull(term=0, ring=0, after_sequence=2), limit_s=0.05)
    job.abort("0.0")
    assert job.call("3.1", RingAssignmentRequest(term=0, slot=3, begins=True)).num_pushed == 1
    assert job.call("3.1", Pull(term=0, ring=0, after_sequence=1)).version == 1


def test_who_hangs_up_after_it_has_left_is_missed_by_nobody(job: Job) -> None:
    job.call("0.0", LeaveRing(term=0, ring=0, is_for_good=True))
    job.abort("0.0")
    assert job.call("1.0", BarrierArrival(term=0, ring=1, number=1, text="b")).texts == {"1": "b"}
    assert job.service.job is not None
    assert not job.service.job.away_s


def test_whoever_hangs_up_before_the_job_has_begun_changes_nothing() -> None:
    job = Job()
    job.abort("0.0")
    with pytest.raises(TrainingError, match="job: 'none yet'"):
        job.call("0.0", PauseRing(term=0, ring=0))


@settings(deadline=None, max_examples=50)
@given(deaths=st.lists(st.integers(1, 60), max_size=12), num_samples=st.integers(1, 60))
def test_whoever_dies_after_whatever_call_each_push_counts_once_and_each_sample_is_on_one_ticket(
    deaths: list[int], num_samples: int
) -> None:
    job = Job()
    job.start()
    rings = [Representatives(job, ring, deaths[ring::2]) for ring in range(2)]
    for ring in rings:
        ring.run(num_samples)
        job.call(f"{RINGS[rings.index(ring)][0]}.0", LeaveRing(term=0, ring=rings.index(ring), is_for_good=False))
    tickets = [ticket for ring in rings for ticket in ring.shards]
    drawn = [sample for first, count in tickets for sample in range(first, first + count)]
    assert sorted(drawn) == list(range(num_samples))
    assert job.service.version == len(tickets)
    assert sum(job.service.counts.pushes.values()) == len(tickets)


def test_a_representative_that_the_ring_has_gone_on_without_changes_nothing_when_it_wakes():
    """It was stopped as it had pushed, and asks for the parameters when another one computes on them already."""
    job = Job()
    job.start()
    job.call("0.0", RegisterRingLeader(term=0, ring=0, generation_id=(1, 3)))
    base = job.call("0.0", Pull(term=0, ring=0, after_sequence=0)).version
    job.push("0.0", 0, 1, base)
    job.call("3.0", RegisterRingLeader(term=0, ring=0, generation_id=(1, 4)))
    base = job.call("3.0", Pull(term=0, ring=0, after_sequence=1)).version
    other = job.call("1.0", Pull(term=0, ring=1, after_sequence=0)).version
    job.push("1.0", 1, 1, other)
    late = [
        RegisterRingLeader(term=0, ring=0, generation_id=(1, 3)),
        Pull(term=0, ring=0, after_sequence=1),
        LeaveRing(term=0, ring=0, is_for_good=False),
        TakeShard(term=0, ring=0, number=1, epoch=0, num_samples=4, least=1, epoch_samples=8),
        BarrierArrival(term=0, ring=0, number=1, epoch=0, text=""),
    ]
    for message in late:
        with pytest.raises(RefusedError, match=r"representative of ring 0: '0.0', expected 3.0"):
            job.call("0.0", message)
    with pytest.raises(RefusedError, match="representative of ring 0"):
        job.push("0.0", 0, 2, base)
    assert job.push("3.0", 0, 2, base).staleness_versions == 1
    job.call("0.1", RingAssignmentRequest(term=0, slot=0, begins=True))
    job.call("0.1", RegisterRingLeader(term=0, ring=0, generation_id=(1, 1)))
    job.call("0.1", Pull(term=0, ring=0, after_sequence=2))


def test_a_certificate_counts_no_more_once_its_ring_has_gone_on_or_a_later_process_has_called(job: Job) -> None:
    def is_revoked(name: str, role: str = "worker") -> bool:
        return job.service.ring_sessions.is_revoked(Identity(job="job", role=role, name=name))

    assert not is_revoked("0.0")
    assert not is_revoked("0.2")
    assert is_revoked("0.1"), "a later process of its slot has called"
    assert not is_revoked("0", "server")
    told = RegisterRingLeader(
        term=0, ring=0, generation_id=(1, 4), least_incarnations=[(0, 3), (3, 1), (1, 9), (77, 9)]
    )
    job.call("0.3", told)
    assert is_revoked("0.2"), "its ring has gone on with a later one, which has not called"
    assert is_revoked("3.0"), "nobody is in its slot any more"
    assert not is_revoked("3.1")
    assert not is_revoked("1.0"), "of another ring, for which this representative does not speak"
    late = RegisterRingLeader(term=0, ring=0, generation_id=(1, 3), least_incarnations=[(0, 9)])
    with pytest.raises(RefusedError, match="representative of ring 0"):
        job.call("3.1", late)
    assert not is_revoked("0.3")


def test_a_worker_that_was_replaced_is_cut_off_by_the_server_at_once(job: Job) -> None:
    authority = rpc.CertificateAuthority("job1")

    def trusted(role: str, name: str) -> rpc.TlsAuthentication:
        return rpc.TlsAuthentication(authority.issue(role, name))

    server = rpc.RpcServer(
        trusted("server", "0"), job.service.handlers(), is_revoked=job.service.ring_sessions.is_revoked
    )
    with server.start("127.0.0.1"):
        connect = partial(rpc.RpcClient.connect, "127.0.0.1", server.port, role="server")
        old = connect(trusted("worker", "0.0"))
        old.call(PauseRing(term=0, ring=0), timeout_s=LONG_S)
        new = connect(trusted("worker", "0.1"))
        polling.wait_until(lambda: server.peer_names() == {"0.1"})
        with pytest.raises(RpcError):
            old.call(PauseRing(term=0, ring=0), timeout_s=LONG_S)
        new.call(PauseRing(term=0, ring=0), timeout_s=LONG_S)
        new.close()


def test_one_that_waits_for_parameters_is_not_given_them_once_another_one_speaks():
    job = Job()
    job.start()
    job.call("0.0", RegisterRingLeader(term=0, ring=0, generation_id=(1, 3)))
    failed = []

    def wait() -> None:
        try:
            job.call("0.0", Pull(term=0, ring=0, after_sequence=1))  # a push that never comes
        except DeadlineError as error:
            failed.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    found = job.service.job
    assert found is not None
    while found.last_pull_sequence.get(0) != 1:
        time.sleep(0.01)
    job.call("3.0", RegisterRingLeader(term=0, ring=0, generation_id=(2, 1)))
    thread.join(LONG_S / 2)
    assert not thread.is_alive()
    assert "no caller that waits" in failed[0]
