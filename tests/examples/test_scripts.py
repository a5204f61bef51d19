"""The examples as a reader runs them: ordinary scripts under torchrun, the others under `ringweave run`."""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from support import demo_data
from tests.ending import ended

EXAMPLES = Path(__file__).parents[2] / "examples"
SUPPORT = EXAMPLES / "support"
SCRIPTS = sorted(EXAMPLES.glob("[0-9]*.py"))
PREPARED, PIPELINE = "03_unequal.py", "05_pipeline_bert.py"
EITHER_WAY = "04_text_unequal.py"
"""Trains by DDP, or by ringweave."""
ORDINARY = [path for path in SCRIPTS if path.name not in (PREPARED, PIPELINE, EITHER_WAY)]


TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node=2")


def ringweave_run(folder: Path, num_workers: int = 2) -> tuple[str, ...]:
    return ("ringweave", "run", f"--workers={num_workers}", f"--run-dir={folder / 'run'}")


def run(launcher: Sequence[str], script: str, arguments: str) -> str:
    command = [sys.executable, "-m", *launcher, str(EXAMPLES / script), *arguments.split()]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    started = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with ended(started) as process:
        output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.distributed
def test_digits_are_learned_by_two_workers(tmp_path):
    output = run(TORCHRUN, "02_digits.py", f"--out {tmp_path}")
    accuracy = json.loads((tmp_path / "run.json").read_text())["test_accuracy"]
    assert accuracy > 0.95
    assert f"test accuracy: {accuracy:.1%}" in output


@pytest.mark.slow
@pytest.mark.distributed
def test_too_little_training_is_a_failure_and_needs_no_launcher():
    done = subprocess.run(
        [sys.executable, EXAMPLES / "02_digits.py", "--steps=2"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "expected more than 95%. Try more --steps." in done.stderr


@pytest.mark.slow
@pytest.mark.distributed
def test_digits_are_learned_with_three_lines_more(tmp_path):
    output = run(ringweave_run(tmp_path), PREPARED, f"--epochs 8 --out {tmp_path}")
    accuracy = json.loads((tmp_path / "run.json").read_text())["test_accuracy"]
    assert accuracy > 0.95
    assert f"test accuracy: {accuracy:.1%}" in output
    assert "samples/s (measured), shares (" in output


@pytest.mark.slow
@pytest.mark.distributed
def test_bert_learns_in_four_stages(tmp_path):
    pytest.importorskip("transformers", reason="the extra hf is not installed")
    sizes = "--layers 2 --width 32 --context 16 --batch 16 --microbatches 4"
    output = run(ringweave_run(tmp_path, 4), PIPELINE, f"--steps 60 --schedule 1f1b-overlap {sizes}")
    losses = [float(loss) for loss in re.findall(r"step \d+: (\d+\.\d+) nats per masked byte", output)]
    assert len(losses) == 6
    assert losses[-1] < losses[0] - 0.5
    assert re.search(r"held out: \d+\.\d+ nats .*, last blocks of stages \(1, 2, 3\)", output)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_training_is_the_same_by_ddp_and_by_ringweave(tmp_path):
    sizes = "--steps 6 --batch 8 --layers 1 --width 32 --max-bytes 300000 --held-out-windows 8 --sample-bytes 20"
    found = []
    for name, way in (("ddp", "--ddp "), ("ringweave", "")):
        output = run(ringweave_run(tmp_path / name), EITHER_WAY, f"{way}{sizes} --out {tmp_path / name}")
        of_run = demo_data.load_run(name, tmp_path / name, {}, None)
        assert f"held out: {of_run.result['held_out_nats_per_byte']:.3f} nats per byte" in output
        assert "a bigram model: " in output
        assert of_run.sample.startswith("def ")
        found.append(of_run)
    assert list(found[0].losses) == list(range(1, 7))
    assert found[1].losses == pytest.approx(found[0].losses, rel=1e-4)


@pytest.mark.parametrize("script", ORDINARY, ids=lambda path: path.name)
def test_examples_are_ordinary_scripts(script):
    assert "ringweave" not in script.read_text().lower()
    assert "dist.init_process_group()" in script.read_text()


@pytest.mark.parametrize("source", sorted({*SUPPORT.glob("*.py")} - {*SUPPORT.glob("demo_*")}), ids=lambda it: it.name)
def test_what_examples_share_does_without_ringweave(source):
    """It may tell ringweave how far it is, where ringweave is there; the demo is of ringweave."""
    tree = ast.parse(source.read_text())
    guarded = {id(node) for attempt in ast.walk(tree) if isinstance(attempt, ast.Try) for node in ast.walk(attempt)}
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {id(node): [getattr(node, "module", None), *(alias.name for alias in node.names)] for node in imports}
    of_ringweave = [node for node in imports if any(str(name).startswith("ringweave") for name in names[id(node)])]
    assert not [node.lineno for node in of_ringweave if id(node) not in guarded]
