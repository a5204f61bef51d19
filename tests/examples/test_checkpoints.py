"""A run must find its last complete checkpoint, and nothing else."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from support.checkpoints import Checkpoints


@pytest.fixture
def alone():
    """A process group of one, for code that asks for its rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def model_and_optimizer(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 2)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def take_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    optimizer.zero_grad()
    model(torch.ones(1, 3)).square().sum().backward()
    optimizer.step()
    return torch.cat([parameter.flatten() for parameter in model.parameters()]).tolist()


def make_half_written(folder: Path) -> None:
    folder.mkdir()
    (folder / "__0_0.distcp").write_bytes(b"half")


@pytest.mark.usefixtures("alone")
def test_restored_weights_and_moments_continue_to_the_same_bits(tmp_path):
    original = model_and_optimizer(seed=0)
    take_step(*original)
    Checkpoints(tmp_path).save(*original, train_step=1)
    expected = [take_step(*original) for _ in range(3)]

    restored = model_and_optimizer(seed=1)
    restored[0](torch.ones(1, 3)).sum().backward()  # gradients that are lying about must not matter
    assert Checkpoints(tmp_path).load(*restored) == 1
    assert [take_step(*restored) for _ in range(3)] == expected


@pytest.mark.usefixtures("alone")
def test_the_last_two_are_kept(tmp_path):
    for train_step in (1, 2, 3):
        Checkpoints(tmp_path).save(*model_and_optimizer(seed=0), train_step=train_step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-000002", "step-000003"]
    assert (tmp_path / "latest").read_text() == "step-000003"


@pytest.mark.usefixtures("alone")
def test_a_half_written_one_is_never_used(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(*model_and_optimizer(seed=0), train_step=1)
    make_half_written(tmp_path / "writing")
    make_half_written(tmp_path / "step-000002")
    assert checkpoints.load(*model_and_optimizer(seed=1)) == 1

    (tmp_path / "latest").write_text("step-000002")
    assert checkpoints.load(*model_and_optimizer(seed=1)) == 1
    checkpoints.save(*model_and_optimizer(seed=0), train_step=2)
    assert checkpoints.load(*model_and_optimizer(seed=1)) == 2


@pytest.mark.usefixtures("alone")
def test_without_a_checkpoint_a_run_starts_at_the_beginning(tmp_path):
    assert Checkpoints(tmp_path / "none").load(*model_and_optimizer(seed=0)) == 0


@pytest.mark.usefixtures("alone")
def test_a_new_run_forgets_the_old_one(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(*model_and_optimizer(seed=0), train_step=5)
    assert checkpoints.clear() == 0
    assert checkpoints.latest() is None
