"""ringweave: distributed training on unequal machines and unequal networks, on PyTorch."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringweave.telemetry import Iterations as Iterations
    from ringweave.training import prepare as prepare

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """`prepare`, which brings torch, and `Iterations`: loaded when asked for: `import ringweave` stays light."""
    if name == "prepare":
        from ringweave.training import prepare

        return prepare
    if name == "Iterations":
        from ringweave.telemetry import Iterations

        return Iterations
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
