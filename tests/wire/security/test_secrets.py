"""The job's token is in no error, whatever a process of the job makes of its hello."""

import json
import socket
from pathlib import Path

import pytest

from ringweave import wire
from ringweave.errors import MessageError
from ringweave.telemetry import EventLog
from ringweave.wire.framing import frames, messages
from ringweave.wire.framing.frames import FrameKind
from tests.wire.mutations import host
from tests.wire.parts import connect, read_frame, serving, trust, wait_until
from tests.wire.strangers import refused

WHO = "ringweave://job1/worker/0"


def hellos(token: str) -> dict[str, bytes]:
    """First frames in which the token is, and something is wrong."""

    def hello(body: object) -> bytes:
        return frames.pack(FrameKind.HELLO, body=json.dumps(body).encode())

    right = {"token": token, "identity": WHO}
    cut = json.dumps({"identity": WHO, "token": token})[:-2].encode()
    failure = messages.encode(messages.Failure(error="RefusedError", text=token))
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
        "cut off": frames.pack(FrameKind.HELLO, body=cut),
        "no JSON": frames.pack(FrameKind.HELLO, body=token.encode()),
        "a refusal": frames.pack(FrameKind.REFUSED, body=failure),
        "a call": frames.pack(FrameKind.CALL, call=1, name="test.add", body=json.dumps(right).encode()),
    }


def call(port: int, source: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=60, source_address=(source, 0))


@pytest.mark.parametrize("secure", [True, False], ids=["tls", "plain"])
def test_no_hello_brings_the_token_into_the_event_log(authority: wire.Authority, tmp_path: Path, secure: bool) -> None:
    credentials = authority.issue("worker", "0")
    token, log = credentials.token, EventLog(tmp_path / "events.jsonl")
    server_trust: wire.Trust = trust(authority, "server", "0")
    peer_trust: wire.Trust = wire.Tls(credentials)
    if not secure:
        server_trust = wire.Plain(server_trust.identity, token)
        peer_trust = wire.Plain(peer_trust.identity, token)
    told: dict[str, str] = {}
    with serving(server_trust, record=log.write) as server:
        for index, (what, data) in enumerate(hellos(token).items()):
            with peer_trust.wrap(call(server.port, host(index)), serves=False) as sock:
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
    assert repr(messages.Hello(token="secret", identity=WHO)) == f"Hello(identity='{WHO}')"


def test_what_is_wrong_with_a_hello_is_said_all_the_same() -> None:
    with pytest.raises(MessageError, match=r"message hello, identity: 'missing', expected a valid one \(Field requ"):
        messages.decode(messages.Hello, b'{"token": "x"}')
    with pytest.raises(MessageError, match=r"message hello, token: 'string_type', expected a valid one \(Input shou"):
        messages.decode(messages.Hello, b'{"token": 1, "identity": "x"}')
    with pytest.raises(MessageError, match=r"message hello: 'extra_forbidden', expected a valid one \(Extra inputs"):
        messages.decode(messages.Hello, b'{"token": "x", "identity": "y", "more": 1}')
