"""`ringweave.prepare`: three lines of a script that trains alone, and it trains on all workers."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ringweave.comm import joining
from ringweave.environment import WorkerEnvironment
from ringweave.errors import TrainingError, explain
from ringweave.params.serving import optimizers
from ringweave.planning import balancing, modes
from ringweave.planning.balancing import Speed
from ringweave.training import control, garbage, reducing, speed_test, timing
from ringweave.training.balancer import Balancer
from ringweave.training.choosing import forecasting, rehearsing
from ringweave.training.control import Control
from ringweave.training.elastic import preparing as elastic_preparing
from ringweave.training.elastic.loader import ElasticLoader
from ringweave.training.elastic.preparing import Wanted
from ringweave.training.loading import orders
from ringweave.training.loading.loader import Parts, SharedLoader
from ringweave.training.recording import Recorder
from ringweave.training.reducing import GradientReducer, SampleWeights
from ringweave.training.rings import preparing as ring_preparing
from ringweave.training.rings.elastic import preparing as kept_preparing
from ringweave.training.rings.elastic.loader import KeptRingLoader
from ringweave.training.rings.elastic.preparing import KeptAsked
from ringweave.training.rings.loader import RingLoader
from ringweave.training.rings.preparing import Asked
from ringweave.training.rings.settings import Asynchronous
from ringweave.training.timing import StepTimer

Triple = tuple[nn.Module, Optimizer, DataLoader]
"""What `prepare` is given."""

REDUCTIONS = ("mean", "sum")
_ALIKE = ("mode", "reduction", "order", "batch_samples", "num_samples", "drop_last")


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
    carried: Mapping[str, Any] | None = None,
) -> tuple[DistributedDataParallel, Optimizer, SharedLoader | RingLoader | ElasticLoader | KeptRingLoader]:
    """Returns what takes the place of the three: the loop stays as it is, and every step is that of one process.

    The batch of a train step is the loader's, whatever the number of workers. Each worker computes its share of it, and
    the gradient of the whole batch is sum b_i g_i / sum b_i, exactly. Works under any launcher, and without one.

    Args:
        model: A module, the same on all ranks but for its values, which become those of rank 0; or one under
            DistributedDataParallel already.
        optimizer: Made of the model's parameters. It is returned as it is, in modes ps-hra and ps in a wrapper that
            has its param_groups.
        loader: A DataLoader with batch_size (of the whole train step) and, if needed, a sampler. With a
            DistributedSampler its batch_size is that of each rank.
        mode: `sync`: equal shares. `balanced`: shares in proportion to measured speeds. `ps-hra`: rings of equally fast
            workers and an asynchronous parameter server between them, not exact; `ps`: the same, each worker alone.
            Both need `ringweave run --mode`. `auto`: what `ringweave run --mode` says; under `--mode auto` the mode
            that is predicted to be the fastest after a trial of the model; without it balanced, if there is more than
            one worker.
        reduction: `mean` if the loss is a mean over the samples of a batch, `sum` if it is their sum. Exactness depends
            on it; a weighted mean, or one over tokens of unequal numbers, is neither.
        max_samples: The most samples of one batch that this rank's memory takes; may differ between ranks.
        ddp: Further arguments of DistributedDataParallel.
        asynchronous: Rings and local steps of the modes with a server; None means `Asynchronous()`.
        carried: Under `ringweave run --elastic`, further objects with `state_dict` and `load_state_dict`, such as a
            scheduler of learning rates, that a worker which joins later gets from the others with the model.

    Raises:
        UsageError: No such mode, or one whose server nobody has started.
        TrainingError: The batches of the loader cannot be shared in this way.
        DisagreementError: Ranks have prepared different things.
        PeerError: A worker does not come to the speed test.
        MembershipError: An elastic job does not take this worker in.
    """
    _check_reduction(reduction)
    modes.check_name(mode)
    settings, environment = asynchronous or Asynchronous(), WorkerEnvironment.from_environ(os.environ)
    asked = Wanted(
        mode=mode, reduction=reduction, max_samples=max_samples, ddp=dict(ddp or {}), carried=dict(carried or {})
    )
    if environment.coordinators:
        return _prepare_elastic((model, optimizer, loader), asked, settings, environment)
    found = _prepare_lasting((model, optimizer, loader), asked, settings, environment)
    garbage.spare_collections()
    return found


def _prepare_elastic(
    triple: Triple, asked: Wanted, settings: Asynchronous, environment: WorkerEnvironment
) -> tuple[DistributedDataParallel, Optimizer, ElasticLoader | KeptRingLoader]:
    """For workers that may come and go."""
    timer = StepTimer(timing.timeline_of(triple[0]))
    chosen, reason = modes.decide(asked.mode, environment.mode, 2)
    if chosen in modes.SERVED:
        kept = KeptAsked(elastic=asked, mode=chosen, reason=reason, settings=settings)
        return kept_preparing.prepare(triple, kept, environment, timer)
    return elastic_preparing.prepare(triple, asked, environment, timer)


def _prepare_lasting(
    triple: Triple, asked: Wanted, settings: Asynchronous, environment: WorkerEnvironment
) -> tuple[DistributedDataParallel, Optimizer, SharedLoader | RingLoader]:
    """For the workers that are there, to the end; nothing is carried to others."""
    model, optimizer, loader = triple
    reading = orders.read(loader)
    joining.join(os.environ)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    decided = modes.decide(asked.mode, environment.mode, world_size)
    is_open = modes.is_open(asked.mode, environment.mode, world_size)
    is_served = environment.server is not None
    referee = speed_test.referee_of_all(settings.speed_test_s, rank, world_size) if is_served else None
    own = {
        "mode": decided[0],
        "reduction": asked.reduction,
        "seed": orders.seed_of(loader),
        "cap": asked.max_samples,
        "optimizer": optimizers.name_of(optimizer),
        "loses_state": not settings.local_steps and optimizers.has_moved(optimizer.state.values()),
        **forecasting.own_prospects(
            model,
            loader,
            reading,
            environment,
            is_needed=is_open or decided[0] == modes.PS_HRA,
            referee=referee,
        ),
    }
    messages = Control()  # of all ranks: made where all are known to be there
    said = messages.gather_json({**dataclasses.asdict(reading), **own})
    control.check_alike(said, _ALIKE)
    recorder = Recorder(environment, rank)
    said = rehearsing.rehearse_if_wanted(said, triple, messages, environment, settings, decided[0], is_open=is_open)
    chosen, reason, rings = forecasting.decide(
        decided, said, settings.rings, is_open=is_open, local_steps=settings.local_steps
    )
    is_mean = asked.reduction == "mean"
    if chosen in modes.SERVED:
        recorder.prepared(mode=chosen, asked=asked.mode, reason=reason, shares=())
        in_rings = Asked(mode=chosen, is_mean=is_mean, settings=settings, ddp=asked.ddp, rings=rings, is_open=is_open)
        return ring_preparing.prepare(triple, reading, said, in_rings, (environment, messages, recorder))
    timer = StepTimer(timing.timeline_of(model))
    parts = Parts(
        control=messages,
        balancer=_balancer(said, chosen, timer, messages, recorder),
        weights=SampleWeights(num_ranks=messages.world_size, is_mean=is_mean),
        timer=timer,
        note=recorder.accounted,
    )
    recorder.prepared(mode=chosen, asked=asked.mode, reason=reason, shares=parts.balancer.latest)
    reducer = GradientReducer(process_group=None, timer=timer)
    parallel = reducing.attach(model, parts.weights, reducer, asked.ddp)
    timing.watch(timer, parallel, optimizer)
    return parallel, optimizer, SharedLoader(loader, reading, said[0]["seed"], parts)


def _balancer(
    said: list[dict[str, Any]], mode: str, timer: StepTimer, messages: Control, recorder: Recorder
) -> Balancer:
    """First shares: by what is known of speeds if they are to be balanced, else equal ones."""
    batch_samples = said[0]["batch_samples"]
    is_balanced = mode == modes.BALANCED
    caps = balancing.limits(batch_samples, (each["cap"] for each in said))
    times_s = forecasting.sample_s(said) if is_balanced else [1.0] * len(said)
    speeds = [Speed(s_per_sample=each_s) for each_s in times_s]
    return Balancer(
        balancing.apportion(batch_samples, speeds, caps),
        timer,
        messages if is_balanced else None,
        caps=caps,
        num_prefetched=max(each["num_prefetched"] for each in said),
        on_change=recorder.shares_changed,
    )


def _check_reduction(reduction: str) -> None:
    if reduction not in REDUCTIONS:
        do = "Say how the loss of a batch follows from the losses of its samples"
        raise TrainingError(explain("reduction", got=reduction, expected="mean or sum", do=do))
