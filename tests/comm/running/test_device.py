"""Rounds of messages of an accelerator's library: what needs no accelerator, with a library that only notes."""

from typing import Any

import pytest
import torch
from torch.distributed import ReduceOp

from ringweave import schedules
from ringweave.comm.engine import engine
from ringweave.comm.engine.reductions import reduction_for
from ringweave.errors import CommunicationError
from ringweave.schedules.program import Transfer

CUDA = torch.device("cuda")


class Work:
    """Of a group of messages."""

    def wait(self) -> None:
        pass


class Library:
    """NCCL, as torch shows it: a group of messages has a work, an empty one has none."""

    def __init__(self) -> None:
        self.messages: list[int] = []
        self.groups: list[int] = []

    def _start_coalescing(self, device: torch.device) -> None:
        self.messages.clear()

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        self.messages.append(peer)
        return Work()

    recv = send

    def _end_coalescing(self, device: torch.device) -> Work | None:
        self.groups.append(len(self.messages))
        return Work() if self.messages else None


class OnDevice(torch.Tensor):
    """A tensor that says it is on an accelerator."""

    device = CUDA  # type: ignore[assignment]


def transfers(rank: int, num_ranks: int) -> list[Transfer]:
    return list(schedules.project_rank(schedules.generate("ring", num_ranks), rank))


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_without_a_piece_in_a_round_starts_no_group_in_it(rank: int) -> None:
    """One element for four ranks: in most rounds most of them have nothing to say."""
    library: Any = Library()
    message = torch.ones(1).as_subclass(OnDevice)
    schedule = schedules.generate("ring", 4)
    engine.run_rounds(schedule, transfers(rank, 4), message, torch.Tensor.add_, library)
    assert library.groups
    assert all(library.groups), "no empty ones"
    assert len(library.groups) < len({transfer.round_index for transfer in transfers(rank, 4)})


def test_a_group_of_messages_without_a_work_is_not_waited_for() -> None:
    library: Any = Library()
    library._end_coalescing = lambda device: None
    piece = (transfers(0, 2)[0], torch.ones(1))
    assert engine._start_round(library, [piece], CUDA, tag=0) == []


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_what_nccl_does_not_send_is_refused(dtype: torch.dtype) -> None:
    text = rf"reduce operation avg on an accelerator: '{dtype}', expected a dtype that NCCL sends\. Convert"
    with pytest.raises(CommunicationError, match=text):
        engine.check_sendable(reduction_for(ReduceOp.AVG, dtype), dtype)


def test_what_nccl_sends_is_not_refused() -> None:
    engine.check_sendable(reduction_for(ReduceOp.SUM, torch.bfloat16), torch.bfloat16)
