"""Automatic repartitioning of a pipeline while it trains: measure, decide on rank 0, move blocks.

Each rank's step time travels with the losses of the next train step. Rank 0 collects the times in windows and decides.

Link probes are short, since no rank trains meanwhile. Links are full duplex, so each link carries one message each way
at the same time; links that share no stage are probed at once. A probe is repeated only if its time differs from the
previous one, and the fastest counts: other load can only slow a message down. Such a message is too short to give the
link's rate: a rate-limited link first passes a burst, and the answer takes time too. So its time is compared with the
same message's time at profiling, after a pause in which the link can refill its burst.
"""

import enum
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ringweave.environment import WorkerEnvironment
from ringweave.pipeline import profiling
from ringweave.pipeline.migration import BlockMigrator, MigrationOutcome
from ringweave.pipeline.optimizer import MakeOptimizer, has_parameters
from ringweave.pipeline.pipeline import Pipeline, broadcast_text
from ringweave.pipeline.profiling import LinkProbe, Profile, StageLink, transfer_mode
from ringweave.pipeline.runtime.stopwatch import Stopwatch, StopwatchLap
from ringweave.pipeline.stage_layout import Layout
from ringweave.planning.partition.problem import PartitionMemory
from ringweave.planning.repartition import (
    LinkProbeScheduler,
    MeasurementWindow,
    PipelineConditions,
    PipelineWorkload,
    RepartitionController,
    RepartitionDecision,
    RepartitionPolicy,
)
from ringweave.sim.pipeline_simulation import Overheads, Piece, StageDevices
from ringweave.telemetry import EventLog


class StepAction(enum.IntEnum):
    """Action of all ranks at the end of the step in which they receive it."""

    NOTHING = 0
    PROBE = 1
    """Time the links, then receive rank 0's decision."""
    RECEIVE_DECISION = 2
    """Receive rank 0's decision."""


class StepReport(NamedTuple):
    """Report of one train step, received from all ranks."""

    compute_s: Sequence[float]
    """Compute time of each rank; 0 from a rank whose step was not counted."""
    action: StepAction


class StepExchange:
    """One number from each rank and one more from rank 0: sent with a train step, received at its end."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._outgoing = torch.zeros(world_size + 1, dtype=torch.float64)
        self._slots = self._outgoing.numpy()
        """A numpy view of the same memory: setting an item of a tensor takes microseconds."""
        self.compute_s = 0.0
        """Compute time of the newest counted train step; 0 if it was not counted."""
        self.action = StepAction.NOTHING
        """Rank 0's action; values set on other ranks are ignored."""
        self._totals: Tensor | None = None

    def outgoing(self) -> Tensor:
        """This rank's numbers, zeros in others' places: [world size + 1]. The next call changes the same tensor."""
        self._slots[self._rank] = self.compute_s
        if self._rank == 0:
            self._slots[-1] = self.action
        return self._outgoing

    def receive(self, totals: Tensor) -> None:
        """Keep the sums until they are taken; after several forwards in one train step the last ones remain."""
        self._totals = totals

    def take_report(self) -> StepReport | None:
        """Return the report received since the last call, or None, and reset the action."""
        if self._totals is None:
            return None
        *compute_s, action = self._totals.tolist()
        self._totals, self.action = None, StepAction.NOTHING
        return StepReport(compute_s, StepAction(int(action)))


class RebalanceController:
    """Rank 0's controller: sees every train step one step after its end, once all ranks' numbers have arrived."""

    def __init__(
        self, controller: RepartitionController, layout: Layout, policy: RepartitionPolicy, log: EventLog | None
    ) -> None:
        self.controller = controller
        self._layout, self._policy, self._log = layout, policy, log
        self._probe_scheduler = LinkProbeScheduler(controller.workload, policy)
        self._in_flight: tuple[int, float] | None = None
        self._steps: list[tuple[tuple[float, ...], float]] = []
        self._window: MeasurementWindow | None = None
        self.decision_text = ""
        """The decision that all ranks receive, as text."""

    def step_sent(self, train_step: int, step_s: float | None) -> None:
        """Note that the numbers of a train step are in flight; None if the step is not counted."""
        self._in_flight = None if step_s is None else (train_step, step_s)

    def step_received(self, compute_s: Sequence[float]) -> StepAction:
        """Take the numbers that arrived from each rank, and return the next action."""
        if self._in_flight is None:
            return StepAction.NOTHING
        train_step, step_s = self._in_flight
        devices = map(self._layout.ranks_of_device, range(self._layout.num_devices))
        self._steps.append((tuple(max(compute_s[rank] for rank in ranks) for ranks in devices), step_s))
        if len(self._steps) < self._policy.window_steps:
            return StepAction.NOTHING
        rows, steps_s = zip(*self._steps, strict=True)
        first = train_step + 1 - len(self._steps)
        self._window = MeasurementWindow(first_step=first, compute_s=tuple(zip(*rows, strict=True)), step_s=steps_s)
        self._steps.clear()
        if self._probe_scheduler.is_due(self._window, self.controller.splits, self.controller.conditions):
            return StepAction.PROBE
        return StepAction.RECEIVE_DECISION if self._decide(self._window).is_move else StepAction.NOTHING

    def links_probed(self, rates: Sequence[tuple[float, ...]], took_s: float) -> None:
        """Take the link rates measured after the newest window, and decide."""
        assert self._window is not None
        window = replace(self._window, rates=tuple(rates))
        self._probe_scheduler.record_probe(window, self.controller.splits, self.controller.conditions, took_s)
        self._decide(window)

    def migration_ended(self, outcome: MigrationOutcome, at_step: int) -> None:
        """Take the outcome of a migration; windows begin anew."""
        self._steps.clear()
        self._in_flight = None
        self.controller.record_move_outcome(
            at_step, is_done=outcome.is_done, pause_s=outcome.pause_s, why=outcome.cause
        )
        self._probe_scheduler.workload = self.controller.workload
        self._write_events()

    def _decide(self, window: MeasurementWindow) -> RepartitionDecision:
        decision = self.controller.observe(window)
        self.decision_text = str(decision)
        self._write_events()
        return decision

    def _write_events(self) -> None:
        for note in self.controller.take_events():
            if self._log is not None:
                self._log.write(note.kind, rank=0, **note.fields)


TARGET_MESSAGE_S = 0.003
"""Target time of a probe message at the expected rate, beside the burst: negligible in a window."""
BURST_BYTES, MAX_MESSAGE_BYTES = 128 * 1024, 2**20
"""Burst that a limited link passes at once, at most; and the longest probe message."""
MAX_PAUSE_S = 0.01
REPEAT_ROUNDS, FIRST_ROUNDS = 2, 5
_PAYLOAD_TAG, _READY_TAG, _DONE_TAG = 1, 2, 3


class LinkRateProber:
    """Times the links of one pipeline; all its ranks make the same calls at the same time."""

    def __init__(
        self,
        pipeline: Pipeline,
        rates: Sequence[float],
        drift: float,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """Take the links' present rates, in bytes per second.

        A probe that differs from them by more than `drift` is repeated.
        """
        self._pipeline, self._drift, self._clock, self._sleep = pipeline, drift, clock, sleep
        self._own, self._num_links = pipeline.layout.device_of_rank(pipeline.rank), pipeline.layout.num_stages - 1
        self.num_bytes = [int(min(BURST_BYTES + TARGET_MESSAGE_S * rate, MAX_MESSAGE_BYTES)) for rate in rates]
        """Bytes of a message on each link."""
        self._pause_s = min(MAX_PAUSE_S, max((BURST_BYTES / rate for rate in rates if rate > 0), default=0.0))
        self._rates = tuple(rates)
        self._first_seconds = self._fastest_seconds(FIRST_ROUNDS)
        self._previous_seconds = self._first_seconds

    def probe(self) -> list[tuple[float, ...]]:
        """Bytes per second of each link in its slower direction, the same on all ranks; () for an unknown rate."""
        seconds = self._fastest_seconds(1)
        pairs = zip(seconds, self._previous_seconds, strict=True)
        if any(not before / self._drift < now < before * self._drift for now, before in pairs):
            seconds = list(map(min, seconds, self._fastest_seconds(REPEAT_ROUNDS)))
        self._previous_seconds = seconds
        links = zip(self._rates, self._first_seconds, seconds, strict=True)
        return [(rate * first / now,) if rate * first * now > 0 else () for rate, first, now in links]

    def _fastest_seconds(self, rounds: int) -> list[float]:
        """Fastest time in seconds of a message and its answer, on each link."""
        return [min(column) for column in zip(*(self._probe_once() for _ in range(rounds)), strict=True)]

    def _probe_once(self) -> list[float]:
        found = torch.zeros(self._num_links, dtype=torch.float64)
        for parity in range(min(2, self._num_links)):
            self._sleep(self._pause_s)
            for piece in self._pipeline.layout.placed.pieces:
                if piece.link % 2 == parity and self._own in (piece.src, piece.dst):
                    found[piece.link] = max(float(found[piece.link]), self._exchange_on_link(piece))
        return self._pipeline.groups.max_over_ranks(found).tolist()

    def _exchange_on_link(self, piece: Piece) -> float:
        """Seconds on this rank until the other end has received everything."""
        peer = piece.dst if self._own == piece.src else piece.src
        num_bytes = self.num_bytes[piece.link]
        if self._pipeline.device.type == "cpu":
            return self._exchange_both_ways(peer, num_bytes)
        # NCCL tells no messages apart by tags: one direction after the other.
        probe = LinkProbe(self._pipeline.groups, self._pipeline.device, self._clock)
        ways = (piece.src, piece.dst), (piece.dst, piece.src)
        return max(probe.exchange(self._own, *way, num_bytes) for way in ways)

    def _exchange_both_ways(self, peer: int, num_bytes: int) -> float:
        """Exchange both ways at once; seconds until the other end has received all of this rank's message."""
        group = self._pipeline.groups.pipeline
        arriving, leaving = torch.empty(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)
        mark = torch.zeros(1, dtype=torch.uint8)
        payload = dist.irecv(arriving, group=group, group_src=peer, tag=_PAYLOAD_TAG)
        answer = dist.irecv(torch.empty_like(mark), group=group, group_src=peer, tag=_DONE_TAG)
        ready = dist.isend(mark, group=group, group_dst=peer, tag=_READY_TAG)
        dist.recv(torch.empty_like(mark), group=group, group_src=peer, tag=_READY_TAG)
        begun_s = self._clock()
        sent = dist.isend(leaving, group=group, group_dst=peer, tag=_PAYLOAD_TAG)
        _wait_for(payload)
        done = dist.isend(mark, group=group, group_dst=peer, tag=_DONE_TAG)
        _wait_for(answer)
        took_s = self._clock() - begun_s
        for work in (ready, sent, done):
            _wait_for(work)
        return took_s


def _wait_for(work: dist.Work | None) -> None:
    assert work is not None
    work.wait()


_WARM_UP_STEPS = 2
"""Steps left out of measurement: the first steps connect and allocate, and so does the first step after a migration."""


class PipelineRebalancer:
    """Keeps the partition of one pipeline the fastest one. All ranks construct it and train as before.

    It runs at the end of the optimizer's step, where the measurement of a train step ends. Each rank's time travels
    with the losses of the next train step, and so does rank 0's request to probe the links or to receive its decision.
    No other step makes a rank wait. A train step may consist of several forwards and backwards.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        workload: PipelineWorkload,
        conditions: PipelineConditions,
        policy: RepartitionPolicy,
        *,
        log: EventLog | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`log` receives rank 0's events; the workload was profiled under `conditions`."""
        self._pipeline, self._num_microbatches, self._clock = pipeline, workload.num_microbatches, clock
        self.migrator = BlockMigrator(pipeline, self._on_migrated, clock=clock)
        rates = conditions.rates or (0.0,) * (pipeline.layout.num_stages - 1)
        self._link_prober = LinkRateProber(pipeline, rates, policy.drift, clock)
        self._rebalance_controller: RebalanceController | None = None
        if pipeline.rank == 0:
            controller = RepartitionController(workload, pipeline.layout.splits, conditions, policy)
            self._rebalance_controller = RebalanceController(controller, pipeline.layout, policy, log)
        self._step_exchange = pipeline.piggyback = StepExchange(pipeline.rank, pipeline.layout.world_size)
        self.outcomes: list[MigrationOutcome] = []
        """Outcomes of all migrations so far."""
        self._num_done, self._num_skipped = pipeline.train_step_index, _WARM_UP_STEPS
        pipeline.stopwatch.clock, pipeline.stopwatch.is_on = clock, True
        pipeline.stopwatch.lap()
        pipeline.optimizer.register_step_post_hook(lambda *_: self._after_step())

    @property
    def controller(self) -> RepartitionController | None:
        """Rank 0's controller; None on other ranks."""
        return self._rebalance_controller.controller if self._rebalance_controller else None

    def _after_step(self) -> None:
        """End a train step.

        It reads the report that came with its losses, and prepares this rank's numbers for the next one.
        """
        lap, now_s = self._pipeline.stopwatch.lap(), self._clock()
        self._num_done += 1
        report = self._step_exchange.take_report()
        if report is not None and self._rebalance_controller is not None:
            self._step_exchange.action = self._rebalance_controller.step_received(report.compute_s)
        self._prepare_measurement(lap, now_s)
        if report is not None and report.action is StepAction.PROBE:
            self._probe_links()
        if report is not None and report.action is not StepAction.NOTHING:
            self._receive_decision()

    def _prepare_measurement(self, lap: StopwatchLap, now_s: float) -> None:
        """Set the newest train step's numbers; zero if the step is not counted."""
        is_counted = not (self.migrator.is_migrating or lap.num_forwards == 0 or self._num_skipped)
        parts = lap.num_forwards / self._num_microbatches if is_counted else 1.0
        self._step_exchange.compute_s = lap.compute_s / parts if is_counted else 0.0
        if self._rebalance_controller is not None:
            self._rebalance_controller.step_sent(
                self._num_done - 1, (now_s - lap.begun_s) / parts if is_counted else None
            )
        if self._num_skipped and lap.num_forwards and not self.migrator.is_migrating:
            self._num_skipped -= 1

    def _probe_links(self) -> None:
        """Time all links, on all ranks together."""
        begun_s = self._clock()
        rates = self._link_prober.probe()
        if self._rebalance_controller is not None:
            self._rebalance_controller.links_probed(rates, self._clock() - begun_s)

    def _receive_decision(self) -> None:
        """Receive rank 0's decision and carry it out."""
        text = self._rebalance_controller.decision_text if self._rebalance_controller else ""
        decision = RepartitionDecision.parse(broadcast_text(text, self._pipeline.groups.control))
        if decision.is_move:
            devices = StageDevices.parse(decision.devices) if decision.devices else None
            self.migrator.start(decision.splits, devices)

    def _on_migrated(self, outcome: MigrationOutcome) -> None:
        """Record a migration's outcome; called on all ranks in the same step."""
        self.outcomes.append(outcome)
        self._num_skipped = 2 if outcome.is_done else 1
        if self._rebalance_controller is not None:
            self._rebalance_controller.migration_ended(outcome, self._num_done + 1)


_MAX_BYTES_PER_S = 1e12
"""Rate of a link whose bytes take no measurable time."""


def adapt(
    pipeline: Pipeline,
    make_optimizer: MakeOptimizer,
    policy: RepartitionPolicy | None = None,
    *,
    memory_bytes: Sequence[float] | None = None,
    profile_rounds: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> PipelineRebalancer:
    """Keep the pipeline's partition the fastest one from now on; all ranks call it at the same time.

    Blocks, links and the schedule's overheads are measured first. Under `ringweave run` rank 0 writes events to the
    event log.

    Args:
        pipeline: The pipeline, which trains as before.
        make_optimizer: As given to the pipeline.
        policy: Conditions for migrations; None: the defaults.
        memory_bytes: Memory of each stage's device; None: unlimited.
        profile_rounds: Measured forwards and backwards of each kind of block.
        clock: Clock in seconds.

    Raises:
        UsageError: Fewer blocks than stages.
    """
    block_profile = profiling.profile(pipeline, make_optimizer, rounds=profile_rounds, clock=clock)
    largest = max(boundary.forward_bytes for boundary in pipeline.boundaries[1:])
    links = profiling.measure_links(pipeline.layout, pipeline.groups, pipeline.device, largest, clock=clock)
    run_dir = WorkerEnvironment.from_environ(os.environ).run_dir
    log = EventLog(run_dir / "events.jsonl") if run_dir and pipeline.rank == 0 else None
    overheads = profiling.measure_overheads(pipeline, links, rounds=profile_rounds, clock=clock)
    reduces_s = _measure_reduces(pipeline, profile_rounds, clock)
    workload = build_workload(pipeline, block_profile, links, overheads, memory_bytes=memory_bytes)
    conditions = initial_conditions(block_profile, links, _reduce_rates(pipeline, reduces_s))
    workload.problem(conditions)
    return PipelineRebalancer(
        pipeline,
        workload,
        conditions,
        policy or RepartitionPolicy(),
        log=log,
        clock=clock,
    )


def _measure_reduces(pipeline: Pipeline, rounds: int, clock: Callable[[], float]) -> tuple[float, ...]:
    """Measure the allreduce of each stage's gradients over its devices, in seconds; the same on every rank.

    All ranks call it at the same time, and all stages reduce at the same time, as at the end of a train step. A stage
    of one device takes no time.

    Cost: (rounds + 1) allreduces of the gradients.
    """
    table = torch.zeros(pipeline.layout.num_stages, dtype=torch.float64)
    group, stopwatch = pipeline.groups.stage_replicas, Stopwatch(pipeline.device, clock)
    stopwatch.is_on, laps = True, []
    held = [pipeline.blocks[block] for block in pipeline.blocks.held if has_parameters(pipeline.blocks[block])]
    sizes = [sum(each.numel() for each in block.parameters() if each.requires_grad) for block in held]
    messages = [torch.zeros(size, device=pipeline.device) for size in sizes]

    def reduce_all() -> None:
        works = [dist.all_reduce(message, group=group, async_op=True) for message in messages]
        for work in works:
            work.wait()

    for _ in range(rounds + 1):
        pipeline.groups.barrier()
        if group is not None:
            stopwatch.time(reduce_all, is_forward=False)
            laps.append(stopwatch.lap().compute_s)
    if laps:
        table[pipeline.stage] = statistics.median(laps[1:])
    return tuple(pipeline.groups.max_over_ranks(table).tolist())


def build_workload(
    pipeline: Pipeline,
    profile: Profile,
    links: tuple[Sequence[StageLink], Sequence[StageLink]],
    overheads: Overheads | None = None,
    *,
    memory_bytes: Sequence[float] | None = None,
) -> PipelineWorkload:
    """Build the controller's workload from measured blocks, links and overheads."""
    costs, devices = profile.blocks, range(profile.num_devices)
    gradients = [_gradient_bytes(pipeline, block) for block in range(len(costs))]
    memory = None
    if memory_bytes is not None:
        memory = PartitionMemory(
            limit=tuple(memory_bytes),
            state=tuple(float(cost.state_bytes) for cost in costs),
            stash=tuple(float(cost.stash_bytes) for cost in costs),
            in_flight=tuple(pipeline.order.peak_in_flight[stage] for stage in pipeline.layout.placed.stage_of_device),
        )
    settings = pipeline.settings
    return PipelineWorkload(
        forward_s=tuple(tuple(cost.forward_s[device] for cost in costs) for device in devices),
        backward_s=tuple(tuple(cost.backward_s[device] for cost in costs) for device in devices),
        kinds=tuple(devices),
        update_s=tuple(tuple(cost.update_s[device] for cost in costs) for device in devices),
        overheads=overheads or Overheads(),
        num_devices=profile.num_devices,
        num_microbatches=settings.num_microbatches,
        forward_bytes=tuple(float(cost.forward_bytes) for cost in costs),
        backward_bytes=tuple(float(cost.backward_bytes) for cost in costs),
        state_bytes=tuple(float(cost.state_bytes - own) for cost, own in zip(costs, gradients, strict=True)),
        gradient_bytes=tuple(map(float, gradients)),
        latency_s=tuple(max(f.latency_s, b.latency_s) for f, b in zip(*links, strict=True)),
        schedule=settings.schedule,
        transfers=transfer_mode(settings.schedule, pipeline.layout.devices),
        memory=memory,
        devices=pipeline.layout.devices,
        coding_s=tuple(tuple(cost.coding_s[device] for cost in costs) for device in devices)
        if costs[0].coding_s
        else (),
        fixed_share=tuple(tuple(cost.fixed_share[device] for cost in costs) for device in devices)
        if costs[0].fixed_share
        else (),
    )


def initial_conditions(
    profile: Profile, links: tuple[Sequence[StageLink], Sequence[StageLink]], reduce_rates: Sequence[float] = ()
) -> PipelineConditions:
    """Conditions at profiling: all device speeds 1, and the rate of each link's slower direction."""
    pairs = zip(*links, strict=True)
    rates = (1 / max(f.s_per_byte, b.s_per_byte, 1 / _MAX_BYTES_PER_S) for f, b in pairs)
    return PipelineConditions(speeds=(1.0,) * profile.num_devices, rates=tuple(rates), reduce_rates=tuple(reduce_rates))


def _reduce_rates(pipeline: Pipeline, reduces_s: Sequence[float]) -> tuple[float, ...]:
    """Bytes of gradients that each stage's devices reduce in a second; empty with one device a stage."""
    if pipeline.layout.devices is None:
        return ()
    sizes = [sum(_gradient_bytes(pipeline, block) for block in blocks) for blocks in pipeline.layout.ranges]
    pairs = zip(sizes, reduces_s, strict=True)
    return tuple(max(1.0, size) / max(took_s, 1e-9) if size else _MAX_BYTES_PER_S for size, took_s in pairs)


def _gradient_bytes(pipeline: Pipeline, block: int) -> int:
    return sum(each.nbytes for each in pipeline.blocks[block].parameters() if each.requires_grad)
