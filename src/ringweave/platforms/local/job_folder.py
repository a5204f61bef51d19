"""Job folder on this machine: paths, locks and wake-up pipes.

```text
STATE/jobs.sqlite                             the registry
STATE/jobs/ID/                                one job; ID is its name and a random number
    bell                                      wakes the supervisor
    supervisor.lock, supervisor.log           held while it runs; its standard error
    config.json, rendezvous.json                    node names, counts, script; the last rendezvous result
    secrets/round-1/worker-0.1.json           credentials of incarnation 1 of a worker; gone when it starts
    groups/NODE.ATTEMPT/                      a worker group that exists (NODE: index in the request)
        alive                                 locked until no process of the group can run any more
        desired.json, status.json, bell        desired state, status, and the pipe that wakes the agent
        removing                              the group is to be removed when it has ended
    runs/NAME/ATTEMPT/agent.log               output of the agent; NAME: of the node
    runs/NAME/ATTEMPT/round-1/                run directory of a round: logs, events.jsonl, cluster.yaml, run.json
```
"""

import contextlib
import fcntl
import os
import select
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ringweave.files import file_io
from ringweave.files.file_io import PathBelow

if TYPE_CHECKING:
    from ringweave.platforms.agent.agent_channel import AgentStatus, DesiredState


class Wakeup:
    """Named pipe at which a process waits for a notification."""

    def __init__(self, path: Path) -> None:
        """Create the pipe if it does not exist.

        Raises:
            OSError: The pipe cannot be created.
        """
        with contextlib.suppress(FileExistsError):
            os.mkfifo(path, 0o600)
        # Open for writing too, so that the pipe never ends for us when its writers have gone.
        self._descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def wait(self, timeout_s: float) -> None:
        """Wait for a notification since the last wait, at most for this time."""
        if select.select([self._descriptor], [], [], max(0.0, timeout_s))[0]:
            with contextlib.suppress(BlockingIOError):
                os.read(self._descriptor, 4096)

    def close(self) -> None:
        os.close(self._descriptor)


def notify(path: Path) -> None:
    """Wake the process that waits at this path, if there is one."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.write(descriptor, b"!")
        finally:
            os.close(descriptor)


REGISTRY = "jobs.sqlite"


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupFolder:
    """Paths of an existing worker group."""

    root: Path
    node: int
    attempt: int

    alive_lock = PathBelow("alive")
    """File locked until no process of the group can run any more."""
    desired_state = PathBelow("desired.json")
    status = PathBelow("status.json")
    wakeup = PathBelow("wakeup")
    """Named pipe that wakes the group's agent."""
    removal_mark = PathBelow("removing")
    """File that exists if the group is to be removed when it has ended."""

    def read_state(self) -> "tuple[AgentStatus | None, DesiredState | None]":
        """Return the status and the desired state; None for a missing one."""
        from ringweave.platforms.agent import agent_channel  # commands that submit a job read no state

        status = desired = None
        with contextlib.suppress(FileNotFoundError):
            status = agent_channel.STATUS_JSON.parse(file_io.read_bounded(self.status))
        with contextlib.suppress(FileNotFoundError):
            desired = agent_channel.DESIRED_STATE_JSON.parse(file_io.read_bounded(self.desired_state))
        return status, desired


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFolder:
    """Paths of a job."""

    root: Path

    wakeup = PathBelow("wakeup")
    """Named pipe that wakes the supervisor."""
    supervisor_lock = PathBelow("supervisor.lock")
    """File locked by the supervisor."""
    supervisor_log = PathBelow("supervisor.log")
    """Standard error of the supervisor."""
    config = PathBelow("config.json")
    """File of the job config: node names, counts, script."""
    rendezvous = PathBelow("rendezvous.json")
    """File of the last rendezvous result."""
    secrets = PathBelow("secrets")
    """Credentials of workers that have not started yet, for a parameter server or an elastic job."""
    runs_folder = PathBelow("runs")
    """Folder with the run directories of all attempts."""

    def group(self, node: int, attempt: int) -> GroupFolder:
        return GroupFolder(root=self.root / "groups" / f"{node}.{attempt}", node=node, attempt=attempt)

    def groups(self) -> list[GroupFolder]:
        try:
            names = [entry.name.split(".") for entry in (self.root / "groups").iterdir()]
        except FileNotFoundError:
            return []
        keys = [(int(words[0]), int(words[1])) for words in names if len(words) == 2 and all(map(str.isdigit, words))]
        return [self.group(node, attempt) for node, attempt in sorted(keys)]

    def runs(self, node_name: str, attempt: int) -> Path:
        return self.runs_folder / node_name / str(attempt)


def job_folder(state: Path, job_id: str) -> JobFolder:
    """Return the folder of a job."""
    return JobFolder(root=state / "jobs" / job_id)


INHERITED_LOCK = 3
"""Descriptor by which a spawned process holds its lock."""


def try_lock_file(path: Path) -> int | None:
    """Return a descriptor that locks the file, to be closed or passed on; None if another process holds the lock.

    Raises:
        OSError: The file cannot be created.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def is_lock_held(path: Path) -> bool:
    """Return whether a process holds the lock; False also if there is no such file."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def spawn_locked(argv: Sequence[str], environ: Mapping[str, str], *, lock: int, log: Path) -> int:
    """Start a process that outlives this one and its terminal, and holds the lock; return its process id.

    Args:
        argv: Command line, the program's full path first.
        environ: Its environment.
        lock: Descriptor of the lock; stays open here. The process has it as `INHERITED_LOCK`.
        log: Gets its standard error, at the end; its standard output goes nowhere.

    Raises:
        OSError: The process cannot be started.
    """
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
        (os.POSIX_SPAWN_OPEN, 2, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
        (os.POSIX_SPAWN_DUP2, lock, INHERITED_LOCK),
    ]
    return os.posix_spawn(argv[0], list(argv), dict(environ), file_actions=actions, setsid=True)


def reap_pids(pids: Sequence[int]) -> list[int]:
    """Reap ended children; return the ones that still run."""
    running = []
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG) == (0, 0):
                running.append(pid)
    return running


@contextlib.contextmanager
def lock_file(path: Path) -> Iterator[None]:
    """Hold the lock for the length of a block; waits for its present holder.

    Raises:
        OSError: The file cannot be created.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def lock_holders(path: Path) -> Sequence[int]:
    """Return the processes of this machine that have the lock's file open, as far as this user may see them."""
    wanted, found = os.path.realpath(path), []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and any(str(each.readlink()) == wanted for each in (entry / "fd").iterdir()):
                found.append(int(entry.name))
    return found
