"""Ranks that share a checkpoint whose file goes away, or is cut, meanwhile: all hear of it, and none waits in vain."""

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ringweave.errors import TrainingError
from ringweave.training.checkpoints import exchange, store
from ringweave.training.checkpoints.store import CheckpointContent, CheckpointFile
from tests.training.checkpoints import examples

NUM_RANKS = 3
Found = tuple[CheckpointFile, CheckpointContent]


class Hall:
    """Where ranks meet that are threads of this process; who waits for one that has left is in time told so."""

    def __init__(self, meanwhile: Mapping[int, Callable[[], object]]) -> None:
        """`meanwhile` is what happens between two messages: after how many, and what."""
        self._meanwhile = meanwhile
        self._barrier = threading.Barrier(NUM_RANKS, timeout=30.0)
        self._said: dict[int, Any] = {}
        self._num_messages = 0

    def exchange(self, rank: int, word: Any) -> list[Any]:
        self._said[rank] = word
        self._barrier.wait()
        found = [self._said[each] for each in range(NUM_RANKS)]
        if self._barrier.wait() == 0:
            self._num_messages += 1
            self._meanwhile.get(self._num_messages, lambda: None)()
        self._barrier.wait()
        return found


class Among:
    """One rank's end of it: `meeting.Messages`."""

    def __init__(self, hall: Hall, rank: int) -> None:
        self.rank, self._hall = rank, hall

    def gather_json(self, document: Mapping[str, object]) -> list[dict]:
        return self._hall.exchange(self.rank, dict(document))

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        sent = self._hall.exchange(self.rank, tensor.clone())[source]
        assert sent.shape == tensor.shape, "all ranks know how much comes"
        return tensor.copy_(sent)


def save(folder: Path) -> Found:
    examples.save_some(folder, range(1, 2))
    saved = examples.newest(folder)
    return saved, store.read_checkpoint(saved)


def agree(own: Mapping[int, Found], meanwhile: Mapping[int, Callable[[], object]]) -> list[Found | Exception | None]:
    """What each rank has at the end, or how it fails; `own` is who has what at the begin."""
    hall = Hall(meanwhile)

    def meet(rank: int) -> Found | Exception | None:
        try:
            return exchange.agree_on_checkpoint(own.get(rank), Among(hall, rank))
        except Exception as error:
            return error

    with ThreadPoolExecutor(NUM_RANKS) as ranks:
        return list(ranks.map(meet, range(NUM_RANKS)))


def cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(100)


def spoil(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


TOLD, SIZE_KNOWN = 1, 2
"""After how many messages."""


@pytest.mark.parametrize("holders", [(1,), (1, 2)])
def test_who_lacks_the_newest_gets_it_though_its_file_goes_once_it_is_open(
    tmp_path: Path, holders: tuple[int, ...]
) -> None:
    found = save(tmp_path)
    results = agree(dict.fromkeys(holders, found), {SIZE_KNOWN: found[0].path.unlink})
    for rank, result in enumerate(results):
        assert isinstance(result, tuple), result
        saved, content = result
        assert (saved.checksum, content.train_step) == (found[0].checksum, 1)
        assert (result is found) == (rank in holders)
        for name, value in found[1].parts["model"].items():
            assert torch.equal(content.parts["model"][name], value)


@pytest.mark.parametrize("holders", [(1,), (1, 2)])
@pytest.mark.parametrize(
    ("moment", "happens", "text"),
    [
        (TOLD, Path.unlink, "FileNotFoundError: No such file or directory"),
        (SIZE_KNOWN, cut, "the file ends before it should"),
    ],
    ids=["gone", "cut"],
)
def test_all_ranks_hear_that_the_source_cannot_read_its_file(
    tmp_path: Path, holders: tuple[int, ...], moment: int, happens: Callable[[Path], object], text: str
) -> None:
    found = save(tmp_path)
    results = agree(dict.fromkeys(holders, found), {moment: lambda: happens(found[0].path)})
    for result in results:
        assert isinstance(result, TrainingError), result
        assert f"checkpoint that all ranks go on from: 'rank 1: {text}', expected a file that stays" in str(result)
        assert str(result).endswith("look at that rank's disk, and start again. [step 1 from rank 1]")


def test_all_ranks_hear_that_one_of_them_got_damaged_bytes(tmp_path: Path) -> None:
    found = save(tmp_path)
    results = agree({1: found, 2: found}, {TOLD: lambda: spoil(found[0].path)})
    for result in results:
        assert isinstance(result, TrainingError), result
        assert "checkpoint that all ranks go on from: 'rank 0: checkpoint: 'bytes of an" in str(result).replace(
            '"', "'"
        )
