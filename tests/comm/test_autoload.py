"""The entry point that `import torch` calls: never in the way, and the default only where that is asked for."""

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
a.register()
import torch
print("fine")
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


def run_python(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RINGWEAVE_")}
    return subprocess.run(
        [sys.executable, "-c", code], env=clean | environ, capture_output=True, text=True, timeout=300, check=False
    )


def test_importing_torch_registers_the_backend_and_changes_no_default_and_brings_no_planner() -> None:
    done = run_python(LOADED + SHOW + REPLACED, RINGWEAVE_REPLACE_BACKEND="")
    assert done.returncode == 0, done.stderr
    loaded, shown, groups = done.stdout.splitlines()
    names = ("comm", "comm.autoload", "environment", "errors", "ports", "relayed_address")
    assert loaded == str([f"ringweave.{name}" for name in names])
    assert shown.startswith("True ")
    assert "'cpu': 'gloo'" in shown
    assert "'cuda': 'nccl'" in shown
    assert groups == "ProcessGroup ProcessGroup"


def test_under_ringweave_run_it_is_the_default() -> None:
    done = run_python(SHOW, RINGWEAVE_RUN_DIR="/nowhere")
    assert "'cpu': 'ringweave'" in done.stdout
    assert "'cuda': 'ringweave'" in done.stdout


def test_with_replaced_backends_it_is_the_default_under_any_launcher_and_replaces_named_ones() -> None:
    done = run_python(SHOW + REPLACED, RINGWEAVE_REPLACE_BACKEND="1")
    shown, groups = done.stdout.splitlines()
    assert "'cpu': 'ringweave'" in shown
    assert groups == "RingweaveProcessGroup RingweaveProcessGroup", done.stderr


def test_autoload_can_be_switched_off() -> None:
    assert run_python(SHOW, TORCH_DEVICE_BACKEND_AUTOLOAD="0").stdout.startswith("False ")


def test_a_failing_registration_does_not_break_torch() -> None:
    done = run_python(BROKEN)
    assert done.stdout.strip() == "fine"
    assert "backend ringweave could not be registered" in done.stderr


def test_warnings_as_errors_do_not_break_torch() -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RINGWEAVE_")}
    command = [sys.executable, "-W", "error", "-c", "import torch; print('fine')"]
    done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.strip() == "fine", done.stderr


def test_a_group_on_one_machine_starts_and_sends_small_messages_without_the_planner() -> None:
    done = run_python(STARTED)
    assert done.stdout.strip() == "[]", done.stderr


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
