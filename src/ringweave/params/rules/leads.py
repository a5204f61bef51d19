"""How much of training others push while a ring computes: how far ahead it should be given the parameters."""

MOST_TRAIN_STEPS = 2.0
"""No parameters are predicted further ahead than that: momentum says little about what comes later."""
_MEMORY = 0.5
"""What the past counts for beside the last round: a stall is forgotten in a few rounds."""


class Leads:
    """Knows for each ring how many train steps its pushes have usually come too late.

    A gradient that is computed on the newest parameters is old when it arrives, since others have pushed meanwhile. By
    how much is nearly the same in each round, so the ring can be given what the parameters will probably be by then.

    Source: weight prediction of pipelines with stale gradients (Chen et al., "Efficient and Robust Parallel DNN
    Training through Model Parallelism on Multi-GPU Platform", 2018; Kosson et al., "Pipelined Backpropagation at
    Scale", 2021), where the delay is fixed; here it is measured.
    """

    def __init__(self) -> None:
        self._since: dict[int, float] = {}
        self._usual: dict[int, float] = {}
        self._training: set[int] = set()

    def grant(self, ring: int, train_steps: float) -> float:
        """The ring takes parameters after so many train steps of all; how many ahead they should be.

        None at first and after a rest: that is where rings meet, and all of them are to have the same parameters.
        """
        self._since[ring] = train_steps
        return min(self._usual.get(ring, 0.0), MOST_TRAIN_STEPS) if ring in self._training else 0.0

    def push(self, ring: int, train_steps: float) -> None:
        """What it computed on them has come, after so many train steps without it."""
        late = train_steps - self._since.get(ring, train_steps)
        self._usual[ring] = _MEMORY * self._usual.get(ring, late) + (1 - _MEMORY) * late
        self._training.add(ring)

    def rest(self, ring: int) -> None:
        """The ring computes nothing any more until its next grant."""
        self._training.discard(ring)
