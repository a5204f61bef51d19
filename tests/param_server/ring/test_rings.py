"""Rings of real processes with a real server over TLS."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from ringweave import rpc
from ringweave.param_server.service import ParameterService
from ringweave.testing.ranks import Ranks
from tests.param_server.ring import ring_functions

TIMEOUT_S = 1200.0
"""Sixteen processes and their groups take a minute on two cores, and one such test among others took 158 s: a limit for
what hangs, which nothing on a busy machine may come near. Collectives wait as long for ranks that start late."""


@contextmanager
def serving(folder: Path, num_ranks: int) -> Iterator[tuple[rpc.RpcServer, ParameterService]]:
    authority = rpc.CertificateAuthority("test")
    for rank in range(num_ranks):
        authority.issue("worker", str(rank)).save(folder / "keys" / str(rank))
    service = ParameterService(max_peers=lambda: server.max_peers("worker"))
    server = rpc.RpcServer(rpc.TlsAuthentication(authority.issue("server", "0")), service.handlers(), roles=("worker",))
    with server.start("127.0.0.1"):
        yield server, service


def run(folder: Path, rings: list[list[int]], *settings: object) -> tuple[list[dict], ParameterService]:
    num_ranks = sum(map(len, rings))
    with serving(folder, num_ranks) as (server, service):
        where = (server.port, str(folder / "keys"), rings)
        with Ranks(ring_functions.train, num_ranks, *where, *settings, timeout_s=TIMEOUT_S) as ranks:
            values = ranks.values(timeout_s=TIMEOUT_S)
    return values, service


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
        ("AdamW", {"lr": 0.01, "betas": (0.8, 0.95)}),
    ],
)
def test_one_ring_is_synchronous_training(tmp_path, name, options):
    values, service = run(tmp_path, [[0, 1, 2]], name, options, 40)
    expected = ring_functions.alone(name, options, 40)
    for value in values:
        for got, wanted in zip(value["parameters"], expected, strict=True):
            torch.testing.assert_close(torch.tensor(got, dtype=torch.float64), wanted, rtol=1e-9, atol=1e-12)
    assert service.status().staleness == {"0": 40}
    assert service.is_done


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_rings_train_beside_each_other(tmp_path):
    rings = [[0, 1], [2], [3]]
    options = {"lr": 0.05, "momentum": 0.9}
    values, service = run(tmp_path, rings, "SGD", options, 30)
    status = service.status()
    assert status.pushes == {"0": 30, "1": 30, "2": 30}
    assert status.version == 90
    assert max(map(int, status.staleness)) <= 12
    assert status.most_peers <= 3
    assert all(value["parameters"] == values[0]["parameters"] for value in values)  # bitwise, after the last refresh
    untrained = ring_functions.loss(ring_functions.model(), ring_functions.batch(0)).item()
    assert all(value["loss"] < untrained / 2 for value in values)


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_changes_after_local_steps(tmp_path):
    rings = [[0, 1], [2, 3]]
    values, service = run(tmp_path, rings, "AdamW", {"lr": 0.01}, 60, 4)
    assert service.status().pushes == {"0": 15, "1": 15}
    assert all(value["parameters"] == values[0]["parameters"] for value in values)
    untrained = ring_functions.loss(ring_functions.model(), ring_functions.batch(0)).item()
    assert all(value["loss"] < untrained / 2 for value in values)


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_one_ring_with_local_steps_is_synchronous_training(tmp_path):
    values, _ = run(tmp_path, [[0, 1]], "AdamW", {"lr": 0.01}, 40, 4)
    expected = ring_functions.alone("AdamW", {"lr": 0.01}, 40)
    for got, wanted in zip(values[1]["parameters"], expected, strict=True):
        torch.testing.assert_close(torch.tensor(got, dtype=torch.float64), wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_sixteen_workers_in_four_rings_are_four_peers_and_the_traffic_of_the_spec(tmp_path):
    rings = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    _, service = run(tmp_path, rings, "SGD", {"lr": 0.05}, 6)
    status = service.status()
    num_bytes = sum(each.numel() * 8 for each in ring_functions.model().parameters())
    assert status.most_peers <= 4
    # S each way for every push; the first parameters in, and those at the start and the end out.
    assert status.received_bytes == (4 * 6 + 1) * num_bytes
    assert status.sent_bytes == (4 * 6 + 2 * 4) * num_bytes
