"""Exchanges before the job begins: the work of real ones, and no trace of them."""

import time

import pytest
import torch

from ringweave.errors import RefusedError, TrainingError
from ringweave.param_server.flat import FlatTensors
from ringweave.param_server.messages import (
    EndExchangeBenchmark,
    ExchangeBenchmark,
    ExchangeBenchmarkResult,
    ParameterGroup,
    Pull,
    ServerSetup,
    StartJob,
    TensorSpec,
)
from ringweave.param_server.optimizers import group_options
from ringweave.param_server.service import ParameterService
from ringweave.rpc import RpcCall, RpcReply
from tests.param_server.serving.callers import peer_of

SPECS = [TensorSpec(name="weight", shape=[50], dtype="float32"), TensorSpec(name="bias", shape=[3], dtype="float64")]
OPTIONS = group_options(torch.optim.AdamW([torch.zeros(1)], lr=0.5).param_groups[0])


def setup_of(rings: list[list[int]]) -> ServerSetup:
    groups = [ParameterGroup(parameters=[0, 1], options=OPTIONS)]
    return ServerSetup(tensors=SPECS, optimizer="AdamW", groups=groups, rings=rings, overlaps=False, compensation=0.0)


class Caller:
    """Ranks, without a connection."""

    def __init__(self) -> None:
        self.service = ParameterService()
        self._handlers = {each.message: each for each in self.service.handlers()}

    def rehearse(
        self, rings: list[list[int]] | None = None, flat: FlatTensors | None = None, rank: int = 0
    ) -> tuple[ExchangeBenchmarkResult, FlatTensors]:
        """What the service has needed so far, and the parameters that it sends."""
        gradient = flat or FlatTensors(SPECS, [torch.ones(50), torch.ones(3, dtype=torch.float64)])
        message = ExchangeBenchmark(term=0, setup=setup_of([[0], [1]] if rings is None else rings))
        answer = self.call(message, gradient, rank)
        assert isinstance(answer.message, ExchangeBenchmarkResult)
        return answer.message, FlatTensors.over_buffers(SPECS, answer.buffers)

    def begin(self) -> FlatTensors:
        """The job begins; its parameters."""
        first = FlatTensors(SPECS, [torch.arange(50.0), torch.arange(3.0, dtype=torch.float64)])
        self.call(StartJob(term=0, setup=setup_of([[0], [1]])), first)
        return first

    def call(
        self,
        message: ExchangeBenchmark | EndExchangeBenchmark | StartJob | Pull,
        flat: FlatTensors | None = None,
        rank: int = 0,
    ) -> RpcReply:
        buffers = flat.buffers() if flat else []
        call = RpcCall(peer=peer_of(rank), message=message, buffers=buffers, deadline_s=time.monotonic() + 60)
        answer = self._handlers[type(message)].handle(call)
        return answer if isinstance(answer, RpcReply) else RpcReply(answer)


def test_pushes_move_parameters_of_zero_as_they_would_in_the_job():
    caller = Caller()
    (first, half), (second, whole) = caller.rehearse(), caller.rehearse()
    for flat in (half, whole):
        assert all((piece < 0).all() for piece in flat.pieces)  # down the gradient
    assert not torch.equal(half.pieces[0], whole.pieces[0])  # of two rings each has half of a train step
    assert 0 <= first.processor_s <= second.processor_s


def test_the_job_knows_nothing_of_them():
    caller = Caller()
    caller.rehearse()
    assert caller.service.status().version == 0
    first = caller.begin()
    pulled = FlatTensors.over_buffers(SPECS, caller.call(Pull(term=0, ring=0, after_sequence=0)).buffers)
    assert all(torch.equal(*pair) for pair in zip(pulled.pieces, first.pieces, strict=True))
    assert caller.service.status().pushes == {}


def test_another_setup_begins_anew():
    caller = Caller()
    _, alone = caller.rehearse([[0]])
    caller.rehearse([[0], [1]])
    assert torch.equal(caller.rehearse([[0]])[1].pieces[0], alone.pieces[0])


def test_the_last_one_to_end_frees_the_memory():
    caller = Caller()
    parameters = [caller.rehearse(rank=rank)[1].pieces[0] for rank in (0, 1, 1)]
    caller.call(EndExchangeBenchmark(term=0), rank=1)
    caller.call(EndExchangeBenchmark(term=0), rank=2)  # of one that had none
    assert (caller.rehearse()[1].pieces[0] < parameters[-1]).all(), "the same model still"
    caller.call(EndExchangeBenchmark(term=0))
    assert torch.equal(caller.rehearse()[1].pieces[0], parameters[0]), "another one of zeros"
    with pytest.raises(RefusedError, match="term"):
        caller.call(EndExchangeBenchmark(term=1))


def test_there_are_none_once_the_job_has_begun():
    caller = Caller()
    caller.begin()
    refused = "exchange benchmark: 'a job that has begun', expected none yet. Run it before the job begins"
    with pytest.raises(TrainingError, match=refused):
        caller.rehearse()


def test_what_is_no_rehearsal_is_refused():
    caller = Caller()
    with pytest.raises(TrainingError, match="bytes of a push"):
        caller.rehearse(flat=FlatTensors(SPECS[1:]))
    with pytest.raises(TrainingError, match="rings of a benchmark: 'none'"):
        caller.rehearse([])
