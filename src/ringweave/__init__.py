"""ringweave: distributed training on unequal machines and unequal networks, on PyTorch."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringweave.training import prepare as prepare

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """`ringweave.prepare`, which brings torch: loaded when it is asked for, so that `import ringweave` stays light."""
    if name == "prepare":
        from ringweave.training import prepare

        return prepare
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
