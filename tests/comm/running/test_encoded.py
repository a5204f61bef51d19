"""Encoded allreduces by the real executor, in threads: equal bits on all ranks, errors within the proof's bound."""

import dataclasses
import itertools
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from ringweave import planning, schedules, topology
from ringweave.comm.engine.executor import ScratchMemory, run_program
from ringweave.schedules import Schedule, WireEncoding
from ringweave.schedules.program import Pipelining, compile_program
from tests import effort
from tests.comm.bridge.worlds import PATIENCE_S, Wires, WireTransport

NAMES = [name for name in schedules.SCHEDULE_NAMES if name != schedules.NATIVE]
PIPELININGS = [Pipelining(), Pipelining(num_segments=5, lag=1, window=4), Pipelining(num_segments=3, lag=0, window=2)]
ZONES = {"nodes": tuple(range(8)), "racks": (0, 0, 0, 0, 1, 1, 1, 1), "one": (0, 0, 0, 0, 0, 0, 0, 1)}
CASES = [
    (name, zones, wire_format, pipelining)
    for place, (name, zones, wire_format) in enumerate(itertools.product(NAMES, ZONES, ["bf16", "int8", "int4"]))
    for number, pipelining in enumerate(PIPELININGS)
    if effort.is_thorough() or (place + place // 3 + number) % len(PIPELININGS) == 0
]
"""Every schedule with every format in every zones; with one way of pipelining every day, and each way with each."""
NUM_ELEMENTS = 5003


def encoded(name: str, wire_format: str, zones: Sequence[int]) -> Schedule:
    cluster = topology.one_machine([1] * len(zones))
    schedule = planning.plan_group(cluster, [node.name for node in cluster.nodes]).generate(name)
    return dataclasses.replace(schedule, encoding=WireEncoding(wire_format, tuple(zones)))


class Group:
    """Ranks in threads that run one program again and again."""

    def __init__(self, schedule: Schedule, pipelining: Pipelining, num_elements: int = NUM_ELEMENTS) -> None:
        self.size, self.num_elements = schedule.num_ranks, num_elements
        self.programs = [
            compile_program(schedule, schedules.project_rank(schedule, rank), num_elements, pipelining)
            for rank in range(self.size)
        ]
        self.residuals = [torch.zeros(num_elements) for _ in range(self.size)]
        self.scratch = [ScratchMemory() for _ in range(self.size)]
        self.num_bytes: dict[tuple[int, int], int] = {}

    def allreduce(self, contributions: Sequence[torch.Tensor], *, feeds_back: bool = True) -> list[torch.Tensor]:
        wires, messages, errors = Wires(self.size), [each.clone() for each in contributions], list[BaseException]()
        members = [
            threading.Thread(target=self._run, args=(rank, wires, messages[rank], feeds_back, errors))
            for rank in range(self.size)
        ]
        for member in members:
            member.start()
        for member in members:
            member.join()
        if errors:
            raise errors[0]
        return messages

    def _run(self, rank: int, wires: Wires, message: torch.Tensor, feeds_back: bool, errors: list[Any]) -> None:
        transport: Any = _CountingTransport(wires, rank, self.num_bytes)
        residual = self.residuals[rank] if feeds_back else None
        try:
            run_program(
                self.programs[rank],
                message,
                lambda mine, arriving: mine.add_(arriving),
                transport,
                self.scratch[rank],
                residual=residual,
                tag=1,
                timeout_s=120.0,
            )
        except BaseException as error:
            errors.append(error)
            wires.cut()


class _CountingTransport(WireTransport):
    """Sends as TCP does: a message is gone before its receiver waits for it, and its memory unchanged until then."""

    def __init__(self, wires: Wires, rank: int, num_bytes: dict[tuple[int, int], int]) -> None:
        super().__init__(wires, rank)
        self._num_bytes = num_bytes

    def send(self, piece: torch.Tensor, peer: int, tag: int, stage: int = -1) -> Any:
        self._num_bytes[self.rank, peer] = self._num_bytes.get((self.rank, peer), 0) + piece.nbytes
        sent = piece.clone()
        self.queues[self.rank, peer].put((tag, sent, sent, threading.Lock()))
        return piece, sent

    def wait(self, handle: Any, timeout_s: float) -> None:
        if len(handle) == 2:
            assert handle[0].numpy().tobytes() == handle[1].numpy().tobytes(), "it must not change until it has left"
            return
        landing, peer, tag = handle
        got_tag, piece, _, _ = self.queues[peer, self.rank].get(timeout=PATIENCE_S)
        assert got_tag == tag
        assert landing.nbytes == piece.nbytes
        landing.copy_(piece)


def contributions(seed: int, size: int, num_elements: int = NUM_ELEMENTS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(num_elements, generator=generator) for _ in range(size)]


@pytest.mark.parametrize(("name", "zones", "wire_format", "pipelining"), CASES)
def test_all_ranks_get_equal_bits_within_the_bound(
    name: str, zones: str, wire_format: str, pipelining: Pipelining
) -> None:
    schedule = encoded(name, wire_format, ZONES[zones])
    bound = schedules.verify(schedule)
    assert 1 <= bound.num_roundings <= 2 * len(schedule.rounds)
    brought = contributions(7, 8)
    results = Group(schedule, pipelining).allreduce(brought, feeds_back=False)
    for result in results[1:]:
        assert result.numpy().tobytes() == results[0].numpy().tobytes()
    largest = sum(float(each.abs().max()) for each in brought)
    error = (results[0].double() - torch.stack(brought).double().sum(0)).abs()
    assert 0 < float(error.max()) <= bound.relative_error * largest


@pytest.mark.parametrize("name", NAMES)
def test_sum_over_many_messages_loses_nothing_but_the_residuals(name: str) -> None:
    group, total, wanted = Group(encoded(name, "int4", ZONES["racks"]), PIPELININGS[1]), 0.0, 0.0
    for seed in range(effort.share_of(80)):
        brought = contributions(seed, 8)
        total = total + group.allreduce(brought)[0].double()
        wanted = wanted + torch.stack(brought).double().sum(0)
    left = torch.stack(group.residuals).double().sum(0)
    np.testing.assert_allclose(total + left, wanted, atol=2e-4)
    assert float(left.abs().max()) > 0


def test_bytes_between_zones_are_encoded_and_those_inside_are_exact() -> None:
    exact = Group(dataclasses.replace(encoded("ring", "int8", ZONES["racks"]), encoding=None), PIPELININGS[1])
    coded = Group(encoded("ring", "int8", ZONES["racks"]), PIPELININGS[1])
    exact.allreduce(contributions(1, 8))
    coded.allreduce(contributions(1, 8))
    for (src, dst), num_bytes in exact.num_bytes.items():
        ratio = coded.num_bytes[src, dst] / num_bytes
        assert ratio == 1 if src // 4 == dst // 4 else 0.25 < ratio < 0.27


def test_value_that_is_not_finite_reaches_all_ranks_and_is_gone_with_the_next_message() -> None:
    group = Group(encoded("direct", "int8", ZONES["nodes"]), PIPELININGS[0])
    brought = contributions(1, 8)
    brought[3][77] = torch.inf
    for result in group.allreduce(brought):
        assert not torch.isfinite(result[77])
    assert all(torch.isfinite(residual).all() for residual in group.residuals)
    assert all(torch.isfinite(result).all() for result in group.allreduce(contributions(2, 8)))
