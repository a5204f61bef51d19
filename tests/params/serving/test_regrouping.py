"""Other rings for a job that goes on: only while all rest, and of the same ranks."""

import pytest
import torch

from ringweave import wire
from ringweave.errors import TrainingError
from ringweave.params.flat import Flat
from ringweave.params.messages import Group, Leave, Pull, Push, Regroup, Setup, Start, TensorSpec
from ringweave.params.serving.optimizers import options_of
from ringweave.params.serving.regrouping import regrouped
from ringweave.params.serving.service import ParameterService
from ringweave.wire import Answer, Call

SPECS = [TensorSpec(name="weight", shape=[4], dtype="float32")]
OPTIONS = options_of(torch.optim.SGD([torch.zeros(1)], lr=0.5).param_groups[0])
SETUP = Setup(
    tensors=SPECS,
    optimizer="SGD",
    groups=[Group(parameters=[0], options=OPTIONS)],
    rings=[[0, 1], [2, 3]],
    overlaps=False,
    compensation=0.0,
)


@pytest.mark.parametrize("rings", [[[0, 1], [2]], [[0, 1], [2, 3, 4]], [[0, 1, 2, 3], []], [[0, 1], [1, 2, 3]]])
def test_every_rank_is_in_one_ring(rings):
    with pytest.raises(
        TrainingError, match=r"^new rings: .*, expected every one of the ranks \[0, 1, 2, 3\] in one of"
    ):
        regrouped(SETUP, rings, [])


def test_nobody_may_be_computing():
    text = r"^rings that compute while new ones are formed: \[1\], expected none\. Let every ring leave first"
    with pytest.raises(TrainingError, match=text):
        regrouped(SETUP, [[0, 2], [1, 3]], [1])


def test_the_job_goes_on_with_what_it_has_learnt():
    service = ParameterService()
    handlers = {each.message: each for each in service.handlers()}

    def say(rank: int, message: wire.Message, buffers: object = ()) -> Answer:
        peer = wire.Identity(job="test", role="worker", name=str(rank))
        call = Call(peer=peer, message=message, buffers=buffers, deadline_s=float("inf"))  # type: ignore[arg-type]
        answer = handlers[type(message)].handle(call)
        return answer if isinstance(answer, Answer) else Answer(answer)

    def push(rank: int, ring: int) -> torch.Tensor:
        base = say(rank, Pull(term=0, ring=ring, after_sequence=0)).message
        gradient = Flat(SPECS)
        gradient.pieces[0].fill_(1.0)
        common = {"term": 0, "ring": ring, "sequence": 1, "base_version": base.version, "num_samples": 1}
        say(rank, Push(**common, content="gradient", batch_share=1.0, options=[OPTIONS]), gradient.buffers())
        answer = say(rank, Pull(term=0, ring=ring, after_sequence=1))
        say(rank, Leave(term=0, ring=ring, is_for_good=False))
        return torch.frombuffer(bytearray(answer.buffers[0]), dtype=torch.float32)

    say(0, Start(term=0, setup=SETUP), Flat(SPECS, [torch.zeros(4)]).buffers())
    before = push(0, 0)
    for rings in ([[1, 2, 3], [0]], [[0, 1, 2, 3]], [[3, 0], [1], [2]]):
        ring = next(index for index, each in enumerate(service.started_job().setup.rings) if 0 in each)
        for _ in range(2):  # said again on a new connection, it changes nothing, whatever ring the caller is in by then
            say(0, Regroup(term=0, ring=ring, rings=rings))
    assert service.version == 1
    torch.testing.assert_close(push(3, 0), before - 0.5)
    assert service.version == 2
    assert not service.is_done
    for ring, rank in enumerate((3, 1, 2)):
        say(rank, Leave(term=0, ring=ring, is_for_good=True))
    assert service.is_done
