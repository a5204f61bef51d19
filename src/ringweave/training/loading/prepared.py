"""What every loader that `prepare` returns can say of itself."""

import abc
from typing import Any

from torch.utils.data import DataLoader

from ringweave.training.loading.orders import Reading
from ringweave.training.reducing import SampleWeights


class PreparedLoader(abc.ABC):
    """Made of the script's loader, which is read and never iterated."""

    def __init__(self, loader: DataLoader, reading: Reading, weights: SampleWeights) -> None:
        self._loader, self._reading, self._weights = loader, reading, weights

    @property
    def dataset(self) -> Any:
        """The data set."""
        return self._loader.dataset

    @property
    def batch_size(self) -> int:
        """Samples of a train step over all ranks, or members."""
        return self._reading.batch_samples

    @property
    def fraction(self) -> float:
        """This rank's part of the present batch, as planned (of its ring's, in rings).

        Weigh a mean by it before a sum over these ranks, to log the true mean.
        """
        return self._weights.fraction

    @property
    @abc.abstractmethod
    def shares(self) -> tuple[int, ...]:
        """Samples of each rank in the next whole batch; in rings of each rank of this one."""

    @property
    @abc.abstractmethod
    def next_epoch(self) -> int:
        """Number of the epoch that the next pass is, or is the rest of."""
