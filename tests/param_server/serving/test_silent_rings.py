"""Rings that nothing is heard of, though their connections last or their last push is still there."""

import threading
import time
from collections.abc import Sequence

import pytest

from ringweave import rpc
from ringweave.errors import DeadlineError, ExpiredGrantError, RpcError
from ringweave.param_server.messages import BarrierArrival, LeaveRing, Pull, Push, RingAssignmentRequest
from ringweave.param_server.versions import StalenessPolicy
from ringweave.rpc import RpcCall
from tests.param_server.serving.two_rings import LONG_S, Job, push_of


@pytest.fixture
def job() -> Job:
    found = Job()
    found.start()
    return found


def peers(**received: int) -> list[rpc.PeerStatus]:
    """Who is connected, and the bytes that have come from each."""
    return [
        rpc.PeerStatus(rpc.Identity(job="test", role="worker", name=f"{slot[1:]}.0"), "here", {"bytes_received": many})
        for slot, many in received.items()
    ]


def listen(job: Job, seconds: float, *, beating: Sequence[str], still: Sequence[str] = ()) -> set[int]:
    """All are connected, some show that they are there; rings that nobody waits for from then on."""
    found = set[int]()
    for _ in range(round(seconds / 0.1)):
        job.now_s = round(job.now_s + 0.1, 1)
        alive = {name: round(job.now_s * 100) for name in beating}
        found |= job.service.ring_sessions.check_silence(peers(**alive, **dict.fromkeys(still, 1)))
    return found


def test_a_ring_that_nothing_is_heard_of_though_its_connections_last_holds_nobody_up(job: Job) -> None:
    base = job.call("0.0", Pull(term=0, ring=0, after_sequence=0)).version
    assert listen(job, 5.0, beating=("w0", "w1")) == set()
    assert listen(job, 0.8, beating=("w1",), still=("w0",)) == set()
    assert listen(job, 1.0, beating=("w1",), still=("w0",)) == {0}
    assert listen(job, 5.0, beating=("w1",), still=("w0",)) == set(), "once"
    most = StalenessPolicy(num_rings=2).max_versions
    version = job.call("1.0", Pull(term=0, ring=1, after_sequence=0)).version
    for sequence in range(1, most + 3):
        job.push("1.0", 1, sequence, version)
        version = job.call("1.0", Pull(term=0, ring=1, after_sequence=sequence)).version
    assert version > base + most
    assert job.push("0.0", 0, 1, base).staleness_versions > most, "it goes on with what it has"
    assert listen(job, 3.0, beating=("w0", "w1")) == set()
    assert listen(job, 3.0, beating=("w1",), still=("w0",)) == {0}, "each time anew"


def test_rings_meet_without_one_that_is_silent_and_what_it_pushes_later_is_lost(job: Job) -> None:
    base = job.call("0.0", Pull(term=0, ring=0, after_sequence=0)).version
    job.push("0.0", 0, 1, base, ring_progress="by push 1")
    base = job.call("0.0", Pull(term=0, ring=0, after_sequence=1)).version
    arrival = BarrierArrival(term=0, ring=1, number=1, text="b")
    listen(job, 5.0, beating=("w0", "w1"))
    listen(job, 3.5, beating=("w1",), still=("w0",))
    with pytest.raises(DeadlineError, match="barrier 1 of the rings: 'not all of them'"):
        job.call("1.0", arrival, limit_s=0.0)
    listen(job, 1.0, beating=("w1",), still=("w0",))
    assert job.call("1.0", arrival).texts == {"0": "by push 1", "1": "b"}
    pushed = job.service.version
    for message in (push_of(0, 2, base)[0], push_of(0, 2, base)[0]):
        with pytest.raises(ExpiredGrantError, match="push 2 of ring 0: 'no grant', expected one"):
            job.call("0.0", message, push_of(0, 2, base)[1])
    assert job.service.version == pushed
    with pytest.raises(DeadlineError, match="its push 2 applied"):  # sent together with that push
        job.call("0.0", Pull(term=0, ring=0, after_sequence=2), limit_s=0.0)
    with pytest.raises(DeadlineError, match="no caller that waits"):
        job.call("0.0", Pull(term=0, ring=0, after_sequence=1), limit_s=0.0)
    job.call("0.0", LeaveRing(term=0, ring=0, is_for_good=False))
    # It is heard again, and the others do not wait for it at the barriers that it has missed.
    listen(job, 3.0, beating=("w0", "w1"))
    second = BarrierArrival(term=0, ring=1, number=2, text="")
    assert job.call("1.0", second, limit_s=0.0).texts == {"0": "by push 1", "1": ""}
    base = job.call("0.0", Pull(term=0, ring=0, after_sequence=1)).version
    for number, texts in ((1, {"0": "by push 1", "1": "b"}), (2, {"0": "by push 1", "1": ""})):
        assert job.call("0.0", BarrierArrival(term=0, ring=0, number=number, text="late")).texts == texts
    assert job.push("0.0", 0, 2, base).version == pushed + 1
    with pytest.raises(DeadlineError, match="barrier 3 of the rings"):
        job.call("1.0", BarrierArrival(term=0, ring=1, number=3, text="b"), limit_s=0.0)


def test_a_ring_that_is_heard_while_others_wait_is_not_passed_over(job: Job) -> None:
    listen(job, 5.0, beating=("w0", "w1"))
    listen(job, 3.5, beating=("w1",), still=("w0",))
    assert listen(job, 0.1, beating=("w0", "w1")) == set()
    listen(job, 1.0, beating=("w1",), still=("w0",))
    with pytest.raises(DeadlineError, match="barrier 1 of the rings"):
        job.call("1.0", BarrierArrival(term=0, ring=1, number=1, text="b"), limit_s=0.0)


def test_a_server_that_was_stopped_itself_passes_nobody_over(job: Job) -> None:
    listen(job, 5.0, beating=("w0", "w1"))
    job.now_s += 30.0
    assert listen(job, 0.8, beating=("w1",), still=("w0",)) == set()


def test_rings_that_lose_no_members_are_waited_for_however_silent_they_are() -> None:
    job = Job()
    assert listen(job, 1.0, beating=("w0",)) == set()
    job.start(may_lose_members=False)
    listen(job, 5.0, beating=("w0", "w1"))
    assert listen(job, 20.0, beating=("w1",), still=("w0",)) == set()


def test_a_push_that_waited_for_its_turn_counts_only_if_its_ring_still_waits_for_it(job: Job) -> None:
    """All of a ring dies meanwhile, and it begins again at the place that the server knows."""
    base = job.call("0.0", Pull(term=0, ring=0, after_sequence=0)).version
    push, content = push_of(0, 1, base)
    peer = rpc.Identity(job="test", role="worker", name="0.0")
    call = RpcCall(peer=peer, message=push, buffers=content, deadline_s=time.monotonic() + LONG_S)
    refused: list[Exception] = []

    def say() -> None:
        try:
            job._handlers[Push].handle(call)
        except RpcError as error:
            refused.append(error)

    with job.service.paused_state():
        saying = threading.Thread(target=say)
        saying.start()
        call.cancelled.set()
    saying.join(LONG_S)
    assert "push 1 of ring 0: 'from a caller that has hung up'" in str(refused[0])
    assert job.call("3.1", RingAssignmentRequest(term=0, slot=3, begins=True)).num_pushed == 0
    base = job.call("3.1", Pull(term=0, ring=0, after_sequence=0)).version
    assert not job.push("3.1", 0, 1, base).is_repeat
