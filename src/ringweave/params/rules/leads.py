"""How much of training others push while a ring computes: how far ahead it should be given the parameters."""

_MEMORY = 0.5
"""What the past counts for beside the last round: a stall is forgotten in a few rounds."""


class Leads:
    """Knows for each ring how many train steps its pushes have usually come too late.

    A gradient that is computed on the newest parameters is old when it arrives, since others have pushed meanwhile. By
    how much is nearly the same in each round, so the ring can be given what the parameters will probably be by then.

    Where all rings take turns, none is late by more than a *turn*: what the others of the ring with the smallest part
    push in one train step. Momentum foretells that much. It does not foretell what a ring comes too late by that has
    become slow: where curvature is high, parameters swing to and fro within a few train steps, and a gradient computed
    far ahead drives them apart. So beyond a turn a lead is the shorter the later the ring is (decision 0044).

    Source: weight prediction of pipelines with stale gradients (Chen et al., "Efficient and Robust Parallel DNN
    Training through Model Parallelism on Multi-GPU Platform", 2018; Kosson et al., "Pipelined Backpropagation at
    Scale", 2021), where the delay is fixed; here it is measured.
    """

    def __init__(self) -> None:
        self._since: dict[int, float] = {}
        self._usual: dict[int, float] = {}
        self._shares: dict[int, float] = {}
        self._training: set[int] = set()

    def grant(self, ring: int, train_steps: float) -> float:
        """The ring takes parameters after so many train steps of all; how many ahead they should be.

        None at first and after a rest: that is where rings meet, and all of them are to have the same parameters.
        """
        self._since[ring] = train_steps
        if ring not in self._training:
            return 0.0
        usual, turn = self._usual[ring], max(0.0, 1.0 - min(self._shares.values()))
        return usual if usual <= turn else turn * turn / usual

    def push(self, ring: int, train_steps: float, share: float) -> None:
        """What it computed on them has come, after so many train steps without it, and is that part of one itself."""
        late = train_steps - self._since.get(ring, train_steps)
        self._usual[ring] = _MEMORY * self._usual.get(ring, late) + (1 - _MEMORY) * late
        self._shares[ring] = share
        self._training.add(ring)

    def rest(self, ring: int) -> None:
        """The ring computes nothing any more until its next grant."""
        self._training.discard(ring)
