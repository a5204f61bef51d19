"""Hosts for tests: folders of this machine, reached by a program called ssh that runs the command in them."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import psutil
import pytest

from ringweave.cli.main import run_command_line
from tests import polling

SSH = """#!/bin/sh
while [ "$1" != "--" ]; do shift; done
destination=$2; shift 2
if [ -e "$HOSTS_ROOT/$destination.refuses" ]; then cat "$HOSTS_ROOT/$destination.refuses" >&2; exit 255; fi
[ -d "$HOSTS_ROOT/$destination" ] || { echo "ssh: Could not resolve hostname $destination" >&2; exit 255; }
export HOME="$HOSTS_ROOT/$destination"
export XDG_STATE_HOME="$HOME/state" XDG_CACHE_HOME="$HOME/cache" XDG_CONFIG_HOME="$HOME/config"
export SSH_CONNECTION="127.0.0.1 1 $(cat "$HOME/address") 22"
cd "$HOME" && exec sh -c "$*"
"""


@dataclass
class FakeHosts:
    """Hosts `a`, `b`, ... in folders, each with a loopback address of its own."""

    root: Path
    names: tuple[str, ...]
    commands: list[subprocess.Popen[str]] = field(default_factory=list)
    namespace: tuple[str, ...] = ()
    """Words before each command that enter a network namespace; empty for this machine's network."""

    def home(self, name: str) -> Path:
        return self.root / name

    def environ(self, host: str | None = None) -> dict[str, str]:
        """Environment of a user of the machine with the command, or of a host."""
        home = self.home(host) if host else self.root / "user"
        home.mkdir(exist_ok=True)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "RINGWEAVE_"))}
        return {
            **kept,
            "HOME": str(home),
            "XDG_STATE_HOME": str(home / "state"),
            "XDG_CACHE_HOME": str(home / "cache"),
            "XDG_CONFIG_HOME": str(home / "config"),
            "HOSTS_ROOT": str(self.root),
            "PATH": f"{self.root / 'bin'}:{os.environ['PATH']}",
        }

    def write_script(self, text: str, name: str = "train.py") -> Path:
        """Write a script into the project folder of the user."""
        folder = self.root / "user" / "project"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
        return folder

    def start(self, *words: str, host: str | None = None) -> "subprocess.Popen[str]":
        """Start `ringweave WORDS` in the project folder, or on a host."""
        command = subprocess.Popen(
            [*self.namespace, sys.executable, "-P", "-m", "ringweave", *words],
            cwd=self.home(host) if host else self.root / "user" / "project",
            env=self.environ(host),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.commands.append(command)
        return command

    def run(self, *words: str, host: str | None = None, timeout_s: float = 300.0) -> "subprocess.CompletedProcess[str]":
        """Run `ringweave WORDS` to its end."""
        command = self.start(*words, host=host)
        out, errors = command.communicate(timeout=timeout_s)
        return subprocess.CompletedProcess(words, command.returncode, out, errors)

    def ask(self, *words: str, host: str | None = None) -> "subprocess.CompletedProcess[str]":
        """Run a verb on runs in this process, where all that it imports is there already."""
        out, errors = io.StringIO(), io.StringIO()
        cwd = self.home(host) if host else self.root / "user" / "project"
        with (
            mock.patch.dict(os.environ, self.environ(host), clear=True),
            contextlib.chdir(cwd),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(errors),
        ):
            code = run_command_line(list(words))
        return subprocess.CompletedProcess(words, code, out.getvalue(), errors.getvalue())

    def processes(self, host: str) -> list[psutil.Process]:
        """Processes of runs on a host."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if any(str(self.home(host)) in word for word in process.cmdline()):
                    found.append(process)
        return found

    def kill(self, host: str, module: str) -> None:
        """Kill the processes of a host that run this module."""
        for process in self.processes(host):
            with contextlib.suppress(psutil.Error):
                if module in process.cmdline():
                    process.kill()

    def run_files(self, host: str) -> list[Path]:
        """Files of runs on a host."""
        return [path for path in (self.home(host) / "state").glob("ringweave/hosts-*/**/*") if path.is_file()]

    def wait(self, condition: Callable[[], object], what: str, timeout_s: float = 300.0) -> None:
        """Wait until the condition holds."""
        polling.wait_until(condition, what, timeout_s, 0.05)

    def wait_state(self, state: str) -> None:
        """Wait until a host has saved that state of its run; to ask again and again would start a process each time."""

        def has_come() -> bool:
            for path in [path for name in self.names for path in self.run_files(name) if path.name == "entry.json"]:
                with contextlib.suppress(FileNotFoundError):  # the run is removed
                    if json.loads(path.read_text())["job"]["record"]["state"] == state:
                        return True
            return False

        self.wait(has_come, state)

    def end(self) -> None:
        """Kill everything that is left."""
        for command in self.commands:
            if command.poll() is None:
                os.killpg(command.pid, signal.SIGKILL)
            command.communicate()
        while left := [process for process in psutil.process_iter() if self._is_of_a_host(process)]:
            for process in left:  # agents start services again, also those of hosts that have joined
                with contextlib.suppress(psutil.Error):
                    process.kill()

    def _is_of_a_host(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):
            is_here = any(str(self.root) in word for word in process.cmdline())
            return is_here and process.status() != psutil.STATUS_ZOMBIE and process.pid != os.getpid()
        return False


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[FakeHosts]:
    """Three hosts."""
    yield from make_hosts(tmp_path, {"a": "127.0.0.2", "b": "127.0.0.3", "c": "127.0.0.4"})


def make_hosts(root: Path, addresses: Mapping[str, str]) -> Iterator[FakeHosts]:
    """Hosts in folders below `root`, by name and address, until the test ends."""
    for name, address in addresses.items():
        (root / name).mkdir()
        (root / name / "address").write_text(address)
    (root / "bin").mkdir()
    ssh = root / "bin" / "ssh"
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    made = FakeHosts(root=root, names=tuple(addresses))
    try:
        yield made
    finally:
        made.end()


def make_hosts_in_namespace(root: Path, addresses: Mapping[str, str], networks: Sequence[str]) -> Iterator[FakeHosts]:
    """Hosts in a network namespace whose loopback interface has these addresses, beside 127.0.0.1; needs a lab."""
    name = f"ringweave-hosts-{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        inside = ("ip", "netns", "exec", name)
        subprocess.run([*inside, "ip", "link", "set", "lo", "up"], check=True)
        for network in networks:
            options = ["nodad"] if ":" in network else []
            subprocess.run([*inside, "ip", "address", "add", network, "dev", "lo", *options], check=True)
        for hosts in make_hosts(root, addresses):
            hosts.namespace = inside
            yield hosts
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)
