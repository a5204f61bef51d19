"""What an attempt printed, put together from its files."""

from pathlib import Path

import pytest

from ringweave.platforms.kubernetes import pod_logs


def write(home: Path, round_: int, rank: int, text: str) -> None:
    path = home / f"round-{round_}" / "logs" / f"rank-{rank}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_rounds_and_ranks_are_in_order(tmp_path: Path) -> None:
    write(tmp_path, 10, 3, "late\n")
    write(tmp_path, 2, 10, "ten\n")
    write(tmp_path, 2, 3, "one\n\nhalf a line")
    assert pod_logs.read_worker_logs(tmp_path) == [
        "[ringweave] round 2",
        "[3] one",
        "[3] ",
        "[3] half a line",
        "[10] ten",
        "[ringweave] round 10",
        "[3] late",
    ]
    assert pod_logs.read_worker_logs(tmp_path / "nowhere") == []


def test_of_much_the_end_is_kept_of_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_logs, "MAX_LOG_BYTES", 20)
    write(tmp_path, 1, 0, "first\nsecond\nthird\n")
    write(tmp_path, 1, 1, "short\n")
    assert pod_logs.read_worker_logs(tmp_path) == ["[ringweave] round 1", "[0] third", "[1] short"]
