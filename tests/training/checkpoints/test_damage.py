"""Whatever happens to a file, it is found out, and the checkpoint before it is taken."""

import logging
import random
from pathlib import Path

import pytest
import torch

from ringweave.errors import TrainingError
from ringweave.files import file_io
from ringweave.training.checkpoints import store
from tests.training.checkpoints import examples


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With checkpoints of steps 1 and 2."""
    examples.save_some(tmp_path / "checkpoints", range(1, 3))
    return tmp_path / "checkpoints"


def test_cut_anywhere_it_is_refused(folder: Path) -> None:
    saved = examples.newest(folder)
    whole = saved.path.read_bytes()
    header_end = 8 + int.from_bytes(whole[:8], "little")
    edges = [at for near in (0, 8, header_end, len(whole)) for at in range(near - 9, near + 10) if 0 <= at < len(whole)]
    for length in {*edges, *range(0, len(whole), 97)}:
        saved.path.write_bytes(whole[:length])
        with pytest.raises(TrainingError, match=r"^checkpoint: .*, expected a whole file of format 2 with check"):
            store.read_checkpoint(saved)
    saved.path.write_bytes(whole)
    assert store.read_checkpoint(saved).train_step == 2


def test_every_flipped_bit_is_noticed(folder: Path) -> None:
    saved = examples.newest(folder)
    whole, rng = saved.path.read_bytes(), random.Random(1)
    places = [*range(64), *rng.sample(range(len(whole)), 500), len(whole) - 1]
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << rng.randrange(8)
        saved.path.write_bytes(damaged)
        with pytest.raises(TrainingError, match=r"bytes of another check"):
            store.read_checkpoint(saved)


def test_bytes_that_fit_their_check_and_mean_nothing_are_refused(tmp_path: Path) -> None:
    """A stranger may write files with good names: they are refused, or hold a state, and nothing else happens."""
    examples.save_some(tmp_path, range(1, 2))
    whole, rng = examples.newest(tmp_path).path.read_bytes(), random.Random(2)
    num_refused = 0
    for _ in range(400):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(min(len(damaged), 6000))] = rng.randrange(256)
        path = tmp_path / "made.safetensors"
        path.write_bytes(damaged)
        try:
            store.read_checkpoint(
                store.CheckpointFile(path=path, train_step=1, rank=0, checksum=file_io.file_checksum(path))
            )
        except TrainingError:
            num_refused += 1
    assert num_refused > 200


@pytest.mark.parametrize("damage", ["cut", "flipped", "emptied", "replaced by the other"])
def test_the_one_before_is_used_and_it_is_said(
    folder: Path, damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    last, before = store.list_checkpoints(folder)
    whole = last.path.read_bytes()
    flipped = whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:]
    other = before.path.read_bytes()
    damaged = {"cut": whole[:-1], "flipped": flipped, "emptied": b"", "replaced by the other": other}[damage]
    last.path.write_bytes(damaged)
    monkeypatch.setenv("RINGWEAVE_EVENTS", str(tmp_path / "events.jsonl"))
    parts = examples.make(seed=5)
    with caplog.at_level(logging.WARNING, "ringweave"):
        assert examples.keeper(folder, parts).load() == 1
    assert "expected a whole file of format 2" in caplog.text
    (event,) = examples.events(tmp_path / "events.jsonl", "checkpoint_refused")
    assert (event["train_step"], event["path"]) == (2, str(last.path))
    (event,) = examples.events(tmp_path / "events.jsonl", "checkpoint_loaded")
    assert event["train_step"] == 1
    expected = examples.make()
    examples.step(expected)
    assert all(torch.equal(a, b) for a, b in zip(expected[0].parameters(), parts[0].parameters(), strict=True))


def test_damaged_ones_do_not_count_among_those_that_are_kept(folder: Path) -> None:
    examples.save_some(folder, range(3, 5), keep=4)
    damaged = store.list_checkpoints(folder)[:2]
    for saved in damaged:
        saved.path.write_bytes(saved.path.read_bytes()[:-1])
    checkpoints = examples.keeper(folder, examples.make(), keep=2)
    assert checkpoints.load() == 2
    checkpoints.save(3)
    assert checkpoints.wait(60)
    assert [saved.train_step for saved in store.list_checkpoints(folder)] == [4, 3, 2], (
        "the later one is not in the way"
    )
    for train_step in (5, 6):
        checkpoints.save(train_step)
        assert checkpoints.wait(60)
        assert examples.newest(folder).train_step == train_step
    assert [saved.train_step for saved in store.list_checkpoints(folder)] == [6, 5]


def test_a_whole_one_before_a_damaged_one_is_kept(folder: Path) -> None:
    examples.save_some(folder, range(3, 4))
    last = examples.newest(folder)
    last.path.write_bytes(last.path.read_bytes()[:-1])
    checkpoints = examples.keeper(folder, examples.make(), keep=2)
    assert checkpoints.load() == 2
    checkpoints.save(4)
    assert checkpoints.wait(60)
    assert [saved.train_step for saved in store.list_checkpoints(folder)] == [4, 3, 2], "two whole ones"


def test_a_damaged_one_that_is_written_again_counts(folder: Path) -> None:
    """The same step with the same bytes has the same name."""
    last = examples.newest(folder)
    parts = examples.make()
    whole = last.path.read_bytes()
    last.path.write_bytes(whole[:-1])
    checkpoints = examples.keeper(folder, parts, keep=1)
    assert checkpoints.load() == 1
    examples.step(parts)
    checkpoints.save(2)
    assert checkpoints.wait(60)
    assert last.path.read_bytes() == whole
    assert [saved.path for saved in store.list_checkpoints(folder)] == [last.path]


def test_if_all_are_damaged_training_begins_anew(folder: Path) -> None:
    for saved in store.list_checkpoints(folder):
        saved.path.write_bytes(saved.path.read_bytes()[:-1])
    assert examples.keeper(folder, examples.make()).load() == 0


def test_half_written_files_and_others_are_no_checkpoints(folder: Path) -> None:
    whole = examples.newest(folder).path.read_bytes()
    for name in (".rank-0.partial", "step-00000009.safetensors", "step-9-0123456789abcdef.safetensors", "best.pt"):
        (folder / name).write_bytes(whole)
    (folder / f"step-00000010-{'0' * 16}.safetensors").mkdir()
    assert examples.keeper(folder, examples.make()).load() == 2


def test_a_format_of_the_future_is_left_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "FORMAT", 3)
    expected = r"checkpoint: .*format 2.*, expected a whole file of format 3 .*Load it with the ringweave that wrote it"
    with pytest.raises(TrainingError, match=expected):
        store.read_checkpoint(examples.newest(folder))
