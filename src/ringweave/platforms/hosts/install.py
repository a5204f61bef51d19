"""Installation of this ringweave on hosts over ssh (`--install`): the wheel of this installation, by pip there."""

import base64
import contextlib
import hashlib
import importlib.metadata
import io
import json
import shlex
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ringweave
from ringweave import __version__
from ringweave.errors import LaunchError
from ringweave.files import file_io
from ringweave.launcher.run_dir import software_versions
from ringweave.platforms.hosts import install_main
from ringweave.platforms.hosts.host_list import HostSpec
from ringweave.platforms.hosts.install_main import OUTPUT_MARK, InstallRequest
from ringweave.platforms.hosts.run_entry import HostsOptions
from ringweave.platforms.hosts.ssh import NO_PYTHON_EXIT, HostError, open_ssh, ssh_error

INSTALLED_PYTHON = f"{install_main.ROOT}/venv-{__version__}/bin/python"
"""Interpreter that an installation makes, below the home folder of each host."""
PYTHON_NAMES = ("python3", "python3.14", "python3.13", "python3.12", "python3.11")
_METADATA_FILES = ("METADATA", "WHEEL", "entry_points.txt")
_ZIP_TIME = (1980, 1, 1, 0, 0, 0)
_LOADER = "import sys; exec(compile(sys.stdin.buffer.read({size}), 'ringweave-install', 'exec'))"
_IS_NEW_ENOUGH = "import sys; sys.exit(sys.version_info < (3, 11))"


@dataclass(frozen=True, kw_only=True, slots=True)
class Wheel:
    """A wheel in memory."""

    name: str
    content: bytes

    @property
    def digest(self) -> str:
        """SHA-256 of the content."""
        return hashlib.sha256(self.content).hexdigest()


def installed_wheel() -> Wheel:
    """Return the wheel of the ringweave that this process runs, also of an editable installation.

    The same files give the same bytes.

    Raises:
        LaunchError: It runs from a folder, without being installed.
    """
    try:
        distribution = importlib.metadata.distribution("ringweave")
    except importlib.metadata.PackageNotFoundError as error:
        do = "Install it: pip install ringweave (in a clone: make setup)"
        got = f"a folder, {Path(ringweave.__file__).parent}"
        raise LaunchError("ringweave", got=got, expected="an installed one to send", do=do) from error
    folder = f"ringweave-{distribution.version}.dist-info"
    files = {**_package_files(Path(ringweave.__file__).parent), **_metadata_files(distribution, folder)}
    rows = [f"{path},sha256={_digest_text(content)},{len(content)}" for path, content in files.items()]
    record = "\n".join([*rows, f"{folder}/RECORD,,", ""]).encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in {**files, f"{folder}/RECORD": record}.items():
            entry = zipfile.ZipInfo(path, _ZIP_TIME)
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(entry, content)
    return Wheel(name=f"ringweave-{distribution.version}-py3-none-any.whl", content=buffer.getvalue())


def _package_files(package: Path) -> dict[str, bytes]:
    paths = sorted(path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(package.parent).as_posix(): path.read_bytes() for path in paths}


def _metadata_files(distribution: importlib.metadata.Distribution, folder: str) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for file in sorted(distribution.files or (), key=str):
        inner = file.parts[1:] if file.parts[0].endswith(".dist-info") else ()
        if inner and (inner[0] == "licenses" or inner in [(name,) for name in _METADATA_FILES]):
            found["/".join((folder, *inner))] = file.read_binary()
    return found


def _digest_text(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def install_command(python: str | None, program_size: int) -> str:
    """Return the command for the remote shell that runs the program of this size from its standard input.

    Args:
        python: Interpreter that the user names; None: the first of the same path as here and usual names.
        program_size: Bytes.
    """
    tried = shlex.join([python] if python is not None else [sys.executable, *PYTHON_NAMES])
    loader = shlex.quote(_LOADER.format(size=program_size))
    script = (
        f'for n in {tried}; do p=$(command -v "$n" 2>/dev/null) || continue; '
        f'"$p" -I -c {shlex.quote(_IS_NEW_ENOUGH)} 2>/dev/null && exec "$p" -I -u -c {loader}; '
        f"done; exit {NO_PYTHON_EXIT}"
    )
    return f"sh -c {shlex.quote(script)}"


def install_on_hosts(hosts: Sequence[HostSpec], python: str | None, notify: Callable[[str], object]) -> HostsOptions:
    """Install this ringweave, and torch where there is none, on all hosts at the same time; return how to run it.

    `python`: interpreter on the hosts that makes the virtual environment; None: one that is found.

    Raises:
        HostError: It cannot be installed on some hosts; the text has one line for each.
        LaunchError: This ringweave is not installed itself.
    """
    wheel = installed_wheel()
    dialogues = [InstallDialogue(host, wheel, python, notify) for host in hosts]
    pool = ThreadPoolExecutor(max_workers=max(1, min(64, len(hosts))))
    try:
        errors = [each for each in pool.map(InstallDialogue.run, dialogues) if each is not None]
    finally:  # an interrupt does not wait for pip
        for dialogue in dialogues:
            dialogue.end()
        pool.shutdown()
    if errors:
        raise HostError("\n".join(str(error) for error in errors))
    return HostsOptions(installed=INSTALLED_PYTHON)


class InstallDialogue:
    """Dialogue with the installer on one host."""

    def __init__(self, host: HostSpec, wheel: Wheel, python: str | None, notify: Callable[[str], object]) -> None:
        self._host, self._wheel, self._python, self._notify = host, wheel, python, notify
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ended = False

    def run(self) -> HostError | None:
        """Install on the host; return the error if that fails."""
        program = Path(install_main.__file__).read_bytes()
        try:
            self._process = open_ssh(self._host, install_command(self._python, len(program)))
        except HostError as error:
            return error
        if self._is_ended:
            self.end()
        try:
            return self._talk(self._process, program)
        finally:
            self.end()
            for pipe in (self._process.stdin, self._process.stdout):
                with contextlib.suppress(OSError):
                    assert pipe is not None
                    pipe.close()

    def end(self) -> None:
        """End the connection; the installer on the host ends with it."""
        self._is_ended = True
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _talk(self, process: "subprocess.Popen[bytes]", program: bytes) -> HostError | None:
        errors: list[str] = []
        reader = threading.Thread(target=self._read_errors, args=(process, errors), daemon=True)
        reader.start()
        request = json.dumps(asdict(self._request())).encode() + b"\n"
        self._send(process, program + request)
        assert process.stdout is not None
        for line in process.stdout:
            _, mark, text = line.decode(errors="replace").partition(OUTPUT_MARK)
            answer: dict[str, Any] = file_io.parse_json(text) if mark else {}
            if "step" in answer:
                self._notify(f"host {self._host.node}: {answer['step']}")
            if "send" in answer:
                self._send(process, self._wheel.content)
            if "problem" in answer:
                return self._problem(answer["problem"])
            if "venv" in answer:
                if answer["is_new"]:
                    self._notify(f"host {self._host.node}: ringweave {__version__} is in {answer['venv']}")
                return None
        code = process.wait()
        reader.join(1.0)
        return self._no_python() if code == NO_PYTHON_EXIT else ssh_error(self._host, errors, code)

    def _request(self) -> InstallRequest:
        return InstallRequest(
            version=__version__,
            wheel=self._wheel.name,
            digest=self._wheel.digest,
            size=len(self._wheel.content),
            torch=software_versions()["torch"] or "",
        )

    def _send(self, process: "subprocess.Popen[bytes]", content: bytes) -> None:
        assert process.stdin is not None
        try:
            process.stdin.write(content)
            process.stdin.flush()
        except OSError:
            return  # the output ends then, and says why

    @staticmethod
    def _read_errors(process: "subprocess.Popen[bytes]", errors: list[str]) -> None:
        assert process.stderr is not None
        with process.stderr as lines:
            errors += [line.decode(errors="replace").rstrip() for line in lines]

    def _problem(self, parts: Mapping[str, str]) -> HostError:
        words = {key: parts[key] for key in ("got", "expected", "do")}
        return HostError(f"{parts['what']} on host {self._host.node}", where="--install", **words)

    def _no_python(self) -> HostError:
        got = f"{self._python} is none" if self._python else "none on its PATH"
        do = "Install one there (Debian: apt install python3 python3-venv), or name one with --python PATH"
        what = f"Python of host {self._host.node}"
        return HostError(what, got=got, expected="version 3.11 or newer", do=do, where="--install")
