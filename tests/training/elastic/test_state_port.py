"""Where members give newcomers their state: who knocks there without a right to is refused, and written down."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from ringweave import rpc
from ringweave.environment import WorkerEnvironment
from ringweave.errors import RemoteError, RpcError
from ringweave.membership.messages import WHOLE_JOB, part_of_ring
from ringweave.rpc.state_transfer import DescribeState, StateDescription, StateServer
from ringweave.training.elastic import member_process
from tests.fakes.elastic_job import ElasticJob
from tests.polling import wait_until
from tests.rpc.strangers import authority_and_expired, check_turned_away, refused, strangers
from tests.training.elastic import elastic_functions
from tests.training.rings.elastic import ring_functions


def test_strangers_are_refused_and_logged_and_members_read_on(tmp_path: Path) -> None:
    authority, expired = authority_and_expired("worker", "1.0")
    environment, shelf = WorkerEnvironment(run_dir=tmp_path), StateServer()
    shelf.publish("1.0", {"weight": bytes(8)})
    trust = rpc.TlsAuthentication(authority.issue("worker", "0.0"))
    newcomer = rpc.TlsAuthentication(authority.issue("worker", "1.0"))
    with member_process.start_state_server(environment, trust, shelf, "127.0.0.1") as server:
        check_turned_away(server.port, strangers(authority, expired, server_role="worker"), tmp_path / "events.jsonl")
        with rpc.RpcClient.connect("127.0.0.1", server.port, newcomer, role="worker") as client:
            found = client.call(DescribeState(name="1.0"), timeout_s=60).message
    assert isinstance(found, StateDescription)
    assert [piece.num_bytes for piece in found.pieces] == [8]


class Broken(StateServer):
    """One that has a bug."""

    def handlers(self) -> list[rpc.RpcHandler]:
        def fail(call: rpc.RpcCall) -> NoReturn:
            raise KeyError("no such thing")

        return [rpc.RpcHandler(message=DescribeState, handle=fail)]


def test_a_bug_in_a_handler_is_in_the_members_log(caplog: pytest.LogCaptureFixture) -> None:
    authority = rpc.CertificateAuthority("test")
    trust, newcomer = (rpc.TlsAuthentication(authority.issue("worker", name)) for name in ("0.0", "1.0"))
    with (
        member_process.start_state_server(WorkerEnvironment(), trust, Broken(), "127.0.0.1") as server,
        rpc.RpcClient.connect("127.0.0.1", server.port, newcomer, role="worker") as client,
        caplog.at_level(logging.WARNING, "ringweave"),
        pytest.raises(RemoteError, match="KeyError in the handler; see its log"),
    ):
        client.call(DescribeState(name="1.0"), timeout_s=60)
    assert caplog.messages == ["state of this member: state.describe of 1.0: KeyError: 'no such thing'"]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("function", "args", "attended_by", "part"),
    [
        (elastic_functions.train, (1000,), (), WHOLE_JOB),
        (ring_functions.train, (1000, 1, {}), ("server",), part_of_ring(0)),
    ],
    ids=["one group", "rings"],
)
def test_members_of_each_kind_write_strangers_down(
    tmp_path: Path, function: Callable[..., Any], args: tuple[Any, ...], attended_by: tuple[str, ...], part: str
) -> None:
    log = tmp_path / "events.jsonl"
    with ElasticJob(function, 1, *args, environ={"RINGWEAVE_EVENTS": str(log)}, services=attended_by) as job:
        job.wait_message("0.0", lambda word: word[0] == "done")
        host, port = job.coordinators[0].memberships_by_part[part][-1].statuses[0].address.split()
        stranger = rpc.TlsAuthentication(rpc.CertificateAuthority("test").issue("worker", "1.0"))
        with pytest.raises(RpcError):
            rpc.RpcClient.connect(host, int(port), stranger, role="worker").close()
        wait_until(lambda: bool(refused(log)))
    (event,) = refused(log).values()
    assert (event["service"], event["reason"]) == ("ringweave://test/worker/0.0", "certificate")
