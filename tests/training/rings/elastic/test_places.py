"""Which ring a worker belongs to, and how much of it is left."""

from ringweave.param_server.messages import RingAssignmentReply
from ringweave.training.rings.ring_progress import PendingPush, RingCursor, SlotAssignment

SEATED = RingAssignmentReply(
    rings=[[0, 3], [1, 2]], shares=[[6, 5], [7, 6]], num_pushed=9, num_shards=10, num_barriers=2, epoch=1
)


def test_the_server_knows_a_slot_s_ring() -> None:
    seat = SlotAssignment.of_slot(2, SEATED)
    assert seat is not None
    assert (seat.ring, seat.slots) == (1, (1, 2))
    assert SlotAssignment.of_slot(7, SEATED) is None


def test_each_ring_has_local_steps_of_its_own() -> None:
    slow = SlotAssignment.of_slot(2, SEATED.model_copy(update={"local_steps": [8, 3]}))
    assert slow is not None
    assert slow.local_steps == 3
    every = SlotAssignment.of_slot(2, SEATED)
    assert every is not None
    assert every.local_steps == 0, "every step is pushed"


def test_a_ring_that_has_lost_a_member_takes_fewer_samples() -> None:
    seat = SlotAssignment.of_slot(0, SEATED)
    assert seat is not None
    assert (seat.shard_samples(["0.0", "3.2"]), seat.shard_samples(["3.2"])) == (11, 5)


def test_a_newcomer_takes_the_ring_s_place_over() -> None:
    pending = PendingPush(num_samples=3, batch_share=0.5, ring_progress="left")
    numbers = {"num_pushed": 4, "base_version": 7, "num_shards": 5, "num_barriers": 2, "next_version": 9}
    before, after = RingCursor(ring=1, **numbers, pending=pending), RingCursor(ring=1)
    after.load_json(before.to_json())
    assert after == before
