"""Which gradients a member has whose model uses other parameters than the others' do; the others are not there."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from ringweave.errors import TrainingError
from ringweave.training.elastic import ddp
from ringweave.training.gradients import SampleWeights

A, B, NEVER = 0, 1, 2


class Branches(nn.Module):
    """Its samples say which parameter is used."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in (A, B, NEVER)])

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.sum() * self.parts[A if inputs[0] > 0 else B].sum()


class Session:
    """Whose reduction is of another member too, which has used these parameters, and whose gradients are all tens."""

    def __init__(self, used: Sequence[int] = ()) -> None:
        self._used = used
        self._begun: list[tuple[Tensor, Any]] = []
        self._ended: list[tuple[int, Any]] = []
        self.said: list[str] = []
        self.residuals = None
        self.commits = self

    def add_bucket(self, bucket: Tensor, parameters: Sequence[Tensor] = ()) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        self._begun.append((bucket.clone(), future))
        self.said.append("bucket")
        return future

    def end_backward(self, used: int) -> torch.futures.Future[int]:
        future: torch.futures.Future[int] = torch.futures.Future()
        self._ended.append((used, future))
        self.said.append("end")
        return future

    def wait_committed(self) -> None:
        for summed, future in self._begun:
            future.set_result(summed.add_(10.0 * bool(self._used)))
        for used, ended in self._ended:
            ended.set_result(used | sum(1 << index for index in self._used))
        self._begun.clear()
        self._ended.clear()


class Timer:
    def gradients_ready(self) -> None: ...


def made(session: Any, weights: SampleWeights) -> tuple[Branches, nn.Module]:
    model, timer = Branches(), Timer()
    parallel = ddp.wrap_elastic_ddp(model, {}, session, weights, timer)  # pyrefly: ignore - what it asks of it
    return model, parallel


def test_a_hook_of_the_script_is_refused() -> None:
    _, parallel = made(Session(), SampleWeights(num_ranks=1, is_mean=True))
    text = (
        r"^communication hook of an elastic job: 'allreduce_hook', expected none\. Leave the hook out, or train without"
    )
    assert isinstance(parallel, DistributedDataParallel)
    with pytest.raises(TrainingError, match=text):
        parallel.register_comm_hook(None, default_hooks.allreduce_hook)


def gradients(model: Branches) -> list[float | None]:
    return [None if each.grad is None else each.grad[0].item() for each in model.parts]


@pytest.mark.parametrize("as_views", [False, True])
@pytest.mark.parametrize(
    ("used_there", "expected"),
    [((), [3.0, None, None]), ((A,), [13.0, None, None]), ((B,), [13.0, 10.0, None])],
)
def test_a_parameter_that_another_member_has_used_gets_its_gradient_here_too(
    used_there: Sequence[int], expected: list[float | None], as_views: bool
) -> None:
    session: Any = Session(used_there)
    model = Branches()
    timer: Any = Timer()
    options = {"gradient_as_bucket_view": as_views}
    parallel = ddp.wrap_elastic_ddp(model, options, session, SampleWeights(num_ranks=1, is_mean=False), timer)
    for _ in range(3):
        model.zero_grad()
        parallel(torch.tensor([1.0, 2.0])).backward()
        assert gradients(model) == expected
    assert session.said == ["bucket", "end"] * 3, "what was used comes last"


@pytest.mark.parametrize(("used_there", "expected"), [((), [None] * 3), ((A,), [10.0, None, None])])
def test_what_only_samples_have_used_that_do_not_count_nobody_has_used(
    used_there: Sequence[int], expected: list[float | None]
) -> None:
    """They are those of a member that follows, or has none in a short last batch."""
    weights = SampleWeights(num_ranks=1, is_mean=True)
    model, parallel = made(Session(used_there), weights)
    for _ in range(3):
        weights.set(0, 4)
        model.zero_grad()
        parallel(torch.tensor([1.0, 2.0])).backward()
        assert gradients(model) == expected
        weights.set(4, 4)
        model.zero_grad()
        parallel(torch.tensor([-1.0, 2.0])).backward()
        assert gradients(model)[B] == 1.0 + 10.0 * bool(used_there)


def test_a_gradient_that_was_there_before_stays() -> None:
    weights = SampleWeights(num_ranks=1, is_mean=True)
    model, parallel = made(Session(), weights)
    model.parts[A].grad = torch.zeros(2)
    weights.set(0, 4)
    parallel(torch.tensor([1.0, 2.0])).backward()
    assert gradients(model) == [0.0, None, None]


def test_static_graphs_are_refused() -> None:
    session: Any = Session()
    timer: Any = Timer()
    weights = SampleWeights(num_ranks=1, is_mean=True)
    with pytest.raises(TrainingError, match=r"option static_graph of an elastic job: True, expected False\. Leave "):
        ddp.wrap_elastic_ddp(Branches(), {"static_graph": True}, session, weights, timer)
