"""The job's token is in no error, whatever a process of the job makes of its hello."""

import json
import socket
from pathlib import Path

import pytest

from ringweave import rpc
from ringweave.errors import MessageError
from ringweave.rpc import framing
from ringweave.rpc.framing import FrameKind
from ringweave.telemetry import EventLog
from tests.fakes.plaintext import PlaintextAuthentication
from tests.polling import wait_until
from tests.rpc.mutations import host
from tests.rpc.parts import connect, read_frame, serving, trust
from tests.rpc.strangers import refused

WHO = "ringweave://job1/worker/0"


def hellos(token: str) -> dict[str, bytes]:
    """First frames in which the token is, and something is wrong."""

    def hello(body: object) -> bytes:
        return framing.pack_frame(FrameKind.HELLO, body=json.dumps(body).encode())

    right = {"token": token, "identity": WHO}
    cut = json.dumps({"identity": WHO, "token": token})[:-2].encode()
    failure = framing.encode_message(framing.RpcFailure(error="RefusedError", text=token))
    return {
        "no identity": hello({"token": token}),
        "no token where it should be": hello({"tokens": token, "identity": WHO}),
        "an identity that is a number": hello({"token": token, "identity": 5}),
        "a list of tokens": hello({"token": [token], "identity": WHO}),
        "a token with keys": hello({"token": {"job1": token}, "identity": WHO}),
        "a token too many": hello(right | {"again": token}),
        "a token that is a key": hello(right | {token: 1}),
        "a token for an identity": hello({"token": token, "identity": token}),
        "a token that is a name": hello({"token": token, "identity": f"ringweave://job1/worker/{token}"}),
        "a token alone": hello(token),
        "tokens alone": hello([token, token]),
        "cut off": framing.pack_frame(FrameKind.HELLO, body=cut),
        "no JSON": framing.pack_frame(FrameKind.HELLO, body=token.encode()),
        "a refusal": framing.pack_frame(FrameKind.REFUSED, body=failure),
        "a call": framing.pack_frame(FrameKind.CALL, call=1, name="test.add", body=json.dumps(right).encode()),
    }


def call(port: int, source: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=60, source_address=(source, 0))


@pytest.mark.parametrize("secure", [True, False], ids=["tls", "plain"])
def test_no_hello_brings_the_token_into_the_event_log(
    authority: rpc.CertificateAuthority, tmp_path: Path, secure: bool
) -> None:
    credentials = authority.issue("worker", "0")
    token, log = credentials.token, EventLog(tmp_path / "events.jsonl")
    server_trust: rpc.PeerAuthentication = trust(authority, "server", "0")
    peer_trust: rpc.PeerAuthentication = rpc.TlsAuthentication(credentials)
    if not secure:
        server_trust = PlaintextAuthentication(server_trust.identity, token)
        peer_trust = PlaintextAuthentication(peer_trust.identity, token)
    told: dict[str, str] = {}
    with serving(server_trust, write_event=log.write) as server:
        for index, (what, data) in enumerate(hellos(token).items()):
            with peer_trust.secure_socket(call(server.port, host(index)), is_server=False) as sock:
                sock.sendall(data)
                prefix, body = read_frame(sock)
                assert prefix.kind == FrameKind.REFUSED, what
                told[what] = body.decode()
        wait_until(lambda: len(refused(log.path)) == len(told))
        connect(server, peer_trust).close()
    pieces = {token[first : first + 8] for first in range(len(token) - 7)}
    written = log.path.read_text()
    assert [piece for piece in pieces if piece in written] == []
    for what, text in told.items():
        assert [piece for piece in pieces if piece in text] == [], what


def test_a_hello_prints_without_its_token() -> None:
    assert repr(framing.HandshakeHello(token="secret", identity=WHO)) == f"HandshakeHello(identity='{WHO}')"


def test_what_is_wrong_with_a_hello_is_said_all_the_same() -> None:
    with pytest.raises(MessageError, match=r"message hello, identity: 'missing', expected a valid one \(Field requ"):
        framing.decode_message(framing.HandshakeHello, b'{"token": "x"}')
    with pytest.raises(MessageError, match=r"message hello, token: 'string_type', expected a valid one \(Input shou"):
        framing.decode_message(framing.HandshakeHello, b'{"token": 1, "identity": "x"}')
    with pytest.raises(MessageError, match=r"message hello: 'extra_forbidden', expected a valid one \(Extra inputs"):
        framing.decode_message(framing.HandshakeHello, b'{"token": "x", "identity": "y", "more": 1}')
