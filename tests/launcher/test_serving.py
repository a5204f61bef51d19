"""The processes of a run's parameter servers, without what they do."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ringweave.errors import LaunchError
from ringweave.launcher.node_context import HostContext
from ringweave.launcher.run_dir import RunDir
from ringweave.launcher.services import JobServer, ServiceSetup, SidecarEndpoint
from ringweave.rpc import CertificateAuthority, Credentials
from tests.polling import wait_until


def a_setup(site: HostContext, run_dir: RunDir, said: list[str], now_s: list[float]) -> ServiceSetup:
    def issue(role: str, index: int) -> Credentials:
        return CertificateAuthority("job").issue(role, str(index))

    return ServiceSetup(node_context=site, run_dir=run_dir, issue=issue, give_up=said.append, clock=lambda: now_s[0])


class FailsOnB(HostContext):
    """What runs in the place of a server stays on node a, and fails at once on node b."""

    def wrap_node_command(self, node: str, argv: Sequence[str]) -> Sequence[str]:
        does = "import signal; signal.pause()" if node == "a" else "import sys; sys.exit(3)"
        return [sys.executable, "-I", "-S", "-c", does]


def test_one_that_dies_time_after_time_is_given_up_and_the_other_one_goes_on(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    site, said, now_s = FailsOnB(), [], [0.0]
    posts = [SidecarEndpoint(node=node, advertised=site.pick_address(node)) for node in ("a", "b")]
    run_dir = RunDir(root=tmp_path)
    server = JobServer(posts, a_setup(site, run_dir, said, now_s))

    def look() -> bool:
        now_s[0] += 1.0
        server.restart_dead()
        return bool(said)

    with server.running(os.environ):
        wait_until(look, "an end of it")
        now_s[0] += 1000.0
        server.restart_dead()
        assert len(server.pids) == 1, "the one on node a"
    assert said == [
        "parameter server 1 on node b is given up: 10 of its processes in a row ended soon after their start, the "
        "last one with exit code 3. Training continues with the other one, without a standby. See the cause in "
        f"{tmp_path / 'logs' / 'server-1.log'}."
    ]
    started = [line for line in run_dir.events.read_text().splitlines() if '"server_started"' in line]
    assert len(started) == 11


class StartsOnce(HostContext):
    """What runs in the place of a server ends at once, and no other process can be had."""

    num_started = 0

    def wrap_node_command(self, node: str, argv: Sequence[str]) -> Sequence[str]:
        self.num_started += 1
        if self.num_started > 2:
            raise LaunchError("no process is to be had")
        return [sys.executable, "-I", "-S", "-c", "import sys; sys.exit(3)"]


def test_one_that_cannot_be_started_again_is_given_up_and_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    site, said, now_s = StartsOnce(), [], [0.0]
    posts = [SidecarEndpoint(node=node, advertised=site.pick_address(node)) for node in ("a", "b")]
    server = JobServer(posts, a_setup(site, RunDir(root=tmp_path), said, now_s))

    def look() -> bool:
        now_s[0] += 1.0
        server.restart_dead()
        return len(said) == 2

    with server.running(os.environ):
        wait_until(look, "an end of both")
    assert all(
        "and a replacement could not be started: no process is to be had. Training continues" in each for each in said
    )
