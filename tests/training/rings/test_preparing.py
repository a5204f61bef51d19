"""What all ranks of all rings have in common before they begin."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ringweave.errors import TrainingError
from ringweave.testing.ranks import Ranks
from ringweave.training import preparation
from ringweave.training.collectives import ControlGroup
from ringweave.training.options import Asynchronous
from ringweave.training.rings import ring_formation
from ringweave.training.rings.ring_formation import RingFormation


def shared() -> dict[str, list]:
    """A model of this rank's own, after its rest was shared."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    model[1].running_mean.normal_()
    model[1].num_batches_tracked.fill_(7 + dist.get_rank())
    trained = [*model[1].parameters(), *model[2].parameters()]
    preparation.broadcast_untrained(model, trained, ControlGroup())
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


def said(*rates: float | None) -> list[dict]:
    return [{"rate": rate, "uplinks": {}} for rate in rates]


def test_rings_that_were_formed_for_stalls_follow_speeds_too_and_stay_as_many():
    pairs = ((0, 1), (2, 3), (4, 5), (6, 7))
    formed = ring_formation.form_initial_rings("ps-hra", Asynchronous(), [1.0] * 8, said(*[None] * 8), pairs)
    assert formed == RingFormation(rings=pairs, follows_speeds=True, num_rings=4)


def test_rings_by_speed_follow_speeds_and_their_number_too():
    formed = ring_formation.form_initial_rings("ps-hra", Asynchronous(), [1.0, 1.0, 0.25, 0.25], said(*[None] * 4))
    assert formed == RingFormation(rings=((0, 1), (2, 3)), follows_speeds=True, num_rings=None)
    formed = ring_formation.form_initial_rings("ps-hra", Asynchronous(rings=2), [1.0] * 4, said(*[None] * 4))
    assert formed == RingFormation(rings=((0, 1), (2, 3)), follows_speeds=True, num_rings=2)


def test_rings_by_links_and_rings_of_one_stay_as_they_are():
    by_links = ((0, 1, 2), (3,))
    assert not ring_formation.form_initial_rings(
        "ps-hra", Asynchronous(), [1.0] * 4, said(50e6, 50e6, 50e6, 5e6), by_links
    ).follows_speeds
    assert not ring_formation.form_initial_rings("ps", Asynchronous(), [1.0] * 2, said(None, None)).follows_speeds


def test_a_model_that_is_larger_than_a_message_is_refused():
    with torch.device("meta"):
        model = nn.Linear(1 << 14, (1 << 14) + 1, bias=False)
    text = r"^parameters in rings: '1073807360 bytes', expected at most 1073741824, which a ring pushes in one mes"
    with pytest.raises(TrainingError, match=text):
        ring_formation.build_server_setup(model, torch.optim.SGD(model.parameters(), lr=1.0), ((0,),), Asynchronous())
