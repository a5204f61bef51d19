"""Ring formation: which ranks form a ring by their speeds, and how many samples of a train step each rank computes.

In a ring, where all ranks wait for the slowest, shares change at step boundaries, as in mode balanced. Rings wait for
each other only at barriers of all rings, so the total of a ring changes there. The rings then start their job on the
parameter server: its set-up, the rings at the start, and checks of what they train.
"""

import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ringweave import rpc
from ringweave.environment import WorkerEnvironment
from ringweave.errors import DisagreementError, TrainingError, UsageError
from ringweave.jobs import modes
from ringweave.param_server import flat, optimizers
from ringweave.param_server.client import RingClient
from ringweave.param_server.messages import OptimizerOption, ParameterGroup, ServerSetup
from ringweave.planning import balancing, ring_grouping
from ringweave.planning.balancing import MemoryLimit, Rebalancer, ShareChange, Speed
from ringweave.planning.balancing.shares import Shares
from ringweave.planning.balancing.speed import MAX_BLOCKS
from ringweave.planning.mode_forecast import Ring
from ringweave.training.balancer import ShareBalancer
from ringweave.training.collectives import ControlGroup
from ringweave.training.mode_choice import forecast
from ringweave.training.options import Asynchronous, Script
from ringweave.training.timing import StepTimer

_KIND_RATIO = 1.25
"""Workers whose speed ratio is smaller are of one kind."""

_MAX_NOISE = 0.5
"""Limit of the noise: rings whose throughput can grow by half are always regrouped."""

_SPEED_ONLY_MODEL = ring_grouping.RingCostModel(exchange_s=lambda _size, _count: 0.0, efficiency=lambda _count: 1.0)
"""Model of speeds alone: before the first round, its costs beside computing are unknown."""

_CONTRADICTION_RATIO = 2.0
"""Trials that contradict the cluster file by this ratio are believed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RingFormation:
    """Rings at the start, and the rule for regrouping."""

    rings: tuple[tuple[int, ...], ...]
    follows_speeds: bool
    """The rings are regrouped when speeds drift."""
    num_rings: int | None
    """Number of rings after regrouping; None leaves it to the speeds."""


def form_rings(
    speeds: Sequence[float],
    mode: str,
    num_rings: int | None,
    kind_ratio: float = _KIND_RATIO,
    queue: Sequence[int] | None = None,
) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each ring, the fastest ring first: one rank per ring in mode `ps`, else ranks of equal speed.

    Args:
        speeds: Relative speed of each rank.
        mode: `ps-hra` or `ps`.
        num_rings: Number of rings; None means one per kind of workers, at least two.
        kind_ratio: Minimal speed ratio between workers of different kinds.
        queue: Ranks in the order in which they finished the speed test; None without a test: then by speed.

    Raises:
        TrainingError: There are fewer ranks than rings.
    """
    if mode == modes.PS:
        return tuple((rank,) for rank in range(len(speeds)))
    by_speed_descending = sorted(speeds, reverse=True)
    kinds = 1 + sum(fast / slow >= kind_ratio for fast, slow in itertools.pairwise(by_speed_descending))
    wanted = num_rings or min(max(kinds, 2), len(speeds))
    if wanted > kinds:  # there are not enough kinds for so many rings: rings of equal sizes, by algorithm 1
        by_speed = sorted(range(len(speeds)), key=lambda rank: (-speeds[rank], rank))
        completions = ring_grouping.CompletionQueue(len(speeds), wanted)
        for rank in by_speed if queue is None else queue:
            completions.report(rank)
        return completions.rings
    return ring_grouping.split_into_rings([1 / speed for speed in speeds], _SPEED_ONLY_MODEL, wanted).rings


def find_better_rings(
    rings: Sequence[Sequence[int]], speeds: Sequence[Speed], num_rings: int | None
) -> tuple[tuple[int, ...], ...] | None:
    """Return other rings if workers are no longer grouped by speed; None to keep the present ones.

    Shares follow speeds in any rings, but only at the ends of epochs: in rings of equal speed, workers that slow down
    together do not wait meanwhile. So rings are compared by their throughput with equal samples on every worker.

    `num_rings`: number of rings asked for; None leaves it to the speeds.
    """
    round_s = [speed.s_per_sample for speed in speeds]
    noise = min(max(speed.noise for speed in speeds), _MAX_NOISE)
    found = form_rings([1 / each_s for each_s in round_s], modes.PS_HRA, num_rings, max(_KIND_RATIO, 1 + 2 * noise))
    before, after = (ring_grouping.ring_throughput(each, round_s, _SPEED_ONLY_MODEL) for each in (rings, found))
    return found if after >= before * (1 + max(ring_grouping.MIN_REGROUPING_GAIN, noise)) else None


def completion_queue(reports: Sequence[Mapping[str, Any]]) -> list[int] | None:
    """Return the ranks in the order in which they finished the speed test; None unless all ranks ran it."""
    places: list[int | None] = [each.get("arrival") for each in reports]
    arrived = sorted((place, rank) for rank, place in enumerate(places) if place is not None)
    return [rank for _, rank in arrived] if len(arrived) == len(reports) else None


def relative_speeds(reports: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return relative speeds: those of the cluster file, unless trials on all ranks contradict them.

    A trial is short, and on a busy machine wrong by a third; so a rank must be off by a factor of two.
    """
    assumed = [each["speed"] for each in reports]
    if not all(each["trial_s"] for each in reports):
        return assumed
    tried = [1 / statistics.median(each["trial_s"]) for each in reports]
    ratios = [own / expected for own, expected in zip(tried, assumed, strict=True)]
    middle = statistics.median(ratios)
    return (
        assumed
        if all(middle / _CONTRADICTION_RATIO < ratio < middle * _CONTRADICTION_RATIO for ratio in ratios)
        else tried
    )


_STEPS_PER_BARRIER = MAX_BLOCKS
"""Train steps that a barrier looks back on: the same for all ranks, whatever their rings have trained."""


class RingShares:
    """Shares of all ranks in a train step of all rings together.

    Shares are proportional to speed: in a ring no rank waits for a slower one, and rings push equally often.
    """

    def __init__(
        self,
        shares: Shares,
        timer: StepTimer,
        control: ControlGroup,
        on_change: Callable[[int, ShareChange], object],
        *,
        caps: Sequence[int] | None = None,
        num_prefetched: int = 0,
    ) -> None:
        """Create them; call `join_ring` next. `caps` are the ranks' limits, `num_prefetched` the read-ahead."""
        self._agreed_shares = shares
        """Shares of all ranks, as all ranks know them; later changes within rings are not included."""
        self._timer, self._control, self._on_change, self._caps = timer, control, on_change, caps
        self._ring: tuple[int, ...] = ()
        self._ring_control: ControlGroup | None = None
        self._num_batches, self._num_drawn = 0, 0
        self._rebalancer = Rebalancer()
        self._balancer = ShareBalancer(
            shares, timer, None, num_prefetched=num_prefetched, on_change=self._report_change
        )

    @property
    def ring_shares(self) -> tuple[int, ...]:
        """Samples of each rank of this ring in the next shard."""
        return self._balancer.shares_of(self._num_drawn)

    @property
    def recent_s(self) -> tuple[float, ...]:
        """Seconds of a sample on this rank, in each of several recent steps."""
        return self._balancer.recent_s

    def set_memory(self, limit: MemoryLimit) -> None:
        """Set the limit of this rank's memory, which other ranks learn with its speed."""
        self._balancer.set_memory(limit)

    def begin_pass(self) -> None:
        """Start an epoch; earlier shards that were not computed are void."""
        self._num_drawn = self._num_batches

    def count_shard(self) -> None:
        """Count a shard taken for the ring; load workers take it long before it is computed."""
        self._num_drawn += 1

    @contextmanager
    def waiting_for_shard(self) -> Iterator[None]:
        """Measure a request for a shard as waiting: the time is the server's and the representative's."""
        self._timer.open_span()
        yield
        self._timer.close_wait()

    def begin_batch(self) -> None:
        """Start the next batch; the computation before it is over."""
        self._balancer.pass_step_boundary(self._num_batches)
        self._timer.begin_step()

    def count_batch(self) -> None:
        self._num_batches += 1

    def join_ring(self, ring: Sequence[int], ring_control: ControlGroup) -> None:
        """Join a ring; all of its ranks call this. `ring_control` has messages among them alone."""
        self._ring, self._ring_control = tuple(ring), ring_control
        self._reset_shares()

    def rebalance_at_barrier(self) -> list[Speed] | None:
        """Agree on new shares at a barrier; all ranks call this. Return all ranks' speeds, if known."""
        speeds = self._control.start_speed_exchange(self._balancer.speed)()
        change = (
            self._rebalancer.propose_change(self._agreed_shares, speeds, self._caps, _STEPS_PER_BARRIER)
            if speeds
            else None
        )
        if change is not None:
            self._agreed_shares = change.shares
            self._reset_shares(change.gain)
            self._on_change(self._num_batches, change)
        return speeds

    def _reset_shares(self, gain: float = 0.0) -> None:
        """Reset the ring's shares to those that all ranks know, with their predicted gain; no shard is pending."""
        self._num_drawn = self._num_batches
        caps = None if self._caps is None else [self._caps[rank] for rank in self._ring]
        ring_control = self._ring_control if len(self._ring) > 1 else None
        shares = tuple(self._agreed_shares[rank] for rank in self._ring)
        self._balancer.reset_shares(self._num_batches, shares, ring_control, caps, gain)

    def _report_change(self, batch_number: int, change: ShareChange) -> None:
        """Report changed shares of this ring, with those of other ranks as this rank knows them."""
        own = dict(zip(self._ring, change.shares, strict=True))
        shares = tuple(own.get(rank, share) for rank, share in enumerate(self._agreed_shares))
        self._on_change(batch_number, replace(change, shares=shares))


SERVER_START_TIMEOUT_S = 300.0
"""Time that the server may take to start: on a busy node it imports torch for a minute."""


def server_connectors(
    environment: WorkerEnvironment,
    authentication: rpc.PeerAuthentication | None = None,
    *,
    keeps_readable: bool = False,
) -> list[Callable[[], rpc.RpcClient]]:
    """Return connectors, one for each server of the job.

    Args:
        environment: Has the addresses, and the location of this worker's credentials.
        authentication: Credentials, if they were read before: a descriptor can be read only once.
        keeps_readable: Keep the descriptor readable.

    Raises:
        UsageError: The run has no server.
    """
    if environment.server is None or environment.credentials is None:
        raise UsageError(
            "parameter server",
            got="none in this run",
            expected="one that the launcher has started",
            do="Use ringweave run --mode ps-hra or ringweave submit; torchrun starts no server",
        )
    authentication = authentication or rpc.TlsAuthentication(
        rpc.Credentials.load_from(environment.credentials, keep_open=keeps_readable or environment.encrypts)
    )
    addresses = [address.rpartition(":") for address in environment.server.split(",")]
    return [
        lambda host=host, port=port: rpc.RpcClient.connect(host, int(port), authentication, role="server")
        for host, _, port in addresses
    ]


def build_server_setup(
    module: nn.Module, optimizer: Optimizer, rings: Sequence[Sequence[int]], settings: Asynchronous
) -> ServerSetup:
    """Return the server's set-up of the job.

    Raises:
        TrainingError: The server does not support the optimizer, or the model is larger than a message.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    named = [
        (names.get(parameter, f"parameter {number}"), parameter)
        for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"])
    ]
    groups, first = [], 0
    for group in optimizer.param_groups:
        indices = list(range(first, first + len(group["params"])))
        first += len(indices)
        groups.append(ParameterGroup(parameters=indices, options=optimizers.group_options(group)))
    overlaps = settings.local_steps > 0
    tensors = flat.tensor_specs(named)
    check_model_size(sum(flat.buffer_sizes(tensors)))
    return ServerSetup(
        tensors=tensors,
        optimizer=optimizers.check_optimizer_name(optimizers.optimizer_name(optimizer)),
        groups=groups,
        rings=[list(ring) for ring in rings],
        overlaps=overlaps,
        compensation=0.0 if overlaps else settings.compensation,
    )


def with_outer_optimizer(setup: ServerSetup, script: Script) -> ServerSetup:
    """Return the set-up of sites that push fragments of outer gradients, to the optimizer of mode local."""
    momentum, places = script.local.outer_momentum, list(range(len(setup.tensors)))
    options: dict[str, OptimizerOption] = {"lr": script.local.outer_lr, "momentum": momentum, "nesterov": momentum > 0}
    update = {
        "optimizer": torch.optim.SGD.__name__,
        "groups": [ParameterGroup(parameters=places, options=options)],
        "fragments": [list(each) for each in script.fragments_between(len(setup.rings))],
    }
    return setup.model_copy(update=update)


def check_optimizer_fresh(optimizer: Optimizer, settings: Asynchronous) -> None:
    """Refuse an optimizer that has taken steps if the server has the state, which starts without them.

    Raises:
        TrainingError: It has taken steps.
    """
    if not settings.local_steps:
        optimizers.check_fresh(optimizer.state.values())


def check_same_prefetch(reports: Sequence[Mapping[str, Any]]) -> None:
    """Refuse unequal numbers of load workers: members of a ring draw shards together, as far ahead as each loads.

    Raises:
        DisagreementError: Ranks load different numbers of batches ahead.
    """
    ahead = [each["num_prefetched"] for each in reports]
    odd = next((rank for rank, each in enumerate(ahead) if each != ahead[0]), None)
    if odd is not None:
        raise DisagreementError(
            f"batches that rank {odd} loads ahead (num_workers x prefetch_factor)",
            got=ahead[odd],
            expected=f"{ahead[0]} as on rank 0, since the members of a ring draw samples together",
            do="Give the DataLoader the same num_workers and prefetch_factor on all ranks, or use mode balanced",
        )


def check_model_size(num_bytes: int) -> None:
    """Refuse a model whose parameters exceed one message, before any rank has started.

    Raises:
        TrainingError: They do.
    """
    if num_bytes > forecast.MAX_RING_MODEL_BYTES:
        raise TrainingError(
            "parameters in rings",
            got=f"{num_bytes} bytes",
            expected=f"at most {forecast.MAX_RING_MODEL_BYTES}, which a ring pushes in one message",
            do="Use mode balanced, or give the optimizer fewer parameters, or ones of smaller dtypes",
        )


def form_initial_rings(
    mode: str,
    settings: Asynchronous,
    speeds: Sequence[float],
    reports: Sequence[Mapping[str, Any]],
    rings: tuple[Ring, ...] | None = None,
) -> RingFormation:
    """Form the initial rings; those by links, and rings of one rank, are not regrouped when speeds drift.

    Args:
        mode: `ps-hra` or `ps`.
        settings: Settings of the script.
        speeds: Relative speed of each rank.
        reports: Reports of all ranks.
        rings: Ranks of each ring; None forms them by speed.
    """
    by_speed = form_rings(speeds, mode, settings.rings, queue=completion_queue(reports))
    rings = rings or by_speed
    is_by_speed = sorted(map(sorted, rings)) == sorted(map(sorted, by_speed))
    is_by_links = not is_by_speed and sorted(map(sorted, rings)) in [
        sorted(map(sorted, way)) for way in forecast.rings_by_links(reports)
    ]
    return RingFormation(
        rings=rings,
        follows_speeds=mode == modes.PS_HRA and not is_by_links,
        num_rings=settings.rings if is_by_speed else len(rings),
    )


@torch.no_grad()
def start_server_job(client: RingClient, setup: ServerSetup, parameters: Sequence[torch.Tensor]) -> None:
    """Give the server the job, with its first parameters."""
    first = flat.tensors_of_setup(setup)
    torch._foreach_copy_(first.views, [each.detach() for each in parameters])
    client.start_job(setup, first.buffers())


def initial_shares(batch_samples: int, speeds: Sequence[float], reports: Sequence[Mapping[str, Any]]) -> Shares:
    """Return each rank's share by its speed, so that rings push equally often and slow rings' pushes are no staler."""
    caps = balancing.share_limits(batch_samples, (each["cap"] for each in reports))
    return balancing.apportion(batch_samples, [Speed(s_per_sample=1 / speed) for speed in speeds], caps)
