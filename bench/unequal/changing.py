"""Effect of a sudden change of speeds on rings, in virtual time; it needs no lab and no root.

    PYTHONPATH=. python bench/unequal/changing.py

Two rings with the server's rules, as in row `changed` of the table: equally fast for half of the training, then one of
them takes four times as long for the samples that it has by then; after one more epoch shares have followed. Printed is
the held-out loss after the epoch of the change and in the end, beside synchronous training and beside rings that stay
equal: the table's small model on digits, in batches that are eight times smaller. Then, for two rings with equal shares
of which one is slower, the highest curvature at which SGD with momentum 0.9 does not run away, times the learning rate;
it is 3.8 in synchronous training. All of it is simulated; five seeds take a minute.
"""

import argparse
import statistics
from collections.abc import Sequence

import torch
from sklearn.datasets import load_digits
from torch import nn

from tests.fakes import async_training
from tests.fakes.async_training import VirtualTask

EPOCHS, BATCH, TRAIN_STEPS, CHANNELS = 4, 256, 12, 32
EQUAL, CHANGED = (1.0, 1.0), (1.0, 0.25)
LEARNING_RATES = {"SGD": 0.05, "AdamW": 3e-3}
SLOWER = (1, 2, 3, 4, 6, 8)
SETTLING = 250
"""Train steps after which it shows what runs away."""

IMAGES, LABELS = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
PICTURES = (IMAGES.float() / 16).view(-1, 1, 8, 8)
IS_HELD_OUT = torch.arange(len(LABELS)) % 5 == 0


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--optimizers", default=",".join(LEARNING_RATES), help="separated by commas")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| optimizer | rings | after the change | of each seed | in the end | of each seed |\n|---|---|---|---|---|---|"
    )
    for optimizer in options.optimizers.split(","):
        for name, later in (("synchronous", None), ("equal", EQUAL), ("changed", CHANGED)):
            found = [losses(optimizer, seed, later) for seed in range(options.seeds)]
            columns = [to_text([each[epoch] for each in found]) for epoch in (EPOCHS // 2, -1)]
            print(f"| {optimizer} | {name} | {' | '.join(columns)} |", flush=True)
    print("\n| one of two rings slower | " + " | ".join(f"{slower} x" for slower in SLOWER) + " |")
    print("|---|" + "---|" * len(SLOWER))
    print("| curvature times learning rate | " + " | ".join(f"{limit(slower):.2f}" for slower in SLOWER) + " |")


def losses(optimizer: str, seed: int, later: Sequence[float] | None) -> list[float]:
    """Held-out losses after each epoch; synchronous training where there are no later speeds."""
    found: list[float] = []

    def make_model() -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(
            *(nn.Conv2d(1, CHANNELS, 3, padding=1), nn.ReLU(), nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.ReLU()),
            *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * CHANNELS, 10)),
        )

    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        if optimizer == "SGD":
            return torch.optim.SGD(model.parameters(), lr=LEARNING_RATES[optimizer], momentum=0.9)
        return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATES[optimizer])

    @torch.no_grad()
    def note(model: nn.Module) -> None:
        found.append(loss(model, IS_HELD_OUT.nonzero().flatten()).item())

    generator, train = torch.Generator().manual_seed(seed), (~IS_HELD_OUT).nonzero().flatten()
    count = BATCH * TRAIN_STEPS
    samples = train.repeat(count // len(train) + 1)[:count]
    task = VirtualTask(
        make_model=make_model,
        make_optimizer=make_optimizer,
        loss=loss,
        epochs=[samples[torch.randperm(count, generator=generator)] for _ in range(EPOCHS)],
        batch_samples=BATCH,
        decay=lambda epoch: 1 - epoch / EPOCHS,
        after_epoch=note,
    )
    if later is None:
        async_training.train_synchronously(task)
    else:
        async_training.train_asynchronously(task, EQUAL, later_speeds=later)
    return found


def loss(model: nn.Module, samples: torch.Tensor) -> torch.Tensor:
    """Cross entropy."""
    return nn.functional.cross_entropy(model(PICTURES[samples]), LABELS[samples])


def limit(slower: float) -> float:
    """The least curvature, times the learning rate, that runs away where one of two rings is so many times slower.

    The model is a place in one valley of each curvature.
    """
    curvatures = torch.arange(0.02, 4.0, 0.02, dtype=torch.float64)
    reached: list[torch.Tensor] = []
    task = VirtualTask(
        make_model=lambda: nn.ParameterList([torch.ones_like(curvatures)]),
        make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9),
        loss=lambda model, _: (curvatures * next(model.parameters()).square()).sum() / 2,
        epochs=[torch.zeros(2 * count, dtype=torch.long) for count in (2, SETTLING)],
        batch_samples=2,
        after_epoch=lambda model: reached.append(next(model.parameters()).detach().abs().clone()),
    )
    async_training.train_asynchronously(task, EQUAL, later_speeds=(1.0, 1 / slower))
    away = (~(reached[1] <= reached[0])).nonzero().flatten()
    return curvatures[away[0]].item() if len(away) else float("inf")


def to_text(found: Sequence[float]) -> str:
    """The mean, and each."""
    return f"{statistics.mean(found):.3f} | {', '.join(f'{each:.2f}' for each in found)}"


if __name__ == "__main__":
    main()
