"""A few exchanges with the parameter server before the job begins: what one needs of processors, there and here.

Links are not all of it, as with a collective: a server with a small part of a processor takes longer to apply a push
than to receive it, and rings that push at the same time wait for each other there. And who pushes has to encrypt what
it sends, and to decrypt what comes.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch.optim import Optimizer

from ringweave import wire
from ringweave.params.flat import Flat
from ringweave.params.messages import Group, Rehearsed, Setup, TensorSpec
from ringweave.params.ring.client import RingClient
from ringweave.params.serving import optimizers
from ringweave.training.rings.preparing import START_S

BUDGET_S = 1.0
"""Of all exchanges but the first one, about: so many are rehearsed as fit, but one at least."""
_MOST_EXCHANGES = 16
_MOST_BYTES = 4 * 2**20
"""Of a push; more bytes are taken to need longer in proportion."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchanged:
    """What an exchange takes; measured."""

    serving_s: float
    """Seconds from one exchange to the next at which the server's processor has no pause left."""
    exchanging_s: float
    """Seconds that it takes this rank alone, without those that the server computes."""


def rehearse(
    optimizer: Optimizer,
    num_bytes: int,
    num_rings: int,
    servers: Sequence[Callable[[], wire.Client]],
    clock: Callable[[], float] = time.perf_counter,
) -> Exchanged:
    """Exchange parameters of zero, as many bytes as the model's, or in proportion.

    A server is taken to use one processor, or the part of one that a quota leaves it.

    Args:
        optimizer: The script's: the server runs the same one, by the options of the first group.
        num_bytes: Of the parameters.
        num_rings: That push in a train step.
        servers: Each connects to one server of the job, which has not begun.
        clock: Seconds that only grow.

    Raises:
        WireError: None of them can be reached, or it refuses.
        TrainingError: The server cannot run this optimizer.
    """
    pushed_bytes = min(num_bytes, _MOST_BYTES)
    with _exchanges(optimizer, pushed_bytes, num_rings, servers) as (_, exchange):
        first = last = exchange()  # the first one makes the connection, and memory
        began_s, count = clock(), 0
        while not count or (count < _MOST_EXCHANGES and clock() - began_s < BUDGET_S):
            last, count = exchange(), count + 1
        took_s = (clock() - began_s) / count
    of_one_s = (last.processor_s - first.processor_s) / count
    in_proportion = max(1.0, num_bytes / max(1, pushed_bytes))
    return Exchanged(
        serving_s=of_one_s / min(1.0, last.cores or 1.0) * in_proportion,
        exchanging_s=max(0.0, took_s - of_one_s) * in_proportion,
    )


@contextmanager
def rounds(
    optimizer: Optimizer, num_bytes: int, num_rings: int, servers: Sequence[Callable[[], wire.Client]]
) -> Iterator[Callable[[], object]]:
    """What a rank that is a ring alone does after computing, for every rank at once: it takes samples, and exchanges.

    Args:
        optimizer: As `rehearse` has it.
        num_bytes: Of the parameters, all of which are exchanged.
        num_rings: All ranks.
        servers: As `rehearse` has them.

    Raises:
        WireError: None of them can be reached, or it refuses.
        TrainingError: The server cannot run this optimizer.
    """
    with _exchanges(optimizer, num_bytes, num_rings, servers) as (client, exchange):

        def once() -> None:
            client.status()  # as short a call as that for samples, of which there are none before the job begins
            exchange()

        once()  # the first one makes the connection, and memory
        yield once


@contextmanager
def _exchanges(
    optimizer: Optimizer, num_bytes: int, num_rings: int, servers: Sequence[Callable[[], wire.Client]]
) -> Iterator[tuple[RingClient, Callable[[], Rehearsed]]]:
    """A connection, and what sends parameters of zero there and back."""
    setup = _setup_of(optimizer, max(1, num_bytes // 4), num_rings)
    gradient, parameters = Flat(setup.tensors), Flat(setup.tensors)
    for piece in gradient.pieces:
        piece.zero_()
    client = RingClient(servers, 0, reconnect_s=START_S)
    try:
        yield client, lambda: client.rehearse(setup, gradient.buffers(), parameters.buffers())
        client.end_rehearsal()
    finally:
        client.close()


def _setup_of(optimizer: Optimizer, num_elements: int, num_rings: int) -> Setup:
    """One tensor in the place of all of them."""
    options = optimizers.options_of(optimizer.param_groups[0])
    return Setup(
        tensors=[TensorSpec(name="rehearsed", shape=[num_elements], dtype="float32")],
        optimizer=optimizers.check_name(optimizers.name_of(optimizer)),
        groups=[Group(parameters=[0], options=options)],
        rings=[[ring] for ring in range(num_rings)],
        overlaps=False,
        compensation=0.0,
    )
