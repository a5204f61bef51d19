"""Workers of elastic jobs whose scripts call collectives of their own."""

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.utils.data import DataLoader

import ringweave
from ringweave.comm.generation_group import GenerationGroups
from tests.fakes.elastic_job import own_member, send_message
from tests.training.elastic.elastic_functions import (
    BATCH,
    CAP_MB,
    HIDDEN,
    WIDE,
    WIDE_CAP_MB,
    kill_self,
    make_data,
    make_model,
    stand_still,
)

NUM_LARGE = (1 << 20) // 8 + 1
"""Elements of float64 of the smallest collective that is not repeated."""


def prepared(hidden: int = HIDDEN) -> tuple[Any, torch.optim.Optimizer, Any]:
    """Return model, optimizer and loader, as `elastic_functions.train` makes them."""
    model = make_model(hidden)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = DataLoader(make_data(), batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(3))
    return ringweave.prepare(
        model, optimizer, data, mode="sync", ddp={"bucket_cap_mb": WIDE_CAP_MB if hidden == WIDE else CAP_MB}
    )


def train_step(model: Any, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    inputs, targets, _ = batch
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    return loss.detach()


def log_in_every_step(stop_file: str, pause_s: float) -> list[bytes]:
    """Train until the file exists; log the mean loss, and decide on the end, by an allreduce in every step."""
    model, optimizer, loader = prepared()
    slot, _, incarnation = own_member().partition(".")
    name = [f"run of {slot}{'+' * int(incarnation)}" if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(name, src=0)
    dist.barrier()
    send_message(("began", name[0]))
    step = loader.num_train_steps
    for _ in loader.epochs(1_000_000):
        for batch in loader:
            loss = train_step(model, optimizer, batch)
            step += 1
            assert step == loader.num_train_steps, "collectives are no train steps"
            must_end = torch.tensor(Path(stop_file).exists())
            dist.all_reduce(loss, dist.ReduceOp.AVG)
            dist.all_reduce(must_end, dist.ReduceOp.MAX)
            send_message(("logged", step, loss.item().hex(), must_end.item()))
            if must_end:
                return [each.detach().numpy().tobytes() for each in model.parameters()]
            time.sleep(pause_s)
    raise AssertionError("more epochs than steps")


def call_all(num_steps: int, victim: str, at: int, pause_s: float = 0.0) -> dict[str, Any]:
    """Call every kind of collective in each step; one member dies among them in that step.

    Members wait for a third one, `pause_s` after each step.
    """
    model, optimizer, loader = prepared()
    found: dict[str, Any] = {}
    for _ in loader.epochs(1_000_000):
        for batch in loader:
            train_step(model, optimizer, batch)
            if own_member() == victim and loader.num_train_steps == at:
                os.abort()
            found = {"members": loader.members, **call_each_kind(float(own_member().partition(".")[0]) + 1)}
            send_message(("done", loader.num_train_steps))
            if loader.num_train_steps == at:
                send_message(("found", found))
            if loader.num_train_steps == num_steps:
                return found
            time.sleep(pause_s if len(loader.members) < 3 else 0.0)
    raise AssertionError("more epochs than steps")


def call_each_kind(own: float) -> dict[str, Any]:
    """Return the results of all collectives that are repeated, as plain values."""
    found: dict[str, Any] = {}
    for operation in ("SUM", "AVG", "MAX", "MIN", "PRODUCT"):
        for dtype in (torch.float64, torch.bfloat16, torch.int64):
            tensor = torch.full((2, 3), own).to(dtype).t()
            dist.all_reduce(tensor, getattr(dist.ReduceOp, operation))
            found[f"{operation} {dtype}"] = tensor.unique().tolist()
    flag = torch.tensor(own == 1)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    found["flag"] = flag.item()
    tensor = torch.tensor([own])
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    work.wait()
    assert work.is_completed()
    assert work.get_future().value()[0] is tensor
    found["asynchronous"] = tensor.item()
    functional = funcol.all_reduce(torch.tensor([own]), "sum", dist.group.WORLD)
    found["functional"] = functional.item()
    world_size = dist.get_world_size()
    rows = [torch.empty(2) for _ in range(world_size)]
    dist.all_gather(rows, torch.tensor([own, -own]))
    found["rows"] = [row.tolist() for row in rows]
    table = torch.empty(world_size)
    dist.all_gather_into_tensor(table, torch.tensor([own]))
    found["table"] = table.tolist()
    objects: list[Any] = [None] * world_size
    dist.all_gather_object(objects, {"own": own})
    found["objects"] = objects
    root = world_size - 1
    value = torch.tensor([own])
    dist.broadcast(value, root)
    found["broadcast"] = value.item()
    texts = [f"of {own}" if dist.get_rank() == root else None]
    dist.broadcast_object_list(texts, root)
    found["texts"] = texts
    dist.barrier()
    return found


def die_in(victim: str, moment: str) -> float:
    """Train a few steps, each with an allreduce; the victim dies in the third one, at a moment of its commit."""
    model, optimizer, loader = prepared()
    total = torch.tensor(0.0)
    for _ in loader.epochs(1):
        for batch in loader:
            train_step(model, optimizer, batch)
            if own_member() == victim and loader.num_train_steps == 3:
                arm_exchange(moment)
            total = torch.tensor(1.0)
            dist.all_reduce(total)
            send_message(("total", loader.num_train_steps, total.item()))
    return total.item()


def arm_exchange(moment: str) -> None:
    """Die in one of the three exchanges of the next collective, or when the last one is over."""
    number, real, num_begun = (
        ("header", "rows", "last byte", "committed").index(moment),
        GenerationGroups.allgather_rows,
        0,
    )

    def exchange(groups: GenerationGroups, row: torch.Tensor) -> torch.Tensor:
        nonlocal num_begun
        if num_begun == number:
            kill_self()
        num_begun += 1
        rows = real(groups, row)
        return kill_self() if num_begun == number == 3 else rows

    GenerationGroups.allgather_rows = exchange


def differ(victim_is_extra: bool, hidden: int) -> None:
    """One member calls a collective that the others do not call, or they all call one of different sizes."""
    model, optimizer, loader = prepared(hidden)
    send_message(("began",))
    for _ in loader.epochs(1):
        for batch in loader:
            train_step(model, optimizer, batch)
            if victim_is_extra and own_member() == "0.0":
                dist.all_reduce(torch.ones(1))
            elif not victim_is_extra:
                dist.all_reduce(torch.ones(1 + int(own_member()[0])))


def lose_the_source(is_large: bool) -> str:
    """The first member dies before it broadcasts, or before a large allreduce; the others continue without that."""
    model, optimizer, loader = prepared()
    said = ""
    for _ in loader.epochs(1):
        for batch in loader:
            train_step(model, optimizer, batch)
            if loader.num_train_steps != 3:
                continue
            if own_member() == "0.0":
                send_message(("halts",))
                stand_still()
            try:
                if is_large:
                    dist.all_reduce(torch.ones(NUM_LARGE, dtype=torch.float64))
                else:
                    dist.broadcast(torch.zeros(1), 0)
            except RuntimeError as error:
                said = str(error)
    return said
