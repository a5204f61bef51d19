"""Messages that are wrong, and callers that are strangers, at `ringweave server` itself."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from ringweave import wire
from ringweave.errors import RemoteError
from ringweave.params.flat import Flat
from ringweave.params.messages import Ask, Group, Meet, Pause, Pull, Push, Rehearse, Seek, Setup, Take, TensorSpec
from ringweave.params.ring.client import RingClient, Round
from ringweave.params.serving.optimizers import options_of
from tests.wire.mutations import send_damaged
from tests.wire.parts import frame, wait_until
from tests.wire.processes import serving
from tests.wire.strangers import authority_and_expired, check_turned_away, refused, strangers

SPECS = [TensorSpec(name="weight", shape=[50], dtype="float32")]
OPTIONS = options_of(torch.optim.SGD([torch.zeros(1)], lr=0.5, momentum=0.9).param_groups[0])
SETUP = Setup(
    tensors=SPECS,
    optimizer="SGD",
    groups=[Group(parameters=[0], options=OPTIONS)],
    rings=[[0], [1]],
    overlaps=False,
    compensation=0.0,
)
PUSH = Push(
    term=0, ring=1, sequence=1, base_version=0, content="gradient", num_samples=4, batch_share=0.5, options=[OPTIONS]
)

OTHERS = (
    Pull(term=0, ring=1, after_sequence=0),
    Take(term=0, ring=1, number=1, epoch=0, num_samples=4, least=1, epoch_samples=100),
    Seek(term=0, slot=1),
    Pause(term=0, ring=1),
    Meet(term=0, ring=1, number=1, said="done"),
    Rehearse(term=0, setup=SETUP),
    Ask(),
)


@contextmanager
def server(folder: Path, authority: wire.Authority) -> Iterator[int]:
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
    authority = wire.Authority("job1")
    first = torch.arange(50.0)
    honest = wire.Tls(authority.issue("worker", "0"))
    with server(tmp_path, authority) as port:
        client = RingClient([lambda: wire.Client.connect("127.0.0.1", port, honest, role="server")], 0)
        client.start(SETUP, Flat(SPECS, [first.clone()]).buffers())
        goods = [frame(PUSH, 1, bytes(200))] * len(OTHERS) + [frame(message, 1) for message in OTHERS]
        calling, num_messages = wire.Tls(authority.issue("worker", "1")), request.config.getoption("--mutations")
        expected = send_damaged(port, calling, goods, num_messages, seed=11, limits=wire.Limits())
        log = tmp_path / "events.jsonl"
        wait_until(lambda: set(refused(log)) == expected)
        assert {event["reason"] for event in refused(log).values()} == {"message"}
        room = Flat(SPECS)
        assert client.pull(0, room.buffers()) == 0  # no version was made
        assert torch.equal(room.pieces[0], first)
        round_ = Round(
            sequence=1, base_version=0, content="gradient", num_samples=4, batch_share=1.0, options=[OPTIONS]
        )
        client.exchange(round_, Flat(SPECS, [torch.ones(50)]).buffers(), room.buffers())
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
        worker = wire.Tls(authority.issue("worker", "1"))
        client = RingClient([lambda: wire.Client.connect("127.0.0.1", port, worker, role="server")], 1)
        client.start(SETUP, Flat(SPECS).buffers())
        other_ring = RingClient([lambda: wire.Client.connect("127.0.0.1", port, worker, role="server")], 0)
        with pytest.raises(RemoteError, match=r"caller for ring 0: '1', expected one of its ranks 0"):
            other_ring.pull(0, Flat(SPECS).buffers())
        client.close()
        other_ring.close()
