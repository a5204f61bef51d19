"""Other rings for a job that goes on: only while all rest, and of the same ranks."""

import pytest
import torch

from ringweave import rpc
from ringweave.errors import TrainingError
from ringweave.param_server.flat import FlatTensors
from ringweave.param_server.messages import (
    LeaveRing,
    ParameterGroup,
    Pull,
    Push,
    RegroupRings,
    ServerSetup,
    StartJob,
    TensorSpec,
)
from ringweave.param_server.optimizers import group_options
from ringweave.param_server.service import ParameterService, regroup_setup
from ringweave.rpc import RpcCall, RpcReply

SPECS = [TensorSpec(name="weight", shape=[4], dtype="float32")]
OPTIONS = group_options(torch.optim.SGD([torch.zeros(1)], lr=0.5).param_groups[0])
SETUP = ServerSetup(
    tensors=SPECS,
    optimizer="SGD",
    groups=[ParameterGroup(parameters=[0], options=OPTIONS)],
    rings=[[0, 1], [2, 3]],
    overlaps=False,
    compensation=0.0,
)


@pytest.mark.parametrize("rings", [[[0, 1], [2]], [[0, 1], [2, 3, 4]], [[0, 1, 2, 3], []], [[0, 1], [1, 2, 3]]])
def test_every_rank_is_in_one_ring(rings):
    with pytest.raises(
        TrainingError, match=r"^new rings: .*, expected every one of the ranks \[0, 1, 2, 3\] in one of"
    ):
        regroup_setup(SETUP, rings, [])


def test_nobody_may_be_computing():
    text = r"^rings that compute while new ones are formed: \[1\], expected none\. Let every ring leave first"
    with pytest.raises(TrainingError, match=text):
        regroup_setup(SETUP, [[0, 2], [1, 3]], [1])


def test_the_job_goes_on_with_what_it_has_learnt():
    service = ParameterService()
    handlers = {each.message: each for each in service.handlers()}

    def say(rank: int, message: rpc.RpcMessage, buffers: object = ()) -> RpcReply:
        peer = rpc.Identity(job="test", role="worker", name=str(rank))
        call = RpcCall(peer=peer, message=message, buffers=buffers, deadline_s=float("inf"))  # type: ignore[arg-type]
        answer = handlers[type(message)].handle(call)
        return answer if isinstance(answer, RpcReply) else RpcReply(answer)

    def push(rank: int, ring: int) -> torch.Tensor:
        base = say(rank, Pull(term=0, ring=ring, after_sequence=0)).message
        gradient = FlatTensors(SPECS)
        gradient.pieces[0].fill_(1.0)
        common = {"term": 0, "ring": ring, "sequence": 1, "base_version": base.version, "num_samples": 1}
        say(rank, Push(**common, content="gradient", batch_share=1.0, options=[OPTIONS]), gradient.buffers())
        answer = say(rank, Pull(term=0, ring=ring, after_sequence=1))
        say(rank, LeaveRing(term=0, ring=ring, is_for_good=False))
        return torch.frombuffer(bytearray(answer.buffers[0]), dtype=torch.float32)

    say(0, StartJob(term=0, setup=SETUP), FlatTensors(SPECS, [torch.zeros(4)]).buffers())
    before = push(0, 0)
    for rings in ([[1, 2, 3], [0]], [[0, 1, 2, 3]], [[3, 0], [1], [2]]):
        ring = next(index for index, each in enumerate(service.started_job().setup.rings) if 0 in each)
        for _ in range(2):  # said again on a new connection, it changes nothing, whatever ring the caller is in by then
            say(0, RegroupRings(term=0, ring=ring, rings=rings))
    assert service.version == 1
    torch.testing.assert_close(push(3, 0), before - 0.5)
    assert service.version == 2
    assert not service.is_done
    for ring, rank in enumerate((3, 1, 2)):
        say(rank, LeaveRing(term=0, ring=ring, is_for_good=True))
    assert service.is_done
