"""Scripts of jobs that train in the tests, as far as they are the same for all of them."""


def prepared(
    *,
    num_samples: int = 32,
    batch: int = 8,
    lr: float = 0.05,
    shuffles: bool = False,
    model: str = "torch.nn.Linear(6, 2)",
    options: str = "",
) -> str:
    """What comes before the loop: a model that learns to repeat two numbers of six, prepared with these `options`."""
    return f"""
import os, pathlib, time, torch, ringweave
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn({num_samples}, 6)
model = {model}
optimizer = torch.optim.SGD(model.parameters(), lr={lr})
loader = DataLoader(TensorDataset(x, x[:, :2]), batch_size={batch}, shuffle={shuffles})
model, optimizer, loader = ringweave.prepare(model, optimizer, loader{options})
"""


def epoch(*, indent: int = 0, also: str = "") -> str:
    """A loop over the loader, so far to the right; `also` is done in each of its steps."""
    lines = ["for a, b in loader:", "    optimizer.zero_grad()"]
    lines += ["    torch.nn.functional.mse_loss(model(a), b).backward()", "    optimizer.step()"]
    lines += [f"    {line}" for line in also.splitlines()]
    return "".join(f"{' ' * indent}{line}\n" for line in lines)


SUM = 'print("sum", sum(p.sum().item() for p in model.parameters()), flush=True)\n'
"""The same on all ranks that have the same parameters."""

PREPARED = prepared()
"""Four batches of eight samples; the loop over `loader` is the test's own."""
