"""A server with two rings, called in this thread and without connections."""

import time
from typing import Any

import torch

from ringweave import wire
from ringweave.params.flat import Flat
from ringweave.params.messages import Group, Push, Setup, Start, TensorSpec
from ringweave.params.serving.optimizers import options_of
from ringweave.params.serving.service import ParameterService
from ringweave.wire import Answer, Call

SPECS = [TensorSpec(name="weight", shape=[4], dtype="float64")]
OPTIONS = options_of(torch.optim.SGD([torch.zeros(1)], lr=1.0).param_groups[0])
RINGS = [[0, 3], [1, 2]]
SHARES = [[6, 5], [7, 6]]
LONG_S = 60.0


class Job:
    """A server with two rings, called as their members call it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.service = ParameterService(clock=lambda: self.now_s)
        self._handlers = {each.message: each for each in self.service.handlers()}

    def start(self, *, may_lose_members: bool = True) -> None:
        setup = Setup(
            tensors=SPECS,
            optimizer="SGD",
            groups=[Group(parameters=[0], options=OPTIONS)],
            rings=RINGS,
            overlaps=False,
            compensation=0.0,
            shares=SHARES if may_lose_members else [],
        )
        self.call("0.0", Start(term=0, setup=setup), Flat(SPECS, [torch.zeros(4, dtype=torch.float64)]).buffers())

    def call(self, who: str, message: wire.Message, buffers: Any = (), limit_s: float = LONG_S) -> Any:
        peer = wire.Identity(job="test", role="worker", name=who)
        call = Call(peer=peer, message=message, buffers=buffers, deadline_s=time.monotonic() + limit_s)
        answer = self._handlers[type(message)].handle(call)
        return answer.message if isinstance(answer, Answer) else answer

    def push(self, who: str, ring: int, sequence: int, base: int, **more: Any) -> Any:
        content = Flat(SPECS, [torch.ones(4, dtype=torch.float64)])
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
        return self.call(who, push, content.buffers())

    def hang_up(self, who: str) -> None:
        self.service.attendance.missed(wire.Identity(job="test", role="worker", name=who))
