"""Checkpoints at the server: one ring reads its state while others push, and a new job is told to go on from it."""

import threading
from typing import Any

import pytest
import torch

from ringweave.errors import RingweaveError, TrainingError
from ringweave.param_server import snapshots
from ringweave.param_server.data_shards import DataPosition
from ringweave.param_server.flat import FlatTensors
from ringweave.param_server.messages import (
    SNAPSHOT_STATE_NAME,
    DataStart,
    OfferCheckpoint,
    Pull,
    ReleaseSnapshot,
    RestoreSnapshot,
    ResumeDecision,
    RingAssignmentRequest,
    SnapshotRequest,
    TakeShard,
)
from ringweave.param_server.service import ParameterService
from ringweave.param_server.snapshots import ServerSnapshot
from ringweave.rpc.state_transfer import DescribeState, ReadState
from tests.param_server.serving.callers import Callers, peer_of


def rings_of(num_rings: int, **options: Any) -> tuple[ParameterService, Callers]:
    service = ParameterService()
    return service, Callers(service, num_rings, compensation=0.0, dtype=torch.float64, lr=0.5, momentum=0.9, **options)


def push(callers: Callers, ring: int, spans: list[tuple[int, int]], **more: int) -> None:
    """One whole round of a ring, of these samples, with a gradient of ones."""
    callers.pull(ring)
    content = torch.ones(50, dtype=torch.float64).numpy().tobytes()
    callers.push(ring, gradient=lambda _: content, spans=spans, batch_share=0.5, **more)


def read(callers: Callers, ring: int) -> ServerSnapshot:
    """What a ring reads, piece by piece."""
    assert callers.handle(ring, SnapshotRequest(term=0, ring=ring)).message.is_there
    described = callers.handle(ring, DescribeState(name=SNAPSHOT_STATE_NAME)).message
    buffers = {}
    for index, piece in enumerate(described.pieces):
        wanted = ReadState(
            name=SNAPSHOT_STATE_NAME, offer=described.offer, piece=index, first_byte=0, num_bytes=piece.num_bytes
        )
        buffers[piece.name] = bytearray(callers.handle(ring, wanted).buffers[0])
    return snapshots.snapshot_from_parts(*snapshots.parts_from_buffers(buffers))


def pieces_of(
    content: bytes, *, check: str = "c", num_pieces: int = 3, **start: Any
) -> list[tuple[RestoreSnapshot, bytes]]:
    words = DataStart(**{"pass_number": 1, "epoch": 0, "done": [], "seed": 5, **start})
    size = -(-len(content) // num_pieces)
    return [
        (
            RestoreSnapshot(
                term=0, ring=0, num_bytes=len(content), first_byte=first, train_step=2, check=check, start=words
            ),
            content[first : first + size],
        )
        for first in range(0, len(content), size)
    ]


def give(callers: Callers, content: bytes, **more: Any) -> None:
    for message, piece in pieces_of(content, **more):
        callers.handle(0, message, [memoryview(piece)])


def newest(callers: Callers) -> torch.Tensor:
    found = read(callers, 0)
    into = FlatTensors(found.setup.tensors)
    snapshots.restore_model(found).read_parameters(into)
    return into.pieces[0]


def test_a_snapshot_says_which_samples_are_in_it_whatever_rings_have_drawn() -> None:
    service, callers = rings_of(2)
    push(callers, 0, [(0, 4)])
    push(callers, 1, [(8, 4)])
    callers.handle(0, TakeShard(term=0, ring=0, number=1, epoch=0, num_samples=4, least=1, epoch_samples=40))
    held = service.status().memory_bytes
    found = read(callers, 0)
    assert found.position == DataPosition(epoch=0, done=((0, 4), (8, 4)))
    assert found.progress.num_done == 1
    assert service.status().memory_bytes > held, "it is held as long as it can be read"
    push(callers, 0, [(4, 4)])
    assert found.position.num_done == 8, "of that moment"
    callers.handle(0, ReleaseSnapshot(term=0, ring=0))
    assert service.status().memory_bytes <= held + 50 * 8, "but for the sum of the next train step's gradients"
    with pytest.raises(RingweaveError, match="state: 'snapshot', expected one of none"):
        callers.handle(0, DescribeState(name=SNAPSHOT_STATE_NAME))


def test_one_ring_saves_for_all_the_first_that_is_there() -> None:
    service, callers = rings_of(3)
    push(callers, 2, [(0, 4)])
    assert not callers.handle(2, SnapshotRequest(term=0, ring=2)).message.is_there
    for ring in (0, 1):
        service.ring_sessions.note_disconnect(peer_of(ring))
    assert callers.handle(2, SnapshotRequest(term=0, ring=2)).message.is_there, "the others have died"
    callers.handle(1, RingAssignmentRequest(term=0, slot=1))
    callers.handle(1, Pull(term=0, ring=1, after_sequence=0))
    assert not callers.handle(2, SnapshotRequest(term=0, ring=2)).message.is_there, "one is back"


def test_another_job_goes_on_exactly_where_the_snapshot_was() -> None:
    _, before = rings_of(2)
    for number in range(5):
        push(before, number % 2, [(4 * number, 4)])
    content = snapshots.snapshot_to_bytes(read(before, 0))
    service, after = rings_of(3)
    give(after, content, done=[(0, 20)], pass_number=1)
    assert service.version == 5
    assert torch.equal(newest(after), newest(before))
    seated = after.handle(1, RingAssignmentRequest(term=0, slot=1)).message
    assert (seated.resumed, seated.resumed_epoch, seated.resumed_seed) == ([(0, 20)], 0, 5)
    assert (seated.num_pushed, seated.num_shards) == (0, 0), "rings count anew"
    for callers in (before, after):
        push(callers, 0, [(20, 4)], pass_number=1)
    assert torch.equal(newest(after), newest(before)), "momentum and the gradients of the train step as well"
    assert read(after, 0).position == DataPosition(pass_number=1, epoch=0, done=((0, 24),))


def test_all_rings_go_on_from_the_newest_that_any_of_them_has() -> None:
    _, before = rings_of(2)
    push(before, 0, [(0, 4)])
    content = snapshots.snapshot_to_bytes(read(before, 0))
    _, callers = rings_of(3)
    heard: dict[int, ResumeDecision] = {}
    offers = {
        0: OfferCheckpoint(term=0, ring=0, train_step=2, check="c"),
        1: OfferCheckpoint(term=0, ring=1),
        2: OfferCheckpoint(term=0, ring=2),
    }

    def offer(ring: int) -> None:
        heard[ring] = callers.handle(ring, offers[ring]).message

    others = [threading.Thread(target=offer, args=(ring,)) for ring in (1, 2)]
    for each in others:
        each.start()
    offer(0)
    assert heard[0].verdict == "give"
    give(callers, content)
    for each in others:
        each.join(60)
    assert [(heard[ring].verdict, heard[ring].check) for ring in (1, 2)] == [("resumed", "c")] * 2
    offer(0)
    assert heard[0].verdict == "resumed"


def test_where_no_ring_has_one_all_begin_and_who_comes_later_hears_that_they_have() -> None:
    service, callers = rings_of(2)
    service.ring_sessions.note_disconnect(peer_of(1))
    assert service.job is not None
    service.job.away_s[1] -= 100.0  # it is dead, and nobody waits for it
    assert callers.handle(0, OfferCheckpoint(term=0, ring=0)).message.verdict == "nothing"
    assert callers.handle(0, OfferCheckpoint(term=0, ring=0)).message.verdict == "nothing", "said again"
    callers.handle(0, TakeShard(term=0, ring=0, number=1, epoch=0, num_samples=4, least=1, epoch_samples=40))
    assert callers.handle(1, OfferCheckpoint(term=0, ring=1, train_step=9, check="d")).message.verdict == "begun"
    _, before = rings_of(1)
    expected = r"checkpoint to go on from: .one after the first samples were drawn., .*right after prepare"
    with pytest.raises(TrainingError, match=expected):
        give(callers, snapshots.snapshot_to_bytes(read(before, 0)))


def test_pieces_come_in_their_order_and_are_of_a_snapshot_of_this_model() -> None:
    _, before = rings_of(1)
    content = snapshots.snapshot_to_bytes(read(before, 0))
    _, callers = rings_of(1)
    first, second, third = pieces_of(content)
    callers.handle(0, first[0], [memoryview(first[1])])
    with pytest.raises(
        TrainingError, match=r"piece of a snapshot: .byte 966 of 1448., expected .*byte 483, of at most \d+.* Give back"
    ):
        callers.handle(0, third[0], [memoryview(third[1])])
    huge = second[0].model_copy(update={"first_byte": 0, "num_bytes": 1 << 40})
    with pytest.raises(TrainingError, match=r"piece of a snapshot: .byte 0 of 1099511627776., expected .*of at most"):
        callers.handle(0, huge, [memoryview(second[1])])
    with pytest.raises(TrainingError, match=r"snapshot of the parameter server: .*expected one of a server that leads"):
        give(callers, bytes(len(content)))
    other = ParameterService()
    narrow = Callers(other, 1, compensation=0.0, dtype=torch.float32, lr=0.5)
    expected = (
        r"parameters of the checkpoint of rings: .*float64.*, expected .*float32.*\. Train what the checkpoint is"
    )
    with pytest.raises(TrainingError, match=expected):
        give(narrow, content)


def test_an_ended_pass_is_over_for_a_checkpoint_also() -> None:
    _, callers = rings_of(1)
    push(callers, 0, [(0, 4)], epoch=3)
    ended = TakeShard(term=0, ring=0, number=1, epoch=0, num_samples=40, least=1, epoch_samples=40, ended_epoch=3)
    callers.handle(0, ended)
    assert read(callers, 0).position == DataPosition(pass_number=1, epoch=4)
