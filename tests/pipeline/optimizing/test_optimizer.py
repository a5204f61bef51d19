"""Optimizers of blocks behind one front, without any process."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ringweave.errors import TrainingError
from ringweave.pipeline.model_blocks import BlockStore
from ringweave.pipeline.optimizer import BlockOptimizers

HOST = torch.device("cpu")


def make(block: nn.Module) -> Optimizer:
    weights = [parameter for parameter in block.parameters() if parameter.ndim > 1]
    rest = [parameter for parameter in block.parameters() if parameter.ndim <= 1]
    return torch.optim.AdamW([{"params": weights}, {"params": rest, "weight_decay": 0.0}], lr=1.0)


def three_blocks() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)]


def test_the_front_has_all_parameters_and_passes_settings_on() -> None:
    blocks = BlockStore(three_blocks(), range(3), HOST)
    front = BlockOptimizers(make, blocks)
    assert [len(group["params"]) for group in front.param_groups] == [2, 2]
    assert [group["weight_decay"] for group in front.param_groups] == [0.01, 0.0]
    scheduler = LambdaLR(front, lambda step: 0.5**step)
    for parameter in front.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    front.step()
    scheduler.step()
    front.step()
    first = front.for_block(0)
    assert first is not None
    assert [group["lr"] for group in first.param_groups] == [0.5, 0.5]
    assert front.for_block(1) is None
    front.zero_grad()
    assert all(parameter.grad is None for group in front.param_groups for parameter in group["params"])


def test_a_rank_without_parameters_has_the_same_settings() -> None:
    front = BlockOptimizers(make, BlockStore(three_blocks(), [1], HOST))
    assert [group["params"] for group in front.param_groups] == [[], []]
    scheduler = LambdaLR(front, lambda step: 0.5**step)
    front.step()
    scheduler.step()
    assert front.param_groups[0]["lr"] == 0.5


def test_a_block_comes_with_its_state_and_goes() -> None:
    whole = BlockOptimizers(make, BlockStore(three_blocks(), range(3), HOST))
    for group in whole.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    whole.step()
    sent = whole.for_block(2)
    assert sent is not None
    blocks = BlockStore(three_blocks(), [0], HOST)
    front = BlockOptimizers(make, blocks)
    blocks.allocate(2).load_state_dict(three_blocks()[2].state_dict())
    taken = front.add_block(2, sent.state_dict())
    assert taken is not None
    assert [len(group["params"]) for group in front.param_groups] == [2, 2]
    assert [state["step"].item() for state in taken.state.values()] == [1, 1]
    front.remove_block(2)
    blocks.drop_values(2)
    assert [len(group["params"]) for group in front.param_groups] == [1, 1]
    assert blocks[2].weight.is_meta


def test_a_block_that_is_taken_for_a_trial_may_fail_alone() -> None:
    blocks = BlockStore(three_blocks(), [0], HOST)
    front = BlockOptimizers(make, blocks)
    blocks.allocate(2).load_state_dict(three_blocks()[2].state_dict())
    failures: list[str] = []

    def attempt(update: Callable[[], None]) -> None:
        try:
            update()
        except KeyError as cause:
            failures.append(str(cause))

    taken = front.add_block(2, guard=attempt)
    assert taken is not None
    for group in front.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    taken.state[blocks[2].weight]["step"] = torch.zeros(())
    before = blocks[0].weight.clone()
    front.step()
    assert failures == ["'exp_avg'"]
    assert not torch.equal(blocks[0].weight, before)
    front.confirm_block(2)
    with pytest.raises(KeyError):
        front.step()
    front.add_block(2, guard=attempt)
    front.remove_block(2)
    front.step()
    front.add_block(2)
    front.step()
    assert len(failures) == 1


def test_the_state_of_all_blocks_is_saved_and_loaded() -> None:
    one, other = (BlockOptimizers(make, BlockStore(three_blocks(), range(3), HOST)) for _ in range(2))
    for group in one.param_groups:
        group["lr"] = 0.25
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    one.step()
    other.load_state_dict(one.state_dict())
    loaded = other.for_block(0)
    assert loaded is not None
    assert len(loaded.state) == 2
    assert other.param_groups[0]["lr"] == 0.25


def test_what_is_refused() -> None:
    with pytest.raises(TrainingError) as caught:
        BlockOptimizers(make, BlockStore([nn.Tanh()], [0], HOST))
    assert str(caught.value) == ("parameters of all blocks: 0, expected 1 or more. Give a model that can be trained.")
    front = BlockOptimizers(make, BlockStore(three_blocks(), range(3), HOST))
    with pytest.raises(TrainingError) as caught:
        front.step(abs)
    assert str(caught.value) == (
        "closure of a pipeline's optimizer: <built-in function abs>, expected none. Take an optimizer that needs none."
    )

    def uneven(block: nn.Module) -> Optimizer:
        return make(block) if block.weight.shape == (2, 2) else torch.optim.AdamW(block.parameters())

    with pytest.raises(TrainingError) as caught:
        BlockOptimizers(uneven, BlockStore(three_blocks(), range(3), HOST))
    assert str(caught.value) == (
        "groups of a block's optimizer: 1, expected 2, as the first block's. "
        "Make the same groups for every block; a group may be empty. [block 2]"
    )
    with pytest.raises(TrainingError) as caught:
        BlockStore([], [], HOST)
    assert str(caught.value) == "blocks: 0, expected 1 or more. Give the model's blocks in their order."
