"""A few steps of mode `balanced` before the first one that counts: what a collective really takes among these ranks.

Links are not all of it. A rank with a small part of a processor moves bytes as slowly as it computes, its kernel stops
it in the middle of a collective, and all others wait for it; no rate of a NIC says how long. So ranks compute shares
that take all of them about equally long, with no trace left in the model, and sum as many bytes as gradients have. Then
one of them exchanges as much with the parameter server.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from ringweave.planning import balancing
from ringweave.planning.balancing import Speed
from ringweave.training import speed_test
from ringweave.training.choosing import forecasting, trials
from ringweave.training.control import Control

BUDGET_S = 3.0
"""Of all steps, about: so many are rehearsed as fit, but one at least."""
_MOST_STEPS = 8
_MOST_BYTES = 256 * 2**20
"""Of a message; more bytes are taken to need longer in proportion."""


def rehearse(
    said: Sequence[Mapping[str, Any]],
    model: nn.Module,
    loader: DataLoader,
    messages: Control,
    serving: Callable[[], float],
    clock: Callable[[], float] = time.perf_counter,
) -> list[dict[str, Any]]:
    """What all ranks said, and what was measured, in seconds; None where that is not known.

    `reducing_s` is what collectives have taken, `serving_s` what an exchange needs at the parameter server.

    All ranks call it alike, since all have heard the same.

    Args:
        said: Of each rank, as `forecasting.look_ahead` has it, with `cap`, the most samples that it takes or None.
        model: As `trials.measure` has it; left as it was.
        loader: The same.
        messages: Among all ranks.
        serving: Measures `serving_s`; called on the first rank, while the others wait.
        clock: Seconds that only grow.

    Raises:
        CommunicationError: A rank is gone.
        WireError: The server cannot be reached.
    """
    if len(said) < 2 or not all(each["trial_s"] for each in said):
        return [{**each, "reducing_s": None, "serving_s": None} for each in said]
    times_s = [Speed(s_per_sample=sum(own) / len(own)) for own in trials.settle([each["trial_s"] for each in said])]
    batch_samples = said[0]["batch_samples"]
    caps = [batch_samples if each["cap"] is None else each["cap"] for each in said]
    shares = balancing.apportion(batch_samples, times_s, caps)
    step_s = max(share * speed.s_per_sample for share, speed in zip(shares, times_s, strict=True))
    num_steps = max(1, min(_MOST_STEPS, int(BUDGET_S / step_s))) if step_s > 0 else _MOST_STEPS
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    num_bytes = said[0]["num_bytes"]
    message = torch.zeros(max(1, min(num_bytes, _MOST_BYTES) // 4), device=next(inner.parameters()).device)
    waits_s, problem = _take_steps(inner, loader, shares[messages.rank], message, num_steps, clock)
    of_server_s = serving() if messages.rank == 0 else None
    heard = messages.gather_json({"waits_s": waits_s, "problem": problem, "serving_s": of_server_s})
    found = None
    if not any(each["problem"] for each in heard):
        found = _collective_s([each["waits_s"] for each in heard]) * max(1.0, num_bytes / _MOST_BYTES)
    return [{**each, "reducing_s": found, "serving_s": heard[0]["serving_s"]} for each in said]


def is_wanted(said: Sequence[Mapping[str, Any]], num_rings: int | None, *, is_open: bool) -> bool:
    """Whether what it shows can change the mode.

    Args:
        said: What all ranks said.
        num_rings: How many rings the script wants.
        is_open: The mode may be chosen.
    """
    return is_open and num_rings is None and forecasting.goes_with_server(said)


def _collective_s(waits_s: Sequence[Sequence[float]]) -> float:
    """The median over steps; the last rank to come to one waits for nobody.

    Args:
        waits_s: Of each rank, seconds from the end of its computing to the end of the step, for each step.
    """
    return statistics.median(min(of_step) for of_step in zip(*waits_s, strict=True))


def _take_steps(
    model: nn.Module,
    loader: DataLoader,
    share: int,
    message: torch.Tensor,
    num_steps: int,
    clock: Callable[[], float],
) -> tuple[list[float], str]:
    """Seconds from the end of this rank's computing to that of each step; why it could not compute.

    Who cannot compute takes part in what is summed nevertheless: the others would wait for it.
    """
    waits_s, problem, batch = [], "", None
    with speed_test.leaving_no_trace(model):
        _sum(message)  # the first one makes connections
        for _ in range(num_steps):
            try:
                batch = batch or trials.first_batch(loader, max(1, share), model)
                trials.try_out(model, batch)
            except Exception as error:  # the script's own code, at a size that it was not tried out with
                problem = problem or f"{type(error).__name__}: {error}"
            began_s = clock()
            _sum(message)
            waits_s.append(clock() - began_s)
    return waits_s, problem


def _sum(message: torch.Tensor) -> None:
    dist.all_reduce(message)
    if message.device.type == "cuda":
        torch.cuda.synchronize(message.device)
