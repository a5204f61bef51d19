"""What all ranks of all rings have in common before they begin."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ringweave.testing.ranks import Ranks
from ringweave.training.control import Control
from ringweave.training.rings import preparing


def shared() -> dict[str, list]:
    """A model of this rank's own, after its rest was shared."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    model[1].running_mean.normal_()
    model[1].num_batches_tracked.fill_(7 + dist.get_rank())
    trained = [*model[1].parameters(), *model[2].parameters()]
    preparing.share_rest(model, trained, Control())
    return {name: tensor.tolist() for name, tensor in model.state_dict().items()}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_frozen_parameters_and_buffers_are_those_of_rank_0():
    with Ranks(shared, 2, backend="gloo", timeout_s=300) as ranks:
        first, second = ranks.values(timeout_s=300)
    assert {name for name in first if first[name] == second[name] and not name.startswith("1.w")} == {
        "0.weight",
        "0.bias",
        "1.bias",
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    }
    assert second["2.weight"] != first["2.weight"]  # trained: it comes from the server
    assert first["1.num_batches_tracked"] == 7
