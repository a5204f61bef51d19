import importlib.util
import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from ringweave.testing import ranks

LIMIT_S = 300.0


def look(teller: Connection) -> None:
    """Tell how many threads the server has, and what it has loaded."""
    status = Path(f"/proc/{os.getppid()}/status").read_text()
    (num_threads,) = (int(line.split()[1]) for line in status.splitlines() if line.startswith("Threads:"))
    teller.send((num_threads, set(sys.modules)))


@pytest.mark.slow
@pytest.mark.distributed
def test_the_server_has_one_thread_and_has_everything_loaded() -> None:
    """Threads would not be there in what is forked, and the locks that they hold would never open."""
    context = ranks.forkserver_context()
    ours, theirs = context.Pipe()
    process = context.Process(target=look, args=(theirs,), daemon=True)
    process.start()
    assert ours.poll(LIMIT_S), "it never said anything"
    num_threads, loaded = ours.recv()
    process.join(LIMIT_S)
    assert num_threads == 1
    wanted = set(ranks.PRELOADED_MODULES)
    if importlib.util.find_spec("aiohttp") is None:
        wanted.remove("tests.fakes.kubernetes.crashing_operator")
    assert wanted - loaded == set()
