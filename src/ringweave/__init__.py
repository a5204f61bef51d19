"""ringweave: distributed training on unequal machines and unequal networks, on PyTorch."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringweave.telemetry import Iterations as Iterations
    from ringweave.training import Checkpoints as Checkpoints
    from ringweave.training import prepare as prepare

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Load public names on first use, since some import torch: `import ringweave` stays light."""
    if name in ("Checkpoints", "prepare"):
        from ringweave import training

        return getattr(training, name)
    if name == "Iterations":
        from ringweave.telemetry import Iterations

        return Iterations
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
