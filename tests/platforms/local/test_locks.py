"""Who holds a lock is found, so that a guard that stands still can be woken."""

import os
from pathlib import Path

from ringweave.platforms.local import job_folder


def test_holders_of_a_lock_are_found_by_their_open_file(tmp_path: Path) -> None:
    path = tmp_path / "alive"
    descriptor = job_folder.try_lock_file(path)
    assert descriptor is not None
    assert job_folder.lock_holders(path) == [os.getpid()]
    os.close(descriptor)
    assert job_folder.lock_holders(path) == []
    assert not job_folder.is_lock_held(path)
