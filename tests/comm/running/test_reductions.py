"""Which reductions there are: what torch cannot compute is refused before anything is sent."""

import pytest
import torch
import torch.distributed as dist

from ringweave.comm.engine import reductions
from ringweave.errors import CommunicationError


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint16, torch.bool, torch.float8_e4m3fn], ids=str)
def test_a_factor_that_a_dtype_cannot_be_multiplied_with_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(
        CommunicationError, match=rf"reduce operation premul_sum: '{dtype}', expected a dtype for which"
    ):
        reductions.reduction_for(dist._make_nccl_premul_sum(0.5), dtype)


def test_a_factor_is_applied_to_floats() -> None:
    reduction = reductions.reduction_for(dist._make_nccl_premul_sum(0.5), torch.float32)
    message = torch.full((3,), 4.0)
    reduction.prepare(message)
    assert message.tolist() == [2.0, 2.0, 2.0]
