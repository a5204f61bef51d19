"""A worker that kills itself, as SIGKILL would, at a named moment of its next train step: for `watched.py`.

Only a process itself knows when it is in the midst of a bucket or of a commit; what follows is as sudden as from
outside.
"""

import os
import signal
from collections.abc import Callable
from typing import Any, NoReturn

import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ringweave.benchmarks.chaos.faults import BACKWARD, BUCKET, COMMIT, COMMITTED, FORWARD, OPTIMIZER
from ringweave.comm.regrouping import EpochGroups
from ringweave.errors import UsageError

_VOTE = (EpochGroups, "vote")
"""What members say to each other when they have all sums of a step, where it is found."""


def die() -> NoReturn:
    """At once: no handler, no clean-up."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a process that was killed goes on")


def arm(moment: str, optimizer: Optimizer, end: Callable[[str], Any]) -> None:
    """Let `end` be called when that moment of the next train step comes.

    Args:
        moment: One of `faults.MOMENTS`; of a bucket with its number, from 0. If steps have fewer buckets: the commit of
            the next whole step.
        optimizer: Has the parameters: gradients of the one in the midst are what backward has reached.
        end: What happens then; it is told which moment has come, for where buckets are fewer it is another one.

    Raises:
        UsageError: There is no such moment.
    """
    name, _, number = moment.partition(" ")
    arms: dict[str, Callable[[], object]] = {
        FORWARD: lambda: register_module_forward_hook(_ending(end, FORWARD)),
        BACKWARD: lambda: _middle(optimizer).register_post_accumulate_grad_hook(_ending(end, BACKWARD)),
        BUCKET: lambda: _at_bucket(int(number), end),
        COMMIT: lambda: _replace(*_VOTE, lambda _real: _ending(end, COMMIT)),
        COMMITTED: lambda: _replace(*_VOTE, lambda real: lambda *args, **more: (real(*args, **more), end(COMMITTED))),
        OPTIMIZER: lambda: register_optimizer_step_pre_hook(_ending(end, OPTIMIZER)),
    }
    if name not in arms:
        raise UsageError(f"moment of a train step: {moment!r}, expected {', '.join(arms)}. See docs/chaos.md.")
    arms[name]()


def _ending(end: Callable[[str], Any], reached: str) -> Callable[..., Any]:
    """A hook that tells which moment has come, whatever it is called with."""
    return lambda *_, **__: end(reached)


def _at_bucket(wanted: int, end: Callable[[str], Any]) -> None:
    """When the sum of that bucket has begun: its first bytes may be on their way.

    Sums may be under way already: of a worker that follows another thread takes part in them.
    """
    num_begun = num_votes = 0

    def begin(real: Callable[..., Any]) -> Callable[..., Any]:
        def begin_one(*args: Any, **more: Any) -> Any:
            nonlocal num_begun
            work = real(*args, **more)
            num_begun += 1
            if num_begun > wanted:
                end(f"{BUCKET} {wanted}")
            return work

        return begin_one

    def vote(real: Callable[..., Any]) -> Callable[..., Any]:
        def vote_one(*args: Any, **more: Any) -> Any:
            nonlocal num_begun, num_votes
            num_begun, num_votes = 0, num_votes + 1
            if num_votes > 1:  # a whole step had no such bucket
                end(COMMIT)
            return real(*args, **more)

        return vote_one

    _replace(dist, "all_reduce", begin)
    _replace(*_VOTE, vote)


def _replace(where: object, name: str, made: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """`ringweave` calls these by their module or class, so what stands there now is what it calls."""
    setattr(where, name, made(getattr(where, name)))


def _middle(optimizer: Optimizer) -> Any:
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    return parameters[len(parameters) // 2]
