import pytest
import torch
from torch import nn

from ringweave.errors import RpcError, TrainingError
from ringweave.training.elastic import training_state
from ringweave.training.elastic.training_state import TrainingState


def trained(
    optimizer_of, num_steps: int = 3
) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(num_steps)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = optimizer_of(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(torch.randn(5, 3)).sum().backward()
        optimizer.step()
        scheduler.step()
    return model, optimizer, scheduler


OPTIMIZERS = {
    "adam": lambda parameters: torch.optim.AdamW(parameters, 0.1, betas=(0.8, 0.9)),
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "plain": lambda parameters: torch.optim.SGD(parameters, 0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_newcomer_goes_on_bit_for_bit(name: str) -> None:
    model, optimizer, scheduler = trained(OPTIMIZERS[name])
    other, other_optimizer, other_scheduler = trained(OPTIMIZERS[name], 0)
    buffers = TrainingState(model, optimizer, {"rate": scheduler}).to_buffers()
    TrainingState(other, other_optimizer, {"rate": other_scheduler}).load(
        {k: memoryview(v) for k, v in buffers.items()}
    )
    inputs = torch.randn(5, 3)
    for each, its_optimizer, its_scheduler in (
        (model, optimizer, scheduler),
        (other, other_optimizer, other_scheduler),
    ):
        for _ in range(3):
            its_optimizer.zero_grad()
            each(inputs).sum().backward()
            its_optimizer.step()
            its_scheduler.step()
    assert all(
        (own == its).all() for own, its in zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    )
    assert scheduler.get_last_lr() == other_scheduler.get_last_lr()


def test_what_does_not_go_along_is_said() -> None:
    model, optimizer, scheduler = trained(OPTIMIZERS["plain"])
    buffers = TrainingState(model, optimizer, {}).to_buffers()
    with pytest.raises(TrainingError, match=r"what goes along with the state: .*, expected rate as well"):
        TrainingState(model, optimizer, {"rate": scheduler}).load({k: memoryview(v) for k, v in buffers.items()})


def test_state_that_is_no_plain_value_is_refused() -> None:
    class Odd:
        def state_dict(self) -> dict:
            return {"it": object()}

    model, optimizer, _ = trained(OPTIMIZERS["plain"])
    with pytest.raises(TrainingError, match="state that goes along: 'object', expected numbers, texts, lists"):
        TrainingState(model, optimizer, {"odd": Odd()}).to_buffers()


OWN = {"model/0.weight": torch.zeros(3, 4)}


@pytest.mark.parametrize(
    "sizes",
    [
        [("rest", 2)],
        [("model/0.weight", 4), ("rest", 2)],
        [("rest", 2**40)],
        [("model/0.weight", 48)],
        [("model/0.weight", 48), ("rest", 2), ("rest", 2)],
        [("model/0.weight", 48), ("rest", 2), ("beside/0", 4)],
        [("model/0.weight", 48), ("rest", 2), ("optimizer/0/x", 2**25)],
    ],
)
def test_another_model_is_refused_before_there_is_memory_for_it(sizes: list[tuple[str, int]]) -> None:
    training_state.check_state_sizes([("model/0.weight", 48), ("rest", 2)], OWN)
    with pytest.raises(RpcError, match=r"state of a peer: .*, expected tensors of the same names and sizes as here"):
        training_state.check_state_sizes(sizes, OWN)


def test_what_goes_along_may_not_be_without_end() -> None:
    expected = r"state of a peer: '16777217 bytes beside tensors', expected at most 16777216\. Let what goes"
    with pytest.raises(RpcError, match=expected):
        training_state.check_state_sizes([("model/0.weight", 48), ("rest", training_state.MAX_REST_BYTES + 1)], OWN)


def test_what_is_beside_the_model_goes_along_and_has_to_be_there() -> None:
    model, optimizer, _ = trained(OPTIMIZERS["sgd"])
    other, other_optimizer, _ = trained(OPTIMIZERS["sgd"], 0)
    pushed, landed = [torch.arange(5.0), torch.arange(3)], [torch.zeros(5), torch.zeros(3, dtype=torch.int64)]
    giving = TrainingState(model, optimizer, {}, extra_tensors=pushed)
    taking = TrainingState(other, other_optimizer, {}, extra_tensors=landed)
    buffers = {name: memoryview(each).cast("B") for name, each in giving.to_buffers().items()}
    sizes = [(name, each.nbytes) for name, each in buffers.items()]
    training_state.check_state_sizes(sizes, taking._tensors())
    taking.load(buffers)
    assert all(map(torch.equal, landed, pushed))
    with pytest.raises(RpcError, match=r"state of a peer: .*beside/0.*, expected tensors of the same names and sizes"):
        training_state.check_state_sizes(sizes, TrainingState(other, other_optimizer, {})._tensors())
