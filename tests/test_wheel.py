"""The wheel holds the product alone: no bench, no fakes, no tests."""

import json
import os
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Sequence
from email import message_from_string
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

import ringweave
from ringweave.page.html_report import PAGE, STATIC_FILES
from ringweave.planning import loss_table

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "cli",
    "comm",
    "cost",
    "files",
    "integrations",
    "jobs",
    "lab",
    "launcher",
    "membership",
    "page",
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
MODULES = {
    "__init__.py",
    "__main__.py",
    "accept_limits.py",
    "environment.py",
    "errors.py",
    "http_servers.py",
    "ports.py",
    "relayed_address.py",
    "units.py",
    "py.typed",
}
TEST_HELPERS = {"__init__.py", "clusters.py", "ranks.py"}


def wheel_files(project: Path, folder: Path) -> set[str]:
    """Build the wheel of a project; return the paths in it."""
    (wheel,) = WheelBuilder(str(project)).build(directory=str(folder), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    wheel_files(ROOT, folder)
    (path,) = folder.glob("*.whl")
    return path


@pytest.mark.slow
def test_the_wheel_holds_the_packages_of_the_product_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        files = set(archive.namelist())
    top = {path.split("/")[0] for path in files}
    assert top == {"ringweave", "ringweave-0.1.0.dist-info"}
    inside = {path.split("/")[1] for path in files if path.startswith("ringweave/")}
    assert inside == PACKAGES | MODULES
    assert {path.split("/")[2] for path in files if path.startswith("ringweave/testing/")} == TEST_HELPERS
    assert "ringweave-0.1.0.dist-info/licenses/LICENSE" in files
    static = {path.removeprefix("ringweave/page/static/") for path in files if "/static/" in path}
    assert f"ringweave/planning/{loss_table.FILE}" in files
    assert static == {PAGE, *STATIC_FILES, "uPlot.LICENSE"}


@pytest.mark.slow
def test_the_metadata_are_what_an_index_shows(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        metadata = message_from_string(archive.read("ringweave-0.1.0.dist-info/METADATA").decode())
    assert (metadata["License-Expression"], metadata["License-File"]) == ("Apache-2.0", "LICENSE")
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Summary"] in (ROOT / "README.md").read_text()
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert str(metadata.get_payload()).strip() == (ROOT / "README.md").read_text().strip()
    classifiers = set(metadata.get_all("Classifier", []))
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)} <= classifiers
    assert not any(each.startswith("License ::") for each in classifiers)  # PEP 639: the expression says it
    required = metadata.get_all("Requires-Dist", [])
    assert [each for each in required if each.startswith("torch")] == ["torch>=2.11; extra == 'train'"]


def test_one_version_in_all_files() -> None:
    project, bench = (tomllib.loads((ROOT / name).read_text()) for name in ("pyproject.toml", "bench/pyproject.toml"))
    version = ringweave.__version__
    assert (project["project"]["version"], bench["project"]["version"]) == (version, version)
    assert bench["project"]["dependencies"] == [f"ringweave=={version}"]
    assert project["project"]["optional-dependencies"]["bench"] == [f"ringweave-bench=={version}"]
    assert f"\n## {version} (" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.slow
def test_the_source_distribution_holds_what_builds_the_wheel(tmp_path: Path) -> None:
    (path,) = SdistBuilder(str(ROOT)).build(directory=str(tmp_path))
    with tarfile.open(path) as archive:
        names = {name.removeprefix("ringweave-0.1.0/") for name in archive.getnames()}
    outside = {name for name in names if not name.startswith("src/ringweave/")}
    assert outside == {".gitignore", "CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml"}
    assert {"src/ringweave/py.typed", "src/ringweave/comm/backend.py"} <= names


NO_TORCH = """
import sys
sys.modules["torch"] = None
"""


@pytest.fixture(scope="module")
def bare_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Interpreter of an environment with the wheel and its dependencies, in which torch cannot be imported."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True)
    (site,) = folder.glob("lib/*/site-packages")
    (site / "sitecustomize.py").write_text(NO_TORCH)
    dependencies = [path for path in sys.path if path.endswith("site-packages")]
    (site / "dependencies.pth").write_text("\n".join(dependencies) + "\n")
    code = "import ringweave; print(ringweave.__file__)"
    environ = bare_environ()
    found = subprocess.run([python, "-c", code], cwd=folder, env=environ, capture_output=True, text=True, check=True)
    assert found.stdout.startswith(str(folder))
    return python


def bare_environ() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "RINGWEAVE_"))}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["plan", str(ROOT / "examples/clusters/two-racks.yaml"), "--bytes", "25MB", "--json"], "bound_s"),
        (["simulate", str(ROOT / "examples/clusters/two-racks.yaml"), "--bytes", "1MB", "--json"], "simulated_s"),
        (["cost", "--architecture", "ring", "--json"], "architecture"),
        (["split", "--gpus", "15", "--capacity", "10,8", "--json"], "min_per_node"),
        (["discover", "--json"], "devices"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_the_installed_wheel_works_without_torch_outside_of_the_clone(
    bare_python: Path, tmp_path: Path, words: list[str], key: str
) -> None:
    done = run_installed(bare_python, tmp_path, words)
    assert done.returncode == 0, done.stderr
    assert key in json.loads(done.stdout)


@pytest.mark.slow
def test_doctor_of_the_installed_wheel_names_torch_as_missing(bare_python: Path, tmp_path: Path) -> None:
    done = run_installed(bare_python, tmp_path, ["doctor"])
    assert done.returncode == 1
    assert "torch" in done.stdout


def run_installed(python: Path, folder: Path, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    command = [str(python.parent / "ringweave"), *words]
    return subprocess.run(
        command, cwd=folder, env=bare_environ(), capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.slow
def test_the_bench_is_a_wheel_of_its_own_that_adds_its_verbs(tmp_path: Path) -> None:
    files = wheel_files(ROOT / "bench", tmp_path)
    assert {path.split("/")[0] for path in files} == {"ringweave_bench", "ringweave_bench-0.1.0.dist-info"}
    assert "ringweave_bench/programs/shifted.c" in files
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        entries = archive.read("ringweave_bench-0.1.0.dist-info/entry_points.txt").decode()
    assert "[ringweave.commands]\nbench = ringweave_bench.bench_command:command\n" in entries
