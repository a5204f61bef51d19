"""What a run has to know of the place where its workers are."""

import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ringweave.errors import LaunchError
from ringweave.launcher import node_context


class Slow:
    """A lab whose nodes do nothing in time."""

    def command(self, node: str, argv: object, device: int | None = None) -> list[str]:
        return [sys.executable, "-I", "-S", "-c", "import signal; signal.pause()"]


def test_a_node_that_does_not_say_its_port_in_time_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(argv: list[str], *, timeout: float, **_: Any) -> None:
        raise subprocess.TimeoutExpired(argv, timeout)

    monkeypatch.setattr(subprocess, "run", run)
    said = r"port on node b: 'nothing in 30 s', expected a free one\. Check that the lab is still up, and the load"
    with pytest.raises(LaunchError, match=said):
        node_context.LabContext(Slow()).pick_address("b")  # type: ignore[arg-type]


def test_workers_in_a_lab_keep_what_they_find_out_in_a_folder_of_the_lab() -> None:
    class Quiet:
        addresses: ClassVar = {"a": ("10.0.0.1", "10.1.0.1"), "b": ("10.0.0.2",)}
        probe_results_folder = Path("/run/ringweave-findings/one")
        quotas = None

        def interfaces(self, node: str) -> list[str]:
            return ["eth0", "eth1"]

    site = node_context.LabContext(Quiet())  # type: ignore[arg-type]
    assert site.node_environ("a") == {
        "GLOO_SOCKET_IFNAME": "eth0",
        "RINGWEAVE_FINDINGS": "/run/ringweave-findings/one",
    }
