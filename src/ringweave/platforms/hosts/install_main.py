"""Installer of ringweave on a host: its text is sent over ssh to a Python there, so it imports nothing else.

It reads one line of JSON (`InstallRequest`) from standard input, and the wheel once it has asked for it. It writes
lines that begin with `OUTPUT_MARK`: each step, then the outcome. It ends, with what it runs, when its input ends.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

OUTPUT_MARK = "ringweave-install "
MARKER = "ringweave-installed.json"
"""File in the virtual environment, written last; without it the installation was interrupted."""
ROOT = ".local/share/ringweave"
"""Folder of the virtual environments below the home folder."""
_NO_NETWORK = re.compile(
    r"ConnectionError|NewConnectionError|Failed to establish|[Nn]ame resolution|Name or service not known"
    r"|Network is unreachable|ProxyError|ConnectTimeout|Connection refused|SSLError|Read timed out"
)
_NO_MATCH = re.compile(r"No matching distribution found for ([^\s(]+)")
_NO_VENV_FIX = "Install it there (Debian: apt install python3-venv), or name another interpreter with --python PATH"
_FULL = re.compile(r"No space left on device|Disk quota exceeded")


@dataclass(frozen=True, kw_only=True, slots=True)
class InstallRequest:
    """Wheel to install, and what has to be beside it."""

    version: str
    wheel: str
    digest: str
    """SHA-256 of the wheel in hexadecimal digits."""
    size: int
    """Bytes of the wheel."""
    torch: str
    """Version of torch to install where none can be imported; empty: the newest."""


class InstallError(Exception):
    """Reason why the installation ends, in the parts of an error's text."""

    def __init__(self, what: str, got: str, expected: str, do: str) -> None:
        super().__init__(f"{what}: {got}")
        self.parts = {"what": what, "got": got, "expected": expected, "do": do}


class Installer:
    """Installation of one version for this user of this host."""

    def __init__(self, request: InstallRequest, root: Path) -> None:
        self._request, self._root = request, root
        self.venv = root / f"venv-{request.version}"
        self._lock = -1

    def install(self) -> bool:
        """Install the wheel unless that is done; return whether something had to be done.

        Raises:
            InstallError: It cannot be installed.
            OSError: A file cannot be written.
        """
        self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._take_lock()
        found = self._installed_digest()
        if found == self._request.digest:
            return False
        self._check_unused()
        marker = self.venv / MARKER
        marker.unlink(missing_ok=True)
        if found is None:
            self._make_venv()
        self._install_wheel()
        self._install_torch()
        self._check_import("ringweave.platforms.hosts.remote_main", "ringweave")
        marker.write_text(json.dumps({"digest": self._request.digest}) + "\n", encoding="utf-8")
        return True

    @property
    def _python(self) -> str:
        return str(self.venv / "bin/python")

    def _take_lock(self) -> None:
        """Hold the lock until this process and the programs that it runs have ended."""
        self._lock = os.open(f"{self.venv}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(step="waiting for another installation there")
            fcntl.flock(self._lock, fcntl.LOCK_EX)

    def _installed_digest(self) -> str | None:
        """Return the digest of the installed wheel; None if there is no whole installation."""
        try:
            content = json.loads((self.venv / MARKER).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return str(content.get("digest")) if os.access(self._python, os.X_OK) else None

    def _check_unused(self) -> None:
        """Refuse to change an environment in which a run goes on."""
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                program = path.read_bytes().partition(b"\0")[0]
            except OSError:
                continue
            if program.startswith(os.fsencode(self.venv) + b"/"):
                raise InstallError(
                    f"environment {self.venv}",
                    f"used by process {path.parent.name}",
                    "none while another ringweave of the same version goes there",
                    "Wait for the run that uses it, or stop it: ringweave jobs --on hosts",
                )

    def _make_venv(self) -> None:
        report(step=f"making {self.venv} with {sys.executable}")
        shutil.rmtree(self.venv, ignore_errors=True)
        code, output = self._run(
            [sys.executable, "-I", "-m", "venv", "--system-site-packages", "--without-pip", str(self.venv)]
        )
        if code != 0:
            raise find_cause("virtual environment", output, self.venv)
        if sys.prefix != sys.base_prefix:  # packages of an environment are as visible as those of the system
            variables = {"base": str(self.venv), "platbase": str(self.venv)}
            target = Path(sysconfig.get_path("purelib", "venv", vars=variables)) / "ringweave-base.pth"
            target.write_text("".join(f"{each}\n" for each in package_folders()), encoding="utf-8")
        self._ensure_pip()

    def _ensure_pip(self) -> None:
        if self._run([self._python, "-P", "-m", "pip", "--version"])[0] == 0:
            return
        code, output = self._run([self._python, "-P", "-m", "ensurepip"])
        if code != 0:
            got = f"neither pip nor ensurepip: {last_line(output)}"
            raise InstallError(f"pip of {sys.executable}", got, "one of them", _NO_VENV_FIX)

    def _install_wheel(self) -> None:
        report(step=f"installing ringweave {self._request.version} and what it needs")
        path = self.venv / self._request.wheel
        path.write_bytes(receive_wheel(self._request))
        self._pip(["--no-deps", "--force-reinstall", str(path)])
        self._pip([f"ringweave=={self._request.version}"])  # it is there: installs what it needs
        path.unlink()

    def _install_torch(self) -> None:
        if self._run([self._python, "-P", "-c", "import torch"])[0] == 0:
            return
        version = self._request.torch
        wanted = f"torch=={version}" if version else "torch"
        report(step=f"installing {wanted}; this can take minutes")
        label = version.partition("+")[2]
        index = ["--extra-index-url", f"https://download.pytorch.org/whl/{label}"] if label else []
        self._pip([*index, wanted])
        self._check_import("torch", "torch")

    def _pip(self, words: Sequence[str]) -> None:
        options = ["--disable-pip-version-check", "--no-input", "--retries", "2"]
        code, output = self._run([self._python, "-P", "-m", "pip", *options, "install", "--progress-bar=off", *words])
        if code != 0:
            raise find_cause(f"pip install {words[-1].rpartition('/')[2]}", output, self.venv)

    def _check_import(self, module: str, name: str) -> None:
        code, output = self._run([self._python, "-P", "-c", f"import {module}"])
        if code != 0:
            do = f"See it there: {self._python} -c 'import {module}'"
            raise InstallError(f"installed {name}", last_line(output), "one that can be imported", do)

    def _run(self, argv: Sequence[str]) -> tuple[int, str]:
        """Run a program to its end; kill it and exit if the connection ends before."""
        pieces: list[bytes] = []
        with subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=self._root,
            pass_fds=(self._lock,),
            start_new_session=True,
        ) as child:
            assert child.stdout is not None
            with selectors.DefaultSelector() as selector:
                selector.register(child.stdout, selectors.EVENT_READ)
                selector.register(sys.stdin.buffer, selectors.EVENT_READ)
                while True:
                    ready = {key.fileobj for key, _ in selector.select()}
                    if sys.stdin.buffer in ready:  # nothing is sent now, so it is the end
                        os.killpg(child.pid, signal.SIGKILL)
                        raise SystemExit(1)
                    received = os.read(child.stdout.fileno(), 1 << 16)
                    if not received:
                        break
                    pieces.append(received)
            return child.wait(), b"".join(pieces).decode(errors="replace")


def package_folders() -> list[str]:
    """Return the folders of installed packages of this interpreter, without the standard library."""
    standard = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    standard |= {f"{folder}/lib-dynload" for folder in standard}
    return [folder for folder in sys.path if Path(folder).is_dir() and folder not in standard]


def receive_wheel(request: InstallRequest) -> bytes:
    """Ask for the wheel, and return it.

    Raises:
        InstallError: Other bytes have arrived.
    """
    report(send=True)
    content = sys.stdin.buffer.read(request.size)
    if hashlib.sha256(content).hexdigest() != request.digest:
        raise InstallError("wheel", f"{len(content)} bytes of other content", "the sent one", "Repeat the command")
    return content


def find_cause(what: str, output: str, venv: Path) -> InstallError:
    """Return the error of a program that failed, by what it has printed."""
    missing = _NO_MATCH.search(output)
    if _FULL.search(output):
        return disk_error(venv)
    named = what if missing is None else f"pip install {missing[1]}"
    if _NO_NETWORK.search(output):
        do = (
            "Give it access to one (pip config set global.index-url URL), or a folder of wheels: pip config set "
            "global.find-links FOLDER; pip config set global.no-index true"
        )
        return InstallError(named, "no connection to the package index", "one", do)
    if missing is not None:
        do = "Add it to the package index of that host, or choose an interpreter that it is made for: --python PATH"
        return InstallError(named, "no such package in the index", "one", do)
    if "No module named venv" in output:
        return InstallError(f"module venv of {sys.executable}", "none", "one", _NO_VENV_FIX)
    return InstallError(what, last_line(output), "success", f"Try it there: {venv}/bin/python -m pip")


def disk_error(folder: Path) -> InstallError:
    """Return the problem of a disk without space."""
    do = f"Free space there: df -h {folder.parent}; pip cache purge"
    return InstallError(f"disk of {folder}", "full", "room for the packages", do)


def last_line(output: str) -> str:
    """Return the last line that says an error, or else the last one."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["no output"])[-1]


def report(**fields: object) -> None:
    """Write one line for the command at the other end."""
    print(OUTPUT_MARK + json.dumps(fields), flush=True)


_MAX_REQUEST_BYTES = 2**20
"""Longest request, which names files and versions."""


def main() -> None:
    """Install what the request on standard input says."""
    request = InstallRequest(**json.loads(sys.stdin.buffer.readline(_MAX_REQUEST_BYTES)))
    installer = Installer(request, Path.home() / ROOT)
    try:
        is_new = installer.install()
    except InstallError as problem:
        report(problem=problem.parts)
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        where = InstallError(str(error.filename), str(error.strerror), "a folder to write in", "Make it writable")
        report(problem=(disk_error(installer.venv) if is_full else where).parts)
    else:
        report(venv=str(installer.venv), is_new=is_new)


if __name__ == "__main__":
    main()
