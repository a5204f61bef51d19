"""What an exchange needs of the server's processor, from what the server says of a few."""

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ringweave import rpc
from ringweave.errors import TrainingError
from ringweave.param_server.messages import EndExchangeBenchmark, ExchangeBenchmark, ExchangeBenchmarkResult
from ringweave.param_server.service import ParameterService
from ringweave.training.mode_choice import step_benchmark

MIB = 2**20
OPTIMIZER = torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9)


class Server:
    """As a client sees one that needs 10 ms for each, and 3 s for the first."""

    def __init__(self, cores: float | None) -> None:
        self.calls: list[ExchangeBenchmark] = []
        self.num_ends = 0
        self._cores = cores

    def call(self, message: Any, content: Any = (), *, into: Any = (), timeout_s: float) -> Any:
        """One exchange; or the end of them."""
        if isinstance(message, EndExchangeBenchmark):
            self.num_ends += 1
            return SimpleNamespace(message=rpc.Ack())
        assert self.num_ends == 0
        assert [len(each) for each in content] == [len(each) for each in into]
        self.calls.append(message)
        return SimpleNamespace(
            message=ExchangeBenchmarkResult(processor_s=3 + 0.01 * (len(self.calls) - 1), cores=self._cores)
        )

    def close(self, *, is_awaited: bool = False) -> None:
        """Nothing is open."""


@pytest.mark.parametrize(
    ("cores", "num_bytes", "expected_s"),
    [(None, 1000, 0.01), (4.0, 1000, 0.01), (0.2, 1000, 0.05), (0.2, 8 * MIB, 0.1), (None, 0, 0.01)],
)
def test_a_part_of_a_processor_makes_it_longer_and_so_do_more_bytes(cores, num_bytes, expected_s):
    server = Server(cores)
    found = step_benchmark.benchmark_exchanges(OPTIMIZER, num_bytes, 8, [lambda: server])  # pyrefly: ignore - as far as it goes
    assert found.serving_s == pytest.approx(expected_s)
    (setup,) = {each.setup.model_dump_json(): each.setup for each in server.calls}.values()
    assert setup.rings == [[ring] for ring in range(8)]
    assert setup.groups[0].options["momentum"] == 0.9
    assert setup.tensors[0].shape == [max(1, min(num_bytes, 4 * MIB) // 4)]
    assert server.num_ends == 1


def test_a_slow_server_is_asked_twice_only():
    now_s = iter(range(0, 1000, 10))
    server = Server(None)
    found = step_benchmark.benchmark_exchanges(OPTIMIZER, 8 * MIB, 2, [lambda: server], clock=lambda: next(now_s))  # pyrefly: ignore
    assert len(server.calls) == 2
    assert found.exchanging_s == pytest.approx(2 * (20 - 0.01))  # of half of the bytes; the clock was read thrice


def serve(folder: Path, pipe: Connection) -> None:
    """A parameter server until told to end; says its port, and then its version."""
    service = ParameterService()
    trust = rpc.TlsAuthentication(rpc.Credentials.load(folder / "server"))
    server = rpc.RpcServer(trust, service.handlers(), roles=("worker",))
    with server.start("127.0.0.1", 0):
        pipe.send(server.port)
        pipe.recv()
    pipe.send(service.version)


@pytest.mark.slow
def test_a_real_server_says_what_it_takes(tmp_path):
    """In a process of its own: what it computes is told from what its caller does by its processor time."""
    authority = rpc.CertificateAuthority("job1")
    for role, folder in (("server", tmp_path / "server"), ("worker", tmp_path / "worker")):
        authority.issue(role, "0").save(folder)
    trust = rpc.TlsAuthentication(rpc.Credentials.load(tmp_path / "worker"))
    own, other = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(tmp_path, other), daemon=True)
    process.start()
    try:
        assert own.poll(60), "the server has started"
        port = own.recv()
        connect = [lambda: rpc.RpcClient.connect("127.0.0.1", port, trust, role="server")]
        found = step_benchmark.benchmark_exchanges(OPTIMIZER, MIB, 4, connect)
        with step_benchmark.benchmark_rounds(OPTIMIZER, 2 * MIB, 4, connect) as once:
            once()
        own.send("end")
        assert own.poll(60), "the server has ended"
        version = own.recv()
    finally:
        process.kill()
        process.join()
    assert 0 < found.serving_s < 10
    assert 0 < found.exchanging_s < 10
    assert version == 0


def test_an_optimizer_that_the_server_does_not_run_is_said():
    lbfgs = torch.optim.LBFGS([torch.zeros(1)])
    with pytest.raises(TrainingError, match="optimizer: 'LBFGS', expected one of SGD"):
        step_benchmark.benchmark_exchanges(lbfgs, 1000, 2, [])
