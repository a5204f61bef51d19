"""Who holds a lock is found, so that a guard that stands still can be woken."""

import os
from pathlib import Path

from ringweave.launch.local.jobs import locks


def test_holders_of_a_lock_are_found_by_their_open_file(tmp_path: Path) -> None:
    path = tmp_path / "alive"
    descriptor = locks.try_lock(path)
    assert descriptor is not None
    assert locks.holders(path) == [os.getpid()]
    os.close(descriptor)
    assert locks.holders(path) == []
    assert not locks.is_held(path)
