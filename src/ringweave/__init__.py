"""ringweave: distributed training on unequal machines and unequal networks, on PyTorch."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringweave.training import Checkpoints as Checkpoints
    from ringweave.training import prepare as prepare

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """What brings torch is loaded when it is asked for, so that `import ringweave` stays light."""
    if name in ("Checkpoints", "prepare"):
        from ringweave import training

        return getattr(training, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
