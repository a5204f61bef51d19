"""`ringweave.prepare`: three lines in a single-process script make it train on all workers."""

import atexit
import dataclasses
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ringweave import units
from ringweave.comm import default_group, group_info
from ringweave.comm.backend import RingweaveProcessGroup
from ringweave.comm.plan_choice import MIN_SCHEDULED_BYTES
from ringweave.environment import AUTO_WIRE, EXACT, WorkerEnvironment, check_max_loss_increase, check_wire
from ringweave.jobs import modes
from ringweave.param_server import optimizers
from ringweave.param_server.client import RingClient
from ringweave.param_server.versions import StalenessPolicy
from ringweave.planning import balancing, sites
from ringweave.planning.balancing import Speed
from ringweave.planning.loss_table import load_loss_table
from ringweave.planning.mode_forecast import Ring
from ringweave.planning.sites import MeasuredSites
from ringweave.training import collectives, gradients, options, outer_optimizer, outer_steps, speed_test, timing
from ringweave.training.balancer import ShareBalancer
from ringweave.training.collectives import ControlGroup
from ringweave.training.data import order
from ringweave.training.data.shared_loader import BatchWeight, SampleWeightTable, SharedLoader
from ringweave.training.data.sources import OrderSource, StaticMembership
from ringweave.training.elastic import ddp as elastic_ddp
from ringweave.training.elastic import member_process
from ringweave.training.elastic.elastic_membership import ElasticMembership, check_elastic_data
from ringweave.training.elastic.session import ElasticSession
from ringweave.training.elastic.training_state import IncompleteStep
from ringweave.training.elastic.wire_choice import WireChoice
from ringweave.training.gradients import GradientReducer, SampleWeights
from ringweave.training.memory import memory_guard
from ringweave.training.mode_choice import forecast, step_benchmark
from ringweave.training.mode_choice.forecast import ElasticWireForecast, LossBound, RingReconsideration
from ringweave.training.options import Asynchronous, Local, Script
from ringweave.training.outer_optimizer import OuterOptimizer
from ringweave.training.outer_steps import RoundControl, SiteExchange, SiteMembership, SiteSource
from ringweave.training.recorder import Recorder, StepRecorder
from ringweave.training.rings import ring_formation, startup_rendezvous
from ringweave.training.rings.elastic_ring import AssignedMember, ElasticRing
from ringweave.training.rings.ring_formation import RingShares, relative_speeds
from ringweave.training.rings.ring_worker import ParameterServerOptimizer
from ringweave.training.rings.shard_source import ShardSource
from ringweave.training.rings.static_ring import (
    RingAssignment,
    RingRegrouper,
    StaticRing,
    create_ring_groups,
    ring_index,
)
from ringweave.training.speed_test import ModelTrial
from ringweave.training.timing import StepTimer

Prepared = tuple[Any, Optimizer, SharedLoader]
"""Replacements of the script's model, optimizer and loader: the model in DistributedDataParallel, or sharded as it is.
"""
_MUST_MATCH = (
    *("mode", "reduction", "weight", "wire", "max_loss_increase", "local"),
    *("order", "batch_samples", "num_samples", "drop_last"),
)
Reports = list[dict[str, Any]]
"""Reports of all ranks about themselves and their scripts."""


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
    local: Local | None = None,
    extra_state: Mapping[str, Any] | None = None,
    on_failure: str = "recompute",
    weight: Sequence[float] | Callable[[Any], float] | None = None,
    wire: str | None = None,
    max_loss_increase: str | None = None,
) -> Prepared:
    """Prepare a single-process script to train on all workers; return replacements for the three arguments.

    The training loop stays as it is, and every step equals that of one process. The batch of a train step is the
    loader's, whatever the number of workers. Each worker computes its share of it, and the gradient of the whole batch
    is sum b_i g_i / sum b_i, exactly. Works under any launcher, and without one.

    Args:
        model: A module, the same on all ranks except for its values, which become those of rank 0; or a
            DistributedDataParallel; or a module under torch's `fully_shard`, which stays as it is (mode sync alone).
        optimizer: Optimizer of the model's parameters. It is returned as it is, in modes ps-hra and ps in a wrapper
            that has its param_groups.
        loader: A DataLoader with batch_size (of the whole train step) and, if needed, a sampler. With a
            DistributedSampler its batch_size is that of each rank.
        mode: `sync`: equal shares. `balanced`: shares in proportion to measured speeds. `ps-hra`: rings of equally fast
            workers and an asynchronous parameter server between them, not exact; `ps`: the same, each worker alone.
            Both need `ringweave run --mode`. `local`: sites train by themselves and tie their parameters together now
            and then, for thin links between them; not exact. `auto`: the mode of `ringweave run --mode`; under
            `--mode auto` the mode with the shortest predicted step after a trial of the model; without it balanced, if
            there is more than one worker.
        reduction: `mean` if the loss is a mean over the samples of a batch, `sum` if it is their sum. Exactness depends
            on it; for a weighted mean, or one over tokens of unequal numbers, give `weight` too.
        max_samples: Limit of samples of one batch in this rank's memory; may differ between ranks. None measures the
            memory, where it is limited, and computes a share that does not fit in microbatches.
        ddp: Further arguments of DistributedDataParallel.
        asynchronous: Rings and local steps of the modes with a server; None means `Asynchronous()`.
        local: Rounds, outer optimizer and sites of mode local; None means `Local()`.
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
        wire: Format in which gradients pass the links that bind: `exact`; `bf16`, `int8` or `int4`, with error
            feedback, the same bits on all ranks; `auto`: bf16 or int8 once steps wait for gradients, where the forecast
            gains 10 % or more. Gradients of other types than float32 stay exact, and so do those of a sharded model.
            None is that of `ringweave run --wire`, or else exact.
        max_loss_increase: Loss at equal samples, such as `0.5%`, that mode and format `auto` may give up for speed, by
            a table that was measured on other tasks. Within it, mode `auto` takes wire formats, also where none is
            named, and mode local. None is that of `ringweave run --max-loss-increase`; without one `auto` takes exact
            modes and ps-hra.

    Raises:
        UsageError: The mode or the format does not exist, or the mode's server was not started; the largest loss
            increase is no percentage.
        TrainingError: The batches of the loader cannot be shared in this way.
        DisagreementError: Ranks have prepared different things.
        PeerError: A worker does not take part in the speed test.
        MembershipError: An elastic job does not admit this worker.
    """
    options.check_options(reduction, on_failure, is_weighted=weight is not None)
    modes.check_mode(mode)
    default_group.use_gpu_of(timing.cuda_devices(model))
    settings, environment = asynchronous or Asynchronous(), WorkerEnvironment.from_environ(os.environ)
    weights = weight if weight is None or callable(weight) else SampleWeightTable.of_script(weight, loader)
    script = Script(
        model=model,
        optimizer=optimizer,
        loader=loader,
        spec=order.read_loader(loader),
        seed=order.shuffle_seed(loader),
        mode=mode,
        reduction=reduction,
        max_samples=max_samples,
        ddp=dict(ddp or {}),
        settings=settings,
        local=local or Local(),
        extra_state=dict(extra_state or {}),
        on_failure=on_failure,
        weight=weights,
        wire=environment.wire if wire is None else check_wire(wire, where="prepare"),
        is_wire_open=wire == AUTO_WIRE or (wire is None and environment.wire in (EXACT, AUTO_WIRE)),
        max_loss_increase=_loss_bound(max_loss_increase, environment),
    )
    if gradients.is_sharded(model):
        found = _prepare_sharded(script, environment)
    elif environment.coordinators:
        return _prepare_elastic(script, environment)
    else:
        found = _prepare_static(script, environment)
    timing.freeze_garbage_collector()
    return found


def _loss_bound(given: str | None, environment: WorkerEnvironment) -> float | None:
    text = check_max_loss_increase(given, where="prepare") or environment.max_loss_increase
    return None if text is None else units.parse_percent(text, "largest loss increase")


def _prepare_elastic(script: Script, environment: WorkerEnvironment) -> Prepared:
    """Join the job, or a ring of it; return when the first generation with this member has begun."""
    timer = _step_timer(script, environment)
    member_process.refuse_process_group()
    mode, reason = modes.decide_mode(script.mode, environment.mode, 2)
    script, reason, wires = _elastic_wire(script, mode, reason, environment)
    has_server, settings = modes.has_server(mode, is_elastic=True), script.settings
    if mode == modes.LOCAL:
        settings = script.local.as_asynchronous()
        script, reason = dataclasses.replace(script, settings=settings), f"{reason}; {options.ELASTIC_SITES}"
    if has_server:
        ring_formation.check_optimizer_fresh(script.optimizer, settings)
    check_elastic_data(script.spec)
    must_match, assigned = _elastic_must_match(script, mode, is_wire_chosen=wires.is_open), None
    sample_weights = script.sample_weights
    authentication = member_process.peer_authentication(environment)
    if has_server:
        assigned = startup_rendezvous.assign_ring(script, environment, authentication, must_match, reason)
    member = member_process.join_job(script, environment, authentication, timer, must_match, wires, assigned)
    session, trainer, recorder = member.session, member.trainer, member.recorder
    if not has_server:
        shares, reason = trainer.share_table.latest.shares, reason + wires.reason
        recorder.training_prepared(mode=mode, options=script.mode, reason=reason, shares=shares)
    weights = SampleWeights(num_ranks=1, is_mean=script.is_mean)
    parallel = elastic_ddp.wrap_elastic_ddp(script.model, script.ddp, session, weights, timer)
    memory_guard.guard_memory(script, parallel, weights, environment, trainer.set_memory)
    incomplete = IncompleteStep(script.optimizer, script.extra_state, lambda: bool(trainer.accounting.missing))
    _scale_elastic_rates(script, mode, assigned, session)
    optimizer, source = script.optimizer, None
    if member.exchange is None or member.worker is None:
        timing.attach_timer(timer, parallel, optimizer)
        membership = ElasticMembership(
            session, trainer, timer, incomplete, recorder.epoch_accounted, is_mean=script.is_mean
        )
        source = OrderSource(script.loader, script.spec, script.seed, membership)
    else:
        ring = ElasticRing(
            session, trainer, member.worker, member.exchange, timer, incomplete, recorder.epoch_accounted
        )
        ring.start_training()
        optimizer = ParameterServerOptimizer(optimizer, member.worker)
        source = ShardSource(script.loader, script.spec, script.seed, ring)
    return parallel, optimizer, SharedLoader(script.loader, source, weights, timer, sample_weights)


def _elastic_must_match(script: Script, mode: str, *, is_wire_chosen: bool) -> dict[str, Any]:
    """Return the values that must be the same on all members."""
    found = script.elastic_must_match(mode) | ({"wire": AUTO_WIRE} if is_wire_chosen else {})
    if not modes.has_server(mode, is_elastic=True):
        return found
    name = optimizers.check_optimizer_name(optimizers.optimizer_name(script.optimizer))
    # The next shard is known only when the ring has agreed on it, so nothing is loaded ahead.
    local = script.local
    outer = [local.elastic_fragments, local.outer_lr, local.outer_momentum] if mode == modes.LOCAL else []
    return found | {
        "num_prefetched": 0,
        "optimizer": name,
        "local_steps": script.settings.local_steps,
        "outer": outer,
    }


def _elastic_wire(
    script: Script, mode: str, reason: str, environment: WorkerEnvironment
) -> tuple[Script, str, WireChoice]:
    """Return the script of an elastic job, the reason, and its wire format, which may be chosen within a bound.

    Rings send their gradients as named: nothing is forecast of their formats.
    """
    is_mode_open = modes.is_undecided(script.mode, environment.mode, 2)
    if script.max_loss_increase is None or not (is_mode_open or script.wire == AUTO_WIRE):
        return script, reason, WireChoice(script.wire)
    if is_mode_open:
        reason += "; an elastic job does not choose modes local and ps-hra: name them"
    script = dataclasses.replace(script, wire=EXACT) if script.is_wire_open else script
    if not script.is_wire_open or modes.has_server(mode, is_elastic=True):
        return script, f"{reason}; an elastic job has no choice within a bound in mode {mode}", WireChoice(script.wire)
    trial = ModelTrial()
    if member_process.is_first_of_slot(environment):  # the others wait for one that replaces a lost one
        num_samples = max(1, script.spec.batch_samples // int(os.environ.get("WORLD_SIZE", "1")))
        trial = speed_test.run_model_trial(script.model, script.loader, num_samples)
    wires = ElasticWireForecast(
        script, mode, num_bytes=_encodable_bytes(script.model), schedule=environment.schedule, trial=trial
    )
    trial_s = statistics.median(trial.sample_s) if trial.sample_s else None
    return script, reason, WireChoice(script.wire, wires.propose, trial_s)


def _encodable_bytes(model: nn.Module) -> int:
    """Return the bytes of the gradients; 0 if they cannot be encoded."""
    parameters = [each for each in model.parameters() if each.requires_grad]
    num_bytes = sum(each.nbytes for each in parameters)
    is_encodable = all(each.dtype == torch.float32 for each in parameters) and num_bytes >= MIN_SCHEDULED_BYTES
    return num_bytes if is_encodable else 0


def _step_timer(script: Script, environment: WorkerEnvironment) -> StepTimer:
    return StepTimer(timing.choose_timeline(script.model), StepRecorder.of_this_process(environment))


def _prepare_static(script: Script, environment: WorkerEnvironment) -> Prepared:
    """Prepare for a fixed set of workers; no extra state is carried to others."""
    default_group.ensure_process_group(os.environ)
    rank, world_size, settings = dist.get_rank(), dist.get_world_size(), script.settings
    preset = modes.decide_mode(script.mode, environment.mode, world_size)
    is_open = modes.is_undecided(script.mode, environment.mode, world_size)
    reports, control = _gather_reports(script, environment, preset[0], is_open=is_open)
    recorder = Recorder(environment, rank)
    reports, exchange = step_benchmark.benchmark_if_useful(
        reports, script, control, environment, preset[0], is_open=is_open
    )
    mode, reason, rings = forecast.choose_mode(
        preset, reports, settings.rings, is_open=is_open, local_steps=settings.local_steps
    )
    if script.max_loss_increase is not None and (is_open or script.wire == AUTO_WIRE):
        script, mode, reason, rings = _choose_within_bound(script, (mode, reason, rings), reports, is_open=is_open)
    if mode == modes.LOCAL:
        all_sites = sites.sites_of(script.local.sites, reports)
        reason += sites.explain_sites(script.local.sites, reports)
        if len(all_sites) > 1:
            recorder.training_prepared(mode=mode, options=script.mode, reason=reason, shares=())
            exchange = exchange or SiteExchange(all_sites, rank)
            return _prepare_sites(script, environment, reports, control, recorder, exchange)
        reason += "; all workers are in one site, so there is no outer step and it trains as balanced does"
    if exchange is not None:
        exchange.close()
    if mode in modes.SERVER_MODES:
        recorder.training_prepared(mode=mode, options=script.mode, reason=reason, shares=())
        reconsideration = None
        if is_open and settings.rings is None:  # the script names neither the mode nor a number of rings
            reconsideration = RingReconsideration(
                reports=reports,
                control=control,
                local_steps=settings.local_steps,
                record_choice=recorder.mode_reconsidered,
            )
        return _prepare_static_rings(script, environment, reports, control, recorder, (mode, rings, reconsideration))
    timer = _step_timer(script, environment)
    balancer = _make_balancer(reports, mode, timer, control, recorder, batch_samples=script.spec.batch_samples)
    weights = SampleWeights(num_ranks=control.world_size, is_mean=script.is_mean)
    recorder.training_prepared(mode=mode, options=script.mode, reason=reason, shares=balancer.latest)
    reducer = GradientReducer(process_group=None, timer=timer, wire=script.wire)
    parallel = gradients.wrap_ddp(script.model, weights, reducer, script.ddp)
    timing.attach_timer(timer, parallel, script.optimizer)
    memory_guard.guard_memory(script, parallel, weights, environment, balancer.set_memory)
    membership = StaticMembership(control, balancer, timer, recorder.epoch_accounted)
    source = OrderSource(script.loader, script.spec, reports[0]["seed"], membership)
    weight = _batch_weight(script, control)
    return parallel, script.optimizer, SharedLoader(script.loader, source, weights, timer, weight)


def _choose_within_bound(
    script: Script, exact: tuple[str, str, tuple[Ring, ...] | None], reports: Reports, *, is_open: bool
) -> tuple[Script, str, str, tuple[Ring, ...] | None]:
    """Return the script with the chosen wire format and limits of mode local; mode, reason and rings."""
    assert script.max_loss_increase is not None, "there is a bound"
    bound = LossBound(
        max_increase=script.max_loss_increase,
        is_mode_open=is_open,
        is_wire_open=script.is_wire_open and (is_open or script.wire == AUTO_WIRE),
        local=script.local,
        local_steps=script.settings.local_steps,
    )
    found = forecast.choose_within_bound(exact, reports, bound, load_loss_table())
    if script.is_wire_open:
        script = dataclasses.replace(script, wire=found.wire)
    if is_open and found.mode == modes.LOCAL and found.max_inner_steps:
        limit = min(script.local.max_inner_steps, found.max_inner_steps)
        script = dataclasses.replace(script, local=dataclasses.replace(script.local, max_inner_steps=limit))
    return script, found.mode, found.reason, found.rings


def _prepare_sharded(script: Script, environment: WorkerEnvironment) -> Prepared:
    """Prepare a model that FSDP has sharded: it stays as it is, and sums its gradients itself."""
    from ringweave.training import sharded_model  # late: torch.distributed.tensor takes a part of a second

    sharded_model.check_script(script, environment)
    mode, reason = sharded_model.decide_mode(script.mode, environment.mode)
    script = dataclasses.replace(script, max_loss_increase=None)  # its gradients stay exact, and there is no choice
    reports, control = _gather_reports(script, environment, mode, is_open=False)
    recorder, timer = Recorder(environment, control.rank), _step_timer(script, environment)
    balancer = _make_balancer(reports, mode, timer, control, recorder, batch_samples=script.spec.batch_samples)
    weights = SampleWeights(num_ranks=control.world_size, is_mean=script.is_mean)
    recorder.training_prepared(mode=mode, options=script.mode, reason=reason, shares=balancer.latest)
    sharded_model.share_replicas(script.model, control)
    sharded_model.weigh_outputs(script.model, weights)
    sharded_model.overlap_collectives(script.model)
    membership = StaticMembership(control, balancer, timer, recorder.epoch_accounted)
    source = OrderSource(script.loader, script.spec, reports[0]["seed"], membership)
    weight = _batch_weight(script, control)
    return script.model, script.optimizer, SharedLoader(script.loader, source, weights, timer, weight)


def _batch_weight(script: Script, control: ControlGroup) -> BatchWeight | SampleWeightTable | None:
    return BatchWeight(script.weight, control) if callable(script.weight) else script.sample_weights


def _gather_reports(
    script: Script, environment: WorkerEnvironment, mode: str, *, is_open: bool
) -> tuple[Reports, ControlGroup]:
    """Return the reports of all ranks, and a group of all ranks."""
    settings, participant = script.settings, None
    if environment.server is not None:
        participant = speed_test.join_speed_test(settings.speed_test_s, dist.get_rank(), dist.get_world_size())
    has_bound = script.max_loss_increase is not None
    is_served, is_auto_wire = forecast.is_served(environment), script.wire == AUTO_WIRE
    loses_state = not settings.local_steps and optimizers.has_taken_steps(script.optimizer.state.values())
    own_report = {
        "mode": mode,
        "reduction": script.reduction,
        "weight": script.weight_digest,
        "wire": script.wire,
        "max_loss_increase": script.max_loss_increase,
        "wires_s": _predicted_wires_s(script, environment) if has_bound else None,
        **_describe_for_sites(script, environment, is_needed=mode == modes.LOCAL or (is_open and has_bound)),
        "seed": script.seed,
        "cap": script.max_samples,
        "optimizer": optimizers.optimizer_name(script.optimizer),
        "loses_state": loses_state,
        **forecast.describe_own_rank(
            script.model,
            script.loader,
            script.spec,
            environment,
            is_needed=(is_served and (is_open or mode == modes.PS_HRA)) or (has_bound and (is_open or is_auto_wire)),
            participant=participant,
        ),
    }
    control = ControlGroup()  # of all ranks: created when all are known to be present
    reports = control.gather_json({**dataclasses.asdict(script.spec), **own_report})
    collectives.check_equal(reports, _MUST_MATCH)
    return reports, control


def _predicted_wires_s(script: Script, environment: WorkerEnvironment) -> dict[str, float] | None:
    """Return the predicted seconds of an allreduce of the gradients by wire format; None if none may be chosen."""
    group, num_bytes = dist.group.WORLD, _encodable_bytes(script.model)
    if not (script.is_wire_open and num_bytes and isinstance(group, RingweaveProcessGroup)):
        return None
    found = group.wait_for_plan(is_whole=True).allreduce_s_by_wire(num_bytes, environment.schedule)
    return found if len(found) > 1 and all(map(math.isfinite, found.values())) else None


def _describe_for_sites(script: Script, environment: WorkerEnvironment, *, is_needed: bool) -> dict[str, Any]:
    """Return this rank's settings of mode local, its node, and a checksum of its parameters."""
    if not is_needed:
        return {"local": ""}
    node = group_info.locate_process(environment, os.environ).node
    found = _find_measured_sites(environment)
    measured = {"measured_sites": found.nodes, "measured_sites_text": str(found)} if found is not None else {}
    return {"local": str(script.local), "node": node, "values": outer_steps.describe_values(script.model), **measured}


def _find_measured_sites(environment: WorkerEnvironment) -> MeasuredSites | None:
    """Return the sites by probed links; None on all ranks but the first, and where a cluster file describes links."""
    group = dist.group.WORLD
    if not isinstance(group, RingweaveProcessGroup) or group.measured_network is None:
        return None
    if environment.describes_links:
        return None
    names = list(dict.fromkeys(each.location.node for each in group.members.ranks))
    return sites.group_nodes_by_links(names, group.measured_network.cluster(), group.measured_network.link_rates)


def _prepare_sites(
    script: Script,
    environment: WorkerEnvironment,
    reports: Reports,
    control: ControlGroup,
    recorder: Recorder,
    exchange: SiteExchange,
) -> Prepared:
    """Prepare this rank in its site, of several."""
    if len({each["values"] for each in reports}) > 1:
        outer_steps.copy_first_values(script.model, exchange)
    timer, site_control = _step_timer(script, environment), exchange.site_control
    rounds = RoundControl(exchange, script.local, script.spec.batch_samples, recorder.outer_step_done)
    site_reports, num_samples = [reports[rank] for rank in exchange.site], rounds.split.site_batches[exchange.index]
    balancer = _make_balancer(site_reports, modes.LOCAL, timer, site_control, recorder, batch_samples=num_samples)
    weights = SampleWeights(num_ranks=len(exchange.site), is_mean=script.is_mean)
    reducer = GradientReducer(process_group=exchange.site_group, timer=timer, wire=script.wire)
    parallel = gradients.wrap_ddp(script.model, weights, reducer, script.ddp)
    timing.attach_timer(timer, parallel, script.optimizer)
    memory_guard.guard_memory(script, parallel, weights, environment, balancer.set_memory)
    weight = BatchWeight(script.weight, site_control) if callable(script.weight) else script.sample_weights
    outer = OuterOptimizer(parallel.module, script.local, rounds.split.fragments)
    factor = _scale_inner_rates(
        script, lambda is_invariant: rounds.split.inner_lr_factor(exchange.index, is_scale_invariant=is_invariant)
    )
    recorder.sites_formed(exchange.sites, rounds.split.inner_steps, factor())
    membership = SiteMembership(control, balancer, timer, recorder.epoch_accounted, outer, rounds=rounds)
    source = SiteSource(script.loader, script.spec, reports[0]["seed"], membership)
    return parallel, script.optimizer, SharedLoader(script.loader, source, weights, timer, weight)


def _scale_elastic_rates(script: Script, mode: str, assigned: AssignedMember | None, session: ElasticSession) -> None:
    """Scale the learning rates of mode local in an elastic job, by the present members' part of a batch."""
    if mode != modes.LOCAL or assigned is None:
        return

    def factor(is_invariant: bool) -> float:
        own_samples = assigned.assignment.shard_samples(session.membership.members)
        return math.sqrt(script.spec.batch_samples / max(1, own_samples)) if is_invariant else 1.0

    _scale_inner_rates(script, factor)


def _scale_inner_rates(script: Script, derive: Callable[[bool], float]) -> Callable[[], float]:
    """Scale the learning rates of a site's steps, whose batches are smaller than the script's; return the factor.

    `derive` returns the factor for an optimizer whose steps do not depend on the size of gradients, or do.
    """
    given, is_invariant = script.local.inner_lr_factor, outer_optimizer.is_scale_invariant(script.optimizer)

    def factor() -> float:
        return derive(is_invariant) if given is None else given

    outer_optimizer.scale_learning_rates(script.optimizer, factor)
    return factor


def _make_balancer(
    reports: Reports, mode: str, timer: StepTimer, control: ControlGroup, recorder: Recorder, *, batch_samples: int
) -> ShareBalancer:
    """Return the balancer with its first shares: by known speeds in modes balanced and local, else equal."""
    is_balanced = mode in (modes.BALANCED, modes.LOCAL)
    caps = balancing.share_limits(batch_samples, (each["cap"] for each in reports))
    times_s = forecast.sample_times_s(reports) if is_balanced else [1.0] * len(reports)
    speeds = [Speed(s_per_sample=each_s) for each_s in times_s]
    return ShareBalancer(
        balancing.apportion(batch_samples, speeds, caps),
        timer,
        control if is_balanced else None,
        caps=caps,
        num_prefetched=max(each["num_prefetched"] for each in reports),
        on_change=recorder.shares_changed,
    )


# Long: one sequence, in the order that all ranks share; each part is made elsewhere.
def _prepare_static_rings(
    script: Script,
    environment: WorkerEnvironment,
    reports: Reports,
    control: ControlGroup,
    recorder: Recorder,
    choice: tuple[str, tuple[Ring, ...] | None, RingReconsideration | None],
) -> Prepared:
    """Prepare this rank in its ring, of the chosen mode and rings."""
    settings, optimizer, parameters = script.settings, script.optimizer, script.parameters
    mode, chosen_rings, reconsideration = choice
    sample_weights = script.sample_weights
    ring_formation.check_optimizer_fresh(optimizer, settings)
    ring_formation.check_same_prefetch(reports)
    connectors, speeds = ring_formation.server_connectors(environment), relative_speeds(reports)
    formation = ring_formation.form_initial_rings(mode, settings, speeds, reports, chosen_rings)
    rings = formation.rings
    ring_groups, index = create_ring_groups(rings, control.rank), ring_index(rings, control.rank)
    weights = SampleWeights(num_ranks=len(rings[index]), is_mean=script.is_mean)
    timer = _step_timer(script, environment)
    reducer = GradientReducer(process_group=ring_groups[0], timer=timer, wire=script.wire)
    broadcast_untrained(script.model, parameters, control)
    parallel = gradients.wrap_ddp(script.model, weights, reducer, script.ddp)
    timing.attach_timer(timer, parallel, optimizer)  # the script's own optimizer: it takes the local steps
    setup = ring_formation.build_server_setup(parallel.module, optimizer, rings, settings)
    if control.rank == 0:
        client = RingClient(connectors, index, reconnect_timeout_s=ring_formation.SERVER_START_TIMEOUT_S)
        ring_formation.start_server_job(client, setup, parameters)
        client.close()
    control.broadcast(torch.zeros(1))  # all ranks wait until the server has the job
    assignment = RingAssignment(connectors, control, setup, parameters, ring_groups, settings.local_steps)
    assignment.current.worker.refresh()
    atexit.register(assignment.leave_server)
    ring_optimizer = ParameterServerOptimizer(optimizer, assignment.current.worker)
    shares = RingShares(
        ring_formation.initial_shares(script.spec.batch_samples, speeds, reports),
        timer,
        control,
        recorder.shares_changed,
        caps=balancing.share_limits(script.spec.batch_samples, (each["cap"] for each in reports)),
        num_prefetched=max(each["num_prefetched"] for each in reports),
    )
    shares.join_ring(assignment.current.ring, assignment.current.speed_control)
    memory_guard.guard_memory(script, parallel, weights, environment, shares.set_memory)
    regrouper = RingRegrouper(
        assignment=assignment,
        settings=settings,
        formation=formation,
        parallel=parallel,
        reducer=reducer,
        weights=weights,
        optimizer=ring_optimizer,
        shares=shares,
        recorder=recorder,
        reconsideration=reconsideration,
    )
    ring = StaticRing(control, assignment, shares, regrouper.regroup_if_faster, recorder.epoch_accounted)
    recorder.rings_formed(rings=rings, most_versions=StalenessPolicy(num_rings=len(rings)).max_versions)
    source = ShardSource(script.loader, script.spec, reports[0]["seed"], ring)
    return parallel, ring_optimizer, SharedLoader(script.loader, source, weights, timer, sample_weights)


@torch.no_grad()
def broadcast_untrained(model: nn.Module, trained: Sequence[torch.Tensor], control: ControlGroup) -> None:
    """Give all ranks rank 0's frozen parameters and buffers; DDP does so in a ring only, the server not at all.

    Buffers that change later, such as those of batch norm, differ between rings from here on.
    """
    trained_set = set(trained)
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor not in trained_set:
            tensor.copy_(control.broadcast(tensor.detach().cpu().contiguous()))
