"""Two processes that are rank 0, one after the other, and write into one folder at the same time."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ringweave
from ringweave.training.checkpoints import store

PATIENCE_S = 100.0


class Held:
    """The first checkpoint that is written stops before its last piece, until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stands, self.may_go = threading.Event(), threading.Event()
        self._real: Callable[[], Any] = store.xxhash.xxh3_64
        self._is_first = True
        monkeypatch.setattr(store, "_PIECE_BYTES", 1024)
        monkeypatch.setattr(store.xxhash, "xxh3_64", self._make)

    def _make(self) -> Any:
        real, is_first, self._is_first = self._real(), self._is_first, False
        return Holding(real, self) if is_first else real


class Holding:
    """A check that is computed slowly."""

    def __init__(self, real: Any, held: Held) -> None:
        self._real, self._held, self._num_pieces = real, held, 0

    def update(self, piece: memoryview) -> None:
        self._num_pieces += 1
        if self._num_pieces == 4:
            self._held.stands.set()
            assert self._held.may_go.wait(PATIENCE_S)
        self._real.update(piece)

    def hexdigest(self) -> str:
        return self._real.hexdigest()


def writer(folder: Path, value: float) -> ringweave.Checkpoints:
    model = nn.Linear(32, 32)  # 4 KiB: several pieces
    nn.init.constant_(model.weight, value)
    return ringweave.Checkpoints(folder, model=model, keep=1)


def write_both(folder: Path, monkeypatch: pytest.MonkeyPatch, steps: tuple[int, int]) -> None:
    """The first begins with its step, the second writes its own, the first gets on."""
    held = Held(monkeypatch)
    first, second = (writer(folder, float(step)) for step in steps)
    first.save(steps[0])
    assert held.stands.wait(PATIENCE_S)
    second.save(steps[1])
    assert second.wait(PATIENCE_S)
    held.may_go.set()
    assert first.wait(PATIENCE_S)


def check_newest(folder: Path, train_step: int) -> None:
    """Every file is whole, the newest is that of this step, and nothing half-written is left."""
    for saved in store.list_checkpoints(folder):
        content = store.read_checkpoint(saved)
        assert content.parts["model"]["weight"].unique().tolist() == [float(saved.train_step)]
    assert store.list_checkpoints(folder)[0].train_step == train_step
    assert not list(folder.glob(".*"))


def test_one_that_another_has_overtaken_hears_so_and_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "ringweave"):
        write_both(tmp_path, monkeypatch, (1, 2))
    check_newest(tmp_path, 2)
    assert "checkpoint of step 1: not written: [Errno 2] removed before it was whole, as another process" in caplog.text


def test_one_that_is_late_with_an_earlier_step_costs_the_later_one_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "ringweave"):
        write_both(tmp_path, monkeypatch, (2, 1))
    check_newest(tmp_path, 2)
    assert "not written" not in caplog.text


def test_a_folder_that_is_cleared_has_nothing_half_written_of_a_later_step(tmp_path: Path) -> None:
    (tmp_path / ".rank-3.step-00005000.0123456789abcdef.partial").write_bytes(b"half")
    mine = tmp_path / ".hidden.partial"
    mine.write_text("mine")
    torch.manual_seed(1)
    checkpoints = writer(tmp_path, 1.0)
    assert checkpoints.clear() == 0
    assert list(tmp_path.iterdir()) == [mine]
