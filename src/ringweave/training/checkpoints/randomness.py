"""Random numbers: the generators of Python, numpy and torch in this process."""

import random
from typing import Any

import numpy as np
import torch


def take() -> dict[str, Any]:
    """Where the generators are now; that of the GPU in use, if one is."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None,
    }


def put(state: dict[str, Any]) -> None:
    """Have the generators go on from there; that of the GPU if one is in use on both sides."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
