"""Mode `local`: sites train by themselves, and tie their parameters together by outer steps.

Inside a site every gradient is reduced, exactly as in mode `balanced`. After each round of inner steps the sites begin
to exchange one fragment of their outer gradients (the parameters after the last outer step minus the parameters now),
and apply the mean, weighted by samples, at the end of the next round. So the exchange has a whole round of time, in
which all compute. At the end of an epoch, and for a checkpoint, all fragments are exchanged at once and waited for:
then all sites have the same parameters. Outer steps happen between two batches, so the script stays as it is.

Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models" (arXiv 2311.08105), and
"Streaming DiLoCo with overlapping communication" (arXiv 2501.18512).
"""

import atexit
import contextlib
import statistics
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn

from ringweave.comm.peer_data import BackgroundCall
from ringweave.errors import TrainingError
from ringweave.planning import balancing
from ringweave.planning.balancing import SampleAccount
from ringweave.planning.balancing.epochs import Indices
from ringweave.planning.sites import FIRST_INNER_STEPS, MIN_STEPS_CHANGE, NUM_REMEMBERED, RoundSplit, Site, SiteOrder
from ringweave.training.balancer import ShareBalancer
from ringweave.training.collectives import ControlGroup
from ringweave.training.data import order
from ringweave.training.data.order import LoaderSpec, Portion
from ringweave.training.data.sources import DrawnBatch, EpochPass, OrderSource, StaticMembership
from ringweave.training.elastic.accounting import EpochAccount
from ringweave.training.options import Local
from ringweave.training.outer_formats import OuterFormat
from ringweave.training.outer_optimizer import OuterGradient, OuterOptimizer
from ringweave.training.timing import StepTimer


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteReport:
    """Report of a site about its round, which travels before its outer gradient."""

    FORMAT: ClassVar[struct.Struct] = struct.Struct("<8d")

    samples: float = 0.0
    """Samples of the round."""
    weight: float = 0.0
    """Samples since the last outer step of the same fragments began."""
    inner_steps: float = 0.0
    """Inner steps of the round."""
    computing_s: float = 0.0
    """Measured: seconds of the round's inner steps, without outer exchanges and waits for other sites."""
    blocked_s: float = 0.0
    """Measured: seconds of the last outer step in which this site did not compute."""
    exchange_s: float = 0.0
    """Measured: seconds of the last exchange between leaders; 0 if it was of all fragments, or there was none."""
    wanted_saves: float = 0.0
    """Checkpoints that are due, one bit each."""
    is_broken_off: float = 0.0
    """1: the script has broken off its pass."""

    def to_tensor(self) -> Tensor:
        return torch.frombuffer(bytearray(self.FORMAT.pack(*astuple(self))), dtype=torch.uint8)

    @classmethod
    def of_tensor(cls, content: Tensor) -> "SiteReport":
        values = cls.FORMAT.unpack(content.numpy().tobytes())
        return cls(**dict(zip(cls.__slots__, values, strict=True)))


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
    """Measured: seconds of the round's inner steps on each site."""
    wait_s: float
    """Measured: seconds that rank 0 waited for the exchange, and for other sites."""
    exchange_s: float
    """Measured: seconds of the exchange on rank 0, during which it computed, but for the wait."""
    blocked_s: float
    """Measured: seconds of rank 0 for the outer step itself."""
    sent_bytes: int
    """Bytes that each site has sent to each other site."""
    next_inner_steps: int
    """Train steps from now on in which each parameter gets one outer step."""


class SiteExchange:
    """Exchanges between sites: one leader for each, and inside a site a broadcast of the result.

    Each exchange runs in a thread of its own, on groups that nothing else uses, and one ends before the next begins.
    """

    def __init__(self, all_sites: Sequence[Site], rank: int) -> None:
        """Create the groups; all ranks call it alike."""
        self.sites = tuple(all_sites)
        self.index = next(index for index, site in enumerate(self.sites) if rank in site)
        self.site = self.sites[self.index]
        self.is_leader = rank == self.site[0]
        self.site_group = self._create_groups("ringweave")
        control = self._create_groups("gloo")
        self.site_control = ControlGroup(control)
        self._relay_group = self._create_groups("gloo")
        leaders = dist.new_group([site[0] for site in self.sites], backend="ringweave")
        self._leaders = leaders if isinstance(leaders, dist.ProcessGroup) and self.is_leader else None
        self._groups = [self.site_group, control, self._relay_group, *([self._leaders] if self._leaders else [])]
        self.exchange_s = 0.0
        """Measured: seconds of the last exchange between the leaders."""

    def close(self) -> None:
        """Close the groups; all ranks call it alike."""
        for group in self._groups:
            dist.destroy_process_group(group)

    def gather(self, message: Tensor, num_bytes: int) -> list[Tensor]:
        """Return the messages of all sites, (num_bytes,) uint8 each; only the leader's own one counts.

        Cost: each leader receives the messages of all others; a broadcast of all inside each site.
        """
        every = torch.empty((len(self.sites), num_bytes), dtype=torch.uint8)
        if self._leaders is not None:
            began_s = time.perf_counter()
            dist.all_gather(list(every), message, group=self._leaders)
            self.exchange_s = time.perf_counter() - began_s
        if len(self.site) > 1:
            dist.broadcast(every, self.site[0], group=self._relay_group)
        return list(every)

    def copy_from_first(self, values: Tensor) -> Tensor:
        """Copy rank 0's values to all ranks, in place."""
        if self._leaders is not None:
            dist.broadcast(values, 0, group=self._leaders)
        if len(self.site) > 1:
            dist.broadcast(values, self.site[0], group=self.site_group)
        return values

    def _create_groups(self, backend: str) -> dist.ProcessGroup:
        groups = [dist.new_group(list(site), backend=backend) for site in self.sites]
        own = groups[self.index]
        assert isinstance(own, dist.ProcessGroup), "a rank is in its own site"
        return own


class OuterExchange:
    """Exchange of this site's outer gradient with those of all other sites, while the script goes on."""

    def __init__(self, exchange: SiteExchange, wire: OuterFormat, gradient: OuterGradient, own: SiteReport) -> None:
        """Start it; `own` is the report that goes along."""
        self.gradient = gradient
        self._exchange, self._wire, self._own = exchange, wire, own
        self.num_bytes = SiteReport.FORMAT.size + gradient.num_bytes(wire)
        self._call = BackgroundCall(self._run, "ringweave outer exchange")

    def wait(self) -> list[SiteReport]:
        """Return the reports of all sites, once the mean is known."""
        return self._call.result()

    @torch.no_grad()
    def _run(self) -> list[SiteReport]:
        message, length = torch.empty(0, dtype=torch.uint8), SiteReport.FORMAT.size
        if self._exchange.is_leader:
            message = torch.cat((self._own.to_tensor(), self.gradient.encode(self._wire)))
        found = self._exchange.gather(message, self.num_bytes)
        reports = [SiteReport.of_tensor(each[:length]) for each in found]
        weights = [each.weight for each in reports]
        if sum(weights):
            self.gradient.set_mean(self._wire, [each[length:] for each in found], weights)
        return reports


@torch.no_grad()
def copy_first_values(model: nn.Module, exchange: SiteExchange) -> None:
    """Give all sites rank 0's parameters and buffers; DDP does so inside a site only."""
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.copy_(exchange.copy_from_first(tensor.detach().clone(memory_format=torch.contiguous_format)))


class SiteMembership(StaticMembership):
    """Ranks of all sites. Those of this rank's site share each inner step; a round ends as an outer step begins.

    A rank that breaks off its pass ends it for all sites, when they learn of it: they get no further batch, and no
    account of the pass. When the next pass begins, all sites take the same parameters.
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
        self._outer, self.rounds, self._timer = outer, rounds, timer
        self._running: OuterExchange | None = None
        self._has_broken_off, self._is_level = False, True
        """The script has broken off its pass; all sites have the same parameters."""
        self._saves: list[Callable[[int], None]] = []
        self._wanted_saves = 0
        self.sites, self.site_state = rounds.exchange.sites, outer.unsent

    @property
    def num_train_steps(self) -> int:  # pyrefly: ignore - counted here
        """Finished train steps of all sites, as of the last outer step."""
        return self.rounds.num_train_steps

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
            if self._is_level or self._has_broken_off:
                return False
            self._wanted_saves |= bit
            return True

        return request

    def begin_epoch(self, number: int, start: int) -> bool:
        """Begin a pass; after one that was broken off, all sites take the same parameters first."""
        self._outer.take_parameters_once()
        self._finish_broken_off()
        if not self._is_level:
            self._begin_outer_step(is_of_all=True)
            self._end_outer_step()
            self._is_level = True
        return super().begin_epoch(number, start)

    def record_received(self, own: Portion) -> None:
        self.progress.num_drawn += 1
        self._received += SampleAccount.from_indices(own.indices)
        self.rounds.count_batch(own.num_total)
        self._is_level = False

    def begin_inner_step(self) -> None:
        self._timer.begin_step()

    def end_inner_step(self) -> None:
        self.rounds.end_inner_step()
        self.balancer.pass_step_boundary(self.progress.num_drawn)

    def end_round(self, num_samples: int, *, is_last: bool) -> bool:
        """End a round of so many samples: the outer step of the round before ends, and the next one begins.

        Returns:
            False if a rank has broken off the pass.
        """
        reports = self._end_outer_step()
        if any(each.is_broken_off for each in reports):
            return False
        self.progress.position += num_samples
        wanted = int(max((each.wanted_saves for each in reports), default=0))
        self._begin_outer_step(is_of_all=is_last or wanted > 0)
        if is_last or wanted:
            reports = self._end_outer_step()
            if any(each.is_broken_off for each in reports):
                return False
            self._is_level = True
            self._run_saves(wanted | int(reports[0].wanted_saves))
        return True

    def abort_pass(self, begun: EpochPass) -> None:
        """Break off the pass; waits for no other rank, since the script may have failed.

        A save that is due is made at once, with the parameters of this site.
        """
        if self._is_level or not dist.is_initialized():
            return
        self._run_saves(self._wanted_saves)
        self._has_broken_off, self._wanted_saves = True, 0
        atexit.register(self._finish_at_exit)

    def end_epoch(self, epoch: int) -> EpochAccount | None:  # pyrefly: ignore - none of a pass that is broken off
        return super().end_epoch(epoch) if self._is_level else None

    def state_dict(self) -> dict[str, Any]:
        return {**self._outer.state_dict(), **self.rounds.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load it; what was not sent is that of the first site, unless another site's own is loaded after it."""
        self._outer.load_state_dict(state)
        if self.rounds.exchange.index == 0 and self.rounds.exchange.is_leader:
            self.site_state.load_state_dict(state)
        self.rounds.load_state_dict(state)

    def _run_saves(self, wanted: int) -> None:
        for index, save in enumerate(self._saves):
            if wanted >> index & 1:
                save(self.num_train_steps)

    def _finish_broken_off(self) -> None:
        """Tell the other sites that this one has broken off its pass, unless one of them has done so before."""
        if not self._has_broken_off:
            return
        if not any(each.is_broken_off for each in self._end_outer_step()):
            self._begin_outer_step(is_of_all=False, is_broken_off=True)
            self._end_outer_step()
        self._has_broken_off = False

    def _finish_at_exit(self) -> None:
        """Keep the process until the other ranks know that the pass is broken off, or are gone."""
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                self._finish_broken_off()

    def _begin_outer_step(self, *, is_of_all: bool, is_broken_off: bool = False) -> None:
        began_s = time.perf_counter()
        fragments = self.rounds.next_fragments(is_of_all=is_of_all)
        gradient = self._outer.begin_step(fragments)
        report = self.rounds.close_round(fragments, self._wanted_saves, is_broken_off=is_broken_off)
        self._wanted_saves = 0
        self._running = OuterExchange(self.rounds.exchange, self.rounds.wire, gradient, report)
        self.rounds.blocked_s = time.perf_counter() - began_s

    def _end_outer_step(self) -> list[SiteReport]:
        """End the outer step in progress, if there is one; return the reports of all sites about it."""
        running, self._running = self._running, None
        if running is None:
            return []
        began_s = time.perf_counter()
        reports = running.wait()
        ready_s = time.perf_counter()
        if any(each.weight for each in reports):
            self._outer.apply_step(running.gradient)
        self.rounds.blocked_s += time.perf_counter() - ready_s
        self.rounds.record_step(reports, ready_s - began_s, running.num_bytes)
        return reports


class RoundControl:
    """Present round of this site, and the decision on the next ones, the same on all ranks."""

    def __init__(
        self, exchange: SiteExchange, settings: Local, batch_samples: int, record: Callable[[OuterStep], object]
    ) -> None:
        """Create it; `record` is called on every rank with each outer step."""
        self.exchange, self._settings, self._record = exchange, settings, record
        self.wire = settings.format
        first = settings.inner_steps or min(FIRST_INNER_STEPS, settings.max_inner_steps)
        fragments = min(settings.fragments, first)
        self.split = RoundSplit(
            batch_samples=batch_samples,
            inner_steps=first,
            speeds=tuple(float(len(site)) for site in exchange.sites),
            num_ranks=tuple(map(len, exchange.sites)),
            fragments=fragments,
            max_inner_steps=settings.max_inner_steps,
        )
        self.num_outer_steps = self.num_train_steps = 0
        self.blocked_s = 0.0
        self._num_samples = self._total_samples = 0
        self._begun_at = [0] * fragments
        """Samples of this site when the last outer step of each fragment began."""
        self._step_s: list[float] = []
        self._step_began_s = 0.0
        self._is_of_all = False
        self._recent: deque[Sequence[SiteReport]] = deque(maxlen=NUM_REMEMBERED)

    def begin_inner_step(self) -> None:
        """Begin an inner step: from here on, this site computes."""
        self._step_began_s = time.perf_counter()

    def count_batch(self, num_samples: int) -> None:
        """Count an inner step of so many samples of this site."""
        self._num_samples += num_samples

    def end_inner_step(self) -> None:
        self._step_s.append(time.perf_counter() - self._step_began_s)

    def next_fragments(self, *, is_of_all: bool) -> tuple[int, ...]:
        """Return the fragments of the next outer step: one after the other, or all."""
        num = self.split.fragments
        self._is_of_all = is_of_all and num > 1
        return tuple(range(num)) if is_of_all else (self.num_outer_steps % num,)

    def close_round(self, fragments: Sequence[int], wanted_saves: int, *, is_broken_off: bool) -> SiteReport:
        """Close the round with the begin of an outer step of these fragments; return the report about it."""
        self._total_samples += self._num_samples
        last = min(self._begun_at[each] for each in fragments)
        for each in fragments:
            self._begun_at[each] = self._total_samples
        # The median: a step in which the script evaluates its model tells nothing about computing.
        computing_s = statistics.median(self._step_s) * len(self._step_s) if self._step_s else 0.0
        report = SiteReport(
            samples=self._num_samples,
            weight=self._total_samples - last,
            inner_steps=len(self._step_s),
            computing_s=computing_s,
            blocked_s=self.blocked_s,
            exchange_s=self.exchange.exchange_s,
            wanted_saves=wanted_saves,
            is_broken_off=is_broken_off,
        )
        self._num_samples, self._step_s = 0, []
        return report

    def record_step(self, reports: Sequence[SiteReport], wait_s: float, num_bytes: int) -> None:
        """Record an outer step; divide the rounds after the present one by what was measured.

        Args:
            reports: Reports of all sites, by site.
            wait_s: Seconds that this rank waited.
            num_bytes: Bytes of each site's message.
        """
        samples, computing_s = [each.samples for each in reports], [each.computing_s for each in reports]
        num_steps = -(-int(sum(samples)) // self.split.batch_samples)
        self.num_outer_steps += 1
        self.num_train_steps += num_steps
        self._recent.append(reports)
        self._divide_next_rounds()
        measured_s = self.exchange.exchange_s
        if self._is_of_all:
            self.exchange.exchange_s = 0.0
        self._record(
            OuterStep(
                number=self.num_outer_steps,
                train_steps=self.num_train_steps,
                samples=tuple(map(int, samples)),
                inner_steps=tuple(int(each.inner_steps) for each in reports),
                computing_s=tuple(computing_s),
                wait_s=wait_s,
                exchange_s=measured_s,
                blocked_s=self.blocked_s,
                sent_bytes=num_bytes,
                next_inner_steps=self.split.inner_steps,
            )
        )

    def _divide_next_rounds(self) -> None:
        """Divide the next rounds by what all ranks have measured in the last ones."""
        by_site = list(zip(*self._recent, strict=True))
        samples = [sum(each.samples for each in site) for site in by_site]
        computing_s = [sum(each.computing_s for each in site) for site in by_site]
        self.split = self.split.with_measured(samples, computing_s)
        exchanges_s = [min(each.exchange_s for each in reports) for reports in self._recent]
        exchanges_s = [each for each in exchanges_s if each > 0]
        if self._settings.inner_steps is not None or not exchanges_s or min(computing_s) <= 0:
            return
        blocked_s = statistics.median(max(each.blocked_s for each in reports) for reports in self._recent)
        step_s = max(computing_s) / (sum(samples) / self.split.batch_samples)
        share = self._settings.computing_share
        self.split = self.split.fitted(step_s, statistics.median(exchanges_s), blocked_s, share, MIN_STEPS_CHANGE)

    def state_dict(self) -> dict[str, Any]:
        return {
            "inner_steps": self.split.inner_steps,
            "speeds": list(self.split.speeds),
            "num_outer_steps": self.num_outer_steps,
            "num_train_steps": self.num_train_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the division of rounds; speeds of another number of sites, and inner steps that are set, stay."""
        speeds = tuple(state["speeds"]) if len(state["speeds"]) == len(self.exchange.sites) else self.split.speeds
        steps = self._settings.inner_steps or int(state["inner_steps"])
        self.split = replace(self.split, inner_steps=steps, speeds=speeds)
        self.num_outer_steps, self.num_train_steps = state["num_outer_steps"], state["num_train_steps"]


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
            raise TrainingError("data of mode local", got="a stream", expected=expected, do=do)
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
        for number, (num_samples, num_inner_steps) in enumerate(own_order.rounds, 1):
            step_samples = num_samples / -(-num_samples // self.spec.batch_samples)
            for _ in range(num_inner_steps):
                rounds.begin_inner_step()
                members.begin_inner_step()
                batch, own = next(reader)
                members.record_received(own)
                self._num_left -= 1
                yield batch, own, own.num_total / step_samples
                members.end_inner_step()
            if not members.end_round(num_samples, is_last=number == len(own_order.rounds)):
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
