"""What a script sees of its checkpoints, in one process."""

import dataclasses
import logging
import threading
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import ringweave
from ringweave.comm import generation_group
from ringweave.errors import TrainingError
from ringweave.training.checkpoints import format, manager, store
from ringweave.training.rings.ring_worker import ParameterServerOptimizer
from tests.training.checkpoints import examples


def test_a_restored_training_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    """Weights, running statistics, moments, learning rate, dropout."""
    parts = examples.make()
    checkpoints = examples.keeper(tmp_path, parts)
    for _ in range(3):
        examples.step(parts)
    checkpoints.save(3)
    expected = [examples.step(parts) for _ in range(4)]
    assert checkpoints.wait(60)

    again = examples.make(seed=1)
    examples.step(again)  # gradients and moments that are there must not matter
    torch.rand(7)
    assert examples.keeper(tmp_path, again).load() == 3
    assert [examples.step(again) for _ in range(4)] == expected
    assert again[2].get_last_lr() == parts[2].get_last_lr()
    assert torch.equal(again[0][1].running_mean, parts[0][1].running_mean)


def test_the_state_is_that_of_the_call_though_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_write, write = threading.Event(), store.write_checkpoint
    monkeypatch.setattr(store, "write_checkpoint", lambda *args, **more: (may_write.wait(60), write(*args, **more))[1])
    model = nn.Linear(2, 2)
    checkpoints = ringweave.Checkpoints(tmp_path, model=model)
    before = model.weight.detach().clone()
    checkpoints.save(1)
    with torch.no_grad():
        model.weight.zero_()
    assert not checkpoints.wait(0)
    may_write.set()
    assert checkpoints.wait(60)
    assert checkpoints.load() == 1
    assert torch.equal(model.weight, before)


def test_a_slow_disk_gets_fewer_checkpoints_and_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGWEAVE_EVENTS", str(tmp_path / "events.jsonl"))
    began, may_write, write = threading.Event(), threading.Event(), store.write_checkpoint

    def slow_write(*args, **more):
        began.set()
        assert may_write.wait(60)
        return write(*args, **more)

    monkeypatch.setattr(store, "write_checkpoint", slow_write)
    checkpoints = examples.keeper(tmp_path / "checkpoints", examples.make())
    checkpoints.save(1)
    assert began.wait(60)
    checkpoints.save(2)
    checkpoints.save(3)
    may_write.set()
    assert checkpoints.wait(60)
    assert [saved.train_step for saved in store.list_checkpoints(tmp_path / "checkpoints")] == [3, 1]
    (event,) = examples.events(tmp_path / "events.jsonl", "checkpoint_failed")
    assert event["train_step"] == 2
    assert event["text"] == "the disk was still busy with an earlier one when a later one came."
    assert len(examples.events(tmp_path / "events.jsonl", "checkpoint_saved")) == 2


def test_so_many_are_kept_and_nothing_else_is_touched(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    examples.save_some(tmp_path, range(1, 6), keep=2)
    assert [saved.train_step for saved in store.list_checkpoints(tmp_path)] == [5, 4]
    assert (tmp_path / "mine.txt").exists()
    assert len(list(tmp_path.iterdir())) == 3


def test_what_was_just_written_stays_though_an_earlier_training_had_come_further(tmp_path: Path) -> None:
    examples.save_some(tmp_path, range(100, 103), keep=2)
    examples.save_some(tmp_path, range(1, 2), keep=2)
    assert [saved.train_step for saved in store.list_checkpoints(tmp_path)] == [102, 101, 1]
    examples.save_some(tmp_path, range(2, 5), keep=2)
    assert [saved.train_step for saved in store.list_checkpoints(tmp_path)] == [102, 101, 4, 3]
    examples.save_some(tmp_path, range(103, 105), keep=2)
    assert [saved.train_step for saved in store.list_checkpoints(tmp_path)] == [104, 103]


def test_a_step_that_is_saved_again_replaces_the_first(tmp_path: Path) -> None:
    examples.save_some(tmp_path, range(1, 3))
    parts = examples.make(seed=9)
    checkpoints = examples.keeper(tmp_path, parts)
    checkpoints.save(2)
    assert checkpoints.wait(60)
    assert [saved.train_step for saved in store.list_checkpoints(tmp_path)] == [2, 1]
    again = examples.make(seed=3)
    assert examples.keeper(tmp_path, again).load() == 2
    assert torch.equal(again[0][0].weight, parts[0][0].weight)


def test_without_a_checkpoint_or_a_folder_training_begins_at_step_0(tmp_path: Path) -> None:
    assert examples.keeper(tmp_path / "absent", examples.make()).load() == 0


@pytest.mark.parametrize("ask", ["load", "clear"])
def test_the_loader_of_an_elastic_job_has_to_be_among_the_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: str
) -> None:
    monkeypatch.setattr(generation_group, "is_generation_group", lambda: True)
    expected = (
        r"parts of checkpoints of an elastic job: .*, expected the loader that ringweave\.prepare returned among them\."
        r" Give Checkpoints loader=loader, by which a worker that joins knows where the others are\."
    )
    with pytest.raises(TrainingError, match=expected):
        getattr(examples.keeper(tmp_path, examples.make()), ask)()


def test_clear_forgets_an_earlier_training(tmp_path: Path) -> None:
    examples.save_some(tmp_path, range(1, 3))
    checkpoints = examples.keeper(tmp_path, examples.make())
    assert checkpoints.clear() == 0
    assert list(tmp_path.iterdir()) == []
    assert checkpoints.load() == 0


class Table:
    """A part of the user's own."""

    def __init__(self, state: dict) -> None:
        self.state = state

    def state_dict(self) -> dict:
        return self.state

    def load_state_dict(self, state: dict) -> None:
        self.state = state


def test_tensors_of_all_types_shapes_and_places_come_back(tmp_path: Path) -> None:
    state = {str(dtype): torch.arange(15).to(dtype).reshape(3, 5)[:, 1:4].T for dtype in format.SAFETENSORS_DTYPES}
    state |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 2), "spread": torch.ones(1).expand(3)}
    checkpoints = ringweave.Checkpoints(tmp_path, table=Table(state))
    checkpoints.save(1)
    assert checkpoints.wait(60)
    found = Table({})
    assert ringweave.Checkpoints(tmp_path, table=found).load() == 1
    assert found.state.keys() == state.keys()
    for name, tensor in state.items():
        assert (found.state[name].dtype, found.state[name].shape) == (tensor.dtype, tensor.shape)
        assert found.state[name].tolist() == tensor.tolist()
        found.state[name].zero_()  # memory of its own, not the file's


def test_any_reader_of_safetensors_reads_it(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = nn.Linear(2, 2)
    checkpoints = ringweave.Checkpoints(tmp_path, model=model)
    checkpoints.save(1)
    assert checkpoints.wait(60)
    assert torch.equal(load_file(examples.newest(tmp_path).path)["model.weight"], model.weight)


def test_the_random_numbers_may_be_left_out(tmp_path: Path) -> None:
    examples.save_some(tmp_path, range(1, 2), rng=False)
    torch.manual_seed(77)
    expected = torch.rand(3)
    torch.manual_seed(77)
    model, optimizer, schedule = examples.make()
    torch.manual_seed(77)
    options = {"model": model, "optimizer": optimizer, "schedule": schedule}
    assert ringweave.Checkpoints(tmp_path, rng=False, **options).load() == 1
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (3, r"part it of checkpoints: 'int', expected an object with state_dict and load_state_dict\. Leave it out;"),
        (
            DataLoader([1]),
            r"part it of checkpoints: 'DataLoader', expected .*a loader has them when it comes from ring",
        ),
        (
            ParameterServerOptimizer(torch.optim.SGD([torch.zeros(1)]), cast("Any", None)),
            r"part it of checkpoints: 'the optimizer of a ring, without its loader', expected both of them\. Give Ch",
        ),
    ],
)
def test_parts_without_a_state_are_refused(tmp_path: Path, part: object, text: str) -> None:
    with pytest.raises(TrainingError, match=text):
        ringweave.Checkpoints(tmp_path, it=part)


def test_a_sharded_model_is_refused(tmp_path: Path) -> None:
    class FullyShardedDataParallel(nn.Linear):
        pass

    expected = r"part model of checkpoints: 'a sharded model', expected one that is whole, or sharded by fully"
    with pytest.raises(TrainingError, match=expected):
        ringweave.Checkpoints(tmp_path, model=nn.Sequential(FullyShardedDataParallel(2, 2)))


def test_at_least_one_is_kept(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"checkpoints to keep: 0, expected at least 1\. Three leave a way back\."):
        ringweave.Checkpoints(tmp_path, keep=0)


def test_other_parts_than_were_saved_are_refused(tmp_path: Path) -> None:
    examples.save_some(tmp_path, range(1, 2))
    expected = r"parts of a checkpoint: 'model, optimizer, schedule', expected model\. Give Checkpoints the parts that"
    with pytest.raises(TrainingError, match=expected):
        ringweave.Checkpoints(tmp_path, model=examples.make()[0]).load()


def test_another_model_is_refused_by_name(tmp_path: Path) -> None:
    checkpoints = ringweave.Checkpoints(tmp_path, model=nn.Linear(2, 2))
    checkpoints.save(1)
    assert checkpoints.wait(60)
    expected = (
        r"part model of a checkpoint: .Error.s. in loading state_dict.*, expected the state of one that is built "
    )
    with pytest.raises(TrainingError, match=expected + r"alike\. Go on with the model"):
        ringweave.Checkpoints(tmp_path, model=nn.Linear(2, 3)).load()


def test_several_ranks_need_a_process_group_to_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    expected = r"process group: None, expected one, so that all ranks go on from the same checkpoint\. Call ringweave"
    with pytest.raises(TrainingError, match=expected):
        examples.keeper(tmp_path, examples.make()).load()


def test_random_numbers_that_are_damaged_do_not_keep_training_from_going_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of a rank other than 0 are in a file of their own."""
    checkpoints = examples.keeper(tmp_path, examples.make())
    checkpoints.save(1)
    assert checkpoints.wait(60)
    (of_first,) = store.list_checkpoints(tmp_path)
    monkeypatch.setattr(manager, "_rank_and_world_size", lambda: (1, 2))
    checkpoints.save(1)
    assert checkpoints.wait(60)
    (of_second,) = store.list_checkpoints(tmp_path, rank=1)
    assert of_first.path.exists()
    of_second.path.write_bytes(of_second.path.read_bytes()[:-1])
    content = dataclasses.replace(store.read_checkpoint(of_first), world_size=2)
    before = torch.get_rng_state()
    with caplog.at_level(logging.INFO, "ringweave"):
        checkpoints._restore(of_first, content)
    assert torch.equal(torch.get_rng_state(), before)
    assert "random numbers of rank 1 begin anew after step 1: their file is damaged or gone" in caplog.text
