"""Checkpoints are loaded with other stages, and training goes on with the same bits."""

import json
from pathlib import Path

import pytest

from ringweave.pipeline import checkpoints
from ringweave.testing.ranks import run_ranks
from tests.pipeline import pipeline_functions

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def test_training_goes_on_with_the_same_bits_on_other_stages_and_on_one_device(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint"
    whole: dict[int, str] = {}
    for bits in run_ranks(pipeline_functions.save_and_go_on, 3, directory):
        whole |= bits
    assert sorted(path.name for path in directory.iterdir()) == [
        *(f"block-0000{index}.safetensors" for index in range(5)),
        checkpoints.SHARED,
    ]
    assert not list(tmp_path.glob("*.part"))
    assert json.loads((directory / checkpoints.SHARED).read_text())["train_steps"] == 3
    for splits in ((), (1,)):
        found: dict[int, str] = {}
        for bits, before in run_ranks(pipeline_functions.load_and_go_on, len(splits) + 1, directory, splits):
            found |= bits
            assert before == 3
        assert found == whole


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
        "Build the same blocks as the run that saved it. [DIR/block-00000.safetensors]"
    )
