"""Random numbers of blocks: drawn by what is computed, not by who computes it or what was drawn before.

So dropout is the same bits however blocks lie on ranks, and after they moved. Only torch's own generators are keyed; a
block that draws from Python's or numpy's does not have this.
"""

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import xxhash


@dataclass(frozen=True, kw_only=True, slots=True)
class Keys:
    """Seeds of one replica's blocks."""

    seed: int
    """Of the run."""
    replica: int
    """Replicas draw differently, as workers of data-parallel training do."""

    def key(self, block: int, train_step: int, microbatch: int) -> int:
        """64 bits for a block's forward of a microbatch in a train step."""
        parts = (self.seed % 2**64, self.replica, block, train_step, microbatch)
        return xxhash.xxh3_64_intdigest(struct.pack("<5Q", *parts))

    @contextmanager
    def drawing(self, train_step: int, microbatch: int, device: torch.device) -> Iterator[Callable[[int], None]]:
        """Inside, torch draws by the keys; afterwards it goes on as if nothing had been drawn.

        Gives what begins a block: what torch draws from then on is that block's.
        """
        generators = [torch.default_generator]
        if device.type == "cuda":
            generators.append(torch.cuda.default_generators[device.index or 0])
        states = [generator.get_state() for generator in generators]

        def begin(block: int) -> None:
            for generator in generators:
                generator.manual_seed(self.key(block, train_step, microbatch))

        try:
            yield begin
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
