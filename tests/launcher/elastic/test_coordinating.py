"""The processes of a run's coordinators, without what they do."""

import errno
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringweave import rpc
from ringweave.errors import LaunchError
from ringweave.launcher.node_context import HostContext
from ringweave.launcher.restarts import MembershipHistory
from ringweave.launcher.run_dir import RunDir
from ringweave.launcher.services import (
    CoordinatorPair,
    CoordinatorProcesses,
    CoordinatorQuery,
    ServiceSetup,
    SidecarEndpoint,
    create_coordinators,
)
from ringweave.membership import main
from ringweave.membership.messages import CoordinatorStatus, CoordinatorStatusRequest
from ringweave.membership.settings import MemberBounds
from ringweave.rpc import CertificateAuthority, Credentials
from ringweave.topology import Cluster, Device, Nic, Node
from tests.polling import wait_until

ENDS_BADLY = "import sys; sys.exit(3)"
STAYS = "import signal; signal.pause()"
CPU, NIC = Device(kind="cpu"), Nic(name="lo", rate_bytes_per_s=1e9)


class Noted(HostContext):
    """Runs something else in the place of a coordinator: the first one of node a fails at once, all others stay."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, bool, int]] = []
        self.others: list[str] = []
        self.successors: list[str] = []

    def wrap_node_command(self, node: str, argv: Sequence[str]) -> Sequence[str]:
        asked = main.parse(argv[3:])
        self.asked.append((node, asked.standby, asked.index))
        self.others.append(asked.other)
        self.successors.append(asked.successors)
        return [sys.executable, "-c", ENDS_BADLY if len(self.asked) == 1 else STAYS]


def a_setup(site: HostContext, folder: Path) -> ServiceSetup:
    authority = CertificateAuthority("job")
    run_dir = RunDir(root=folder)
    return ServiceSetup(node_context=site, run_dir=run_dir, issue=lambda role, index: authority.issue(role, str(index)))


def test_one_that_died_comes_back_as_a_standby_with_its_own_index(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    site = Noted()
    cluster = Cluster(name="two", nodes=tuple(Node(name=name, devices=(CPU,), nics=(NIC,)) for name in "ab"))
    bounds = MemberBounds(min_members=1, max_members=2)
    crew = create_coordinators(bounds, cluster, a_setup(site, tmp_path))

    def look() -> bool:
        crew.restart_dead()
        return len(site.asked) > 2

    with crew.running(os.environ):
        wait_until(look, "another coordinator")
        assert len(crew.pids) == 2, "those that run"
    assert not crew.pids
    assert site.asked == [("a", False, 0), ("b", True, 1), ("a", True, 0)]
    first, second = (f"{host}:{port}" for host, port in crew.addresses)
    assert site.others == [second, first, second], "each knows where the other one is"


class AlwaysFails(HostContext):
    def wrap_node_command(self, node: str, argv: Sequence[str]) -> Sequence[str]:
        return [sys.executable, "-I", "-S", "-c", ENDS_BADLY]


def test_one_that_dies_time_after_time_is_given_up_and_it_is_said(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    site, said, now_s = AlwaysFails(), [], [0.0]
    posts = [SidecarEndpoint(node=node, advertised=site.pick_address(node)) for node in ("a", "b")]
    pair = CoordinatorPair(endpoints=posts, bounds=MemberBounds(min_members=1, max_members=2), expected_members=2)
    setup = replace(a_setup(site, tmp_path), give_up=said.append, clock=lambda: now_s[0])
    coordinators = CoordinatorProcesses(pair, setup, {1: True})

    def look() -> bool:
        now_s[0] += 1.0
        coordinators.restart_dead()
        return bool(said)

    with coordinators.running(os.environ):
        wait_until(look, "an end of it")
        now_s[0] += 1000.0
        coordinators.restart_dead()
        assert not coordinators.pids
    assert said == [
        "coordinator 1 on node b is given up: 10 of its processes in a row ended soon after their start, the last "
        "one with exit code 3. Training continues, without a standby for the other coordinator. See the cause in "
        f"{tmp_path / 'logs' / 'coordinator-1.log'}."
    ]


@pytest.mark.parametrize("error", [LaunchError("none left"), OSError(errno.EMFILE, "Too many open files")])
def test_one_that_cannot_be_started_again_is_given_up_and_ends_nothing(tmp_path: Path, error: Exception) -> None:
    (tmp_path / "logs").mkdir()
    site, said, now_s = AlwaysFails(), [], [0.0]
    posts = [SidecarEndpoint(node=node, advertised=site.pick_address(node)) for node in ("a", "b")]
    left = [CertificateAuthority("job").issue("coordinator", "0")]

    def issue(role: str, index: int) -> Credentials:
        if not left:
            raise error
        return left.pop()

    pair = CoordinatorPair(endpoints=posts, bounds=MemberBounds(min_members=1, max_members=2), expected_members=2)
    setup = replace(a_setup(site, tmp_path), issue=issue, give_up=said.append, clock=lambda: now_s[0])
    coordinators = CoordinatorProcesses(pair, setup, {0: False})

    def look() -> bool:
        now_s[0] += 1.0
        coordinators.restart_dead()
        return bool(said)

    with coordinators.running(os.environ):
        wait_until(look, "an end of it")
    assert f"and a replacement could not be started: {error}. Training continues" in said[0]


@pytest.mark.parametrize(
    ("count", "found"),
    [
        ({"members": ["0.0", "1.0"]}, {"0.0", "1.0"}),
        ({"parts": {"lobby": 1, "ring 1": 1}}, {"0.0", "1.1"}),
        ({"parts": {"lobby": 1}}, set()),
    ],
)
def test_members_that_no_event_tells_of_are_asked_for(
    tmp_path: Path, count: Mapping[str, Any], found: set[str]
) -> None:
    """Of the second coordinator, where the first one is down; in rings it is known only that there are some."""
    authority, roles = CertificateAuthority("job"), list[str]()
    said = {
        "term": 1,
        "is_active": True,
        "generation_id": (1, 1),
        "members": [],
        "committed": 0,
        "present": [],
        "ended": "",
    }

    def answer(call: rpc.RpcCall) -> CoordinatorStatus:
        roles.append(call.peer.role)
        return CoordinatorStatus(**{**said, **count})

    trust = rpc.TlsAuthentication(authority.issue("coordinator", "1"))
    server = rpc.RpcServer(
        trust,
        [rpc.RpcHandler(message=CoordinatorStatusRequest, handle=answer)],
        roles=("worker", "launcher", "coordinator"),
    )
    with server.start("127.0.0.1", 0):
        down = HostContext().pick_address("a")
        addresses = [(down.host, down.port), ("127.0.0.1", server.port)]
        query = CoordinatorQuery(addresses, lambda: authority.issue("launcher", "0"))
        history = MembershipHistory(tmp_path / "events.jsonl", query.members)
        assert history.read().members == set()
        assert history.read(["0.0", "1.1"]).members == found
    assert roles == ["launcher"]


def test_only_the_first_process_is_told_who_starts_beside_it(tmp_path: Path) -> None:
    """When it dies and another one is started, those may be members, and nobody's successors any more."""
    (tmp_path / "logs").mkdir()
    site = Noted()
    posts = [SidecarEndpoint(node=node, advertised=site.pick_address(node)) for node in ("a", "b")]
    pair = CoordinatorPair(
        endpoints=posts,
        bounds=MemberBounds(min_members=1, max_members=2),
        expected_members=2,
        initial_members=("0.1", "1.1"),
    )
    coordinators = CoordinatorProcesses(pair, a_setup(site, tmp_path), {0: True})

    def look() -> bool:
        coordinators.restart_dead()
        return len(site.asked) > 1

    with coordinators.running(os.environ):
        wait_until(look, "another coordinator")
    assert site.successors == ["0.1,1.1", ""]
