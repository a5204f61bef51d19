"""Messages with something wrong, thousands of them, at the server's session itself: no process, no handshake for each.

`test_attacks` sends some of them to a real process over TLS.
"""

import json
import random
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ringweave import rpc
from ringweave.errors import ConnectionLostError, RpcError
from ringweave.param_server.messages import Pull, Push, StartJob
from ringweave.param_server.service import ParameterService
from ringweave.param_server.standby import LeaderReplay
from ringweave.rpc.channel import RpcChannel
from ringweave.rpc.server import MemoryBudget, PeerSession
from tests import effort
from tests.param_server.serving.test_attacks import PUSH, SETUP
from tests.rpc.mutations import damaged, is_refused
from tests.rpc.parts import frame, packed

FIRST = torch.arange(50.0)
GRADIENT = torch.ones(50).numpy().tobytes()
GOOD = frame(PUSH, 1, GRADIENT)
BODY = json.loads(PUSH.model_dump_json())
GROUP = BODY["options"][0]
WRONG: dict[str, tuple[Any, ...]] = {
    "term": (1, -1, "0", None, 0.5),
    "ring": (0, 2, 10**12, -1, None),
    "sequence": (0, 2, -5, 1.5, 2**70),
    "base_version": (1, 10**9, -1, None),
    "content": ("", "gradients", 1, None),
    "num_samples": (-1, 1.5, "4", None),
    "batch_share": (-0.1, float("nan"), float("inf"), "0.5", None),
    "absent": ([1], [10**9], [-1], [0.5], "0", None),
    "options": (
        *([], [{}], [GROUP, GROUP], "SGD", None, [None]),
        *([GROUP | {name: value}] for name in ("lr", "momentum", "weight_decay") for value in ("x", None, [1.0])),
        *([GROUP | {"nesterov": value}] for value in ("x", None, [1.0])),
        [{name: value for name, value in GROUP.items() if name != "lr"}],
    ),
    "unknown": (0,),
}
"""What no push of this job may say, field by field."""


@dataclass(frozen=True, slots=True)
class Heard:
    """What came of bytes that a worker sent."""

    refused: tuple[str, ...]
    """What a server writes down."""
    num_failures: int
    """Calls that were answered by why there is no answer."""


def hang_up_after(connection: socket.socket, num_bytes: int) -> None:
    connection.recv(num_bytes, socket.MSG_WAITALL)
    connection.shutdown(socket.SHUT_WR)


class Server:
    """A parameter server whose ring 1 has been granted a push, so that the right one would be applied."""

    def __init__(self) -> None:
        self.service = ParameterService()
        self.crashes: list[Exception] = []
        self._handlers = {handler.message.kind: handler for handler in self.service.handlers()}
        self.hear(frame(StartJob(term=0, setup=SETUP), 1, FIRST.numpy().tobytes()), "0", awaits_answer=True)
        LeaderReplay(self.service).replay_grant(1, 0, 0.0)

    def hear(self, data: bytes, rank: str = "1", *, awaits_answer: bool = False) -> Heard:
        """Let a worker of the job send these bytes and hang up; returns when all that comes of it is over.

        A push is not applied if its caller hangs up before; one that awaits the answer does not.
        """
        own, others = socket.socketpair()
        peer = rpc.Identity(job="job1", role="worker", name=rank)
        with others:
            others.sendall(data)
            hang_up = threading.Thread(target=hang_up_after, args=(others, int(awaits_answer)))
            hang_up.start()
            channel, refused = RpcChannel(own, rpc.RpcLimits(), "here"), list[str]()

            def note(error: RpcError) -> None:
                refused.append(str(error))  # the error itself would keep the memory that the next push needs

            session = PeerSession(channel, peer, self._handlers, MemoryBudget(2 << 30), self._on_handler_error, note)
            try:
                session.run()
            except ConnectionLostError:
                pass  # it stopped halfway: nothing that a server writes down
            except RpcError as error:
                note(error)
            assert session.wait_idle(60.0)
            hang_up.join()
            return Heard(tuple(refused), channel.traffic.failures)

    def parameters(self) -> torch.Tensor:
        """As ring 0 is given them now."""
        peer = rpc.Identity(job="job1", role="worker", name="0")
        pull = Pull(term=0, ring=0, after_sequence=0)
        call = rpc.RpcCall(peer=peer, message=pull, buffers=(), deadline_s=time.monotonic() + 60.0)
        answer = self._handlers[Pull.kind].handle(call)
        assert isinstance(answer, rpc.RpcReply)
        return torch.frombuffer(bytearray(answer.buffers[0]), dtype=torch.float32)

    def _on_handler_error(self, peer: rpc.Identity, kind: str, error: Exception) -> None:
        self.crashes.append(error)


def test_what_the_mutations_are_made_of_is_right() -> None:
    server = Server()
    server.hear(GOOD, awaits_answer=True)
    assert server.service.version == 1
    assert torch.equal(server.parameters(), FIRST - 0.5 * 0.5)  # half a train step, at a rate of a half


def by_chance(rng: random.Random) -> bytes:
    """Bytes of a push with some of them wrong."""
    return damaged(rng, GOOD)


def is_written_down(data: bytes, heard: Heard) -> bool:
    """Unless it stops halfway, and then it is not."""
    return bool(heard.refused) == is_refused(data, rpc.RpcLimits())


def is_answered(_: bytes, heard: Heard) -> bool:
    """By why it is refused; who breaks no schema is not written down."""
    return heard.num_failures == 1


def lying(rng: random.Random) -> bytes:
    """A frame whose checks are right, of a push that says what it may not, or has other buffers than it should."""
    body, name, buffers = dict(BODY), PUSH.kind, [GRADIENT]
    match rng.randrange(8):
        case 0:
            buffers = rng.choice(([], [b""], [GRADIENT, b""], [GRADIENT[:-4]], [GRADIENT + bytes(4)], [bytes(1 << 16)]))
        case 1:
            name = rng.choice(
                ("params.push_result", "params.start_job", "params.regroup_rings", "params.nothing", "", "done")
            )
        case 2:
            body.pop(rng.choice([name for name, field in type(PUSH).model_fields.items() if field.is_required()]))
        case _:
            field = rng.choice(list(WRONG))
            body[field] = rng.choice(WRONG[field])
    return packed(name, json.dumps(body).encode(), buffers)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("make", "is_noticed"), [(by_chance, is_written_down), (lying, is_answered)])
def test_mutated_pushes_change_nothing_and_are_noticed(
    make: Callable[[random.Random], bytes], is_noticed: Callable[[bytes, Heard], bool]
) -> None:
    rng, server = random.Random(11), Server()
    for _ in range(5000 if effort.is_thorough() else 1000):
        data = make(rng)
        assert is_noticed(data, server.hear(data)), data
        assert (server.service.version, server.crashes) == (0, []), data
    assert torch.equal(server.parameters(), FIRST)
    server.hear(GOOD, awaits_answer=True)  # an honest push counts as ever
    assert server.service.version == 1
    assert torch.equal(server.parameters(), FIRST - 0.5 * 0.5)


@pytest.mark.parametrize("field", WRONG)
def test_no_field_of_a_push_may_say_anything_else(field: str) -> None:
    for value in WRONG[field]:
        server = Server()
        heard = server.hear(packed(PUSH.kind, json.dumps(BODY | {field: value}).encode(), [GRADIENT]))
        assert heard.num_failures == 1, (field, value)
        assert (server.service.version, server.crashes) == (0, []), (field, value)
        server.hear(GOOD, awaits_answer=True)
        assert torch.equal(server.parameters(), FIRST - 0.5 * 0.5), (field, value)


ANYTHING = (
    *(0, 1, 2, 3, 7, -1, 1.5, 10**12, 2**70, float("nan"), True, None),
    *("", "x", "0", "gradient", [], [0], [1], [[0], [1]], [[1], [0]], [[0, 1]], [["x"]], {}, {"0": "x"}, {"x": [1]}),
)
OTHERS = [handler.message for handler in ParameterService().handlers() if handler.message is not Push]


def made_up(rng: random.Random, message: type[rpc.RpcMessage]) -> bytes:
    """A frame whose checks are right, of a call of this kind with anything in it; its term is right more often."""
    body = {name: rng.choice(ANYTHING) for name in message.model_fields if rng.random() < 0.9}
    if type(body.get("wait_s")) in (int, float):
        body["wait_s"] /= 1000  # of a state that does not come
    if rng.random() < 0.7:
        body |= {name: right for name, right in (("term", 0), ("ring", 1)) if name in body}
    if rng.random() < 0.7 and "setup" in body:
        field = rng.choice(list(type(SETUP).model_fields))
        body["setup"] = json.loads(SETUP.model_dump_json()) | {field: rng.choice(ANYTHING)}
    buffers = rng.choice(([], [], [b""], [GRADIENT], [GRADIENT, GRADIENT], [bytes(1 << 16)]))
    text = json.dumps(body).encode()
    return packed(message.kind, text, buffers, timeout_s=0.01)  # what would be waited for does not come


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("message", OTHERS, ids=lambda message: message.kind)
def test_calls_of_all_other_kinds_with_anything_in_them_change_no_parameter(message: type[rpc.RpcMessage]) -> None:
    rng = random.Random(12)
    for _ in range(8):
        server = Server()
        for _ in range(25):
            data = made_up(rng, message)
            server.hear(data)
            assert (server.service.version, server.crashes) == (0, []), data
        assert torch.equal(server.parameters(), FIRST)
