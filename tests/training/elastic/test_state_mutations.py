"""A peer whose state is damaged, or made up: a newcomer takes over all of one that fits, or nothing, and says why."""

import copy
import json
import random
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from ringweave import rpc
from ringweave.errors import MessageError, RpcError, TrainingError
from ringweave.rpc import framing
from ringweave.rpc.state_transfer import DescribeState, StateDescription, StateServer
from ringweave.training.elastic import training_state
from ringweave.training.elastic.training_state import TrainingState
from tests.fakes.plaintext import PlaintextAuthentication
from tests.rpc.mutations import mutated
from tests.training.elastic.test_state import OPTIMIZERS, trained

Buffers = dict[str, bytes]


class Worker:
    """One that trains, with something of each kind in its state."""

    def __init__(self, num_steps: int) -> None:
        self.model, self.optimizer, self.scheduler = trained(OPTIMIZERS["adam"], num_steps)
        self.beside = [torch.arange(5.0) * num_steps, torch.arange(3) * num_steps]
        self.state = TrainingState(self.model, self.optimizer, {"rate": self.scheduler}, extra_tensors=self.beside)

    def all(self) -> dict[str, Any]:
        """Everything that may change."""
        parts = (self.model.state_dict(), self.beside, self.optimizer.state_dict(), self.scheduler.state_dict())
        return {str(number): copy.deepcopy(part) for number, part in enumerate(parts)}

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(5, 3)).sum().backward()
        self.optimizer.step()
        self.scheduler.step()


def is_same(one: Any, other: Any) -> bool:
    """Whether two states are, to the bit."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and raw(one) == raw(other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(is_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(is_same, one, other))
    return repr(one) == repr(other)


def raw(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def given_by(worker: Worker) -> Buffers:
    return {name: bytes(memoryview(each)) for name, each in worker.state.to_buffers().items()}


def loaded(newcomer: Worker, buffers: Buffers) -> None:
    newcomer.state.load({name: memoryview(bytearray(each)) for name, each in buffers.items()})


def damaged(rng: random.Random, good: Buffers) -> Buffers:
    """With a buffer missing, doubled, under another's name, or with other bytes; most often the one with JSON."""
    found, name = dict(good), rng.choice([training_state.REST_BUFFER] * 9 + sorted(good))
    match rng.randrange(12):
        case 0:
            del found[name]
        case 1:
            found[f"{name}x"] = found[name]
        case 2:
            other = rng.choice(sorted(good))
            found[name], found[other] = found[other], found[name]
        case 3:
            found[name] = found[name][rng.randrange(len(found[name])) :]
        case _:
            found[name] = mutated(rng, found[name].ljust(32))
    return found


def test_a_damaged_state_is_taken_over_whole_or_not_at_all() -> None:
    rng, good = random.Random(14), given_by(Worker(3))
    num_refused = num_taken = 0
    for _ in range(600):
        buffers, newcomer = damaged(rng, good), Worker(0)
        before = newcomer.all()
        try:
            loaded(newcomer, buffers)
        except (MessageError, TrainingError):
            num_refused += 1
            assert is_same(newcomer.all(), before), "it begins anew with what it has"
        else:
            num_taken += 1
            now, rest = given_by(newcomer), json.loads(buffers[training_state.REST_BUFFER])
            assert {name: now[name] for name in newcomer.state._tensors()} == {
                name: buffers[name] for name in newcomer.state._tensors()
            }
            assert repr(json.loads(now[training_state.REST_BUFFER])["groups"]) == repr(rest["groups"])
            assert now.keys() == buffers.keys()
    assert num_refused > 300
    assert num_taken > 20


def changed(good: Buffers, change: Callable[[dict[str, Any]], object]) -> Buffers:
    rest = json.loads(good[training_state.REST_BUFFER])
    change(rest)
    return good | {training_state.REST_BUFFER: json.dumps(rest).encode()}


EXP_AVG = {"dtype": "float32", "shape": [4, 3]}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda rest: rest["optimizer"]["0"].update(exp_avg={"tensor": {**EXP_AVG, "dtype": "save"}}), "save"),
        (lambda rest: rest["optimizer"]["0"].update(exp_avg={"tensor": {**EXP_AVG, "dtype": "nn"}}), "nn"),
        (lambda rest: rest["optimizer"]["0"].update(exp_avg={"tensor": {**EXP_AVG, "shape": [-4, -3]}}), "48 bytes"),
        (lambda rest: rest["optimizer"]["0"].update(exp_avg={"tensor": {**EXP_AVG, "shape": [2**40, 3]}}), "48 bytes"),
        (lambda rest: rest["optimizer"]["0"].update(exp_avg={"tensor": {**EXP_AVG, "shape": [4.0, 3]}}), "48 bytes"),
        (lambda rest: rest["optimizer"]["0"].update(exp_avg={"tensor": {"shape": [4, 3]}}), "neither a value nor"),
        (lambda rest: rest["optimizer"]["0"].update(exp_avg={"value": 1}), "also"),
        (lambda rest: rest["optimizer"]["0"].update(more={"tensor": EXP_AVG}), "optimizer/0/more"),
        (lambda rest: rest["optimizer"].update({"9": rest["optimizer"].pop("0")}), "9"),
        (lambda rest: rest["optimizer"].update({"-1": {}}), "-1"),
        (lambda rest: rest.update(optimizer=[]), "optimizer is no object"),
        (lambda rest: rest.update(groups=[]), "groups of other parameters"),
        (lambda rest: rest["groups"].append(rest["groups"][0]), "groups of other parameters"),
        (lambda rest: rest["groups"][0]["params"].reverse(), "groups of other parameters"),
        (lambda rest: rest["groups"][0].pop("lr"), "lr"),
        (lambda rest: rest["groups"][0].update(lr="0.1"), "lr is '0.1'"),
        (lambda rest: rest["groups"][0].update(betas=[0.9]), r"betas is \[0.9\]"),
        (lambda rest: rest.update(extra_state=None), "extra_state is no object"),
        (lambda rest: rest["extra_state"].update(rate=[1]), "Error"),
        (lambda rest: rest.pop("groups"), "groups"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(change: Callable[[dict[str, Any]], object], why: str) -> None:
    good, newcomer = given_by(Worker(3)), Worker(0)
    before = newcomer.all()
    with pytest.raises(MessageError, match=f"state of a peer: .*{why}.*, expected one of the same model"):
        loaded(newcomer, changed(good, change))
    assert is_same(newcomer.all(), before)


@pytest.mark.parametrize("rest", [b"", b"null", b"[]", b"{}", b"\xff\xfe", b"[" * 100_000, b"9" * 5000, b" " * 2**25])
def test_rubbish_is_refused_and_changes_nothing(rest: bytes) -> None:
    newcomer = Worker(0)
    before = newcomer.all()
    with pytest.raises(MessageError, match=r"state of a peer: .*, expected one of the same model, optimizer and"):
        loaded(newcomer, given_by(Worker(3)) | {training_state.REST_BUFFER: rest})
    assert is_same(newcomer.all(), before)


class Grudging:
    """Goes along, and fails halfway when it takes over what it does not know."""

    def __init__(self) -> None:
        self.value, self.error = 1, ZeroDivisionError("no")

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]
        if self.value == 7:
            raise self.error


@pytest.mark.parametrize("error", [ZeroDivisionError("no"), TrainingError("no: 7, expected 1. Do without.")])
def test_what_goes_along_and_fails_takes_nothing_with_it(error: Exception) -> None:
    giver, newcomer, theirs, own = Worker(3), Worker(2), Grudging(), Grudging()
    theirs.value, own.error = 7, error
    carried = {"rate": giver.scheduler, "grudging": theirs}
    buffers = TrainingState(giver.model, giver.optimizer, carried, extra_tensors=giver.beside).to_buffers()
    taker = TrainingState(
        newcomer.model, newcomer.optimizer, {"rate": newcomer.scheduler, "grudging": own}, extra_tensors=newcomer.beside
    )
    before = newcomer.all()
    with pytest.raises((MessageError, TrainingError), match="no") as caught:
        taker.load({name: memoryview(bytearray(each)) for name, each in buffers.items()})
    assert isinstance(caught.value, type(error) if isinstance(error, TrainingError) else MessageError)
    assert is_same(newcomer.all(), before)
    assert own.value == 1
    newcomer.train()


class Peer:
    """A connection to a peer: what it sends passes through `spoil`, and then through what a client checks of it."""

    def __init__(self, shelf: StateServer, spoil: Callable[[bytes], bytes]) -> None:
        self._handlers = {handler.message: handler.handle for handler in shelf.handlers()}
        self._spoil = spoil

    def call(self, message: rpc.RpcMessage, *, timeout_s: float) -> rpc.RpcReply:
        assert isinstance(message, DescribeState)
        found = self._handlers[DescribeState](rpc.RpcCall(peer=PEER, message=message, buffers=(), deadline_s=timeout_s))
        assert isinstance(found, StateDescription)
        return rpc.RpcReply(framing.decode_message(StateDescription, self._spoil(framing.encode_message(found))))

    def start(self, message: rpc.RpcMessage, *, timeout_s: float, into: list[memoryview]) -> "Peer":
        found = self._handlers[type(message)](rpc.RpcCall(peer=PEER, message=message, buffers=(), deadline_s=timeout_s))
        assert isinstance(found, rpc.RpcReply)
        data = self._spoil(bytes(memoryview(found.buffers[0])))
        if len(data) != into[0].nbytes:
            raise MessageError("chunk: of another length")
        into[0][:] = data
        return self

    def wait(self) -> None:
        """It is there."""

    def cancel(self) -> None:
        """It is there."""


class Spoiling:
    """Damages one of the messages that pass, but not how long it is."""

    def __init__(self, rng: random.Random, which: int) -> None:
        self._rng, self._left = rng, which

    def __call__(self, data: bytes) -> bytes:
        self._left -= 1
        return mutated(self._rng, data.ljust(32))[: len(data)] if self._left == -1 else data


PEER = rpc.Identity(job="job1", role="worker", name="0.0")
TRUST = PlaintextAuthentication(PEER, "token")


def test_what_is_damaged_under_way_is_taken_over_as_it_was_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    giver, shelf, rng = Worker(3), StateServer(), random.Random(15)
    shelf.publish("state", giver.state.to_buffers())
    num_messages, num_refused, num_taken = len(given_by(giver)), 0, 0
    for _ in range(250):
        peer = Peer(shelf, Spoiling(rng, rng.randrange(2 * num_messages)))
        monkeypatch.setattr(rpc.RpcClient, "connect", lambda *_, peer=peer, **__: nullcontext(peer))
        newcomer = Worker(0)
        before = newcomer.all()
        try:
            newcomer.state.fetch_from_peer("host", 1, TRUST, "state", timeout_s=60.0)
        except RpcError:
            num_refused += 1
            assert is_same(newcomer.all(), before)
        else:
            num_taken += 1
            assert is_same(newcomer.all(), giver.all())
    assert num_refused > 60
    assert num_taken > 60
