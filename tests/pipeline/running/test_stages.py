"""Blocks of a stage, their random numbers, and what crosses between them, without any process."""

import pytest
import torch
from torch import Tensor, nn

from ringweave.errors import TrainingError
from ringweave.pipeline.runtime import boundaries
from ringweave.pipeline.runtime.boundaries import CPU, Precision
from ringweave.pipeline.runtime.runner import BlockSeeds, StageModule


class Two(nn.Module):
    """Two tensors go on, one of them without a gradient."""

    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return x * scale, torch.arange(3)


def test_what_crosses_is_followed_without_moving_anything() -> None:
    norm = nn.BatchNorm1d(4)
    blocks = [nn.Linear(3, 4), norm, Two()]
    drawn = torch.get_rng_state()
    found = boundaries.trace_boundaries(
        blocks, (torch.empty(5, 3),), {"scale": torch.ones(5, 1), "unused": torch.ones(5)}
    )
    assert [[form.shape for form in boundary.tensors] for boundary in found] == [
        [(5, 3)],
        [(5, 4)],
        [(5, 4)],
        [(5, 4), (3,)],
    ]
    assert found[0].backward_bytes == 0
    assert (found[3].forward_bytes, found[3].backward_bytes) == (5 * 4 * 4 + 3 * 8, 5 * 4 * 4)
    assert norm.num_batches_tracked == 0
    assert torch.equal(drawn, torch.get_rng_state())


def test_blocks_that_decide_by_values_are_tried_as_copies() -> None:
    class Deciding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            return x if x.sum().item() > -1e9 else x[:, :1]

    block = Deciding()
    assert boundaries.trace_boundaries([block], (torch.empty(2, 3),), {})[1].tensors[0].shape == (2, 3)
    assert block.seen == 0


def test_under_autocast_other_types_cross() -> None:
    precision = Precision(device=CPU, autocast=torch.bfloat16)
    found = boundaries.trace_boundaries([nn.Linear(3, 4), nn.Tanh()], (torch.empty(5, 3),), {}, precision)
    assert [boundary.tensors[0].dtype for boundary in found] == [torch.float32, torch.bfloat16, torch.bfloat16]


def test_blocks_that_do_not_fit_each_other() -> None:
    with pytest.raises(TrainingError) as caught:
        boundaries.trace_boundaries([nn.Linear(3, 4), nn.Linear(3, 4)], (torch.empty(5, 3),), {})
    assert "expected a block that can be computed on what the one before it returns" in str(caught.value)
    assert "[block 1, Linear]" in str(caught.value)

    class Named(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"x": x}

    with pytest.raises(TrainingError) as caught:
        boundaries.trace_boundaries([Named()], (torch.empty(5, 3),), {})
    assert str(caught.value) == (
        "output of a block: 'dict', expected a tensor or a tuple of tensors. "
        "Wrap it so that it returns what the next block is called with. [block 0, Named]"
    )


def test_random_numbers_follow_from_what_is_computed() -> None:
    keys = BlockSeeds(seed=3, replica=0)
    places = [(block, step, microbatch) for block in range(3) for step in range(3) for microbatch in range(3)]
    assert len({keys.seed_for(*place) for place in places}) == len(places)
    assert keys.seed_for(1, 2, 0) != BlockSeeds(seed=3, replica=1).seed_for(1, 2, 0)
    before = torch.get_rng_state()
    draws = []
    for _ in range(2):
        with keys.seeded(2, 0, CPU) as begin:
            torch.rand(1)
            begin(1)
            draws.append(torch.rand(3))
        torch.rand(5)
    assert torch.equal(*draws)
    torch.set_rng_state(before)
    with keys.seeded(0, 0, CPU) as begin:
        begin(0)
        torch.rand(3)
    assert torch.equal(before, torch.get_rng_state())


def test_activations_of_another_form_are_refused() -> None:
    module = StageModule(BlockSeeds(seed=0, replica=0), Precision(device=CPU))
    module.blocks = [(0, nn.Linear(3, 4))]
    module.output_boundary = boundaries.trace_boundaries([nn.Linear(3, 4)], (torch.empty(5, 3),), {})[1]
    module.begin_step(0, (0, 1), [{}, {}])
    assert module(torch.ones(5, 3)).shape == (5, 4)
    with pytest.raises(TrainingError) as caught:
        module(torch.ones(6, 3))
    assert str(caught.value) == (
        "activations of a stage: [((6, 4), torch.float32)], expected [((5, 4), torch.float32)], as in the example. "
        "Compute in one precision (Settings.autocast), with shapes that do not depend on values."
    )
