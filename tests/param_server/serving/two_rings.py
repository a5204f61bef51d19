"""A server with two rings, called in this thread and without connections."""

import time
from typing import Any

import torch

from ringweave import rpc
from ringweave.param_server.flat import FlatTensors
from ringweave.param_server.messages import ParameterGroup, Pull, Push, ServerSetup, StartJob, TakeShard, TensorSpec
from ringweave.param_server.optimizers import group_options
from ringweave.param_server.service import ParameterService
from ringweave.rpc import RpcCall, RpcReply

SPECS = [TensorSpec(name="weight", shape=[4], dtype="float64")]
OPTIONS = group_options(torch.optim.SGD([torch.zeros(1)], lr=1.0).param_groups[0])
RINGS = [[0, 3], [1, 2]]
SHARES = [[6, 5], [7, 6]]
LONG_S = 60.0


def push_of(ring: int, sequence: int, base: int, **more: Any) -> tuple[Push, Any]:
    """A ring's push of ones, and its content."""
    push = Push(
        term=0,
        ring=ring,
        sequence=sequence,
        base_version=base,
        content="gradient",
        num_samples=1,
        batch_share=0.5,
        options=[OPTIONS],
        **more,
    )
    return push, FlatTensors(SPECS, [torch.ones(4, dtype=torch.float64)]).buffers()


class Job:
    """A server with two rings, called as their members call it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.service = ParameterService(clock=lambda: self.now_s)
        self._handlers = {each.message: each for each in self.service.handlers()}

    def start(self, *, may_lose_members: bool = True) -> None:
        setup = ServerSetup(
            tensors=SPECS,
            optimizer="SGD",
            groups=[ParameterGroup(parameters=[0], options=OPTIONS)],
            rings=RINGS,
            overlaps=False,
            compensation=0.0,
            shares=SHARES if may_lose_members else [],
        )
        self.call(
            "0.0", StartJob(term=0, setup=setup), FlatTensors(SPECS, [torch.zeros(4, dtype=torch.float64)]).buffers()
        )

    def call(self, who: str, message: rpc.RpcMessage, buffers: Any = (), limit_s: float = LONG_S) -> Any:
        peer = rpc.Identity(job="test", role="worker", name=who)
        call = RpcCall(peer=peer, message=message, buffers=buffers, deadline_s=time.monotonic() + limit_s)
        answer = self._handlers[type(message)].handle(call)
        return answer.message if isinstance(answer, RpcReply) else answer

    def push(self, who: str, ring: int, sequence: int, base: int, **more: Any) -> Any:
        return self.call(who, *push_of(ring, sequence, base, **more))

    def abort(self, who: str) -> None:
        self.service.ring_sessions.note_disconnect(rpc.Identity(job="test", role="worker", name=who))


class Representatives:
    """Those of one ring, one after the other: each says again what the one before may have said already."""

    def __init__(self, job: Job, ring: int, deaths: list[int]) -> None:
        self._job, self._ring, self._deaths = job, ring, deaths
        self._names = [f"{slot}.0" for slot in RINGS[ring]]
        self.shards: list[tuple[int, int]] = []
        self._num_calls = 0
        self._base, self._num_pushed = 0, 0

    @property
    def name(self) -> str:
        """Of the one that speaks now."""
        return self._names[0]

    def run(self, epoch_samples: int) -> None:
        """One epoch: each step is a ticket and a push; whoever dies leaves the step to the next."""
        self._base = self._again(self._pull)
        while (ticket := self._again(lambda: self._apply_events(epoch_samples)))[1]:
            self.shards.append(ticket)
            self._base = self._again(self._exchange)
            self._num_pushed += 1

    def _again(self, fetch: Any) -> Any:
        while True:
            try:
                return fetch()
            except InterruptedError:
                self._job.abort(self._names[0])
                self._names.append(self._names.pop(0))

    def _said(self) -> None:
        """A call was answered: the representative may die before anybody else knows."""
        self._num_calls += 1
        if self._num_calls in self._deaths:
            raise InterruptedError

    def _pull(self) -> int:
        pull = Pull(term=0, ring=self._ring, after_sequence=self._num_pushed)
        found = self._job.call(self._names[0], pull).version
        self._said()
        return found

    def _apply_events(self, epoch_samples: int) -> tuple[int, int]:
        number = len(self.shards) + 1
        take = TakeShard(
            term=0, ring=self._ring, number=number, epoch=0, num_samples=3, least=1, epoch_samples=epoch_samples
        )
        found = self._job.call(self._names[0], take)
        self._said()
        return found.first, found.num_samples

    def _exchange(self) -> int:
        self._job.push(self._names[0], self._ring, self._num_pushed + 1, self._base)
        self._said()
        pull = Pull(term=0, ring=self._ring, after_sequence=self._num_pushed + 1)
        found = self._job.call(self._names[0], pull).version
        self._said()
        return found
