"""Launching: ranks on this machine or in a lab, with a limit, their output in one log. No torch here."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
DEVICE_PATH = "RINGWEAVE_DEVICE_PATH"


@dataclass(frozen=True, kw_only=True)
class LaunchOutcome:
    """End of a launched program."""

    document: dict[str, Any]
    """The JSON file that it wrote, even if it was ended; empty if there is none."""
    is_timed_out: bool
    exit_codes: list[int]
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """Return the document with the way it ended."""
        ended = {"timed_out": self.is_timed_out, "exit_codes": self.exit_codes, "wall_s": round(self.seconds, 1)}
        return self.document | {"ended": ended}


class ProgramLauncher:
    """Starts programs with a limit; everything they print goes to one log."""

    def __init__(self, work: Path, log: Path, device: str, *, is_short: bool) -> None:
        self.work, self.log, self.device, self.is_short = work, log, device, is_short
        self._count = 0

    def folder(self) -> Path:
        """Make a new folder for one program's files."""
        self._count += 1
        folder = self.work / f"run-{self._count}"
        folder.mkdir(parents=True)
        return folder

    def note(self, text: str) -> None:
        """Write a line to the log."""
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"\n=== {time.strftime('%H:%M:%S')} {text}\n")

    def command(
        self,
        argv: Sequence[str],
        limit_s: float,
        *,
        environ: Mapping[str, str] | None = None,
        result: Path | None = None,
    ) -> LaunchOutcome:
        """Run one command."""
        return self._run([(argv, environ or {})], limit_s, result)

    def program(self, script: str, words: Sequence[str], folder: Path) -> list[str]:
        """Return the command line of a program beside this file."""
        common = ["--device", self.device, "--result", str(folder / "result.json")]
        return [sys.executable, str(HERE / script), *words, *common, *(["--short"] if self.is_short else [])]

    def ranks(
        self,
        script: str,
        words: Sequence[str],
        num_ranks: int,
        limit_s: float,
        *,
        environ: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> LaunchOutcome:
        """Run a program as ranks of one machine, with the variables of torchrun."""
        folder = folder or self.folder()
        shared = {
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "RINGWEAVE_TUNING": "0",
            **(environ or {}),
        }
        argv = self.program(script, words, folder)
        commands = [(argv, shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(num_ranks)]
        return self._run(commands, limit_s, folder / "result.json")

    def in_lab(
        self, lab: str, script: str, words: Sequence[str], limit_s: float, *, order: str = "block"
    ) -> LaunchOutcome:
        """Run a program as ranks of a lab, one per device."""
        folder = self.folder()
        verb = [sys.executable, "-m", "ringweave", "lab", "run", "--lab", lab, "--run-dir", str(folder / "run")]
        argv = [*verb, "--no-tuning", "--order", order, *self.program(script, words, folder)[1:]]
        return self._run([(argv, {})], limit_s, folder / "result.json")

    def _run(
        self, commands: Sequence[tuple[Sequence[str], Mapping[str, str]]], limit_s: float, result: Path | None
    ) -> LaunchOutcome:
        self.note(f"{len(commands)} x {' '.join(map(str, commands[0][0]))[:400]} [limit {limit_s:.0f} s]")
        started_s = time.monotonic()
        with self.log.open("ab") as log:
            running = [
                subprocess.Popen(
                    list(argv),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, DEVICE_PATH: "bridge", **environ},
                    start_new_session=True,
                    cwd=ROOT,
                )
                for argv, environ in commands
            ]
            is_timed_out = not wait_all(running, started_s + limit_s)
        codes = [process.poll() for process in running]
        document = read_json(result) if result else {}
        self.note(f"exit codes {codes}{', timed out' if is_timed_out else ''}")
        return LaunchOutcome(
            document=document,
            is_timed_out=is_timed_out,
            exit_codes=[-99 if code is None else code for code in codes],
            seconds=time.monotonic() - started_s,
        )


def wait_all(running: Sequence["subprocess.Popen[bytes]"], deadline_s: float) -> bool:
    """Wait for all; end those that are left at the deadline, first politely. Return whether all ended by themselves."""
    for process in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline_s - time.monotonic()))
    left = [process for process in running if process.poll() is None]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        for process in left:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(3)
        left_now = [process for process in left if process.poll() is None]
        if not left_now:
            break
    return not left


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON file's document; empty if there is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def free_port() -> int:
    """Return a port outside the usual ephemeral range on which nobody listens."""
    while True:
        port = random.randint(20_000, 29_999)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def lab_up(cluster_file: Path, name: str) -> Iterator[str]:
    """Bring a cluster file up as a lab, and take it down again.

    Raises:
        RingweaveError: This machine cannot host it.
    """
    from ringweave import lab, topology

    lab.down(name)
    made = lab.up(topology.load(cluster_file), name, quotas="never")
    try:
        yield made.name
    finally:
        lab.down(name)
