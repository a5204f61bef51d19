"""The largest proof that is promised: a ring of 10,000 ranks, within a minute and 2 GiB."""

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor

import pytest

from ringweave import schedules
from tests import effort


def verify_ring(num_ranks: int) -> tuple[float, int]:
    """Seconds of the processor, and the most KiB of memory that this process has had."""
    begin_s = time.process_time()
    schedules.verify(schedules.ring(num_ranks), exact=False)
    return time.process_time() - begin_s, effort.peak_kib()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_ranks", [2000, pytest.param(10_000, marks=pytest.mark.thorough)])
def test_a_ring_of_many_ranks(num_ranks: int) -> None:
    # In a process of its own: this one has the memory of the tests before.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as own:
        taken_s, most_kib = own.submit(verify_ring, num_ranks).result()
    assert taken_s < 60
    assert most_kib < 2 * 2**20
