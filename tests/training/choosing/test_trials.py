"""How fast a rank computes, by a model that is left as it was."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from ringweave.topology.cgroups import CpuQuota
from ringweave.training import speed_test
from ringweave.training.speed_test import ModelTrial
from ringweave.training.timing import HostTimeline

SAMPLES = TensorDataset(torch.ones(6, 3), torch.zeros(6))


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.inner(x).squeeze() - y, "count": torch.tensor(3)}


class Refusing(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(f"not with {input.shape}")


class Communicating(DistributedDataParallel):
    """A stand-in for the real one, which wants a group: each of its passes would wait for other ranks."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        raise AssertionError("waits for others")


class Stream(IterableDataset):
    def __iter__(self):
        return iter([torch.ones(3)])


def ticking(step_s: float):
    ticks = itertools.count()
    return lambda: next(ticks) * step_s


@pytest.mark.parametrize("model", [nn.Linear(3, 2), TwoInputs(), nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))])
def test_seconds_of_a_sample(model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.random.get_rng_state()
    found = speed_test.run_model_trial(
        model, DataLoader(SAMPLES, batch_size=4), 4, timeline=HostTimeline(ticking(0.2))
    ).sample_s
    assert found is not None
    assert all(each == pytest.approx(0.2 / 4) for each in found)  # one tick of the clock in a block of one trial
    assert 1 <= len(found) <= 8
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(random, torch.random.get_rng_state())


def test_short_trials_are_put_together():
    found = speed_test.run_model_trial(
        nn.Linear(3, 2), DataLoader(SAMPLES), 2, timeline=HostTimeline(ticking(0.01))
    ).sample_s
    assert found is not None
    assert max(found) < 0.011  # a block of ten trials, not one


@pytest.mark.parametrize(
    ("model", "data", "problem"),
    [
        (Refusing(3, 2), SAMPLES, "RuntimeError: not with torch.Size([2, 3])"),
        (nn.Linear(3, 2), Stream(), "the data set is a stream"),
    ],
)
def test_what_cannot_be_tried_out_has_no_speed_but_a_problem(model, data, problem):
    assert speed_test.run_model_trial(model, DataLoader(data), 2) == ModelTrial(sample_s=None, problem=problem)


def test_under_ddp_nothing_is_communicated():
    trial = speed_test.run_model_trial(
        Communicating(nn.Linear(3, 2)), DataLoader(SAMPLES), 2, timeline=HostTimeline(ticking(0.2))
    )
    assert trial.sample_s
    assert not trial.problem


def test_noise_is_no_stall():
    assert speed_test.denoise_trials([[1.0, 1.1, 0.9], [2.0, 2.2, 1.9]]) == [[1.0], [2.0]]


def test_stalls_are_those_of_all_ranks():
    quiet, stalled = speed_test.denoise_trials([[1.0, 1.0, 1.0, 1.1], [2.0, 2.0, 8.0, 2.0]])
    assert sorted(quiet) == [1.0] * 7 + [4.0]
    assert sorted(stalled) == [2.0] * 7 + [8.0]


def test_a_trial_that_takes_long_is_made_often_enough_to_tell_a_stall():
    found = speed_test.run_model_trial(
        nn.Linear(3, 2), DataLoader(SAMPLES), 2, timeline=HostTimeline(ticking(0.3))
    ).sample_s
    assert found is not None
    assert len(found) == 4
    found = speed_test.run_model_trial(
        nn.Linear(3, 2), DataLoader(SAMPLES), 2, timeline=HostTimeline(ticking(9.0))
    ).sample_s
    assert len(found or ()) == 1


class Throttled(nn.Linear):
    """Each pass works 32 ms, which a fifth of a processor takes 0.16 s for; pauses fall as it happens."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.now_s = self.worked_s = 0.0
        self.walls_s = itertools.cycle([0.12, 0.2])

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.now_s += next(self.walls_s)
        self.worked_s += 0.032
        return super().forward(input)


def test_pauses_of_a_quota_are_no_stalls() -> None:
    model, throttled = Throttled(), itertools.count()
    timeline = HostTimeline(
        lambda: model.now_s,
        lambda: model.worked_s,
        lambda: CpuQuota(cores=0.2, period_s=0.04, num_throttled=next(throttled)),
    )
    found = speed_test.run_model_trial(model, DataLoader(SAMPLES), 1, timeline=timeline).sample_s
    assert found == pytest.approx([0.16] * 7)
    assert speed_test.denoise_trials([found]) == [[pytest.approx(0.16)]]


def test_steps_that_were_rehearsed_differ_for_all_ranks_as_they_did_for_any():
    assert speed_test.spread_step_times([[1.0, 1.0, 1.2], [2.0, 2.0, 1.8]]) == [
        pytest.approx([0.9, 1.0, 1.0, 1.0, 1.0, 1.2]),
        pytest.approx([1.8, 2.0, 2.0, 2.0, 2.0, 2.4]),
    ]


def test_one_long_step_of_very_many_is_of_the_start():
    (of_rank,) = {tuple(own_s) for own_s in speed_test.spread_step_times([[1.0] * 19 + [3.0]] * 2)}
    assert set(of_rank) == {1.0}


def test_of_very_many_steps_some_stand_for_equal_parts():
    often_stalled = [1.0] * 700 + [4.0] * 100
    (of_rank,) = {tuple(own_s) for own_s in speed_test.spread_step_times([often_stalled] * 10)}
    assert len(of_rank) == 64
    assert of_rank.count(4.0) == 5  # of eight, three were long because of the start
    assert {len(own_s) for own_s in speed_test.denoise_trials([often_stalled] * 10)} == {64}
