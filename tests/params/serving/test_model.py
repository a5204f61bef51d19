"""The parameters in versions: held copies never change, steps are torch's, memory is bounded."""

import pytest
import torch

from ringweave.errors import TrainingError
from ringweave.params.flat import Flat, sizes_of
from ringweave.params.messages import Group, Setup, TensorSpec
from ringweave.params.serving.model import VersionedModel, compensate

SPECS = [
    TensorSpec(name="weight", shape=[3, 4], dtype="float64"),
    TensorSpec(name="scale", shape=[2], dtype="float32"),
    TensorSpec(name="bias", shape=[4], dtype="float64"),
]
SGD = {"lr": 0.1, "momentum": 0.9}


def setup_of(optimizer: str = "SGD", options: dict | None = None, compensation: float = 0.04) -> Setup:
    groups = [Group(parameters=[0, 2], options=options or SGD), Group(parameters=[1], options=options or SGD)]
    return Setup(
        tensors=SPECS, optimizer=optimizer, groups=groups, rings=[[0], [1]], overlaps=False, compensation=compensation
    )


def filled(seed: int) -> Flat:
    found, generator = Flat(SPECS), torch.Generator().manual_seed(seed)
    for piece in found.pieces:
        piece.copy_(torch.randn(len(piece), generator=generator))
    return found


def test_tensors_lie_in_one_piece_for_each_dtype():
    found = filled(0)
    assert sizes_of(SPECS) == tuple(piece.nbytes for piece in found.pieces) == (128, 8)
    assert [tuple(view.shape) for view in found.views] == [(3, 4), (2,), (4,)]
    again = Flat.over(SPECS, [memoryview(bytearray(buffer)) for buffer in found.buffers()])
    assert all(map(torch.equal, again.views, found.views))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", SGD),
        ("SGD", {"lr": 0.1, "nesterov": True, "momentum": 0.5}),
        ("AdamW", {"lr": 0.1, "betas": [0.8, 0.9]}),
    ],
)
def test_a_step_is_that_of_torch(name, options):
    model = VersionedModel(setup_of(name, options), filled(0))
    expected = [torch.nn.Parameter(view.clone()) for view in filled(0).views]
    optimizer = getattr(torch.optim, name)(expected, **options)
    for number in range(5):
        for parameter, view in zip(expected, filled(number + 1).views, strict=True):
            parameter.grad = view
        optimizer.step()
        model.hold(0)
        model.apply_gradient(0, filled(number + 1), 1.0, [options, options])
    torch.testing.assert_close(model.hold(0).views, [each.detach() for each in expected], rtol=1e-6, atol=1e-6)


def test_what_is_held_does_not_change():
    model = VersionedModel(setup_of(), filled(0))
    copy = model.hold(1)
    for number in range(3):
        model.hold(0)
        model.apply_gradient(0, filled(number), 1.0, [SGD, SGD])
    assert all(map(torch.equal, copy.views, filled(0).views))
    assert not torch.equal(model.hold(0).views[0], copy.views[0])


@pytest.mark.parametrize("num_rings", [1, 4])
def test_there_are_as_many_copies_as_rings_and_no_more(num_rings):
    model = VersionedModel(setup_of(), filled(0))
    for ring in range(num_rings):
        model.hold(ring)
    for number in range(40):
        ring = number * number % num_rings
        model.apply_gradient(ring, filled(number), 1.0, [SGD, SGD])
        model.hold(ring)
        assert model.memory_bytes <= (num_rings + 2) * 136  # and one of momentum
    assert model.state_bytes == 2 * 136


def test_the_factor_shortens_the_step():
    model = VersionedModel(setup_of(compensation=0.0), filled(0))
    model.apply_gradient(0, filled(1), 0.25, [SGD, SGD])
    torch.testing.assert_close(model.hold(0).views[0], filled(0).views[0] - 0.025 * filled(1).views[0])


def test_parameters_without_a_gradient_stay():
    model = VersionedModel(setup_of(), filled(0))
    model.apply_gradient(0, filled(1), 1.0, [SGD, SGD], absent=[1])
    assert torch.equal(model.hold(0).views[1], filled(0).views[1])
    assert not torch.equal(model.hold(0).views[0], filled(0).views[0])


def test_gradients_are_compensated_for_the_way_the_parameters_went():
    gradient, now, base = filled(0), filled(1), filled(2)
    expected = [g + 0.04 * g * g * (n - b) for g, n, b in zip(gradient.views, now.views, base.views, strict=True)]
    compensate(gradient, now, base, 0.04)
    torch.testing.assert_close(gradient.views, expected)


def test_a_ring_that_is_behind_is_compensated_on_its_own_copy():
    model = VersionedModel(setup_of(options={"lr": 1.0}), filled(0))
    model.hold(0), model.hold(1)
    plain = {"lr": 1.0}
    model.apply_gradient(0, filled(1), 1.0, [plain, plain])
    middle = [view.clone() for view in model.hold(0).views]
    model.apply_gradient(1, filled(2), 1.0, [plain, plain])
    g, moved = filled(2).views[0], middle[0] - filled(0).views[0]
    torch.testing.assert_close(model.hold(1).views[0], middle[0] - (g + 0.04 * g * g * moved))


def test_a_change_moves_the_parameters():
    model = VersionedModel(setup_of(), filled(0))
    model.apply_change(0, filled(1), 0.5)
    torch.testing.assert_close(model.hold(0).views[0], filled(0).views[0] + 0.5 * filled(1).views[0])


def test_options_of_other_groups_are_refused():
    model = VersionedModel(setup_of(), filled(0))
    with pytest.raises(
        TrainingError, match=r"options of the optimizer's groups: \[\['lr', 'momentum'\]\], expected tho"
    ):
        model.apply_gradient(0, filled(1), 1.0, [SGD])
    with pytest.raises(TrainingError, match=r"absent gradients: \[9\], expected places of parameters"):
        model.apply_gradient(0, filled(1), 1.0, [SGD, SGD], absent=[9])


def test_optimizers_that_the_server_cannot_run_are_refused():
    with pytest.raises(TrainingError, match=r"optimizer: 'AdamV', expected one of SGD, .*AdamW"):
        VersionedModel(setup_of("AdamV"), filled(0))
    with pytest.raises(TrainingError, match=r"options of SGD: .*learning rate.*, expected those of the script"):
        VersionedModel(setup_of(options={"lr": -1.0}), filled(0))
