"""kill -9 while a checkpoint is being written, at any moment: what was whole before is found whole."""

import contextlib
import random
import signal
from pathlib import Path

import pytest

import ringweave
from ringweave.testing.ranks import forkserver_context
from ringweave.training.checkpoints import store
from tests.training.checkpoints import examples, rank_functions


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_in_the_midst_of_a_save_it_goes_on_from_the_last_whole_one(tmp_path: Path) -> None:
    rng, last = random.Random(3), 0
    for _ in range(3):
        ours, theirs = forkserver_context().Pipe(duplex=False)
        process = forkserver_context().Process(target=rank_functions.save_for_ever, args=(str(tmp_path), theirs))
        process.start()
        theirs.close()
        steps = [ours.recv() for _ in range(rng.randint(1, 5))]
        process.kill()
        process.join()
        with contextlib.suppress(EOFError):
            while True:
                steps.append(ours.recv())
        assert process.exitcode == -signal.SIGKILL
        assert steps[0] == last + 1, "it went on from the newest whole one"
        found = [saved.train_step for saved in store.list_checkpoints(tmp_path)]
        last = max(found, default=0)
        assert steps[-1] - 1 <= last <= steps[-1], "all but the one that was being written"
        assert len(found) <= 3
        for saved in store.list_checkpoints(tmp_path):
            store.read_checkpoint(saved)


def test_what_a_killed_process_left_is_overwritten(tmp_path: Path) -> None:
    for name in (".rank-0.partial", ".rank-0.step-00000001.0123456789abcdef.partial"):
        (tmp_path / name).write_bytes(b"half")
    parts = examples.make()
    checkpoints = ringweave.Checkpoints(tmp_path, model=parts[0])
    checkpoints.save(1)
    assert checkpoints.wait(60)
    assert [path.name[:13] for path in tmp_path.iterdir()] == ["step-00000001"]
