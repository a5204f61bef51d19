"""Cases of Lightning's tests, and a call in a process that has imported the library; the tests themselves have not."""

import importlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to train."""

    num_ranks: int = 3
    num_epochs: int = 2
    batch: int = 2
    """Samples of each process."""
    accumulate: int = 1
    precision: Any = "64-true"
    shares: tuple[int, ...] = ()
    """Samples of each rank in a batch; empty leaves them equal."""
    evaluates: bool = True
    is_manual: bool = False
    """The training step itself calls the optimizer."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of a training."""

    parameters: list[np.ndarray]
    log: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    """Logged values with their step."""
    metrics: dict[str, float] = field(default_factory=dict)
    global_step: int = 0
    learning_rate: float = 0.0
    is_exact: bool = True
    has_joined_late: bool = False
    backend: str = ""
    ranks: tuple[int, int] = (0, 1)
    """Rank of this process, and their number, as Lightning sees them."""


def call(name: str, *args: Any) -> Any:
    """Call a function of lightning_functions.py."""
    return getattr(importlib.import_module("tests.integrations.lightning_functions"), name)(*args)
