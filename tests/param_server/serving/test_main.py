"""How the server's process ends where it cannot begin."""

import signal
import socket

import pytest

from ringweave import rpc
from ringweave.param_server.main import main


@pytest.fixture(autouse=True)
def same_signal_handlers():
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture
def credentials(tmp_path):
    folder = tmp_path / "server"
    rpc.CertificateAuthority("job1").issue("server", "0").save(folder)
    return folder


def test_credentials_that_are_not_there(tmp_path, capsys):
    assert main(["--host", "127.0.0.1", "--credentials", str(tmp_path / "none")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("ringweave server: error: ")
    assert "No such file or directory" in said


@pytest.mark.parametrize("host", ["203.0.113.1", "127.0.0.1"])
def test_an_address_that_cannot_be_had(credentials, capsys, host):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["--host", host, "--port", port, "--credentials", str(credentials)]) == 2
    assert capsys.readouterr().err.startswith("ringweave server: error: parameter server: ")
