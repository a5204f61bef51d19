"""What collectives work in: the kernel has it back when they are through, whatever thread they ran in."""

import pytest
import torch

from ringweave.comm.engine.executor import ScratchMemory, allocate_pages, flatten_tensor, write_back
from ringweave.testing.ranks import run_ranks
from tests.comm import rank_functions

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.uint16, torch.complex64]


@pytest.mark.slow
@pytest.mark.distributed
def test_threads_that_have_ended_leave_no_memory_behind() -> None:
    """They left 16 to 20 MB each in glibc's pools, for every group that had ever been."""
    (left,) = run_ranks(rank_functions.memory_left_by_ended_threads, 1, backend="gloo")
    assert {use: num_bytes for use, num_bytes in left.items() if num_bytes >= 12_000_000} == {}
    assert len(left) == 4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pages_are_zeroed_and_of_the_dtype(dtype: torch.dtype) -> None:
    taken = allocate_pages(1000, dtype)
    assert (taken.dtype, taken.shape) == (dtype, (1000,))
    assert not taken.view(torch.uint8).any()


def test_no_elements_take_no_pages() -> None:
    assert allocate_pages(0, torch.float32).tolist() == []


def test_a_tensor_that_is_not_contiguous_is_copied_and_written_back() -> None:
    tensor = torch.arange(6.0).view(2, 3).t()
    message = flatten_tensor(tensor)
    assert message.tolist() == [0, 3, 1, 4, 2, 5]
    message += 1
    assert tensor[0, 0] == 0
    write_back(message, tensor)
    assert tensor.tolist() == [[1, 4], [2, 5], [3, 6]]


def test_a_contiguous_tensor_is_its_own_message() -> None:
    tensor = torch.zeros(2, 3)
    flatten_tensor(tensor).add_(1)
    assert tensor.tolist() == [[1, 1, 1], [1, 1, 1]]


def test_scratch_is_kept_while_it_is_large_enough() -> None:
    scratch = ScratchMemory()
    first = scratch.take_buffers(2, 1000, torch.float32)
    assert [buffer.shape for buffer in first] == [(1000,), (1000,)]
    assert first[1].data_ptr() - first[0].data_ptr() == 4032  # a multiple of 64
    smaller = scratch.take_buffers(3, 500, torch.float16)
    assert smaller[0].data_ptr() == first[0].data_ptr()
