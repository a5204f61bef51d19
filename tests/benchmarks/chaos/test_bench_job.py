"""The job of the benches of faults has the sums that moments inside a bucket are drawn among."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ringweave.comm.plan_choice import MIN_SCHEDULED_BYTES
from ringweave.training.elastic.retained_reductions import ReductionRow, RetainedReduction, SumBuffers

BENCH = Path(__file__).parents[3] / "bench" / "faults"


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    import job

    return job


@pytest.fixture
def lab_jobs(job: ModuleType) -> ModuleType:
    import lab_jobs

    return lab_jobs


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def width(lab_jobs: ModuleType) -> int:
    """That of the benches, if nothing else is asked for."""
    return lab_jobs.parser("").parse_args([]).width


def buckets(job: ModuleType, width: int, **options: Any) -> list[Tensor]:
    """Those of the second backward pass: DDP may have ordered them anew after the first one."""
    parallel = DistributedDataParallel(job.make(width), bucket_cap_mb=job.BUCKET_MB, **options)
    found: list[Tensor] = []

    def note(state: list[Tensor], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        state.append(bucket.buffer().clone())
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    parallel.register_comm_hook(found, note)
    for _ in range(2):
        found.clear()
        parallel(torch.ones(2, 64)).sum().backward()
    return found


def sums(each: list[Tensor]) -> list[int]:
    """Bytes of each message that an elastic job makes of them."""
    reduction, room = RetainedReduction(number=1), SumBuffers()
    for bucket in each:
        reduction.add_bucket(bucket, room)
    reduction.complete(ReductionRow(), 0, room)
    return [summed.nbytes for summed in reduction.sums]


@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
def test_a_train_step_of_an_elastic_job_has_three_sums_that_take_a_schedule(
    job: ModuleType, lab_jobs: ModuleType
) -> None:
    found = buckets(job, width(lab_jobs), find_unused_parameters=True)
    assert [each.nbytes for each in found] == [16_168, 295_680, 296_448, 98_304]
    assert sums(found) == [311_848, 296_448, 98_304]
    assert len(sums(found)) == lab_jobs.NUM_SUMS
    assert min(sums(found)) >= MIN_SCHEDULED_BYTES


def test_one_of_a_job_that_is_not_elastic_has_as_many(job: ModuleType, lab_jobs: ModuleType) -> None:
    found = [each.nbytes for each in buckets(job, width(lab_jobs))]
    assert len(found) == lab_jobs.NUM_SUMS
    assert min(found) >= MIN_SCHEDULED_BYTES


def test_what_the_benches_say_of_the_job_is_the_jobs(job: ModuleType, lab_jobs: ModuleType) -> None:
    assert job.NUM_SAMPLES == lab_jobs.STEPS_AN_EPOCH * job.BATCH
    assert job.make(7)(torch.ones(3, 64)).shape == (3, 10), "of an odd width too"


@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
def test_the_model_of_the_bench_of_goodput_is_one_message_that_takes_a_schedule(
    job: ModuleType, lab_jobs: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    import goodput  # beside lab_jobs

    monkeypatch.setattr("sys.argv", ["goodput.py"])
    found = sums(buckets(job, goodput.parse_options().width, find_unused_parameters=True))
    assert len(found) == 1
    assert MIN_SCHEDULED_BYTES <= found[0] < 1.1 * MIN_SCHEDULED_BYTES
