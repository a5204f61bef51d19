"""What workers of elastic jobs in tests run."""

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ringweave
from ringweave.comm.engine import engine
from ringweave.comm.generation_group import GenerationGroups
from ringweave.comm.plan_choice import MIN_SCHEDULED_BYTES
from ringweave.comm.tuning.control_tree import ControlTree
from ringweave.errors import PeerError
from ringweave.membership import failure_detector
from ringweave.planning.balancing import Speed, SpeedEstimator
from ringweave.training import speed_test
from ringweave.training.elastic import recovery
from ringweave.training.elastic.session import SessionThread
from ringweave.training.mode_choice import forecast
from tests.fakes.elastic_job import own_member, send_message

NUM_SAMPLES, BATCH, WIDTH = 96, 12, 6
SHORT_REDUCTION = replace(failure_detector.REDUCTION_TIMEOUT, min_s=6.0)
"""Of members and coordinators where all wait in vain."""
HIDDEN, CAP_MB = 16, 0.001
SHORT_BLOCK_S = 0.02
"""Of a trial of the model, which measures for eight such blocks: a fifth of what scripts take."""
CLIP = 0.3
"""Largest norm of a step's gradients, below that of the first steps."""
ENCODED = 160
"""Width of a model whose layers are large enough for a sum of their own in float32."""
WIDE, WIDE_CAP_MB = 96, 0.06
"""A model with two layers, each of which is a bucket that is large enough for a sum of its own."""


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(NUM_SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.sin(inputs.sum(1, keepdim=True)), torch.arange(NUM_SAMPLES))


def make_model(hidden: int = HIDDEN) -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Linear(WIDTH, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, hidden)]
    return nn.Sequential(*layers, nn.Tanh(), nn.Linear(hidden, 1)).double()


def kill_self(*_: Any, **__: Any) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a process that was killed goes on")


def stand_still() -> NoReturn:
    """Until this process is killed from outside."""
    threading.Event().wait()
    raise AssertionError("nobody lets it go on")


def set_step_time(*, restarts: bool) -> None:
    """Let a step seem to take no time beside an exchange of gradients, or far longer."""
    recovery.compute_s = lambda members, batch_samples: -1.0 if restarts else math.inf


def train(
    num_epochs: int = 2,
    faults: Mapping[str, tuple[int, str]] | None = None,
    pause_s: float = 0.0,
    awaited: str = "",
    mode: str = "sync",
    hidden: int = HIDDEN,
    on_failure: str = "drop",
) -> dict[str, Any]:
    """Train, telling what is drawn and done. A step that is repeated for missing samples is told twice.

    `faults` are member -> (step, moment) of its death. Until the member that is `awaited` has joined, pauses are ten
    times as long. `on_failure` as of `prepare`, and "restart": members compute a whole step anew if it misses samples.
    """
    set_step_time(restarts=on_failure == "restart")
    on_failure = "recompute" if on_failure == "restart" else on_failure
    if "miss" in {moment for _, moment in (faults or {}).values()}:
        failure_detector.REDUCTION_TIMEOUT = SHORT_REDUCTION
    model = make_model(hidden)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = DataLoader(make_data(), batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(3))
    ddp = {"bucket_cap_mb": WIDE_CAP_MB if hidden == WIDE else CAP_MB}
    model, optimizer, loader = ringweave.prepare(model, optimizer, data, mode=mode, ddp=ddp, on_failure=on_failure)
    send_message(("prepared",))
    at, moment = (faults or {}).get(own_member(), (-1, ""))
    sums = Sums(halts_at=at if moment == "second sum" else -1)
    accounts, has_come = [], not awaited
    for _ in loader.epochs(num_epochs):
        for inputs, targets, indices in loader:
            step = step_of(loader)
            send_message(("drawn", step, indices.tolist() if loader.fraction else []))
            send_message(("in", step, loader.source.membership.session.membership.generation_id))
            sums.begin_step(step)
            if step == at:
                arm(moment, model, optimizer)
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            send_message(("done", step, loader.members))
            has_come = has_come or awaited in loader.members
            time.sleep(pause_s if has_come else 10 * pause_s)
        accounts.append(loader.account)
    return {"parameters": [each.detach().numpy().copy() for each in model.module.parameters()], "accounts": accounts}


def step_of(loader: Any) -> int:
    """Return the number of the train step whose batch the loader has given last."""
    place = loader.state_dict()
    return place["epoch"] * (NUM_SAMPLES // BATCH) + (place["position"] - 1) // BATCH


def prepare_encoded() -> tuple[Any, Any, Any, TensorDataset]:
    """Return model, optimizer, loader and data in float32, on a node of each member's own."""
    os.environ["RINGWEAVE_NODE"] = f"n{own_member().partition('.')[0]}"
    set_step_time(restarts=False)
    speed_test.BLOCK_S = SHORT_BLOCK_S
    model = make_model(ENCODED).float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = make_data()
    data = TensorDataset(data.tensors[0].float(), data.tensors[1].float(), data.tensors[2])
    loader = DataLoader(data, batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(3))
    ddp = {"bucket_cap_mb": WIDE_CAP_MB}
    prepared = ringweave.prepare(model, optimizer, loader, mode="sync", ddp=ddp)
    send_message(("prepared",))
    return *prepared, data


def step_encoded(model: Any, optimizer: Any, loader: Any, batch: list[Tensor]) -> None:
    """Do a train step, and tell it."""
    loss = nn.functional.mse_loss(model(batch[0]), batch[1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    send_message(("done", step_of(loader), loader.members))


def train_encoded(faults: Mapping[str, tuple[int, str]], folder: str, num_epochs: int = 2) -> dict[str, Any]:
    """Train in float32, each member on a node of its own, so that gradients between them travel in the asked format.

    At the end a checkpoint is saved, residuals are forgotten, and it is loaded.
    """
    model, optimizer, loader, data = prepare_encoded()
    at, moment = faults.get(own_member(), (-1, ""))
    for _ in loader.epochs(num_epochs):
        for batch in loader:
            if step_of(loader) == at:
                arm(moment, model, optimizer)
            step_encoded(model, optimizer, loader, batch)
    checkpoints = ringweave.Checkpoints(folder, model=model, optimizer=optimizer, loader=loader)
    parameters, residuals = list(model.module.parameters()), model.gradient_residuals
    left = {} if residuals is None else residuals.state_dict(parameters)
    checkpoints.save(loader.num_train_steps)
    checkpoints.wait()
    dist.barrier()
    if residuals is not None:
        residuals.load_state_dict({}, parameters)
    checkpoints.load()
    found = {} if residuals is None else residuals.state_dict(parameters)
    assert found.keys() == left.keys()
    assert all(torch.equal(found[index], left[index]) for index in left)
    with torch.no_grad():
        final = nn.functional.mse_loss(model.module(data.tensors[0]), data.tensors[1]).item()
    return {**values_of(model), "loss": final}


def train_encoded_together(num_members: int, num_steps: int) -> dict[str, Any]:
    """Train as `train_encoded` does until so many members have had samples in so many steps.

    Links are taken to be as slow as the cluster file says.
    """
    forecast._waiting_part = lambda members, predicted_s: 1.0
    model, optimizer, loader, _ = prepare_encoded()
    num_together = 0
    for _ in loader.epochs(1_000_000):
        for batch in loader:
            step_encoded(model, optimizer, loader, batch)
            num_together += sum(share > 0 for share in loader.shares) == num_members
            if num_together == num_steps:
                return values_of(model)
            time.sleep(0.1 * (num_together == 0))
    raise AssertionError("more epochs than steps")


def values_of(model: Any) -> dict[str, Any]:
    """Return the parameters, and the largest residual."""
    parameters, residuals = list(model.module.parameters()), model.gradient_residuals
    left = {} if residuals is None else residuals.state_dict(parameters)
    largest = max((each.abs().max().item() for each in left.values()), default=0.0)
    return {"parameters": [each.detach().numpy().copy() for each in parameters], "left": largest}


def train_richly(num_members: int, num_steps: int, pause_s: float = 0.0) -> dict[str, Any]:
    """With all that a script may make of gradients: accumulation, clipping, a schedule, layers with buffers.

    In every train step it sums over all members, in a collective of its own, what the step is. It ends when so many
    members have had samples for so many steps. Speeds are told: measured ones could leave a member a single sample, of
    which batch normalisation makes nothing.
    """
    slot = int(own_member().partition(".")[0])
    SpeedEstimator.speed = property(lambda _: Speed(s_per_sample=0.01 * (1 + slot % 2 / 2)))  # pyrefly: ignore
    torch.manual_seed(1)
    layers = [nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)]
    model = nn.Sequential(*layers).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    data = DataLoader(make_data(), batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(3))
    model, optimizer, loader = ringweave.prepare(
        model, optimizer, data, mode="balanced", extra_state={"schedule": schedule}, ddp={"bucket_cap_mb": 0.0001}
    )
    step, num_together = loader.num_train_steps, 0
    for _ in loader.epochs(1_000_000):
        for inputs, targets, _ in loader:
            with model.no_sync() if loader.state_dict()["position"] // BATCH % 2 else contextlib.nullcontext():
                nn.functional.mse_loss(model(inputs), targets).backward()
            if loader.state_dict()["position"] // BATCH % 2:
                continue
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step += 1
            total = torch.tensor(step)
            dist.all_reduce(total)
            send_message(("done", step, total.item()))
            num_together += sum(share > 0 for share in loader.shares) == num_members
            if num_together == num_steps:
                return {"state": {name: each.numpy().copy() for name, each in model.module.state_dict().items()}}
            time.sleep(pause_s)
    raise AssertionError("more epochs than steps")


def train_accumulating(
    num_epochs: int,
    faults: Mapping[str, tuple[int, str]],
    pause_s: float = 0.0,
    restarts: bool = False,
    awaited: str = "",
) -> dict[str, Any]:
    """Train by steps of two batches, with clipping and a schedule; missing samples are recomputed.

    `faults` are member -> (number of the batch through all epochs, moment) of its death. With `restarts`,
    members compute a whole step anew if it misses samples. `awaited` as in `train`.
    """
    set_step_time(restarts=restarts)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
    data = DataLoader(make_data(), batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(3))
    model, optimizer, loader = ringweave.prepare(
        model, optimizer, data, mode="sync", extra_state={"schedule": schedule}, ddp={"bucket_cap_mb": CAP_MB}
    )
    send_message(("prepared",))
    at, moment = faults.get(own_member(), (-1, ""))
    accounts, has_come = [], not awaited
    for epoch in loader.epochs(num_epochs):
        for inputs, targets, _ in loader:
            number = loader.state_dict()["position"] // BATCH
            if epoch * (NUM_SAMPLES // BATCH) + number - 1 == at:
                arm(moment, model, optimizer)
            with model.no_sync() if number % 2 else contextlib.nullcontext():
                nn.functional.mse_loss(model(inputs), targets).backward()
            if number % 2 == 0:
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                send_message(("done", loader.num_train_steps, loader.misses_samples))
                has_come = has_come or awaited in loader.members
                time.sleep(pause_s if has_come else 10 * pause_s)
        accounts.append(loader.account)
    parameters = [each.detach().numpy().copy() for each in model.module.parameters()]
    return {"parameters": parameters, "accounts": accounts, "lr": schedule.get_last_lr()}


def train_from_checkpoints(
    folder: str,
    num_steps: int,
    pause_s: float = 0.0,
    mode: str = "sync",
    faults: Mapping[str, tuple[int, str]] | None = None,
) -> dict[str, Any]:
    """Train with checkpoints, from the last one on, until so many train steps are done; tells what it does.

    `faults` as in `train`, but steps count from 1.
    """
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = DataLoader(make_data(), batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(3))
    model, optimizer, loader = ringweave.prepare(model, optimizer, data, mode=mode)
    checkpoints = ringweave.Checkpoints(folder, model=model, optimizer=optimizer, loader=loader)
    train_step = checkpoints.load()
    at, moment = (faults or {}).get(own_member(), (-1, ""))
    send_message(("loaded", train_step))
    for _ in loader.epochs(1_000_000):
        for inputs, targets, indices in loader:
            send_message(("drawn", train_step + 1, indices.tolist() if loader.fraction else []))
            if train_step + 1 == at:
                arm(moment, model, optimizer)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            train_step += 1
            send_message(("done", train_step, loader.members))
            if train_step == 5:
                checkpoints.save(train_step)
            if train_step == num_steps:
                return {"parameters": [each.detach().numpy().copy() for each in model.module.parameters()]}
            time.sleep(pause_s)
    raise AssertionError("more epochs than steps")


def arm(fault: str, model: Any, optimizer: Any) -> None:
    """Die, or hang, when that moment of the present step comes; see `Sums` for the one in the midst of a sum."""
    parameters = list(model.module.parameters())
    if fault == "forward":
        model.module[2].register_forward_hook(kill_self)
    elif fault == "backward":
        model.module[2].register_full_backward_hook(kill_self)
    elif fault.startswith("bucket"):
        parameters[-1 - int(fault.removeprefix("bucket"))].register_post_accumulate_grad_hook(kill_self)
    elif fault == "rows":
        GenerationGroups.allgather_small = kill_self  # what its gradients are of nobody ever hears
    elif fault in ("commit", "heard", "committed"):
        GenerationGroups.all_agree = _voting(fault, GenerationGroups.all_agree)
    elif fault == "optimizer":
        optimizer.register_step_pre_hook(kill_self)
    elif fault == "hang":
        hang()
    elif fault == "miss":
        miss()
    elif fault == "met in vain":
        meet_in_vain()
    else:
        assert fault == "second sum", fault


def _voting(fault: str, real: Any) -> Any:
    """The last word of a step, which all members that have its sums and rows say: how one dies around it."""
    if fault == "commit":
        return kill_self

    def vote(*args: Any, **more: Any) -> None:
        if fault == "heard":  # as the first member, which hears all the others before it lets them know
            ControlTree._send = kill_self
        real(*args, **more)
        kill_self()

    return vote


def hang() -> None:
    """In the midst of the training loop, as a script does that waits for something that never comes.

    Only the thread that trains stands still, and it lets the others run. SIGUSR1 lets it go on.
    """
    woken = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: woken.set())
    send_message(("hangs",))
    woken.wait()


def miss() -> None:
    """From now on its session does not see that there is something to be summed, until it is told to stand still."""
    real, seen = SessionThread._is_ready, list[int]()

    def is_ready(session: SessionThread) -> bool:
        seen.append(session._state.abort_count)
        return seen[-1] != seen[0] and real(session)

    SessionThread._is_ready = is_ready


def meet_in_vain() -> None:
    """The next time that this member has met the others its group breaks, a moment later: they go on without it."""
    real = GenerationGroups.form_group

    def form(*args: Any, **more: Any) -> None:
        real(*args, **more)
        GenerationGroups.form_group = real
        time.sleep(1.0)
        raise PeerError("group: it broke as soon as it stood")

    GenerationGroups.form_group = form


class Sums:
    """Tells of each sum that is there: ("summed", step, how many were begun in the step before it).

    Only of those that are large enough for one of their own.
    """

    def __init__(self, halts_at: int = -1) -> None:
        """In step `halts_at` this member stands still, for ever, in the midst of the second sum, when it has the first.

        It has got a part of what it needs from the others by then, and has passed on nothing of that.
        """
        self._real, self._halts_at = dist.all_reduce, halts_at
        self._step, self._works = -1, list[dist.Work]()
        dist.all_reduce = self._begin

    def begin_step(self, step: int) -> None:
        self._step, self._works = step, []

    def _begin(self, tensor: Tensor, **more: Any) -> Any:
        if tensor.nbytes < MIN_SCHEDULED_BYTES:
            return self._real(tensor, **more)
        place = ("summed", self._step, len(self._works))
        if self._step == self._halts_at and len(self._works) == 1:
            self._works[0].wait()
            self._halt()
        work = self._real(tensor, **more)
        work.get_future().then(lambda done: send_message(place) if _has_value(done) else None)
        self._works.append(work)
        return work

    def _halt(self) -> None:
        """In the sum that begins now."""
        if os.environ.get("RINGWEAVE_SCHEDULE", "") == "":
            send_message(("halts",))
            stand_still()  # in the native backend all others are in it, and wait for this one

        def run(program: Any, message: Any, combine: Any, *args: Any, **more: Any) -> None:
            def halt(*_: Any) -> None:
                send_message(("halts",))
                stand_still()

            real(program, message, halt, *args, **more)

        real, engine.run_program = engine.run_program, run


def _has_value(done: torch.futures.Future[Any]) -> bool:
    try:
        done.value()
    except RuntimeError:
        return False
    return True
