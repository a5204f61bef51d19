"""The pause of moving one block of BERT-base's size while a pipeline trains, beside a restart from a checkpoint.

    python bench/pipeline/pause.py --moves 6        # two processes, about 2 minutes

Blocks are real transformer layers (768 wide, 12 heads, 3072 inside: 7.09 M parameters each, AdamW), on the CPU. A
move's pause is the time in which training is paused: the slowest rank's time for the move while it does nothing
else, by its own clock. Beside it the excess of steps: what beginning the move and the two train steps behind (the one
that copies and ends with the move, and the next) take beyond two median steps; that also has what copying takes away
from computing, and the noise of two steps. The restart: save parameters and optimizer state of all blocks, end, start
processes again, build the pipeline with the other partition, load, and be ready to train. Exit code 1 if any pause is
above one median step or a tenth of the restart.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ringweave.pipeline import Pipeline, Settings
from ringweave.pipeline.migration import BlockMigrator, MigrationOutcome

BLOCKS, WIDTH, MICROBATCHES, SAMPLES, TOKENS = 4, 768, 4, 1, 64


def parse_options() -> argparse.Namespace:
    """Returns the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moves", type=int, default=6)
    parser.add_argument("--apart", type=int, default=4, help="steps without a move between two")
    parser.add_argument("--part", choices=("moves", "save", "load"), default="moves", help="worker: what to do")
    parser.add_argument("--folder", type=Path, default=Path("runs/pipeline-pause"))
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    return parser.parse_args()


def make_pipeline(splits: tuple[int, ...]) -> Pipeline:
    """Two stages of BERT-base's layers."""
    torch.manual_seed(0)
    blocks = [nn.TransformerEncoderLayer(WIDTH, 12, 3072, batch_first=True) for _ in range(BLOCKS)]
    settings = Settings(num_microbatches=MICROBATCHES, splits=splits, device=torch.device("cpu"))
    return Pipeline(blocks, nn.MSELoss(), make_optimizer, batch(), settings)


def make_optimizer(block: nn.Module) -> torch.optim.Optimizer:
    """Return BERT's optimizer for a block."""
    return torch.optim.AdamW(block.parameters(), lr=1e-4)


def batch() -> torch.Tensor:
    """[samples, tokens, width]."""
    return torch.ones(MICROBATCHES * SAMPLES, TOKENS, WIDTH)


def train(pipeline: Pipeline) -> float:
    """Seconds of a train step."""
    begun_s = time.perf_counter()
    pipeline.train_step(batch(), target=batch())
    return time.perf_counter() - begun_s


def move_blocks(options: argparse.Namespace) -> dict[str, Any]:
    """Train, and move block 2 to and fro."""
    pipeline, outcomes = make_pipeline((2,)), list[MigrationOutcome]()
    mover = BlockMigrator(pipeline, outcomes.append)
    for _ in range(3):
        train(pipeline)
    steps_s, begun = [], []
    for place in range(options.moves):
        steps_s += [train(pipeline) for _ in range(options.apart)]
        dist.barrier()
        start_s = time.perf_counter()
        mover.start((1,) if place % 2 == 0 else (2,))
        begun.append((len(steps_s), time.perf_counter() - start_s))
        steps_s += [train(pipeline), train(pipeline)]
    usual = [s for step, s in enumerate(steps_s) if all(step not in (at, at + 1) for at, _ in begun)]
    median_s = statistics.median(usual)
    excess = [begin_s + steps_s[at] + steps_s[at + 1] - 2 * median_s for at, begin_s in begun]
    assert all(outcome.is_done for outcome in outcomes)
    return {
        "median_step_s": median_s,
        "pauses_s": [outcome.pause_s for outcome in outcomes],
        "excess_of_steps_s": excess,
        "usual_steps_s": usual,
        "parameters": sum(each.numel() for each in pipeline.blocks[0].parameters()),
    }


def path_of(options: argparse.Namespace, block: int) -> Path:
    """Return the path of a saved block."""
    return options.folder / f"block-{block}.pt"


def save(options: argparse.Namespace) -> dict[str, Any]:
    """Train some steps and save all blocks."""
    pipeline = make_pipeline((2,))
    for _ in range(3):
        train(pipeline)
    dist.barrier()
    begun_s = time.time()
    for block in pipeline.blocks.held:
        optimizer = pipeline.optimizer.for_block(block)
        assert optimizer is not None
        torch.save([pipeline.blocks[block].state_dict(), optimizer.state_dict()], path_of(options, block))
    dist.barrier()
    return {"begun_s": begun_s}


def load(options: argparse.Namespace) -> dict[str, Any]:
    """Start again with the other partition."""
    pipeline = make_pipeline((1,))
    for block in pipeline.blocks.held:
        parameters, state = torch.load(path_of(options, block), weights_only=True)
        pipeline.blocks[block].load_state_dict(parameters)
        optimizer = pipeline.optimizer.for_block(block)
        assert optimizer is not None
        optimizer.load_state_dict(state)
    dist.barrier()
    return {"ended_s": time.time()}


def run(options: argparse.Namespace, part: str) -> dict[str, Any]:
    """Start two workers for a part; what rank 0 wrote."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    own = ["--part", part, "--moves", str(options.moves), "--apart", str(options.apart), "--folder", options.folder]
    subprocess.run([*command, *map(str, own)], env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
    return json.loads((options.folder / f"{part}.json").read_text())


def work(options: argparse.Namespace) -> None:
    """A worker."""
    torch.set_num_threads(1)
    found = {"moves": move_blocks, "save": save, "load": load}[options.part](options)
    if dist.get_rank() == 0:
        (options.folder / f"{options.part}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def watch(options: argparse.Namespace) -> int:
    """Run everything and print it; the exit code."""
    options.folder.mkdir(parents=True, exist_ok=True)
    found = run(options, "moves")
    begun_s = run(options, "save")["begun_s"]
    restart_s = run(options, "load")["ended_s"] - begun_s
    for block in range(BLOCKS):
        path_of(options, block).unlink()
    longest_s = max(found["pauses_s"])
    found |= {"median_pause_s": statistics.median(found["pauses_s"]), "longest_pause_s": longest_s}
    found |= {"restart_s": restart_s, "median_excess_s": statistics.median(found["excess_of_steps_s"])}
    found["is_good"] = longest_s <= found["median_step_s"] and longest_s <= 0.1 * restart_s
    print(json.dumps({key: value for key, value in found.items() if key != "usual_steps_s"}, indent=1))
    if options.out:
        options.out.write_text(json.dumps(found) + "\n")
    return 0 if found["is_good"] else 1


if __name__ == "__main__":
    chosen = parse_options()
    if "RANK" in os.environ:
        work(chosen)
    else:
        sys.exit(watch(chosen))
