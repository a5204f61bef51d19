"""A few steps of mode `balanced` before the first one that counts: what a collective really takes among these ranks.

Links are not all of it. A rank with a small part of a processor moves bytes as slowly as it computes, its kernel stops
it in the middle of a collective, and all others wait for it; no rate of a NIC says how long. So ranks load and compute
shares that take all of them about equally long, with no trace left in the model, sum as many bytes as gradients have,
and let an optimizer like the script's move a copy of the parameters. Then one of them exchanges as much with the
parameter server. If each rank alone may be faster than balanced by what that shows, they do so all at once: who waits
for nobody has no pauses in which its quota recovers, so that it computes more slowly than in steps of all.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ringweave.environment import WorkerEnvironment
from ringweave.planning import balancing, modes
from ringweave.planning.balancing import Speed
from ringweave.training import reducing, speed_test
from ringweave.training.choosing import forecasting, trials
from ringweave.training.control import Control
from ringweave.training.rings import rehearsing as ring_rehearsing
from ringweave.training.rings.preparing import servers_of
from ringweave.training.rings.rehearsing import Exchanged
from ringweave.training.rings.settings import Asynchronous

_MEASURED = ("reducing_s", "balanced_s", "serving_s", "exchanging_s", "rehearsed_s", "rounds_s")
"""What there is beside what all ranks said before."""
BUDGET_S = 5.0
"""Of all steps, about: so many are rehearsed as fit, but one at least."""
_MOST_STEPS = 12
_LEAST_STEPS = 4
"""Of fewer, what computing has taken says less than trials do. The first one warms up, and does not count for it."""
_MOST_BYTES = 256 * 2**20
"""Of a message; more bytes are taken to need longer in proportion."""
_MOST_ROUND_BYTES = 32 * 2**20
"""Of a round, in which all ranks exchange as many: the server holds a model of them, and an answer for each rank."""
_HOPE = 1.1
"""Times what balanced takes: if each rank alone is predicted to take longer, its rounds are not rehearsed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """What is rehearsed with the parameter server."""

    exchange: Callable[[], Exchanged]
    """Exchanges with it while nobody else does; `rings.rehearsing.rehearse`."""
    rounds: Callable[[], AbstractContextManager[Callable[[], object]]] | None = None
    """Connects a rank to it; then what that does in each round, but computing; `rings.rehearsing.rounds`. None where
    each rank alone is no way to train, or rounds have several steps."""


@dataclass(kw_only=True, slots=True)
class _Taken:
    """What steps have taken this rank."""

    samples_s: list[float] = field(default_factory=list)
    """Seconds of a sample, for each step."""
    steps_s: list[float] = field(default_factory=list)
    """Seconds of each step, to the end of the optimizer's."""
    waits_s: list[float] = field(default_factory=list)
    """Seconds from the end of its computing to the end of the step."""
    problem: str = ""
    """Why it could not compute."""


def rehearse_if_wanted(
    said: list[dict[str, Any]],
    triple: tuple[nn.Module, Optimizer, DataLoader],
    messages: Control,
    environment: WorkerEnvironment,
    settings: Asynchronous,
    mode: str,
    *,
    is_open: bool,
) -> list[dict[str, Any]]:
    """What all ranks said, with what `rehearse` shows where that can change anything; see there and `is_wanted`."""
    if not is_wanted(said, mode, settings.rings, is_open=is_open):
        return said
    optimizer = triple[1]
    asked = optimizer, said[0]["num_bytes"], messages.world_size, servers_of(environment, keeps=True)
    server = Server(
        exchange=lambda: ring_rehearsing.rehearse(*asked),
        rounds=(lambda: ring_rehearsing.rounds(*asked)) if is_open and not settings.local_steps else None,
    )
    return rehearse(said, triple, messages, server)


def rehearse(
    said: Sequence[Mapping[str, Any]],
    triple: tuple[nn.Module, Optimizer, DataLoader],
    messages: Control,
    server: Server,
    clock: Callable[[], float] = time.perf_counter,
) -> list[dict[str, Any]]:
    """What all ranks said, and what was measured, in seconds; None where that is not known.

    `reducing_s` is what collectives have taken, `balanced_s` whole steps, `serving_s` and `exchanging_s` what an
    exchange with the parameter server has, see `Exchanged`, and, of each rank, `rehearsed_s` what a sample has taken it
    in each step, and `rounds_s` in each round alone, with the exchange that ends it.

    All ranks call it alike, since all have heard the same.

    Args:
        said: Of each rank, as `forecasting.look_ahead` has it, with `cap`, the most samples that it takes or None.
        triple: The model, as `trials.measure` has it, an optimizer that the server knows, and the loader; all are left
            as they were.
        messages: Among all ranks.
        server: The exchange is called on the first rank, while the others wait; rounds on all of them.
        clock: Seconds that only grow.

    Raises:
        CommunicationError: A rank is gone.
        WireError: The server cannot be reached.
    """
    if len(said) < 2 or not all(each["trial_s"] for each in said):
        return [{**each, **dict.fromkeys(_MEASURED)} for each in said]
    shares, num_steps = _plan(said)
    model, optimizer, loader = triple
    inner = reducing.inside(model)
    num_bytes = said[0]["num_bytes"]
    message = torch.zeros(max(1, min(num_bytes, _MOST_BYTES) // 4), device=next(inner.parameters()).device)
    own = _take_steps(inner, loader, shares[messages.rank], message, _twin_of(optimizer), num_steps, clock)
    exchanged = dataclasses.asdict(server.exchange()) if messages.rank == 0 else {}
    heard = messages.gather_json({**dataclasses.asdict(own), **exchanged})
    reducing_s, balanced_s, rehearsed_s = None, None, [None] * len(heard)
    if not any(each["problem"] for each in heard):
        reducing_s = _collective_s([each["waits_s"] for each in heard]) * max(1.0, num_bytes / _MOST_BYTES)
        if num_steps >= _LEAST_STEPS:
            balanced_s = _usual_s([each["steps_s"] for each in heard])
            rehearsed_s = [each["samples_s"][1:] for each in heard]
    common = {
        "reducing_s": reducing_s,
        "balanced_s": balanced_s,
        **{name: heard[0][name] for name in ("serving_s", "exchanging_s")},
        "rounds_s": None,
    }
    found = [{**each, **common, "rehearsed_s": steps_s} for each, steps_s in zip(said, rehearsed_s, strict=True)]
    num_rounds = _num_rounds(found) if server.rounds is not None else 0
    if server.rounds is None or not num_rounds:
        return found
    with server.rounds() as once:
        messages.gather_json({})  # connections take some ranks longer than others
        alone = _take_rounds(inner, loader, shares[messages.rank], once, num_rounds, clock)
    heard = messages.gather_json(dataclasses.asdict(alone))
    if any(each["problem"] for each in heard):
        return found
    return [{**each, "rounds_s": of_rank["samples_s"][1:]} for each, of_rank in zip(found, heard, strict=True)]


def is_wanted(said: Sequence[Mapping[str, Any]], mode: str, num_rings: int | None, *, is_open: bool) -> bool:
    """Whether what it shows can change the mode, or the rings.

    Args:
        said: What all ranks said.
        mode: Where it is not open.
        num_rings: How many rings the script wants.
        is_open: The mode may be chosen.
    """
    are_open = is_open or (mode == modes.PS_HRA and num_rings is None)
    return are_open and forecasting.goes_with_server(said)


def _plan(said: Sequence[Mapping[str, Any]]) -> tuple[Sequence[int], int]:
    """Each rank's samples in a step, by trials, and how many steps fit.

    Args:
        said: As `rehearse` has it.
    """
    times_s = [Speed(s_per_sample=sum(own) / len(own)) for own in trials.settle([each["trial_s"] for each in said])]
    batch_samples = said[0]["batch_samples"]
    caps = balancing.limits(batch_samples, (each["cap"] for each in said))
    shares = balancing.apportion(batch_samples, times_s, caps)
    step_s = max(share * speed.s_per_sample for share, speed in zip(shares, times_s, strict=True))
    return shares, max(1, min(_MOST_STEPS, int(BUDGET_S / step_s))) if step_s > 0 else _MOST_STEPS


def _num_rounds(said: Sequence[Mapping[str, Any]]) -> int:
    """How many rounds of each rank alone are worth rehearsing: none where that cannot make it the fastest way.

    Args:
        said: As `rehearse` returns it, without rounds.
    """
    balanced_s = said[0]["balanced_s"]
    if balanced_s is None or said[0]["num_bytes"] > _MOST_ROUND_BYTES:
        return 0
    alone = tuple((rank,) for rank in range(len(said)))
    *_, found = forecasting.look_ahead(said, [alone]).forecasts
    num_rounds = min(_MOST_STEPS, int(BUDGET_S / found.step_s))
    return num_rounds if found.step_s < _HOPE * balanced_s and num_rounds >= _LEAST_STEPS else 0


def _collective_s(waits_s: Sequence[Sequence[float]]) -> float:
    """The median over steps; the last rank to come to one waits for nobody.

    Args:
        waits_s: Of each rank, seconds from the end of its computing to the end of the step, for each step.
    """
    return statistics.median(min(of_step) for of_step in zip(*waits_s, strict=True))


def _usual_s(steps_s: Sequence[Sequence[float]]) -> float:
    """The median of a step, without the first one: a start has long ones that do not come again.

    Args:
        steps_s: Of each rank, seconds of each step; two at least.
    """
    return statistics.median([statistics.fmean(of_step) for of_step in zip(*steps_s, strict=True)][1:])


def _take_steps(
    model: nn.Module,
    loader: DataLoader,
    share: int,
    message: torch.Tensor,
    step: Callable[[], object],
    num_steps: int,
    clock: Callable[[], float],
) -> _Taken:
    """Who cannot compute takes part in what is summed nevertheless: the others would wait for it."""
    taken, batch = _Taken(), None
    with speed_test.leaving_no_trace(model):
        _sum(message)  # the first one makes connections
        for _ in range(num_steps):
            started_s = clock()
            batch = _compute(model, loader, share, batch, taken)
            began_s = clock()
            _sum(message)
            taken.samples_s.append((began_s - started_s) / max(1, share))
            taken.waits_s.append(clock() - began_s)
            step()
            _wait_for(message.device)
            taken.steps_s.append(clock() - started_s)
    return taken


def _take_rounds(
    model: nn.Module,
    loader: DataLoader,
    share: int,
    once: Callable[[], object],
    num_rounds: int,
    clock: Callable[[], float],
) -> _Taken:
    """As `_take_steps`, but `once` is what each round ends with, and nobody waits for another."""
    taken, batch = _Taken(), None
    with speed_test.leaving_no_trace(model):
        for _ in range(num_rounds):
            started_s = clock()
            batch = _compute(model, loader, share, batch, taken)
            once()
            taken.samples_s.append((clock() - started_s) / max(1, share))
    return taken


def _compute(model: nn.Module, loader: DataLoader, share: int, batch: Any, taken: _Taken) -> Any:
    """Load a batch, or take the last one again where others load it; compute, or say why that cannot be."""
    try:
        if batch is None or loader.num_workers == 0:
            batch = trials.first_batch(loader, max(1, share), model)
        trials.try_out(model, batch)
    except Exception as error:  # the script's own code, at a size that it was not tried out with
        taken.problem = taken.problem or f"{type(error).__name__}: {error}"
    return batch


def _twin_of(optimizer: Optimizer) -> Callable[[], object]:
    """The step of an optimizer of the same kind, of copies of the parameters; of very large ones, no step at all."""
    groups = [
        {name: value for name, value in group.items() if name != "param_names"}
        | {"params": [each for each in group["params"] if each.requires_grad]}
        for group in optimizer.param_groups
    ]
    if sum(each.nbytes for group in groups for each in group["params"]) > _MOST_BYTES:
        return lambda: None
    for group in groups:
        group["params"] = [each.detach().clone() for each in group["params"]]
        for each in group["params"]:
            each.grad = torch.zeros_like(each)
    made: Any = type(optimizer)
    return made(groups).step


def _sum(message: torch.Tensor) -> None:
    dist.all_reduce(message)
    _wait_for(message.device)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
