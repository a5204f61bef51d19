"""The entry point that `import torch` calls: never in the way, and the default only where that is asked for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ringweave.testing.ranks import Ranks

pytestmark = pytest.mark.slow

SHOW = """
import torch, torch.distributed as d
print("ringweave" in d.Backend.backend_list, d.Backend.default_device_backend_map)
"""
BROKEN = """
import ringweave.comm.autoload as a
a._register = lambda e: 1 / 0
"""
LOADED = """
import sys, torch
print(sorted(m for m in sys.modules if m.startswith(("ruamel", "pydantic", "ringweave."))))
"""
"""Before anything else is done."""
STARTED = """
import os, sys, torch, torch.distributed as d
os.environ["MASTER_ADDR"] = "127.0.0.1"
d.init_process_group("ringweave", store=d.HashStore(), rank=0, world_size=1)
d.all_reduce(torch.ones(256))
heavy = "pydantic psutil ruamel ringweave.planning ringweave.schedules ringweave.topology.cluster ringweave.telemetry"
print([name for name in heavy.split() if name in sys.modules])
d.destroy_process_group()
"""
REPLACED = """
import torch, torch.distributed as d
d.init_process_group("gloo", store=d.HashStore(), rank=0, world_size=1)
print(type(d.group.WORLD).__name__, type(d.new_group([0], backend="gloo")).__name__)
d.destroy_process_group()
"""
FORKS = """
import json, os, sys
import torch, torch.distributed as d
print("ringweave" in d.Backend.backend_list)
for before, after, environ in json.loads(sys.argv[1]):
    print("next", flush=True)
    if not os.fork():
        os.dup2(1, 2)
        os.environ.update(environ)
        exec(before)
        torch._import_device_backends()
        exec(after)
        sys.stdout.flush()
        os._exit(0)
    os.wait()
"""
"""Imports torch once, without entry points, and does in a fork of its own for each case as the end of `import torch`
does. A case is code before that, code after it, and variables."""
CASES = {
    "under ringweave run": ("", SHOW, {"RINGWEAVE_RUN_DIR": "/nowhere"}),
    "replaced": ("", SHOW + REPLACED, {"RINGWEAVE_REPLACE_BACKEND": "1"}),
    "broken": (BROKEN, 'print("fine")', {}),
}


def run_python(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RINGWEAVE_")}
    return subprocess.run(
        [sys.executable, *words], env=clean | environ, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """What each case says, and what is said where autoload is switched off."""
    done = run_python("-c", FORKS, json.dumps(list(CASES.values())), TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.returncode == 0, done.stderr
    return dict(zip(("switched off", *CASES), done.stdout.split("next\n"), strict=True))


def test_importing_torch_registers_the_backend_and_changes_no_default_and_brings_no_planner() -> None:
    """Warnings as errors do not break it; nor does a group on one machine need the planner for small messages."""
    code = LOADED + SHOW + REPLACED + STARTED
    done = run_python("-W", "error", "-c", code, RINGWEAVE_REPLACE_BACKEND="")
    assert done.returncode == 0, done.stderr
    loaded, shown, groups, heavy = done.stdout.splitlines()
    names = ("comm", "comm.autoload", "environment", "errors", "ports", "relayed_address")
    assert loaded == str([f"ringweave.{name}" for name in names])
    assert shown.startswith("True ")
    assert "'cpu': 'gloo'" in shown
    assert "'cuda': 'nccl'" in shown
    assert groups == "ProcessGroup ProcessGroup"
    assert heavy == "[]"


def test_under_ringweave_run_it_is_the_default(said: dict[str, str]) -> None:
    assert "'cpu': 'ringweave'" in said["under ringweave run"]
    assert "'cuda': 'ringweave'" in said["under ringweave run"]


def test_with_replaced_backends_it_is_the_default_under_any_launcher_and_replaces_named_ones(
    said: dict[str, str],
) -> None:
    shown, groups = said["replaced"].splitlines()
    assert "'cpu': 'ringweave'" in shown
    assert groups == "RingweaveProcessGroup RingweaveProcessGroup"


def test_autoload_can_be_switched_off(said: dict[str, str]) -> None:
    assert said["switched off"] == "False\n"


def test_a_failing_registration_does_not_break_torch(said: dict[str, str]) -> None:
    assert said["broken"].endswith("fine\n")
    assert "backend ringweave could not be registered" in said["broken"]


def error_at_start(**environ: str) -> str:
    """Error of a rank that starts a group in this environment."""
    with Ranks(os.getpid, 1, environ=environ) as ranks:
        (outcome,) = ranks.outcomes()
    assert "init_process_group" in outcome.error
    return outcome.error


def test_a_wrong_schedule_is_refused_when_the_group_starts() -> None:
    assert "UsageError: schedule: 'rign', expected one of ring, leader-matrix" in error_at_start(
        RINGWEAVE_SCHEDULE="rign"
    )


def test_a_wrong_cluster_file_is_refused_when_the_group_starts(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("name: c\nnodes: [{name: elsewhere, nic: 1Gbit/s, devices: 1}]\n")
    error = error_at_start(RINGWEAVE_CLUSTER=str(path), RINGWEAVE_NODE="here")
    assert "PlacementError: node of this worker, from RINGWEAVE_NODE: 'here'" in error
