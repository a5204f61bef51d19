"""Checkpoints are loaded with other stages, and training goes on with the same bits."""

import itertools
import json
import re
from pathlib import Path

import pytest
import torch

from ringweave.pipeline import checkpoints
from ringweave.testing.ranks import run_ranks
from tests.pipeline import pipeline_functions, saving_functions

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def test_training_goes_on_with_the_same_bits_on_other_stages_and_on_one_device(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint"
    whole: dict[int, str] = {}
    for bits in run_ranks(pipeline_functions.save_and_go_on, 3, directory):
        whole |= bits
    names = sorted(path.name for path in directory.iterdir())
    assert [pipeline_functions.without_checks(name) for name in names] == [
        *(f"block-0000{index}-CHECK.safetensors" for index in range(5)),
        checkpoints.SHARED_FILE,
    ]
    assert not list(tmp_path.glob("*.part"))
    assert json.loads((directory / checkpoints.SHARED_FILE).read_text())["train_steps"] == 3
    for splits in ((), (1,)):
        found: dict[int, str] = {}
        for bits, before in run_ranks(pipeline_functions.load_and_go_on, len(splits) + 1, directory, splits):
            found |= bits
            assert before == 3
        assert found == whole


@pytest.mark.parametrize("moment", saving_functions.MOMENTS)
def test_a_crash_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path, moment: str) -> None:
    """Of three saves the second one breaks off; what is loaded behind it is the first or the second, never neither."""
    found = run_ranks(saving_functions.crash_while_saving, 1, tmp_path / "checkpoint", moment)[0]
    is_new = moment in ("the new one has its name", "the old one half deleted")
    assert found["has crashed"]
    assert found["steps after the crash"] == (2 if is_new else 1)
    assert found["same values"]
    assert found["steps after the next save"] == 3
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path: Path) -> None:
    done = run_ranks(saving_functions.watch_saving, 1, tmp_path / "checkpoint")[0]
    stems = [f"block-{index:05d}" for index in range(len(pipeline_functions.make_blocks()))]
    blocks = [(f"sync {stem}.safetensors", f"rename {stem}.safetensors {stem}-CHECK.safetensors") for stem in stems]
    assert done == [
        *itertools.chain.from_iterable(blocks),
        f"sync {checkpoints.SHARED_FILE}",
        "sync checkpoint.part",
        "rename checkpoint.part checkpoint",
        f"sync {tmp_path.name}",
    ]


def test_a_full_disk_of_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    """Nobody waits for the rank that failed; the checkpoint before stays, and the next save is whole."""
    directory = tmp_path / "checkpoint"
    found = run_ranks(saving_functions.save_on_full_disks, 3, directory)
    assert found == [found[0]] * 3
    said, loaded = found[0]
    text = (
        "checkpoint: \"rank {}: OSError(28, 'No space left on device')\", expected a disk that takes all blocks. "
        "Make room and save again; the one before can still be loaded. [DIR]"
    )
    assert said == [text.format(rank) for rank in (0, 1, 2, 0)]
    assert loaded == 1
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    assert json.loads((directory / checkpoints.SHARED_FILE).read_text())["train_steps"] == 2


def test_types_of_the_optimizer_and_extra_state_come_back_as_they_were(tmp_path: Path) -> None:
    found = run_ranks(saving_functions.save_what_is_rare, 1, tmp_path / "checkpoint")[0]
    assert found["types"] == {torch.float32}, "float32 state of bfloat16 weights was made as coarse as they are"
    assert found["same"]
    assert found["seen"] == [3, 3], "one without data, two of the train step"
    assert found["kinds"] == 2, "the first one is computed on what needs no gradient"
    assert found["of a model"] == 2


def test_wrong_checkpoints(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint"
    run_ranks(pipeline_functions.save_and_go_on, 3, directory)
    absent, fewer, other = run_ranks(pipeline_functions.load_wrongly, 1, directory)[0]
    assert absent.startswith("checkpoint: ")
    assert absent.endswith(
        "expected a file pipeline.json. Name a directory that checkpoints.save has written. [DIR/none]"
    )
    assert fewer == (
        "blocks of the checkpoint: 5, expected 2, as the pipeline has. "
        "Build the same blocks as the run that saved it. [DIR]"
    )
    assert other == (
        "block 0 of the checkpoint: ('0.bias', (8,)), expected the names and shapes of this block. "
        "Build the same blocks as the run that saved it. [DIR/block-00000-CHECK.safetensors]"
    )


def test_damage_is_found_before_anything_changes(tmp_path: Path) -> None:
    found = run_ranks(saving_functions.load_damaged, 1, tmp_path / "checkpoint")[0]
    assert found["unchanged"]
    assert found["steps of the whole one"] == 1
    check = "[0-9a-f]{16}"
    do = ". Load one that was saved before, in a directory of another name, or train anew. "
    other_bytes = rf"damaged checkpoint: 'check {check}', expected {check}, as its name says{do}\[DIR/block"
    patterns = {
        "cut": other_bytes,
        "flipped": other_bytes,
        "missing": rf"damaged checkpoint: '0 files of block \d', expected one{do}\[DIR\]",
        "another number": rf"damaged checkpoint: 'content of another check', expected check {check}{do}"
        r"\[DIR/pipeline.json\]",
        "half of pipeline.json": r"checkpoint: .*, expected a file pipeline.json. Name a directory that "
        r"checkpoints.save has written. \[DIR\]",
        "right check, no safetensors": r"damaged checkpoint: .*, expected a block that checkpoints.save has written"
        rf"{do}\[DIR/block",
    }
    assert found["texts"].keys() == patterns.keys()
    for damage, pattern in patterns.items():
        assert found["texts"][damage], damage
        for text in found["texts"][damage]:
            assert re.match(pattern, text), (damage, text)
