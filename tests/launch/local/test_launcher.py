import os
import time
from pathlib import Path

from ringweave.launch.local import leftovers
from ringweave.launch.local.launcher import LocalLauncher
from ringweave.launch.local.merging import Console, MergedStream
from ringweave.launch.workers import WorkerGroup, WorkerSpec


def test_the_last_words_of_an_ended_worker_are_waited_for(tmp_path: Path, monkeypatch) -> None:
    """The thread that reads pipes may come late, where the end of a process is seen at once."""
    feed = MergedStream.feed

    def feed_late(stream: MergedStream, received: bytes) -> None:
        if received:
            time.sleep(0.5)
        feed(stream, received)

    monkeypatch.setattr(leftovers, "adopt_orphans", lambda: None)  # this process has other tests to run
    monkeypatch.setattr(MergedStream, "feed", feed_late)
    worker = WorkerSpec(global_rank=0, local_rank=0, node="a", environ={})
    with LocalLauncher(lambda rank: tmp_path / f"{rank}.log", Console({}, os.environ), os.environ) as launcher:
        launcher.start(WorkerGroup(argv=("sh", "-c", "echo no room; exit 3"), workers=(worker,)))
        while (ended := launcher.observe()[0].exit) is None:
            time.sleep(0.01)
        assert ended.exit_code == 3
        assert launcher.logs(0, 1) == ["no room"]
