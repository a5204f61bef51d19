"""Messages that are wrong, and callers that are strangers, at the process of a coordinator itself."""

import contextlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ringweave import rpc, telemetry
from ringweave.membership.client import MembershipClient
from ringweave.membership.failure_detector import Heartbeat
from tests.membership.serving.asking import CALL_S, count
from tests.membership.serving.test_mutated import RIGHT
from tests.membership.test_agent import Still
from tests.polling import wait_until
from tests.rpc.mutations import send_damaged
from tests.rpc.parts import frame
from tests.rpc.processes import serving
from tests.rpc.strangers import authority_and_expired, check_turned_away, refused, strangers

pytestmark = pytest.mark.slow


@contextmanager
def coordinator(folder: Path, authority: rpc.CertificateAuthority) -> Iterator[int]:
    """The port of a real process, of a job that begins with one member, which it does not give up: it has the state."""
    authority.issue("coordinator", "0").save(folder / "coordinator")
    argv = [sys.executable, "-m", "ringweave.membership.main", "--host", "127.0.0.1", "--index", "0"]
    argv += ["--credentials", str(folder / "coordinator"), "--run-dir", str(folder)]
    argv += ["--elastic", "1:4", "--expected", "1", "--patience-s", "600"]

    def check_said(said: str) -> None:
        assert said == ""

    with serving(argv, CALL_S, check_said) as port:
        yield port


@contextmanager
def member(authority: rpc.CertificateAuthority, port: int, name: str) -> Iterator[Still]:
    """Joins, and beats until the end."""
    found = Still(name)
    agent = MembershipClient(
        name, [("127.0.0.1", port)], rpc.TlsAuthentication(authority.issue("worker", name)), found, Heartbeat
    ).start()
    with contextlib.closing(agent):
        wait_until(lambda: bool(found.memberships))
        yield found


@contextmanager
def undisturbed(folder: Path, authority: rpc.CertificateAuthority, port: int) -> Iterator[None]:
    """Whatever happens within: the coordinator decides as if it had not, then and later."""
    launcher = rpc.TlsAuthentication(authority.issue("launcher", "0"))
    with (
        member(authority, port, "0.0") as first,
        rpc.RpcClient.connect("127.0.0.1", port, launcher, role="coordinator", timeout_s=CALL_S) as asker,
    ):
        before = count(asker)
        assert before.members == before.present == ["0.0"]
        yield
        assert count(asker) == before
        assert len(first.memberships) == 1
        with member(authority, port, "1.0") as second:
            assert [each.members for each in second.memberships] == [("0.0", "1.0")]
            wait_until(lambda: len(first.memberships) == 2)
            kinds = ("generation_begun", "member_lost")
            events = [event for event in telemetry.read_events(folder / "events.jsonl") if event["kind"] in kinds]
            assert [event.get("members") for event in events] == [["0.0"], ["0.0", "1.0"]]


@pytest.mark.timeout(900)
def test_strangers_are_refused_and_logged_and_the_membership_does_not_notice(tmp_path: Path) -> None:
    """They say that they are the member: that their connections break is no sign of its death."""
    authority, expired = authority_and_expired("worker", "0.0")
    with coordinator(tmp_path, authority) as port, undisturbed(tmp_path, authority, port):
        check_turned_away(port, strangers(authority, expired, server_role="coordinator"), tmp_path / "events.jsonl")


def test_mutated_messages_are_refused_and_logged_and_the_membership_does_not_notice(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """They come from a process that has the job's credentials.

    The test has no time of its own, which --timeout would not change: many --mutations take long.
    """
    authority, log = rpc.CertificateAuthority("job1"), tmp_path / "events.jsonl"
    goods, num_messages = [frame(message, 1) for message in RIGHT], request.config.getoption("--mutations")
    with coordinator(tmp_path, authority) as port, undisturbed(tmp_path, authority, port):
        calling = rpc.TlsAuthentication(authority.issue("worker", "2.0"))
        expected = send_damaged(port, calling, goods, num_messages, seed=11, limits=rpc.RpcLimits())
        assert len(expected) > num_messages / 2, "the others stop halfway"
        wait_until(lambda: set(refused(log)) == expected)
        assert {event["reason"] for event in refused(log).values()} == {"message"}
