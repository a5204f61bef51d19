"""Steps are torch's, also where several pushes make one; what is read beforehand leaves no trace; memory is bounded."""

import pytest
import torch

from ringweave.errors import TrainingError
from ringweave.param_server import model
from ringweave.param_server.flat import FlatTensors, buffer_sizes
from ringweave.param_server.messages import ParameterGroup, ServerSetup, TensorSpec
from ringweave.param_server.model import AccumulatingModel, ScratchTensors, compensate_gradient

SPECS = [
    TensorSpec(name="weight", shape=[3, 4], dtype="float64"),
    TensorSpec(name="scale", shape=[2], dtype="float32"),
    TensorSpec(name="bias", shape=[4], dtype="float64"),
]
SGD = {"lr": 0.1, "momentum": 0.9}


def setup_of(optimizer: str = "SGD", options: dict | None = None, compensation: float = 0.04) -> ServerSetup:
    groups = [
        ParameterGroup(parameters=[0, 2], options=options or SGD),
        ParameterGroup(parameters=[1], options=options or SGD),
    ]
    return ServerSetup(
        tensors=SPECS, optimizer=optimizer, groups=groups, rings=[[0], [1]], overlaps=False, compensation=compensation
    )


def filled(seed: int) -> FlatTensors:
    found, generator = FlatTensors(SPECS), torch.Generator().manual_seed(seed)
    for piece in found.pieces:
        piece.copy_(torch.randn(len(piece), generator=generator))
    return found


def test_tensors_lie_in_one_piece_for_each_dtype():
    found = filled(0)
    assert buffer_sizes(SPECS) == tuple(piece.nbytes for piece in found.pieces) == (128, 8)
    assert [tuple(view.shape) for view in found.views] == [(3, 4), (2,), (4,)]
    again = FlatTensors.over_buffers(SPECS, [memoryview(bytearray(buffer)) for buffer in found.buffers()])
    assert all(map(torch.equal, again.views, found.views))


def newest(model: AccumulatingModel) -> list[torch.Tensor]:
    found = FlatTensors(SPECS)
    model.read_parameters(found)
    return found.views


def by_torch(name: str, options: dict, seeds: list[int]) -> list[torch.Tensor]:
    expected = [torch.nn.Parameter(view.clone()) for view in filled(0).views]
    optimizer = getattr(torch.optim, name)(expected, **options)
    for seed in seeds:
        for parameter, view in zip(expected, filled(seed).views, strict=True):
            parameter.grad = view
        optimizer.step()
    return [each.detach() for each in expected]


OPTIMIZERS = [
    ("SGD", SGD),
    ("SGD", {"lr": 0.1, "nesterov": True, "momentum": 0.5, "weight_decay": 0.1}),
    *(("AdamW", {"lr": 0.1, "betas": [0.8, 0.9], "amsgrad": amsgrad}) for amsgrad in (False, True)),
    *((name, {"lr": 0.01}) for name in ("Adam", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adadelta")),
]


@pytest.fixture(params=[1 << 18, 5])
def block(request, monkeypatch):
    """As in production, and blocks that are shorter than a tensor."""
    monkeypatch.setattr(model, "BLOCK_ELEMENTS", request.param)


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize(("name", "options"), OPTIMIZERS)
def test_a_push_of_a_whole_step_is_a_step_of_torch(name, options):
    model = AccumulatingModel(setup_of(name, options), filled(0))
    for number in range(5):
        model.apply_gradient(filled(number + 1), 1.0, [options, options])
    torch.testing.assert_close(newest(model), by_torch(name, options, [1, 2, 3, 4, 5]), rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize(("name", "options"), OPTIMIZERS)
def test_pushes_that_make_a_step_are_that_step(name, options):
    model = AccumulatingModel(setup_of(name, options), filled(0))
    for number in range(5):
        for share in (0.5, 0.3, 0.2):
            model.apply_gradient(filled(number + 1), share, [options, options])
            newest(model)
    torch.testing.assert_close(newest(model), by_torch(name, options, [1, 2, 3, 4, 5]), rtol=1e-6, atol=1e-6)
    assert model.progress.num_finished == 5


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize(("name", "options"), OPTIMIZERS)
def test_a_part_of_a_step_counts_at_once_and_reading_leaves_no_trace(name, options):
    model, other = (AccumulatingModel(setup_of(name, options), filled(0)) for _ in range(2))
    for number in range(7):
        for each in (model, other):
            each.apply_gradient(filled(number), 0.4, [options, options])
        before = newest(model)
        torch.testing.assert_close(newest(model), before, rtol=0, atol=0)
    torch.testing.assert_close(newest(model), newest(other), rtol=0, atol=0)
    assert not torch.equal(newest(model)[0], model.step_start.views[0])


def test_a_part_of_the_first_step_goes_that_part_of_the_way():
    model = AccumulatingModel(setup_of(), filled(0))
    model.apply_gradient(filled(1), 0.25, [SGD, SGD])
    torch.testing.assert_close(newest(model)[0], filled(0).views[0] - 0.025 * filled(1).views[0])


def test_damping_weighs_within_a_step_and_does_not_shorten_it():
    model = AccumulatingModel(setup_of(), filled(0))
    model.apply_gradient(filled(1), 0.5, [SGD, SGD])
    model.apply_gradient(filled(2), 0.5, [SGD, SGD], damping=0.5)
    mean = (filled(1).views[0] + 0.5 * filled(2).views[0]) / 1.5
    torch.testing.assert_close(newest(model)[0], filled(0).views[0] - 0.1 * mean)


def test_shares_that_do_not_add_up_to_one_make_as_many_steps():
    model = AccumulatingModel(setup_of(), filled(0))
    for share in (0.375, 0.375, 0.625, 0.625) * 25:
        model.apply_gradient(filled(1), share, [SGD, SGD])
    assert model.progress.num_finished == 50
    assert model.progress.total == pytest.approx(50)


def test_memory_is_that_of_one_sum_and_the_state():
    model = AccumulatingModel(setup_of(), filled(0))
    model.apply_gradient(filled(1), 1.0, [SGD, SGD])
    assert model.memory_bytes == model.state_bytes == 2 * 136  # one of parameters and one of momentum
    for number in range(40):
        model.apply_gradient(filled(number), 0.25, [SGD, SGD])
        newest(model)
        assert model.memory_bytes == 3 * 136


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_parameters_without_a_gradient_stay(share):
    model = AccumulatingModel(setup_of(), filled(0))
    model.apply_gradient(filled(1), share, [SGD, SGD], absent=[1])
    assert torch.equal(newest(model)[1], filled(0).views[1])
    assert not torch.equal(newest(model)[0], filled(0).views[0])


def test_gradients_are_compensated_for_the_way_the_parameters_went():
    gradient, now, base = filled(0), filled(1), filled(2)
    expected = [g + 0.04 * g * g * (n - b) for g, n, b in zip(gradient.views, now.views, base.views, strict=True)]
    compensate_gradient(gradient, now, base, 0.04)
    torch.testing.assert_close(gradient.views, expected)


def test_a_ring_that_is_behind_is_compensated_on_its_own_copy():
    plain = {"lr": 1.0}
    model = AccumulatingModel(setup_of(options=plain), filled(0))
    model.keep_base(1, filled(0))
    model.apply_gradient(filled(1), 1.0, [plain, plain])
    middle = [view.clone() for view in newest(model)]
    gradient = filled(2)
    model.compensate(1, gradient)
    model.apply_gradient(gradient, 1.0, [plain, plain])
    g, moved = filled(2).views[0], middle[0] - filled(0).views[0]
    torch.testing.assert_close(newest(model)[0], middle[0] - (g + 0.04 * g * g * moved))


def test_a_change_moves_the_parameters():
    model = AccumulatingModel(setup_of(), filled(0))
    model.apply_change(filled(1), 0.5)
    torch.testing.assert_close(newest(model)[0], filled(0).views[0] + 0.5 * filled(1).views[0])


def test_options_of_other_groups_are_refused():
    model = AccumulatingModel(setup_of(), filled(0))
    with pytest.raises(
        TrainingError, match=r"options of the optimizer's groups: \[\['lr', 'momentum'\]\], expected tho"
    ):
        model.apply_gradient(filled(1), 1.0, [SGD])
    with pytest.raises(TrainingError, match=r"absent gradients: \[9\], expected places of parameters"):
        model.apply_gradient(filled(1), 1.0, [SGD, SGD], absent=[9])


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ({"momentum": "much"}, r"option momentum: 'much', expected one like 0\.9\. Run the same script on all ranks"),
        ({"nesterov": 1.0}, r"option nesterov: 1\.0, expected one like False"),
        ({"params": [0.5]}, r"option params: \[0\.5\], expected nothing, it is the server's own"),
    ],
)
def test_options_that_a_step_would_fail_at_are_refused_before_anything_counts(option, text):
    model = AccumulatingModel(setup_of(options=SGD), filled(0))
    with pytest.raises(TrainingError, match=text):
        model.apply_gradient(filled(1), 0.5, [SGD | option, SGD])
    assert model.progress.length == 0.0
    torch.testing.assert_close(newest(model)[0], filled(0).views[0])


def test_optimizers_that_the_server_cannot_run_are_refused():
    with pytest.raises(TrainingError, match=r"optimizer: 'AdamV', expected one of SGD, .*AdamW"):
        AccumulatingModel(setup_of("AdamV"), filled(0))
    with pytest.raises(TrainingError, match=r"options of SGD: .*learning rate.*, expected those of the script"):
        AccumulatingModel(setup_of(options={"lr": -1.0}), filled(0))


@pytest.mark.usefixtures("block")
def test_ahead_are_those_of_the_momentum_where_nothing_is_gathered_yet():
    model = AccumulatingModel(setup_of(), filled(0))
    for number in (1, 2):
        model.apply_gradient(filled(number), 1.0, [SGD, SGD])
    now, ahead = newest(model), FlatTensors(SPECS)
    model.read_parameters(ahead, 0.75)
    moved = now[0] - 0.75 * 0.1 * 0.9 * (filled(2).views[0] + 0.9 * filled(1).views[0])
    torch.testing.assert_close(ahead.views[0], moved)
    torch.testing.assert_close(newest(model), now, rtol=0, atol=0)


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize(("name", "options"), OPTIMIZERS)
def test_ahead_of_a_part_of_a_step_is_the_rest_of_it_with_the_same_gradient(name, options):
    model = AccumulatingModel(setup_of(name, options), filled(0))
    for number, share in ((1, 1.0), (2, 0.4)):
        model.apply_gradient(filled(number), share, [options, options])
    ahead = FlatTensors(SPECS)
    model.read_parameters(ahead, 0.6)
    model.apply_gradient(filled(2), 0.6, [options, options])
    torch.testing.assert_close(ahead.views, newest(model), rtol=1e-6, atol=1e-6)


def test_nothing_is_ahead_before_the_first_push():
    model, ahead = AccumulatingModel(setup_of(), filled(0)), FlatTensors(SPECS)
    model.read_parameters(ahead, 0.5)
    torch.testing.assert_close(ahead.views, filled(0).views, rtol=0, atol=0)


def test_scratch_is_used_again():
    scratch = ScratchTensors()
    first = scratch.like_tensor(torch.zeros(2, 3))
    second = scratch.copy_value(torch.ones(4))
    assert (first.shape, second.tolist()) == ((2, 3), [1.0] * 4)
    assert scratch.copy_value("text") == "text"
    scratch.clear()
    assert scratch.like_tensor(torch.zeros(6)).data_ptr() == first.data_ptr()
    assert scratch.like_tensor(torch.zeros(())).data_ptr() == second.data_ptr()
    assert scratch.like_tensor(torch.zeros(2, dtype=torch.float64)).dtype == torch.float64
