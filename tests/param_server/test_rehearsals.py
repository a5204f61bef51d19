"""Rings with the server's defaults, in virtual time: what staleness does to the loss beside synchronous training."""

import functools
import statistics

import pytest
import torch
from torch import nn

from tests.fakes import async_training
from tests.fakes.async_training import VirtualTask

EPOCHS, BATCH = 8, 128
IS_HELD_OUT = torch.arange(1797) % 5 == 0


@functools.cache
def digits() -> list[torch.Tensor]:
    """Images and labels."""
    from sklearn.datasets import load_digits  # late: every process of tests imports this module, and few its tests run

    return [torch.from_numpy(array) for array in load_digits(return_X_y=True)]


@pytest.fixture(autouse=True)
def one_thread():
    """Threads that wait for each other take minutes for this on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def loss(model: nn.Module, samples: torch.Tensor) -> torch.Tensor:
    images, labels = digits()
    return nn.functional.cross_entropy(model(images[samples].float() / 16), labels[samples])


def task_of(optimizer: str, seed: int) -> VirtualTask:
    def make_model() -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))

    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        if optimizer == "SGD":
            return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return torch.optim.AdamW(model.parameters(), lr=3e-3)

    generator, train = torch.Generator().manual_seed(seed), (~IS_HELD_OUT).nonzero().flatten()
    whole = len(train) - len(train) % BATCH
    return VirtualTask(
        make_model=make_model,
        make_optimizer=make_optimizer,
        loss=loss,
        epochs=[train[torch.randperm(len(train), generator=generator)[:whole]] for _ in range(EPOCHS)],
        batch_samples=BATCH,
        decay=lambda epoch: 1 - epoch / EPOCHS,
    )


@torch.no_grad()
def held_out(model: nn.Module) -> float:
    return loss(model, IS_HELD_OUT.nonzero().flatten()).item()


@functools.cache
def synchronous_loss(optimizer: str) -> float:
    """Return the held-out loss of synchronous training, the mean over seeds."""
    return statistics.mean(held_out(async_training.train_synchronously(task_of(optimizer, seed))) for seed in range(3))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("speeds", [(4.0, 1.0), (1.0, 1.01, 0.5)])
def test_the_loss_is_that_of_synchronous_training(optimizer, speeds):
    tasks = [task_of(optimizer, seed) for seed in range(3)]
    found = [async_training.train_asynchronously(task, speeds) for task in tasks]
    # An optimizer that steps once a push is 15 to 40 % behind with AdamW. What is left is noise of the seeds.
    assert statistics.mean(held_out(each.model) for each in found) < synchronous_loss(optimizer) * 1.02
    assert max(max(each.staleness) for each in found) <= 4 * len(speeds)


def test_one_ring_is_synchronous_training():
    task = task_of("AdamW", 0)
    expected = async_training.train_synchronously(task)
    found = async_training.train_asynchronously(task, (1.0,))
    assert set(found.staleness) == {0}
    torch.testing.assert_close(list(found.model.parameters()), list(expected.parameters()), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_stalls_let_the_others_go_on():
    task = task_of("SGD", 0)
    found = async_training.train_asynchronously(task, (1.0,) * 4, stall=0.125)
    assert max(found.staleness) > 3
    assert held_out(found.model) < held_out(async_training.train_synchronously(task)) * 1.1


@pytest.mark.parametrize("slower", [1, 2, 3, 4, 8])
def test_nothing_runs_away_when_a_ring_suddenly_becomes_slow(slower):
    after, curvatures = [], torch.linspace(0.1, 1.4, 14, dtype=torch.float64)
    task = VirtualTask(
        make_model=lambda: nn.ParameterList([torch.ones_like(curvatures)]),  # a place in one valley of each curvature
        make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9),
        loss=lambda model, _: (curvatures * next(model.parameters()).square()).sum() / 2,
        epochs=[torch.zeros(2 * train_steps, dtype=torch.long) for train_steps in (10, 120)],
        batch_samples=2,
        after_epoch=lambda model: after.append(next(model.parameters()).detach().abs().clone()),
    )
    async_training.train_asynchronously(task, (1.0, 1.0), later_speeds=(1.0, 1 / slower))
    # With leads of up to two train steps a curvature of 0.8 / lr was enough for four times slower, 0.5 / lr for eight.
    assert (after[1] < after[0]).all()


def test_shares_follow_a_change_of_speeds_an_epoch_later():
    found = async_training.train_asynchronously(task_of("SGD", 0), (1.0, 1.0), later_speeds=(1.0, 0.25))
    assert max(found.staleness) == 4, "the slow ring's pushes, as long as shares are equal"
    assert max(found.staleness[-20:]) < 4
