"""Rings formed anew when speeds have drifted: looked at where all rings meet, by all ranks alike."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ringweave.params.ring.optimizer import PushedOptimizer
from ringweave.params.rules import StalenessPolicy
from ringweave.planning.balancing import Speed
from ringweave.planning.grouping.forecasts import Ring
from ringweave.training.choosing.reconsidering import Reconsidering
from ringweave.training.recording import Recorder
from ringweave.training.reducing import GradientReducer, SampleWeights
from ringweave.training.rings import moments
from ringweave.training.rings.forming import Formed, better_rings
from ringweave.training.rings.seating import Seating
from ringweave.training.rings.settings import Asynchronous
from ringweave.training.rings.sharing import RingShares


@dataclass(frozen=True, kw_only=True, slots=True)
class Regrouping:
    """All that belongs to one ring, and has to belong to another one."""

    places: Seating
    settings: Asynchronous
    formed: Formed
    """The rings at the start."""
    parallel: DistributedDataParallel
    reducer: GradientReducer
    weights: SampleWeights
    optimizer: PushedOptimizer
    shares: RingShares
    recorder: Recorder
    reconsidering: Reconsidering | None = None
    """Where `auto` has chosen, and chooses again."""

    def look(self, speeds: Sequence[Speed] | None) -> None:
        """Form other rings if these speeds call for them; every ring rests, and takes parameters afterwards.

        Args:
            speeds: Of all ranks, the same on all of them; None as long as one of them is not known.
        """
        rings = None if speeds is None else self._better(speeds)
        if speeds is not None and rings is not None:
            self._move(rings)

    def _better(self, speeds: Sequence[Speed]) -> tuple[Ring, ...] | None:
        present = self.places.seat.rings
        if self.reconsidering is not None:
            return self.reconsidering.better_rings(present, self.shares.recent_s)
        return better_rings(present, speeds, self.formed.num_rings) if self.formed.follows else None

    def _move(self, rings: tuple[Ring, ...]) -> None:
        left = self.places.seat.groups
        self.places.move(rings)
        seat = self.places.seat
        self.reducer.process_group = seat.process_group
        self.parallel._update_process_group(seat.process_group)  # buckets are ordered anew, on all ranks alike
        self.weights.num_ranks = len(seat.ring)
        self.optimizer.move(seat.member)
        if self.settings.local_steps:
            moments.share(self.optimizer, seat.speeds, seat.ring[0], is_own=seat.client is not None)
        self.shares.sit(seat.ring, seat.speeds)
        for group in left:  # on all ranks in this order, once nothing uses them any more
            dist.destroy_process_group(group)
        self.recorder.rings_formed(rings=rings, most_versions=StalenessPolicy(num_rings=len(rings)).most_versions)
