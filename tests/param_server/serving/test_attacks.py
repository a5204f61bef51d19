"""Messages that are wrong, and callers that are strangers, at `ringweave server` itself."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from ringweave import rpc
from ringweave.errors import RemoteError
from ringweave.param_server.client import RingClient, RingPush
from ringweave.param_server.flat import FlatTensors
from ringweave.param_server.messages import (
    BarrierArrival,
    ExchangeBenchmark,
    ParameterGroup,
    PauseRing,
    Pull,
    Push,
    RingAssignmentRequest,
    ServerSetup,
    ServerStatusRequest,
    TakeShard,
    TensorSpec,
)
from ringweave.param_server.optimizers import group_options
from tests.polling import wait_until
from tests.rpc.mutations import send_damaged
from tests.rpc.parts import frame
from tests.rpc.processes import serving
from tests.rpc.strangers import authority_and_expired, check_turned_away, refused, strangers

SPECS = [TensorSpec(name="weight", shape=[50], dtype="float32")]
OPTIONS = group_options(torch.optim.SGD([torch.zeros(1)], lr=0.5, momentum=0.9).param_groups[0])
SETUP = ServerSetup(
    tensors=SPECS,
    optimizer="SGD",
    groups=[ParameterGroup(parameters=[0], options=OPTIONS)],
    rings=[[0], [1]],
    overlaps=False,
    compensation=0.0,
)
PUSH = Push(
    term=0, ring=1, sequence=1, base_version=0, content="gradient", num_samples=4, batch_share=0.5, options=[OPTIONS]
)

OTHERS = (
    Pull(term=0, ring=1, after_sequence=0),
    TakeShard(term=0, ring=1, number=1, epoch=0, num_samples=4, least=1, epoch_samples=100),
    RingAssignmentRequest(term=0, slot=1),
    PauseRing(term=0, ring=1),
    BarrierArrival(term=0, ring=1, number=1, text="done"),
    ExchangeBenchmark(term=0, setup=SETUP),
    ServerStatusRequest(),
)


@contextmanager
def server(folder: Path, authority: rpc.CertificateAuthority) -> Iterator[int]:
    """The port of a real server process."""
    authority.issue("server", "0").save(folder / "server")
    argv = [sys.executable, "-m", "ringweave", "server", "--host", "127.0.0.1", "--credentials", str(folder / "server")]
    argv += ["--run-dir", str(folder), "--node", "here"]

    def check_said(said: str) -> None:
        assert "Traceback" not in said

    with serving(argv, 250, check_said) as port:
        yield port


@pytest.mark.slow  # and no time of its own, which --timeout would not change: many --mutations take long
def test_mutated_calls_change_nothing_and_are_written_down(tmp_path, request):
    authority = rpc.CertificateAuthority("job1")
    first = torch.arange(50.0)
    honest = rpc.TlsAuthentication(authority.issue("worker", "0"))
    with server(tmp_path, authority) as port:
        client = RingClient([lambda: rpc.RpcClient.connect("127.0.0.1", port, honest, role="server")], 0)
        client.start_job(SETUP, FlatTensors(SPECS, [first.clone()]).buffers())
        goods = [frame(PUSH, 1, bytes(200))] * len(OTHERS) + [frame(message, 1) for message in OTHERS]
        calling, num_messages = (
            rpc.TlsAuthentication(authority.issue("worker", "1")),
            request.config.getoption("--mutations"),
        )
        expected = send_damaged(port, calling, goods, num_messages, seed=11, limits=rpc.RpcLimits())
        log = tmp_path / "events.jsonl"
        wait_until(lambda: set(refused(log)) == expected)
        assert {event["reason"] for event in refused(log).values()} == {"message"}
        room = FlatTensors(SPECS)
        assert client.pull(0, room.buffers()) == 0  # no version was made
        assert torch.equal(room.pieces[0], first)
        round_ = RingPush(
            sequence=1, base_version=0, content="gradient", num_samples=4, batch_share=1.0, options=[OPTIONS]
        )
        client.push_and_pull(round_, FlatTensors(SPECS, [torch.ones(50)]).buffers(), room.buffers())
        assert torch.equal(room.pieces[0], first - 0.5)  # an honest push counts as ever
        status = client.status()
        assert (status.version, status.samples) == (1, 4)
        client.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_strangers_are_refused_and_logged(tmp_path):
    authority, expired = authority_and_expired("worker", "1")
    with server(tmp_path, authority) as port:
        check_turned_away(port, strangers(authority, expired, server_role="server"), tmp_path / "events.jsonl")
        worker = rpc.TlsAuthentication(authority.issue("worker", "1"))
        client = RingClient([lambda: rpc.RpcClient.connect("127.0.0.1", port, worker, role="server")], 1)
        client.start_job(SETUP, FlatTensors(SPECS).buffers())
        other_ring = RingClient([lambda: rpc.RpcClient.connect("127.0.0.1", port, worker, role="server")], 0)
        with pytest.raises(RemoteError, match=r"caller for ring 0: '1', expected one of its ranks 0"):
            other_ring.pull(0, FlatTensors(SPECS).buffers())
        client.close()
        other_ring.close()
