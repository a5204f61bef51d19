"""`ringweave doctor --listening`: what it says of a real run, beside the kernel's tables and the docs."""

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ringweave.cli import doctor
from ringweave.cli.main import run_command_line

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys, time
from pathlib import Path
import torch, torch.distributed as dist
dist.init_process_group()
dist.all_reduce(torch.ones(100_000))
dist.barrier()
folder = Path(sys.argv[1])
(folder / f"ready-{dist.get_rank()}").touch()
while not (folder / "go").exists():
    time.sleep(0.05)
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("encrypt", ["on", pytest.param("off", marks=pytest.mark.thorough)])
def test_every_port_of_a_run_is_listed_with_its_protection(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], encrypt: str
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, "-m", "ringweave", "run", "--workers", "1,1", "--encrypt", encrypt]
    command += ["--run-dir", str(tmp_path / "run"), str(tmp_path / "script.py"), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as run:
        try:
            until_s = time.monotonic() + 100
            while len(list(tmp_path.glob("ready-*"))) < 2 and time.monotonic() < until_s and run.poll() is None:
                time.sleep(0.05)
            assert run_command_line(["doctor", "--listening", str(tmp_path / "run"), "--json"]) == 0
            listed = json.loads(capsys.readouterr().out)
            kernel = {
                (process.pid, each.laddr.ip, each.laddr.port)
                for process in psutil.Process(run.pid).children(recursive=True)
                for each in process.net_connections("inet")
                if each.status == psutil.CONN_LISTEN
            }
        finally:
            (tmp_path / "go").touch()
            run.communicate(timeout=100)
    assert run.returncode == 0
    assert {(each["pid"], each["address"], each["port"]) for each in listed} == kernel
    assert {each["process"] for each in listed} == {"rank 0", "rank 1"}
    assert {each["protection"] for each in listed} == {doctor.LOOPBACK}, "nothing of a run on one machine is open"
    assert len(kernel) >= 7


@pytest.mark.parametrize(
    ("address", "is_secured", "expected"),
    [
        ("10.0.0.1", True, doctor.CERTIFICATES),
        ("0.0.0.0", False, doctor.PLAIN),
        ("::ffff:10.0.0.1", False, doctor.PLAIN),
        ("127.33.0.1", False, doctor.LOOPBACK),
        ("::ffff:127.0.0.1", True, doctor.LOOPBACK),
    ],
)
def test_a_port_is_protected_by_its_address_or_its_run(address: str, is_secured: bool, expected: str) -> None:
    assert doctor._protection(address, is_secured=is_secured) == expected


def test_docs_name_every_protection() -> None:
    page = (ROOT / "docs" / "reference" / "ports.md").read_text(encoding="utf-8")
    assert all(f"`{each}`" in page for each in (doctor.LOOPBACK, doctor.CERTIFICATES, doctor.PLAIN))


def test_a_folder_of_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["doctor", "--listening", str(tmp_path)]) == 2
    assert "expected a folder with events.jsonl. Give the folder that ringweave run named" in capsys.readouterr().err
