"""The wheel holds the product alone: no bench, no fakes, no tests."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "cli",
    "comm",
    "cost",
    "files",
    "jobs",
    "lab",
    "launcher",
    "membership",
    "param_server",
    "pipeline",
    "planning",
    "platforms",
    "plots",
    "rpc",
    "schedules",
    "sim",
    "telemetry",
    "testing",
    "topology",
    "training",
}
MODULES = {"__init__.py", "__main__.py", "environment.py", "errors.py", "ports.py", "units.py", "py.typed"}
TEST_HELPERS = {"__init__.py", "clusters.py", "ranks.py"}


def wheel_files(project: Path, folder: Path) -> set[str]:
    """Build the wheel of a project; return the paths in it."""
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(project)], check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.mark.slow
def test_the_wheel_holds_the_packages_of_the_product_alone(tmp_path: Path) -> None:
    files = wheel_files(ROOT, tmp_path)
    top = {path.split("/")[0] for path in files}
    assert top == {"ringweave", "ringweave-0.1.0.dist-info"}
    inside = {path.split("/")[1] for path in files if path.startswith("ringweave/")}
    assert inside == PACKAGES | MODULES
    assert {path.split("/")[2] for path in files if path.startswith("ringweave/testing/")} == TEST_HELPERS
    assert "ringweave-0.1.0.dist-info/licenses/LICENSE" in files


@pytest.mark.slow
def test_the_bench_is_a_wheel_of_its_own_that_adds_its_verbs(tmp_path: Path) -> None:
    files = wheel_files(ROOT / "bench", tmp_path)
    assert {path.split("/")[0] for path in files} == {"ringweave_bench", "ringweave_bench-0.1.0.dist-info"}
    assert "ringweave_bench/programs/shifted.c" in files
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        entries = archive.read("ringweave_bench-0.1.0.dist-info/entry_points.txt").decode()
    assert "[ringweave.commands]\nbench = ringweave_bench.bench_command:command\n" in entries
