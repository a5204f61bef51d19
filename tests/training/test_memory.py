"""Memory guard on a card of the test's own: measured trials, microbatches, and out-of-memory errors anywhere."""

import types
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ringweave.environment import WorkerEnvironment
from ringweave.planning.balancing import MemoryLimit
from ringweave.topology.cgroups import ProcessMemory
from ringweave.training.gradients import SampleWeights
from ringweave.training.memory import microbatches
from ringweave.training.memory.memory_guard import MemoryGuard, OomRecord
from tests.training.fakes import Card

FEATURES = 5


class FailingBackward(torch.autograd.Function):
    """Needs memory in the backward pass."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, card: Card) -> Tensor:
        ctx.card = card
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.card.allocate(len(gradient))
        return gradient, None


class Model(nn.Module):
    """Treats samples one by one, and counts those that take memory."""

    def __init__(self, card: Card, *, fails_backward: bool = False, mixes: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Dropout(dropout), nn.Linear(7, 3)).double()
        self.unused = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.card, self.fails_backward, self.mixes = card, fails_backward, mixes

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        if torch.is_grad_enabled():
            self.card.at_once.append(len(x))
            if not self.fails_backward:
                self.card.allocate(len(x))
        found = self.layers(x)
        if self.fails_backward and torch.is_grad_enabled():
            found = FailingBackward.apply(found, self.card)
        if self.mixes:
            found = found - found.mean(0)
        if labels is None:
            return found
        return {"loss": nn.functional.cross_entropy(found, labels), "logits": found, "name": "model"}


def guarded(
    card: Card, model: Model, num_samples: int, *, finds_unused: bool = False
) -> tuple[Any, MemoryGuard, SampleWeights, list]:
    """The model's forward pass under a guard, as DDP calls it."""
    limits: list[MemoryLimit] = []
    weights = SampleWeights(num_ranks=1, is_mean=True)
    weights.set(num_samples, num_samples)
    parallel: Any = types.SimpleNamespace(module=model, _run_ddp_forward=model, find_unused_parameters=finds_unused)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = MemoryGuard(parallel, optimizer, weights, card, 1.0, lambda limit, *_: limits.append(limit))
    guard.attach(parallel)
    return parallel._run_ddp_forward, guard, weights, limits


def gradients_of(model: Model) -> list[Tensor | None]:
    found = [None if each.grad is None else each.grad.clone() for each in model.parameters()]
    model.zero_grad(set_to_none=True)
    return found


def batch(num_samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_samples)
    x = torch.randn(num_samples, FEATURES, dtype=torch.float64, generator=generator)
    return x, torch.randint(3, (num_samples,), generator=generator)


def assert_same_gradients(model: Model, run: Any, num_samples: int) -> None:
    x, labels = batch(num_samples)
    nn.functional.cross_entropy(run(x), labels).backward()
    found = gradients_of(model)
    card, model.card = model.card, Card(1e9)
    nn.functional.cross_entropy(model(x), labels).backward()
    model.card = card
    for one, other in zip(found, gradients_of(model), strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or (one - other).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("num_samples", "finds_unused"), [(1, False), (2, True), (3, False), (7, True), (20, True), (50, False), (64, True)]
)
def test_gradients_are_those_of_the_whole_share_and_no_pass_exceeds_the_memory(num_samples, finds_unused) -> None:
    card = Card(400e3)  # 26 samples below nine tenths of it, if only the model's gradients did not count
    model = Model(card)
    run, _, _, limits = guarded(card, model, num_samples, finds_unused=finds_unused)
    for _ in range(3):
        assert_same_gradients(model, run, num_samples)
    at_most = limits[-1].whole_samples if limits else 1
    assert max(card.at_once) <= max(at_most, 2)
    if num_samples == 64:
        assert not card.keeps_freed
        assert 10 < at_most <= 26


def test_a_share_that_fits_is_computed_at_once_after_a_trial_of_a_few_samples() -> None:
    card = Card(100e6)
    model = Model(card)
    run, _, _, limits = guarded(card, model, 500)
    assert_same_gradients(model, run, 500)
    assert card.at_once == [2, 2, 8, 500]
    assert_same_gradients(model, run, 500)
    assert card.at_once[4:] == [500]
    assert limits[0].whole_samples > 5000
    assert card.keeps_freed


@pytest.mark.parametrize("fails_backward", [False, True])
def test_an_error_in_either_pass_lowers_the_limit_and_the_step_is_the_same(fails_backward) -> None:
    """The card has a quarter of the memory that it claims to have."""
    card = Card(200e3, says_bytes=900e3)
    model = Model(card, fails_backward=fails_backward)
    run, _, _, limits = guarded(card, model, 60)
    for _ in range(4):
        assert_same_gradients(model, run, 60)
    assert limits[-1].whole_samples < 23
    before = len(card.at_once)
    assert_same_gradients(model, run, 60)
    assert max(card.at_once[before:]) <= 10, "no further error"


def test_one_sample_that_does_not_fit_is_an_error() -> None:
    card = Card(105e3, says_bytes=900e3)
    run, *_ = guarded(card, Model(card), 1)
    with pytest.raises(torch.OutOfMemoryError):
        run(batch(1)[0])


def test_other_errors_pass_through() -> None:
    card = Card(900e3)
    run, *_ = guarded(card, Model(card), 4)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        run(torch.zeros(4, FEATURES + 1, dtype=torch.float64))


def test_a_model_that_mixes_samples_is_not_split(caplog) -> None:
    card = Card(200e3)
    model = Model(card, mixes=True)
    run, _, weights, _ = guarded(card, model, 9)
    for num_samples in (9, 12):
        weights.set(num_samples, num_samples)
        with pytest.raises(torch.OutOfMemoryError, match="12 samples") if num_samples == 12 else nullcontext():
            run(batch(num_samples)[0])
    assert "does not treat samples one by one" in caplog.text


def test_a_loss_inside_of_the_model_is_the_weighted_mean_of_its_microbatches() -> None:
    card = Card(280e3)
    model = Model(card)
    run, _, weights, _ = guarded(card, model, 30)
    x, labels = batch(30)
    labels[::3] = -100
    counts = (labels != -100).double()
    weights.set_weights(float(counts.sum()), float(counts.sum()), lambda first, until: float(counts[first:until].sum()))
    weights.is_mean = True
    output = run(x, labels=labels)
    assert len(card.at_once) > 4
    output["loss"].backward()
    found = gradients_of(model)
    model.card = Card(1e9)
    expected = model(x, labels=labels)
    assert output["name"] == "model"
    assert torch.allclose(output["loss"], expected["loss"], atol=1e-14)
    assert torch.allclose(output["logits"], expected["logits"], atol=1e-14)
    expected["loss"].backward()
    for one, other in zip(found, gradients_of(model), strict=True):
        assert one is None or torch.allclose(one, other, atol=1e-14)  # pyrefly: ignore - both are there or none


def test_dropout_is_the_same_in_the_repeated_forward_pass() -> None:
    """The gradient of the sum of outputs by the last bias counts samples; by the last weight it sums kept values."""
    card = Card(280e3)
    model = Model(card, dropout=0.5)
    run, *_ = guarded(card, model, 30)
    x, _ = batch(30)
    output = run(x)
    output.square().sum().backward()
    weight, bias = model.layers[3].weight, model.layers[3].bias
    hidden_times_weight = (output - bias).detach()
    # sum_ij dL/dw_ij w_ij = sum_n 2 y_n (y_n - b): true only if forward and backward passes dropped the same values
    assert (weight.grad * weight).sum().item() == pytest.approx((2 * output * hidden_times_weight).sum().item())


def test_autocast_of_the_script_holds_in_the_backward_pass() -> None:
    card = Card(280e3)
    model = Model(card).float()
    run, *_ = guarded(card, model, 30)
    x = batch(30)[0].float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = run(x)
        assert output.dtype == torch.bfloat16
    output.float().square().sum().backward()
    found = gradients_of(model)
    model.card = Card(1e9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(x)
    assert torch.equal(output, expected)
    expected.float().square().sum().backward()
    for one, other in zip(found, gradients_of(model), strict=True):
        assert one is None or torch.allclose(one, other, rtol=0.05, atol=0.05)  # pyrefly: ignore - as above


def test_a_compiled_model_is_measured_and_split() -> None:
    card = Card(280e3)
    model = Model(card)
    model.layers = torch.compile(model.layers, backend="aot_eager")  # pyrefly: ignore - a module again
    run, *_ = guarded(card, model, 30)
    for _ in range(2):
        assert_same_gradients(model, run, 30)
    assert max(card.at_once) < 16


def test_the_next_process_uses_less_memory_if_the_kernel_has_killed_this_one(tmp_path) -> None:
    environment = WorkerEnvironment(run_dir=tmp_path, member="2.0")
    assert OomRecord.of_worker(environment, {}, 5).factor == 1.0
    assert OomRecord.of_worker(environment, {}, 5).factor == 1.0, "it ended for another reason"
    assert OomRecord.of_worker(environment, {}, 6).factor == pytest.approx(0.7)
    other = OomRecord.of_worker(WorkerEnvironment(run_dir=tmp_path, member="2.1"), {}, 6)
    other.record_exit(ValueError("another reason"))
    other.record_exit(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"))
    assert OomRecord.of_worker(environment, {}, 6).factor == pytest.approx(0.49)
    assert OomRecord.of_worker(WorkerEnvironment(run_dir=tmp_path, member="3.0"), {}, 6).factor == 1.0
    (tmp_path / "memory-3.json").write_text("[6, ")
    assert OomRecord.of_worker(WorkerEnvironment(run_dir=tmp_path, member="3.1"), {}, 6).factor == 1.0


def test_a_batch_is_cut_wherever_it_has_as_many_rows() -> None:
    tree = {"x": torch.arange(6), "mask": [torch.zeros(6, 2), torch.zeros(2)], "name": "a"}
    found = microbatches.slice_samples(tree, 6, 2, 5)
    assert found["x"].tolist() == [2, 3, 4]
    assert [len(each) for each in found["mask"]] == [3, 2]
    assert found["name"] == "a"


def test_memory_of_this_process_rises_and_falls_with_its_tensors() -> None:
    """Real numbers of the kernel."""
    process = ProcessMemory(1)
    process.reset_peak()
    before = process.peak_bytes()
    torch.ones(2**24).sum()
    assert process.peak_bytes() - before == pytest.approx(2**26, rel=0.2)
    assert process.num_oom_kills() >= 0
