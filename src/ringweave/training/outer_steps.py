"""Mode `local`: sites train by themselves, and tie their parameters together by an outer step now and then.

Inside a site every gradient is reduced, exactly as in mode `balanced`. After a round of inner steps the sites exchange
once: each gives its outer gradient (the parameters after the last outer step minus its parameters now), and all apply
the mean, weighted by samples, with the same outer optimizer. An outer step happens between two batches, when the script
asks for the next one, and at the end of an epoch, so the script stays as it is.

Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models" (arXiv 2311.08105).
"""

import atexit
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn

from ringweave.comm import wire_scope
from ringweave.environment import EXACT
from ringweave.errors import TrainingError, explain
from ringweave.planning import balancing, sites
from ringweave.planning.balancing import SampleAccount
from ringweave.planning.balancing.epochs import Indices
from ringweave.planning.sites import RoundSplit, Site, SiteOrder
from ringweave.training.balancer import ShareBalancer
from ringweave.training.collectives import ControlGroup
from ringweave.training.data import order
from ringweave.training.data.order import LoaderSpec, Portion
from ringweave.training.data.sources import DrawnBatch, EpochPass, OrderSource, StaticMembership
from ringweave.training.elastic.accounting import EpochAccount
from ringweave.training.options import Local
from ringweave.training.timing import StepTimer

FIRST_INNER_STEPS = 16
"""Inner steps of the first round, if they are derived: no exchange has been measured yet."""
_MIN_CHANGE = 0.2
"""Relative change from which derived inner steps are changed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OuterStep:
    """One outer step, as all ranks know it."""

    number: int
    """Outer steps so far."""
    train_steps: int
    """Train steps so far, over all sites."""
    samples: tuple[int, ...]
    """Samples of each site in the round."""
    inner_steps: tuple[int, ...]
    """Inner steps of each site in the round."""
    computing_s: tuple[float, ...]
    """Measured: seconds of the round on each site, without the outer exchange and the wait for other sites."""
    wait_s: float
    """Measured: seconds that rank 0 waited for other sites."""
    exchange_s: float
    """Measured: seconds of the outer exchange on rank 0."""
    next_inner_steps: int
    """Train steps of the next round."""


class SiteExchange:
    """Exchanges between sites: one leader for each, and inside a site a broadcast of the result."""

    def __init__(self, all_sites: Sequence[Site], rank: int) -> None:
        """Create the groups; all ranks call it alike."""
        self.sites = tuple(all_sites)
        self.index = next(index for index, site in enumerate(self.sites) if rank in site)
        self.site = self.sites[self.index]
        self.is_leader = rank == self.site[0]
        self.site_group = self._create_groups("ringweave")
        self.site_control = ControlGroup(self._create_groups("gloo"))
        leaders = dist.new_group([site[0] for site in self.sites], backend="ringweave")
        self._leaders = leaders if isinstance(leaders, dist.ProcessGroup) and self.is_leader else None

    def sum_over_sites(self, values: Tensor) -> Tensor:
        """Return the sum over sites, in place; the same bits on all ranks. Only the leader's values count.

        Cost: an allreduce among the leaders over the links between sites, and a broadcast inside each site.
        """
        if self._leaders is not None:
            with wire_scope.encoded_as(EXACT, None):  # these are no gradients
                dist.all_reduce(values, group=self._leaders)
        return self._broadcast_in_site(values)

    def copy_from_first(self, values: Tensor) -> Tensor:
        """Copy rank 0's values to all ranks, in place."""
        if self._leaders is not None:
            dist.broadcast(values, 0, group=self._leaders)
        return self._broadcast_in_site(values)

    def _broadcast_in_site(self, values: Tensor) -> Tensor:
        if len(self.site) > 1:
            dist.broadcast(values, self.site[0], group=self.site_group)
        return values

    def _create_groups(self, backend: str) -> dist.ProcessGroup:
        groups = [dist.new_group(list(site), backend=backend) for site in self.sites]
        own = groups[self.index]
        assert isinstance(own, dist.ProcessGroup), "a rank is in its own site"
        return own


class OuterOptimizer:
    """Outer parameters, their optimizer and its counters: the same on all ranks after each outer step."""

    def __init__(self, model: nn.Module, exchange: SiteExchange, settings: Local) -> None:
        self._parameters = [each for each in model.parameters() if each.requires_grad]
        self._buffers = [each for each in model.buffers() if each.is_floating_point()]
        self._exchange, self._settings = exchange, settings
        self._outer: list[Tensor] = []
        self._optimizer: torch.optim.SGD | None = None
        self.num_outer_steps = self.num_train_steps = 0

    @torch.no_grad()
    def take_parameters_once(self) -> None:
        """Take the present parameters as those of the last outer step, unless there has been one."""
        if self._optimizer is not None:
            return
        self._outer = [_copy_precise(each) for each in self._parameters]
        momentum = self._settings.outer_momentum
        self._optimizer = torch.optim.SGD(
            self._outer, lr=self._settings.outer_lr, momentum=momentum, nesterov=momentum > 0
        )

    @torch.no_grad()
    def step(self, fraction: float) -> None:
        """Do an outer step; `fraction` is this site's part of the samples of all sites in the round."""
        assert self._optimizer is not None, "a pass has begun"
        deltas = [outer - now for outer, now in zip(self._outer, self._parameters, strict=True)]
        values = torch.cat([each.flatten().to(_widest(deltas)) for each in (*deltas, *self._buffers)]).mul_(fraction)
        self._exchange.sum_over_sites(values)
        means = values.split([each.numel() for each in (*deltas, *self._buffers)])
        for outer, mean in zip(self._outer, means, strict=False):
            outer.grad = mean.view_as(outer).to(outer.dtype)
        self._optimizer.step()
        self._optimizer.zero_grad()
        for parameter, outer in zip(self._parameters, self._outer, strict=True):
            parameter.copy_(outer)
        for buffer, mean in zip(self._buffers, means[len(deltas) :], strict=True):
            buffer.copy_(mean.view_as(buffer))
        self.num_outer_steps += 1

    def state_dict(self) -> dict[str, Any]:
        """Return parameters, momentum and counters as of the last outer step."""
        self.take_parameters_once()
        assert self._optimizer is not None, "just made"
        state = self._optimizer.state_dict()["state"]
        return {
            "parameters": list(self._outer),
            "momentum": [state[index].get("momentum_buffer") for index in sorted(state)],
            "num_outer_steps": self.num_outer_steps,
            "num_train_steps": self.num_train_steps,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned.

        Raises:
            ValueError: It is that of another model.
        """
        self.take_parameters_once()
        assert self._optimizer is not None, "just made"
        if [each.shape for each in state["parameters"]] != [each.shape for each in self._outer]:
            raise ValueError("outer parameters of other shapes than this model's")
        for own, loaded in zip(self._outer, state["parameters"], strict=True):
            own.copy_(loaded)
        groups = self._optimizer.state_dict()["param_groups"]
        buffers = {index: {"momentum_buffer": each} for index, each in enumerate(state["momentum"])}
        self._optimizer.load_state_dict({"state": buffers, "param_groups": groups})
        self.num_outer_steps, self.num_train_steps = state["num_outer_steps"], state["num_train_steps"]


def _copy_precise(parameter: Tensor) -> Tensor:
    """Return a copy in float32, or in float64 if the parameter is: sums of small changes need it."""
    dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
    return parameter.detach().to(dtype, copy=True)


def _widest(tensors: Sequence[Tensor]) -> torch.dtype:
    return torch.float64 if any(each.dtype == torch.float64 for each in tensors) else torch.float32


@torch.no_grad()
def copy_first_values(model: nn.Module, exchange: SiteExchange) -> None:
    """Give all sites rank 0's parameters and buffers; DDP does so inside a site only."""
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.copy_(exchange.copy_from_first(tensor.detach().clone(memory_format=torch.contiguous_format)))


class SiteMembership(StaticMembership):
    """Ranks of all sites. Those of this rank's site share each inner step; an outer step ends a round.

    A rank that breaks off its pass ends it for all sites, at their next outer step: they get no further batch, and no
    account of the pass. The outer step of that round takes place when the next pass begins.
    """

    def __init__(
        self,
        control: ControlGroup,
        balancer: ShareBalancer,
        timer: StepTimer,
        record_account: Callable[[EpochAccount], object],
        outer: OuterOptimizer,
        *,
        rounds: "RoundControl",
    ) -> None:
        """Create it; `control` connects all ranks, `balancer` shares an inner step out in this site."""
        super().__init__(control, balancer, timer, record_account)
        self._outer, self.rounds, self._begin_step = outer, rounds, timer.begin_step
        self._notice: Callable[[], list[list[float]]] | None = None
        """Exchange of a round that was broken off."""
        self._saves: list[Callable[[int], None]] = []
        self._wanted_saves = 0
        self.sites = rounds.exchange.sites

    @property
    def num_train_steps(self) -> int:  # pyrefly: ignore - counted here
        """Finished train steps of all sites, as of the last outer step."""
        return self._outer.num_train_steps

    def portion(self, number: int, batch: Indices) -> Portion:
        return order.portion_of_rank(batch, self.balancer.shares_of(number), self.rounds.exchange.site_control.rank)

    def evaluation_slice(self, num_samples: int) -> slice:
        """Return an equal part: at the end of an epoch all ranks have the same parameters."""
        equal = balancing.scale_shares((1,) * self.control.world_size, num_samples)
        return balancing.rank_slice(equal, self.control.rank)

    def register_deferred_save(self, save: Callable[[int], None]) -> Callable[[], bool]:
        bit = 1 << len(self._saves)
        self._saves.append(save)

        def request() -> bool:
            if not self.rounds.is_open or self._notice is not None:
                return False
            self._wanted_saves |= bit
            return True

        return request

    def begin_epoch(self, number: int, start: int) -> bool:
        """Begin a pass; a round that was broken off gets its outer step first."""
        self._outer.take_parameters_once()
        if self._notice is not None:
            notice, self._notice = self._notice, None
            self._step_outer(notice(), time.perf_counter())
        return super().begin_epoch(number, start)

    def record_received(self, own: Portion) -> None:
        self.progress.num_drawn += 1
        self._received += SampleAccount.from_indices(own.indices)
        self.rounds.count_batch(own.num_total)

    def begin_inner_step(self) -> None:
        self._begin_step()

    def end_inner_step(self) -> None:
        self.balancer.pass_step_boundary(self.progress.num_drawn)

    def end_round(self, num_samples: int) -> bool:
        """End a round of so many samples by an outer step; return False if a rank has broken off the pass."""
        exchange, began_s = self._start_exchange(is_broken_off=False), time.perf_counter()
        numbers = exchange()
        if any(each[0] for each in numbers):
            self._notice = lambda: numbers
            return False
        self.progress.position += num_samples
        self._step_outer(numbers, began_s)
        self._run_saves(int(numbers[0][-1]))
        return True

    def abort_pass(self, begun: EpochPass) -> None:
        """Break off the pass; waits for no other rank, since the script may have failed.

        A save that is due is made at once, with the parameters of this site.
        """
        if not (self.rounds.is_open and dist.is_initialized()):
            return
        self._run_saves(self._wanted_saves)
        self._notice = self._start_exchange(is_broken_off=True)
        atexit.register(self._finish_notice)

    def end_epoch(self, epoch: int) -> EpochAccount | None:  # pyrefly: ignore - none of a pass that is broken off
        return None if self._notice is not None else super().end_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        return {**self._outer.state_dict(), **self.rounds.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._outer.load_state_dict(state)
        self.rounds.load_state_dict(state)

    def _run_saves(self, wanted: int) -> None:
        for index, save in enumerate(self._saves):
            if wanted >> index & 1:
                save(self.num_train_steps)

    def _finish_notice(self) -> None:
        """Keep the process until the other ranks know that the pass is broken off, or are gone."""
        if self._notice is not None and dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                self._notice()

    def _start_exchange(self, *, is_broken_off: bool) -> Callable[[], list[list[float]]]:
        wanted, self._wanted_saves = self._wanted_saves, 0
        return self.control.start_number_exchange((float(is_broken_off), *self.rounds.own_numbers(), wanted))

    def _step_outer(self, numbers: list[list[float]], began_s: float) -> None:
        ready_s = time.perf_counter()
        fraction = self.rounds.fraction_of_samples(numbers)
        if fraction is not None:
            self._outer.step(fraction)
            self._outer.num_train_steps += self.rounds.train_steps(numbers)
        times_s = ready_s - began_s, time.perf_counter() - ready_s
        self.rounds.close(numbers, self._outer.num_outer_steps, self._outer.num_train_steps, times_s)


class RoundControl:
    """Present round of this site, and the decision on the next ones, the same on all ranks."""

    def __init__(
        self, exchange: SiteExchange, settings: Local, batch_samples: int, record: Callable[[OuterStep], object]
    ) -> None:
        """Create it; `record` is called on every rank with each outer step."""
        self.exchange, self._settings, self._record = exchange, settings, record
        first = settings.inner_steps or FIRST_INNER_STEPS
        speeds = tuple(float(len(site)) for site in exchange.sites)
        self.split = RoundSplit(batch_samples=batch_samples, inner_steps=first, speeds=speeds)
        self._num_samples = self._num_inner_steps = 0
        self._began_s = time.perf_counter()
        self._exchange_s = 0.0

    @property
    def is_open(self) -> bool:
        """Inner steps of this site have begun that no outer step has ended yet."""
        return self._num_inner_steps > 0

    def begin(self) -> None:
        """Begin a round: from here on, this site computes."""
        self._began_s = time.perf_counter()

    def count_batch(self, num_samples: int) -> None:
        """Count an inner step of so many samples of this site."""
        self._num_samples += num_samples
        self._num_inner_steps += 1

    def own_numbers(self) -> tuple[float, ...]:
        """Return samples, inner steps and seconds of the round, and the seconds of the last exchange."""
        return self._num_samples, self._num_inner_steps, time.perf_counter() - self._began_s, self._exchange_s

    def fraction_of_samples(self, numbers: Sequence[Sequence[float]]) -> float | None:
        """Return this site's part of the samples of a round; None if no site has any."""
        samples = self._of_leaders(numbers, 1)
        return samples[self.exchange.index] / sum(samples) if sum(samples) else None

    def train_steps(self, numbers: Sequence[Sequence[float]]) -> int:
        """Return the train steps that the round makes."""
        return -(-int(sum(self._of_leaders(numbers, 1))) // self.split.batch_samples)

    def close(self, numbers: Sequence[Sequence[float]], outer_steps: int, train_steps: int, times_s: Any) -> None:
        """Close the round after its outer step; divide the next ones by what was measured.

        Args:
            numbers: What each rank gave: broken off, and `own_numbers`.
            outer_steps: Outer steps so far.
            train_steps: Train steps so far.
            times_s: Seconds of waiting for other sites, and of the outer exchange, on this rank.
        """
        samples, steps, computing_s = (self._of_leaders(numbers, place) for place in (1, 2, 3))
        exchange_s = max(each[4] for each in numbers)
        num_steps = self.train_steps(numbers)
        self.split = self.split.with_measured(samples, computing_s)
        if self._settings.inner_steps is None and exchange_s > 0 and num_steps:
            self._derive_inner_steps(max(computing_s) / num_steps, exchange_s)
        self._num_samples = self._num_inner_steps = 0
        self._exchange_s = times_s[1]
        self._record(
            OuterStep(
                number=outer_steps,
                train_steps=train_steps,
                samples=tuple(map(int, samples)),
                inner_steps=tuple(map(int, steps)),
                computing_s=tuple(computing_s),
                wait_s=times_s[0],
                exchange_s=times_s[1],
                next_inner_steps=self.split.inner_steps,
            )
        )

    def state_dict(self) -> dict[str, Any]:
        return {"inner_steps": self.split.inner_steps, "speeds": list(self.split.speeds)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the division of rounds; speeds of another number of sites, and inner steps that are set, stay."""
        speeds = tuple(state["speeds"]) if len(state["speeds"]) == len(self.exchange.sites) else self.split.speeds
        steps = self._settings.inner_steps or int(state["inner_steps"])
        self.split = RoundSplit(batch_samples=self.split.batch_samples, inner_steps=steps, speeds=speeds)

    def _derive_inner_steps(self, step_s: float, exchange_s: float) -> None:
        wanted = sites.inner_steps_for_share(step_s, exchange_s, self._settings.computing_share)
        if abs(wanted - self.split.inner_steps) > _MIN_CHANGE * self.split.inner_steps:
            self.split = RoundSplit(
                batch_samples=self.split.batch_samples, inner_steps=wanted, speeds=self.split.speeds
            )

    def _of_leaders(self, numbers: Sequence[Sequence[float]], place: int) -> list[float]:
        return [numbers[site[0]][place] for site in self.exchange.sites]


class SiteSource(OrderSource):
    """Inner steps of this rank's site, in the epoch's order, round by round."""

    def __init__(self, loader: Any, spec: LoaderSpec, seed: int, membership: SiteMembership) -> None:
        """Create it.

        Raises:
            TrainingError: The data are a stream.
        """
        if spec.num_samples is None:
            do = "Use mode balanced, or a data set with an index"
            expected = "a data set with an index"
            raise TrainingError(explain("data of mode local", got="a stream", expected=expected, do=do))
        super().__init__(loader, spec, seed, membership)
        self._members = membership
        self._num_left = 0
        """Batches of this site in the rest of the epoch, by the present division."""

    @property
    def is_at_end(self) -> bool:
        return self._num_left == 0

    def batches(self, begun: EpochPass) -> Iterator[DrawnBatch]:
        """Yield the inner steps of this site, with an outer step after each round."""
        members = self._members
        whole = self._epoch_order()
        assert whole is not None, "no stream"
        indices = whole.trained_indices(whole.num_batches)
        members.begin_batches(SampleAccount.from_indices(indices))
        while len(indices):
            num_done = yield from self._rounds_of_one_split(indices)
            if num_done is None:
                return
            indices = indices[num_done:]

    def _rounds_of_one_split(self, indices: Indices) -> Iterator[DrawnBatch]:  # pyrefly: ignore - a generator
        """Yield the inner steps of the rounds until they are divided in another way.

        Returns:
            Samples of all sites in these rounds; None if a rank has broken off the pass.
        """
        members, rounds, num_done = self._members, self._members.rounds, 0
        own_order = SiteOrder(indices=indices, split=rounds.split, site=rounds.exchange.index)
        reader = self._reader.batches(own_order, members.progress.num_drawn)  # pyrefly: ignore - read like an epoch's order
        self._num_left = own_order.num_batches
        for num_samples, num_inner_steps in own_order.rounds:
            rounds.begin()
            step_samples = num_samples / -(-num_samples // self.spec.batch_samples)
            for _ in range(num_inner_steps):
                members.begin_inner_step()
                batch, own = next(reader)
                members.record_received(own)
                self._num_left -= 1
                yield batch, own, own.num_total / step_samples
                members.end_inner_step()
            if not members.end_round(num_samples):
                return None
            num_done += num_samples
            if rounds.split != own_order.split:
                break
        return num_done

    def end_pass(self, begun: EpochPass) -> None:
        self.account = self.membership.end_epoch(begun.epoch)
        if self.account is not None:
            self.account.check()

    def state_dict(self) -> dict[str, Any]:
        """Return epoch and position as of the last outer step, and the outer state."""
        return {**super().state_dict(), "outer": self._members.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load it; the state of another mode has no outer state, which then begins with the model's parameters."""
        super().load_state_dict(state)
        if "outer" in state:
            self._members.load_state_dict(state["outer"])


def describe_values(model: nn.Module) -> str:
    """Return a checksum of the parameters and buffers; equal values have equal ones."""
    digest = xxhash.xxh3_64()
    for tensor in [*model.parameters(), *model.buffers()]:
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
