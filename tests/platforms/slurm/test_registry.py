"""The log of a job's events, to which processes that may die at any time append."""

import json
from pathlib import Path

from ringweave.platforms.slurm import registry

EVENT = {"key": "a", "time_s": 1.0, "kind": "Started", "text": "é\u2028"}


def test_lines_that_are_no_events_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert registry._read_event_lines(path) == []
    good = json.dumps(EVENT).encode()
    rubbish = (b"", b"null", b"[]", b"{}", b'{"key": ', b"\xff\xfe", b"[" * 100_000, b"9" * 5000)
    path.write_bytes(b"".join(line + b"\n" + good + b"\n" for line in rubbish) + good[:20])
    assert registry._read_event_lines(path) == [EVENT] * len(rubbish)
