"""What collectives work in: the kernel has it back when they are through, whatever thread they ran in."""

import subprocess
import sys

import pytest
import torch

from ringweave.comm.engine.executor import ScratchMemory, allocate_pages, flatten_tensor, write_back

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.uint16, torch.complex64]

KEPT = """
import threading
import psutil, torch
from torch.distributed import ReduceOp
from ringweave.comm.engine import executor, reductions

NUM_BYTES, NUM_THREADS = 20_000_000, 4

def use(started):
    started.wait()  # together, so that each has a pool of its own
    {use}

torch.set_num_threads(1)
torch.ones(32_000_000, dtype=torch.uint8)  # freed: from now on glibc takes less than that out of its pools
{given}
def count_private():
    memory = psutil.Process().memory_info()
    return memory.rss - memory.shared

before = count_private()
started = threading.Barrier(NUM_THREADS)
threads = [threading.Thread(target=use, args=(started,)) for _ in range(NUM_THREADS)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(count_private() - before)
"""

USES = {
    "scratch": ("", "executor.ScratchMemory().take_buffers(1, NUM_BYTES, torch.uint8)[0].fill_(1)"),
    "a tensor that is not contiguous": (
        "tensor = torch.ones(1000, NUM_BYTES // 1000, dtype=torch.uint8).t()",
        "executor.flatten_tensor(tensor).add_(1)",
    ),
    "float8": (
        "tensor = torch.ones(NUM_BYTES // 4).to(torch.float8_e4m3fn)",
        "r = reductions.reduction_for(ReduceOp.AVG, tensor.dtype); r.combine(tensor, tensor); r.finish(tensor, 2)",
    ),
    "unsigned numbers": (
        "tensor = torch.ones(NUM_BYTES // 4, dtype=torch.int32).view(torch.uint32)",
        "reductions.reduction_for(ReduceOp.MIN, tensor.dtype).combine(tensor, tensor)",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "use"),
    [
        pytest.param(*USES[name], id=name, marks=pytest.mark.thorough if number % 2 else ())
        for number, name in enumerate(USES)
    ],
)
def test_threads_that_have_ended_leave_no_memory_behind(given: str, use: str) -> None:
    """They left 16 to 20 MB each in glibc's pools, for every group that had ever been."""
    command = [sys.executable, "-c", KEPT.format(given=given, use=use)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) < 12_000_000


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
