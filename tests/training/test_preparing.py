"""What `prepare` refuses, what it leaves in the run's files, and that `import ringweave` stays light."""

import subprocess
import sys
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import ringweave
from ringweave.comm import default_group
from ringweave.errors import TrainingError, UsageError
from ringweave.training import timing
from ringweave.training.gradients import GradientReducer, SampleWeights
from ringweave.training.timing import StepTimer


def things() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader]:
    model = nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2)


def test_importing_ringweave_does_not_bring_torch() -> None:
    code = "import sys, ringweave; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    with pytest.raises(AttributeError, match=r"^module 'ringweave' has no attribute 'prepared'$"):
        _ = ringweave.prepared  # pyrefly: ignore


@pytest.mark.parametrize("mode", ["ps-hra", "ps"])
def test_modes_with_a_server_need_one_that_was_started(mode: str) -> None:
    text = r"^parameter server: 'none in this run', expected one that the launcher has started\. Use ringweave run"
    try:
        with pytest.raises(UsageError, match=text):
            ringweave.prepare(*things(), mode=mode)
    finally:
        dist.destroy_process_group()


def test_an_unknown_mode_is_refused() -> None:
    text = r"^mode: 'balance', expected one of auto, sync, balanced, ps-hra, ps, local\. Did you mean \"balanced\"\?"
    with pytest.raises(UsageError, match=text):
        ringweave.prepare(*things(), mode="balance")


def test_an_unknown_reduction_is_refused() -> None:
    text = r"^reduction: 'max', expected mean or sum\. Say how the loss of a batch follows from the losses"
    with pytest.raises(TrainingError, match=text):
        ringweave.prepare(*things(), reduction="max")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"weight": [1.0]}, r"^weight of the samples: '1 of them', expected 4\. Give one number for each sample"),
        (
            {"weight": [1, 2, 3, -1]},
            r"^weight of the samples: '-1\.0 of sample 3', expected numbers from 0 on\. ",
        ),
        ({"weight": len, "reduction": "sum"}, r"^reduction: 'sum', expected mean beside weight\. Leave out weight"),
        ({"on_failure": "wait"}, r"^on_failure: 'wait', expected recompute or drop\. Say what happens to the samples"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(TrainingError, match=text):
        ringweave.prepare(*things(), **options)


def test_a_hook_before_prepare_and_a_second_one_are_refused() -> None:
    model, optimizer, loader = things()
    try:
        default_group.ensure_process_group({})
        early = DistributedDataParallel(model)
        early.register_comm_hook(None, default_hooks.allreduce_hook)
        text = (
            r"^communication hook of the model: 'registered', expected none yet\. Register it on the model that prepare"
        )
        with pytest.raises(TrainingError, match=text):
            ringweave.prepare(early, optimizer, loader, mode="sync")
        prepared, *_ = ringweave.prepare(*things(), mode="sync")
        assert isinstance(prepared, DistributedDataParallel)
        prepared.register_comm_hook(None, default_hooks.allreduce_hook)
        with pytest.raises(
            TrainingError, match=r"^communication hook: 'a second one', expected one\. Register one hook;"
        ):
            prepared.register_comm_hook(None, default_hooks.fp16_compress_hook)
    finally:
        dist.destroy_process_group()


def test_a_hook_in_rings_is_refused() -> None:
    timer = StepTimer(timing.choose_timeline(nn.Linear(1, 1)))
    reducer = GradientReducer(process_group=cast(Any, "a ring"), timer=timer)
    text = r"^communication hook in rings or sites: 'one', expected none\. Leave the hook out, or use mode "
    with pytest.raises(TrainingError, match=text):
        reducer.register_comm_hook(None, default_hooks.allreduce_hook)


def test_weights_of_the_script_take_the_place_of_numbers_of_samples() -> None:
    weights = SampleWeights(num_ranks=4, is_mean=True)
    asked = []
    weights.set(6, 12)
    weights.set_weights(30.0, lambda: asked.append(1) or 120.0)
    assert (weights.factor, weights.fraction) == (1.0, 0.25)
    assert len(asked) == 1, "the weight of the whole batch is waited for once"
    weights.set_weights(0.0, 120.0)
    assert (weights.factor, weights.fraction) == (0.0, 0.0)
    weights.set(6, 12)
    assert weights.factor == 2.0


@pytest.mark.parametrize(
    ("is_mean", "num_samples", "factor"), [(True, 6, 2.0), (True, 0, 0.0), (False, 6, 4.0), (False, 0, 0.0)]
)
def test_gradients_count_by_samples(is_mean: bool, num_samples: int, factor: float) -> None:
    weights = SampleWeights(num_ranks=4, is_mean=is_mean)
    assert weights.factor == 1.0
    assert weights.fraction == 0.25
    weights.set(num_samples, 12)
    assert weights.factor == factor
    assert weights.fraction == num_samples / 12
    gradient = torch.tensor([1.0, float("inf")])
    weighed = weights.weigh(gradient)
    assert weighed is not None
    assert weighed.tolist() == ([0.0, 0.0] if factor == 0 else [factor, float("inf")])


SCRIPT = """
import gc, torch, ringweave
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.ones(6, 2)), batch_size=3)
model, optimizer, loader = ringweave.prepare(model, optimizer, loader)
assert len(gc.get_objects()) < 5000 < gc.get_freeze_count()
for (x,) in loader:
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
print(loader.account.is_exact, loader.account.total.num_samples)
"""


@pytest.mark.slow
def test_a_script_that_nobody_launched_trains_alone_and_ends_in_silence() -> None:
    """Its group is ended with it. And whole collections of garbage go through what came after `prepare` alone."""
    first = "import atexit, torch.distributed as dist\natexit.register(lambda: print(dist.is_initialized()))\n"
    command = [sys.executable, "-c", first + SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True 6\nFalse\n", "")
