"""Installation on hosts: the wheel, the dialogue with a real installer, and its errors."""

import csv
import hashlib
import importlib.metadata
import io
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ringweave import __version__
from ringweave.cli.main import main
from ringweave.errors import LaunchError
from ringweave.platforms.hosts import install, install_main
from ringweave.platforms.hosts.host_list import parse_hosts
from ringweave.platforms.hosts.run_entry import HostsOptions
from ringweave.platforms.hosts.ssh import HostConnections, HostError
from tests.fakes.ssh_program import SshHosts, use_ssh_hosts

BASE_PYTHON = str(Path(sys.executable).resolve())
VENV = Path(install_main.ROOT) / f"venv-{__version__}"


@pytest.fixture
def ssh_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SshHosts:
    return use_ssh_hosts(tmp_path, monkeypatch)


def install_error(hosts: str, python: str | None = None) -> str:
    with pytest.raises(HostError, match="host") as caught:
        install.install_on_hosts(parse_hosts(hosts).hosts, python, print)
    return str(caught.value)


def test_the_wheel_has_all_files_of_the_package_and_a_record_of_each() -> None:
    wheel = install.installed_wheel()
    assert wheel.name == f"ringweave-{__version__}-py3-none-any.whl"
    assert wheel.digest == install.installed_wheel().digest
    package = Path(install.__file__).parents[2]
    expected = {path.relative_to(package.parent).as_posix() for path in package.rglob("*.py")}
    with zipfile.ZipFile(io.BytesIO(wheel.content)) as archive:
        names = set(archive.namelist())
        folder = f"ringweave-{__version__}.dist-info"
        assert names >= expected | {"ringweave/py.typed"} | {f"{folder}/{name}" for name in ("METADATA", "WHEEL")}
        assert not {name for name in names if "__pycache__" in name or "direct_url" in name}
        assert "ringweave.cli.main:main" in archive.read(f"{folder}/entry_points.txt").decode()
        rows = list(csv.reader(archive.read(f"{folder}/RECORD").decode().splitlines()))
        assert {row[0] for row in rows} == names
        assert all(int(size) == len(archive.read(path)) for path, _, size in rows if size)


def test_a_ringweave_that_is_not_installed_cannot_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> importlib.metadata.Distribution:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", find)
    with pytest.raises(
        LaunchError, match=r"^ringweave: 'a folder, /.*', expected an installed one to send\. Install it"
    ):
        install.installed_wheel()


@pytest.mark.slow
def test_an_installation_that_was_interrupted_is_redone_and_found_again(ssh_hosts: SshHosts) -> None:
    home = ssh_hosts.add("a", {"PIP_NO_INDEX": "1"})
    (home / VENV / "half").mkdir(parents=True)
    hosts, steps = parse_hosts("a:2").hosts, []
    options = install.install_on_hosts(hosts, None, steps.append)
    assert options == HostsOptions(installed=str(VENV / "bin/python"))
    assert [step.partition(" with ")[0] for step in steps] == [
        f"host a: making {home / VENV}",
        f"host a: installing ringweave {__version__} and what it needs",
        f"host a: ringweave {__version__} is in {home / VENV}",
    ]
    assert (home / VENV / "lib").is_dir()
    assert not (home / VENV / "half").exists()
    with HostConnections(hosts, options) as connections:
        assert connections.open[0].hello["executable"] == str(home / VENV / "bin/python")
    python = home / VENV / "bin/python"
    where = subprocess.run(
        [python, "-P", "-c", "import ringweave; print(ringweave.__file__)"], capture_output=True, text=True, check=True
    )
    assert Path(where.stdout.strip()).is_relative_to(home / VENV)

    install.install_on_hosts(hosts, None, steps.append)
    assert len(steps) == 3

    with subprocess.Popen([python, "-c", "input()"], stdin=subprocess.PIPE) as user:
        (home / VENV / install_main.MARKER).write_text(json.dumps({"digest": "of another wheel"}), encoding="utf-8")
        assert f"used by process {user.pid}', expected none while another ringweave" in install_error("a")


@pytest.mark.slow
def test_no_way_to_the_package_index_is_named(ssh_hosts: SshHosts) -> None:
    ssh_hosts.add("a", {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_CONFIG_FILE": "/dev/null"})
    text = install_error("a", BASE_PYTHON)
    assert text.startswith("pip install "), text
    assert " on host a: 'no connection to the package index', expected one. Give it access to one" in text
    assert text.endswith("[--install]")


def test_a_host_without_pip_python_or_a_writable_home_is_named_with_the_mend(ssh_hosts: SshHosts) -> None:
    broken = ssh_hosts.add("nopip")
    for name in ("pip", "ensurepip"):
        (broken / f"{name}.py").write_text(f"raise ImportError('no {name}')\n", encoding="utf-8")
    with (broken / ".environment").open("a", encoding="utf-8") as file:
        file.write(f"export PYTHONPATH={broken}\n")
    closed = ssh_hosts.add("closed")
    (closed / ".local").write_text("a file", encoding="utf-8")
    lines = install_error("nopip,closed,gone").splitlines()
    assert lines[0].startswith("pip of ")
    assert (
        "on host nopip: 'neither pip nor ensurepip: ImportError: no ensurepip', expected one of them. Inst" in lines[0]
    )
    assert "/closed/.local" in lines[1]
    assert "on host closed: 'Not a directory', expected a folder to write in. Make it writable. [--install]" in lines[1]
    assert "host gone: 'a name that cannot be resolved'" in lines[2]
    ssh_hosts.add("nopython")
    assert install_error("nopython", "/nowhere/python").startswith(
        "Python of host nopython: '/nowhere/python is none', expected version 3.11 or newer. Install one there"
    )


@pytest.mark.parametrize(
    ("output", "text", "do"),
    [
        ("ERROR: Could not install: [Errno 28] No space left on device", "disk of /v: full", "Free space there: df"),
        ("x\nERROR: No matching distribution found for torch==2.13.0", "pip install torch==2.13.0: no such", "Add it"),
        ("python: No module named venv", f"module venv of {sys.executable}: none", "Install it there (Debian"),
        ("ERROR: bad\nlast", "pip install x: ERROR: bad", "Try it there: /v/bin/python -m pip"),
    ],
)
def test_the_cause_is_read_from_what_pip_prints(output: str, text: str, do: str) -> None:
    error = install_main.find_cause("pip install x", output, Path("/v"))
    assert str(error).startswith(text)
    assert error.parts["do"].startswith(do)


def test_another_wheel_than_the_announced_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    request = install_main.InstallRequest(
        version="1", wheel="w", digest=hashlib.sha256(b"right").hexdigest(), size=5, torch=""
    )
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"wrong")))
    with pytest.raises(install_main.InstallError) as caught:
        install_main.receive_wheel(request)
    assert str(caught.value) == "wheel: 5 bytes of other content"


def test_an_installation_needs_hosts(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--install", __file__])
    text = "--install: 'no --hosts', expected a run on hosts. Add --hosts, or leave it out."
    assert text in capfd.readouterr().err
