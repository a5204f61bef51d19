"""Real processes in a real process group, for tests of code that runs under torch.distributed."""

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from signal import Signals
from typing import Any, Self

PRELOADED_MODULES = [
    "numpy.ma",  # loaded by the first tensor that is saved
    "torch._dynamo",  # loaded by DDP and every optimizer at their first use
    "torch.distributed.algorithms.ddp_comm_hooks",
    "torch.distributed.pipelining",
    "torch.nn.parallel",
    "ringweave.comm.backend",
    "ringweave.comm.engine.engine",
    "ringweave.comm.probing.measure",
    "ringweave.comm.transport.shared_memory",
    "ringweave.comm.transport.sockets",
    "ringweave.param_server.client",
    "ringweave.pipeline",
    "ringweave.topology.discovery",  # loaded by every group of several nodes
    "ringweave.training",
    "ringweave.training.elastic.member_process",
    "ringweave.training.sharded_model",
    "ringweave.testing.ranks",
]
"""Modules loaded by the fork server. One list for all tests, since a process has one fork server, which loads the list
of its first user; a conftest.py may append modules of its own. No module starts a thread or opens a file: a fork
inherits only code."""


def forkserver_context() -> ForkServerContext:
    """Return a context that starts processes from the fork server."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(PRELOADED_MODULES)
    return found


_STORE_PORT_VARIABLE = "RINGWEAVE_TESTING_STORE_PORT"
_STACKS_TIMEOUT_S = 20.0
"""Time for a late rank to dump the stacks of its threads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankOutcome:
    """Outcome of one rank."""

    value: Any = None
    """Return value of its function."""
    error: str = ""
    """Traceback of its exception."""
    exit_code: int | None = None
    """Exit code of a process that ended without a result; negative for a signal."""
    seconds: float = 0.0
    """Duration of the function."""


class Ranks:
    """Processes rank 0 .. n-1, each running `function(*args)` inside an initialised process group.

    The store is in the calling process, so that any rank may die. Processes are forked from a server with torch loaded,
    so they start quickly.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        num_ranks: int,
        *args: Any,
        backend: str | None = "ringweave",
        timeout_s: float = 120.0,
        environ: Mapping[str, str] | None = None,
        nodes: Sequence[str] | None = None,
    ) -> None:
        """`nodes` names the node of each rank; it and `environ` go into the environment of the processes."""
        from torch.distributed import TCPStore

        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._folder = tempfile.TemporaryDirectory()
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        context = forkserver_context()
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            variables = {**(environ or {}), "RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
            variables[_STORE_PORT_VARIABLE] = str(self.store.port)
            if nodes is not None:
                variables["RINGWEAVE_NODE"] = nodes[rank]
            setting = (rank, num_ranks, backend, timeout_s, variables, self._stacks_path(rank))
            process = context.Process(target=_rank_main, args=(theirs, setting, function, args), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join()
        self._folder.cleanup()

    def signal(self, rank: int, number: Signals) -> None:
        """Send a real signal to the process of a rank."""
        pid = self._processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def wait_for(self, *keys: str, timeout_s: float = 300.0) -> None:
        """Block until the ranks have set these keys in the store."""
        self.store.wait(list(keys), timedelta(seconds=timeout_s))

    def outcomes(self, ranks: Sequence[int] | None = None, timeout_s: float = 300.0) -> list[RankOutcome]:
        """Return the outcomes of all ranks, or of the given ones.

        Raises:
            TimeoutError: A rank has not ended in time.
        """
        deadline = time.monotonic() + timeout_s
        return [self._outcome(rank, deadline) for rank in (ranks or range(len(self._processes)))]

    def values(self, timeout_s: float = 300.0) -> list[Any]:
        """Return the value of each rank's function.

        Raises:
            AssertionError: A rank failed; the text holds its traceback.
        """
        outcomes = self.outcomes(timeout_s=timeout_s)
        for rank, outcome in enumerate(outcomes):
            if outcome.error or outcome.exit_code:
                raise AssertionError(f"rank {rank} failed (exit code {outcome.exit_code}):\n{outcome.error}")
        return [outcome.value for outcome in outcomes]

    def _outcome(self, rank: int, deadline: float) -> RankOutcome:
        connection = self._connections[rank]
        if not connection.poll(max(0.0, deadline - time.monotonic())):
            raise TimeoutError(f"rank {rank} has not ended in time; its threads:\n{self._dump_stacks(rank)}")
        try:
            return connection.recv()
        except EOFError:
            self._processes[rank].join()
            return RankOutcome(exit_code=self._processes[rank].exitcode)

    def _dump_stacks(self, rank: int) -> str:
        """Return the stacks of all threads of a rank; empty for one that is stopped or has not started."""
        path, deadline = self._stacks_path(rank), time.monotonic() + _STACKS_TIMEOUT_S
        if not path.exists():
            return "it has not begun"
        with contextlib.suppress(ProcessLookupError):
            self.signal(rank, signal.SIGUSR1)
        while not path.stat().st_size and time.monotonic() < deadline:
            time.sleep(0.1)
        return path.read_text()

    def _stacks_path(self, rank: int) -> Path:
        return Path(self._folder.name) / f"stacks-{rank}"


def run_ranks(
    function: Callable[..., Any], num_ranks: int, *args: Any, wait_s: float = 300.0, **settings: Any
) -> list[Any]:
    """Return the value of `function(*args)` on each of `num_ranks` ranks, within `wait_s`; settings as in `Ranks`."""
    with Ranks(function, num_ranks, *args, **settings) as ranks:
        return ranks.values(timeout_s=wait_s)


def announce(milestone: str, value: str = "1") -> None:
    """Set a milestone for the test, which waits with `Ranks.wait_for(f"{milestone}/{rank}")`. Called in a rank.

    The test finds `value` under that key of `Ranks.store`.
    """
    from torch.distributed import TCPStore

    TCPStore("127.0.0.1", int(os.environ[_STORE_PORT_VARIABLE]), is_master=False).set(
        f"{milestone}/{os.environ['RANK']}", value
    )


def _wait_for_all_ranks(store: Any, num_ranks: int) -> None:
    """Wait until the group exists on all ranks, so that a rank killed later is a full member."""
    if store.add("ranks/formed", 1) == num_ranks:
        store.set("ranks/all-formed", "1")
    store.wait(["ranks/all-formed"])


def _rank_main(connection: Connection, setting: tuple, function: Callable[..., Any], args: tuple) -> None:
    gc.freeze()  # a collection would write to all that the fork server has imported, and so copy it: 0.3 s
    multiprocessing.set_start_method(None, force=True)  # Python's default: workers of a DataLoader import nothing anew
    import torch
    import torch.distributed as dist

    rank, num_ranks, backend, timeout_s, variables, stacks = setting
    faulthandler.register(signal.SIGUSR1, file=stacks.open("w"), all_threads=True)
    os.environ.update(variables)
    torch.set_num_threads(1)
    started = time.monotonic()
    try:
        store = dist.TCPStore("127.0.0.1", int(os.environ[_STORE_PORT_VARIABLE]), is_master=False)
        limit = timedelta(seconds=timeout_s)
        dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=limit)
        _wait_for_all_ranks(store, num_ranks)
        started = time.monotonic()
        value = function(*args)
        seconds = time.monotonic() - started
        dist.destroy_process_group()
        outcome = RankOutcome(value=value, seconds=seconds)
    except BaseException:
        outcome = RankOutcome(error=traceback.format_exc(), seconds=time.monotonic() - started)
    connection.send(outcome)
    connection.close()
