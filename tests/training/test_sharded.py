"""Sharded models under `prepare`: FSDP2 and HSDP against one process on the whole batch, and what is refused."""

import pytest
import torch

from ringweave.testing.ranks import run_ranks
from ringweave.training import sharded_model
from tests import effort
from tests.training import sharded_functions
from tests.training.training_functions import Case

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

NUM_STEPS = max(12, effort.share_of(20))
"""Three passes over the data every day, and all shares; five in the thorough run."""
SHARES = [(1, 2, 8, 1), (3, 3, 3, 3), (7, 4, 1, 0)]
CASES = {
    "equal shares, uneven last batch": (Case(num_steps=NUM_STEPS), []),
    "last batch of one sample": (Case(num_samples=49, num_steps=NUM_STEPS), []),
    "unequal shares": (Case(num_steps=NUM_STEPS), SHARES),
    "accumulation": (Case(num_steps=NUM_STEPS, accumulate=3), SHARES),
    "accumulation without communication": (Case(num_steps=NUM_STEPS, accumulate=3, uses_no_sync=True), SHARES),
    "sum": (Case(num_steps=NUM_STEPS, reduction="sum"), SHARES),
    "clipping and schedule": (Case(num_steps=NUM_STEPS, clips=True, schedules=True), SHARES),
    "a term of the loss without samples": (Case(num_steps=NUM_STEPS, has_regularizer=True), SHARES),
    "tokens, by sample": (Case(num_steps=NUM_STEPS, weighs="sample"), SHARES),
    "tokens, by batch": (Case(num_steps=NUM_STEPS, weighs="batch"), SHARES),
}


DAILY_HSDP = "accumulation without communication"


@pytest.mark.parametrize(
    ("name", "shape"),
    [(name, (4,)) for name in CASES]
    + [pytest.param(name, (2, 2), marks=[] if name == DAILY_HSDP else pytest.mark.thorough) for name in CASES],
)
def test_weights_equal_those_of_one_process(name: str, shape: tuple[int, ...]) -> None:
    """FSDP2, and HSDP with a shape of two dimensions."""
    case, shares = CASES[name]
    for distance, is_accounted, is_sharded in run_ranks(
        sharded_functions.distance_from_one_process, 4, case, shares, shape
    ):
        assert distance < 1e-9
        assert is_accounted
        assert is_sharded


def test_a_rank_with_little_memory_gets_fewer_samples() -> None:
    case = Case(num_steps=12)
    for distance, is_accounted, _ in run_ranks(sharded_functions.distance_from_one_process, 2, case, [], (2,), 7):
        assert distance < 1e-9
        assert is_accounted


def test_replicas_and_buffers_get_the_values_of_the_lower_rank() -> None:
    found = run_ranks(sharded_functions.replicate_what_differs, 4, (2, 2))
    assert [set(first) for first, _ in found] == [{0.0}, {1.0}, {0.0}, {1.0}]
    assert all(buffer == [0.0] * 8 for _, buffer in found)


@pytest.mark.parametrize(
    ("accumulate", "has_hook", "num_overlapped"),
    [
        pytest.param(1, False, 9, id="each of three groups in three steps"),
        pytest.param(2, False, 9, id="none that is added to gradients at once"),
        pytest.param(1, True, 6, id="none whose gradient a hook reads"),
    ],
)
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_reductions_overlap_with_the_backward_pass(
    shape: tuple[int, ...], accumulate: int, has_hook: bool, num_overlapped: int
) -> None:
    found = run_ranks(sharded_functions.overlapped_beside_waited, 4, shape, accumulate, has_hook)
    counts = {"scatter": num_overlapped, "sum": num_overlapped * (len(shape) == 2)}
    assert found == [(True, 3, counts)] * 4


class RecordedWork:
    """Work of a collective that says when it was waited for."""

    def __init__(self, name: str, told: list[str]) -> None:
        self.name, self.told = name, told
        told.append(f"start {name}")

    def wait(self) -> None:
        self.told.append(f"end {self.name}")


def test_reductions_end_with_their_own_pass_in_the_order_of_their_needs() -> None:
    reductions, told, names = sharded_model.OpenReductions(), [], iter(["lost", "first", "second"])
    outputs = [torch.zeros(1), torch.zeros(1), torch.zeros(1)]

    def reduce(gradient: torch.Tensor) -> None:
        assert reductions.may_open()
        name, output = next(names), outputs.pop()
        reductions.scatter(output, lambda: RecordedWork(f"scatter {name}", told))
        reductions.sum(output, lambda: RecordedWork(f"sum {name}", told))
        if name == "lost":
            raise ValueError("the script's own error")

    weight = torch.ones(1, requires_grad=True)
    middle = weight * 2
    weight.register_hook(reduce)
    with pytest.raises(ValueError, match="own error"):
        middle.sum().backward(retain_graph=True)
    assert told[0] == "start scatter lost"
    assert not reductions.may_open()
    reductions.start_all()
    told.clear()
    middle.register_hook(reduce)
    (middle * 3).sum().backward()
    for each in ("first", "second"):
        in_order = [f"start scatter {each}", f"end scatter {each}", f"start sum {each}", f"end sum {each}"]
        places = [told.index(event) for event in in_order]
        assert places == sorted(places)
    assert told.index("end scatter first") < told.index("start scatter second")
    assert told.index("start sum first") < told.index("start sum second")


EXPECTED = {
    "early optimizer": "parameters of the optimizer: '2 of 2 that the model does not have', expected the sharded "
    "model's. Make the optimizer after fully_shard",
    "balanced": "mode: 'balanced', expected sync for a sharded model, since the waits for one another in every layer",
    "ps": "mode: 'ps', expected sync for a sharded model, since each worker alone would need the whole model",
    "ps-hra": "mode: 'ps-hra', expected sync for a sharded model, since the parameter server needs the whole model",
    "ddp": "options ddp: 'bucket_cap_mb', expected none for a sharded model",
    "partly": "parameter 1.weight: 'a whole tensor', expected a part of a tensor that is sharded over all ranks. Shard "
    "the whole model by torch.distributed.fsdp.fully_shard",
    "replicated": "parameter weight: 'a tensor with placements (Replicate(),)', expected a part of a tensor",
    "fsdp1": "one of FullyShardedDataParallel (FSDP1)",
    "output": "output of the model: 'OwnOutput', expected a tensor, or a tuple, list or dict with tensors. Return one",
    "elastic": "model of an elastic job: 'a sharded model', expected one that every worker has whole",
}


def test_what_does_not_go_with_a_sharded_model_is_refused() -> None:
    for said in run_ranks(sharded_functions.refusals, 2, {}):
        assert said.keys() == EXPECTED.keys()
        for name, text in EXPECTED.items():
            assert text in said[name], (name, said[name])
