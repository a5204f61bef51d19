"""`ringweave.prepare`: three lines in a single-process script make it train on all workers."""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ringweave.comm import default_group
from ringweave.environment import WorkerEnvironment
from ringweave.errors import TrainingError, explain
from ringweave.param_server import optimizers
from ringweave.planning import balancing, modes
from ringweave.planning.balancing import Speed
from ringweave.training import collectives, gradients, speed_test, timing
from ringweave.training.balancer import ShareBalancer
from ringweave.training.collectives import ControlGroup
from ringweave.training.data import order
from ringweave.training.data.shared_loader import BatchWeight, SampleWeightTable, SharedLoader
from ringweave.training.data.sources import OrderSource, StaticMembership
from ringweave.training.elastic import elastic_preparation
from ringweave.training.elastic.elastic_preparation import PrepareOptions
from ringweave.training.gradients import GradientReducer, SampleWeights
from ringweave.training.mode_choice import forecast, step_benchmark
from ringweave.training.recorder import Recorder
from ringweave.training.rings import elastic_ring_preparation, ring_preparation
from ringweave.training.rings.elastic_ring_preparation import ElasticRingOptions
from ringweave.training.rings.ring_preparation import RingOptions
from ringweave.training.rings.ring_settings import Asynchronous
from ringweave.training.timing import StepTimer

TrainingTriple = tuple[nn.Module, Optimizer, DataLoader]
"""Arguments of `prepare`: model, optimizer and loader."""

REDUCTIONS = ("mean", "sum")
ON_FAILURE = ("recompute", "drop")
_MUST_MATCH = ("mode", "reduction", "weight", "order", "batch_samples", "num_samples", "drop_last")


def prepare(  # noqa: PLR0913 - a user's one call: three things and options with defaults; half of it says what they are
    model: nn.Module,
    optimizer: Optimizer,
    loader: DataLoader,
    mode: str = modes.AUTO,
    *,
    reduction: str = "mean",
    max_samples: int | None = None,
    ddp: Mapping[str, Any] | None = None,
    asynchronous: Asynchronous | None = None,
    extra_state: Mapping[str, Any] | None = None,
    on_failure: str = "recompute",
    weight: Sequence[float] | Callable[[Any], float] | None = None,
) -> tuple[DistributedDataParallel, Optimizer, SharedLoader]:
    """Prepare a single-process script to train on all workers; return replacements for the three arguments.

    The training loop stays as it is, and every step equals that of one process. The batch of a train step is the
    loader's, whatever the number of workers. Each worker computes its share of it, and the gradient of the whole batch
    is sum b_i g_i / sum b_i, exactly. Works under any launcher, and without one.

    Args:
        model: A module, the same on all ranks except for its values, which become those of rank 0; or a
            DistributedDataParallel.
        optimizer: Optimizer of the model's parameters. It is returned as it is, in modes ps-hra and ps in a wrapper
            that has its param_groups.
        loader: A DataLoader with batch_size (of the whole train step) and, if needed, a sampler. With a
            DistributedSampler its batch_size is that of each rank.
        mode: `sync`: equal shares. `balanced`: shares in proportion to measured speeds. `ps-hra`: rings of equally fast
            workers and an asynchronous parameter server between them, not exact; `ps`: the same, each worker alone.
            Both need `ringweave run --mode`. `auto`: the mode of `ringweave run --mode`; under `--mode auto` the mode
            with the shortest predicted step after a trial of the model; without it balanced, if there is more than one
            worker.
        reduction: `mean` if the loss is a mean over the samples of a batch, `sum` if it is their sum. Exactness depends
            on it; for a weighted mean, or one over tokens of unequal numbers, give `weight` too.
        max_samples: Limit of samples of one batch in this rank's memory; may differ between ranks.
        ddp: Further arguments of DistributedDataParallel.
        asynchronous: Rings and local steps of the modes with a server; None means `Asynchronous()`.
        extra_state: Under `ringweave run --elastic`, further objects with `state_dict` and `load_state_dict`, such as a
            scheduler of learning rates, that a worker which joins later gets from the others with the model. When a
            step is repeated for the samples of a lost worker, their state is that of before the step.
        on_failure: Under `ringweave run --elastic`, the samples of a worker that is lost within a train step. With
            `recompute` the others compute them before the step ends, so its batch stays whole: the loader yields them
            as another batch, and the optimizer skips the step that misses them. With `drop` the step is the mean over
            the other samples.
        weight: Weights in the mean that the loss is, such as the number of tokens of each sample: one number for each
            sample of the data set, or a function that gets a batch from the loader and returns its weight. With a
            function the workers exchange their weights while the model computes; it works in modes sync and balanced
            without `--elastic`. A batch must have some weight.

    Raises:
        UsageError: The mode does not exist, or its server was not started.
        TrainingError: The batches of the loader cannot be shared in this way.
        DisagreementError: Ranks have prepared different things.
        PeerError: A worker does not take part in the speed test.
        MembershipError: An elastic job does not admit this worker.
    """
    _check_reduction(reduction)
    _check_on_failure(on_failure)
    _check_weight(weight, reduction)
    modes.check_mode(mode)
    settings, environment = asynchronous or Asynchronous(), WorkerEnvironment.from_environ(os.environ)
    options = PrepareOptions(
        mode=mode,
        reduction=reduction,
        max_samples=max_samples,
        ddp=dict(ddp or {}),
        extra_state=dict(extra_state or {}),
        on_failure=on_failure,
        weight=weight if weight is None or callable(weight) else SampleWeightTable.of_script(weight, loader),
    )
    if environment.coordinators:
        return _prepare_for_elastic_job((model, optimizer, loader), options, settings, environment)
    found = _prepare_for_static_job((model, optimizer, loader), options, settings, environment)
    timing.freeze_garbage_collector()
    return found


def _prepare_for_elastic_job(
    triple: TrainingTriple, options: PrepareOptions, settings: Asynchronous, environment: WorkerEnvironment
) -> tuple[DistributedDataParallel, Optimizer, SharedLoader]:
    """Prepare for workers that may join and leave."""
    timer = StepTimer(timing.choose_timeline(triple[0]))
    chosen, reason = modes.decide_mode(options.mode, environment.mode, 2)
    if chosen in modes.SERVER_MODES:
        ring_options = ElasticRingOptions(elastic=options, mode=chosen, reason=reason, settings=settings)
        return elastic_ring_preparation.prepare_elastic_rings(triple, ring_options, environment, timer)
    return elastic_preparation.prepare_elastic(triple, options, environment, timer)


def _prepare_for_static_job(
    triple: TrainingTriple, options: PrepareOptions, settings: Asynchronous, environment: WorkerEnvironment
) -> tuple[DistributedDataParallel, Optimizer, SharedLoader]:
    """Prepare for a fixed set of workers; no extra state is carried to others."""
    model, optimizer, loader = triple
    spec = order.read_loader(loader)
    default_group.ensure_process_group(os.environ)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    preset = modes.decide_mode(options.mode, environment.mode, world_size)
    is_open = modes.is_undecided(options.mode, environment.mode, world_size)
    is_served = environment.server is not None
    participant = speed_test.join_speed_test(settings.speed_test_s, rank, world_size) if is_served else None
    own_report = {
        "mode": preset[0],
        **_describe_script(triple, options, settings),
        **forecast.describe_own_rank(
            model,
            loader,
            spec,
            environment,
            is_needed=is_open or preset[0] == modes.PS_HRA,
            participant=participant,
        ),
    }
    control_group = ControlGroup()  # of all ranks: created when all are known to be present
    reports = control_group.gather_json({**dataclasses.asdict(spec), **own_report})
    collectives.check_equal(reports, _MUST_MATCH)
    recorder = Recorder(environment, rank)
    reports = step_benchmark.benchmark_if_useful(
        reports, triple, control_group, environment, settings, preset[0], is_open=is_open
    )
    chosen, reason, rings = forecast.choose_mode(
        preset, reports, settings.rings, is_open=is_open, local_steps=settings.local_steps
    )
    is_mean = options.reduction == "mean"
    if chosen in modes.SERVER_MODES:
        recorder.training_prepared(mode=chosen, options=options.mode, reason=reason, shares=())
        ring_options = _ring_options(options, settings, chosen, rings, is_open=is_open)
        return ring_preparation.prepare_rings(
            triple, spec, reports, ring_options, (environment, control_group, recorder)
        )
    timer = StepTimer(timing.choose_timeline(model))
    balancer = _make_balancer(reports, chosen, timer, control_group, recorder)
    weights = SampleWeights(num_ranks=control_group.world_size, is_mean=is_mean)
    recorder.training_prepared(mode=chosen, options=options.mode, reason=reason, shares=balancer.latest)
    reducer = GradientReducer(process_group=None, timer=timer)
    parallel = gradients.wrap_ddp(model, weights, reducer, options.ddp)
    timing.attach_timer(timer, parallel, optimizer)
    weight = BatchWeight(options.weight, control_group) if callable(options.weight) else options.sample_weights
    membership = StaticMembership(control_group, balancer, timer, recorder.epoch_accounted)
    source = OrderSource(loader, spec, reports[0]["seed"], membership)
    return parallel, optimizer, SharedLoader(loader, source, weights, timer, weight)


def _ring_options(
    options: PrepareOptions,
    settings: Asynchronous,
    mode: str,
    rings: tuple[tuple[int, ...], ...] | None,
    *,
    is_open: bool,
) -> RingOptions:
    return RingOptions(
        mode=mode,
        is_mean=options.reduction == "mean",
        settings=settings,
        ddp=options.ddp,
        rings=rings,
        is_open=is_open,
        sample_weights=options.sample_weights,
    )


def _describe_script(triple: TrainingTriple, options: PrepareOptions, settings: Asynchronous) -> dict[str, Any]:
    """Return what the script gives `prepare`, for the other ranks."""
    _, optimizer, loader = triple
    return {
        "reduction": options.reduction,
        "weight": options.weight_digest,
        "seed": order.shuffle_seed(loader),
        "cap": options.max_samples,
        "optimizer": optimizers.optimizer_name(optimizer),
        "loses_state": not settings.local_steps and optimizers.has_taken_steps(optimizer.state.values()),
    }


def _make_balancer(
    reports: list[dict[str, Any]], mode: str, timer: StepTimer, control_group: ControlGroup, recorder: Recorder
) -> ShareBalancer:
    """Return the balancer with its first shares: by known speeds in mode balanced, else equal."""
    batch_samples = reports[0]["batch_samples"]
    is_balanced = mode == modes.BALANCED
    caps = balancing.share_limits(batch_samples, (each["cap"] for each in reports))
    times_s = forecast.sample_times_s(reports) if is_balanced else [1.0] * len(reports)
    speeds = [Speed(s_per_sample=each_s) for each_s in times_s]
    return ShareBalancer(
        balancing.apportion(batch_samples, speeds, caps),
        timer,
        control_group if is_balanced else None,
        caps=caps,
        num_prefetched=max(each["num_prefetched"] for each in reports),
        on_change=recorder.shares_changed,
    )


def _check_weight(weight: Sequence[float] | Callable[[Any], float] | None, reduction: str) -> None:
    if weight is not None and reduction != "mean":
        do = "Leave out weight: a sum of losses needs none"
        raise TrainingError(explain("reduction", got=reduction, expected="mean beside weight", do=do))


def _check_on_failure(on_failure: str) -> None:
    if on_failure not in ON_FAILURE:
        do = "Say what happens to the samples of a worker that is lost within a train step"
        raise TrainingError(explain("on_failure", got=on_failure, expected="recompute or drop", do=do))


def _check_reduction(reduction: str) -> None:
    if reduction not in REDUCTIONS:
        do = "Say how the loss of a batch follows from the losses of its samples"
        raise TrainingError(explain("reduction", got=reduction, expected="mean or sum", do=do))
