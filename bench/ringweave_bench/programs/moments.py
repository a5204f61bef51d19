"""Self-kill of a worker, as by SIGKILL, at a named moment of its next train step: for `watched.py`.

Only the process itself knows when it is inside a bucket or a commit; its death is as sudden as from outside.
"""

import os
import signal
from collections.abc import Callable
from typing import Any, NoReturn

import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ringweave.comm.generation_group import GenerationGroups
from ringweave.errors import UsageError
from ringweave_bench.chaos.fault_script import BACKWARD, BUCKET, COMMIT, COMMITTED, FORWARD, OPTIMIZER

_COMMIT_VOTE = (GenerationGroups, "all_agree")
"""Class and method of the vote that members take when they have all sums of a step."""


def kill_self() -> NoReturn:
    """Kill this process at once: no handler, no clean-up."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a process that was killed goes on")


def arm_moment(moment: str, optimizer: Optimizer, on_moment: Callable[[str], Any]) -> None:
    """Arrange that `on_moment` is called when a moment of the next train step comes.

    Args:
        moment: One of `faults.MOMENTS`, a bucket with its number from 0. If steps have fewer buckets: the commit of
            the next whole step.
        optimizer: Optimizer of the model; `backward` is the gradient of its middle parameter.
        on_moment: Called with the moment that has come, which differs if there are fewer buckets.

    Raises:
        UsageError: There is no such moment.
    """
    name, _, number = moment.partition(" ")
    arms: dict[str, Callable[[], object]] = {
        FORWARD: lambda: register_module_forward_hook(_moment_hook(on_moment, FORWARD)),
        BACKWARD: lambda: _middle_parameter(optimizer).register_post_accumulate_grad_hook(
            _moment_hook(on_moment, BACKWARD)
        ),
        BUCKET: lambda: _arm_bucket(int(number), on_moment),
        COMMIT: lambda: _wrap_attribute(*_COMMIT_VOTE, lambda _real: _moment_hook(on_moment, COMMIT)),
        COMMITTED: lambda: _wrap_attribute(
            *_COMMIT_VOTE, lambda real: lambda *args, **more: (real(*args, **more), on_moment(COMMITTED))
        ),
        OPTIMIZER: lambda: register_optimizer_step_pre_hook(_moment_hook(on_moment, OPTIMIZER)),
    }
    if name not in arms:
        raise UsageError(
            f"moment of a train step: {moment!r}, expected {', '.join(arms)}. See docs/how-to/inject-faults.md."
        )
    arms[name]()


def _moment_hook(on_moment: Callable[[str], Any], reached: str) -> Callable[..., Any]:
    """Return a hook that reports the moment, for any arguments."""
    return lambda *_, **__: on_moment(reached)


def _arm_bucket(wanted: int, on_moment: Callable[[str], Any]) -> None:
    """Fire when the allreduce of that bucket has begun: its first bytes may be on their way.

    Allreduces may be under way already: in a recovering worker another thread takes part in them.
    """
    num_begun = num_votes = 0

    def begin(real: Callable[..., Any]) -> Callable[..., Any]:
        def begin_one(*args: Any, **more: Any) -> Any:
            nonlocal num_begun
            work = real(*args, **more)
            num_begun += 1
            if num_begun > wanted:
                on_moment(f"{BUCKET} {wanted}")
            return work

        return begin_one

    def vote(real: Callable[..., Any]) -> Callable[..., Any]:
        def vote_one(*args: Any, **more: Any) -> Any:
            nonlocal num_begun, num_votes
            num_begun, num_votes = 0, num_votes + 1
            if num_votes > 1:  # a whole step had no such bucket
                on_moment(COMMIT)
            return real(*args, **more)

        return vote_one

    _wrap_attribute(dist, "all_reduce", begin)
    _wrap_attribute(*_COMMIT_VOTE, vote)


def _wrap_attribute(owner: object, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace an attribute; `ringweave` calls it by its module or class, so it calls the replacement."""
    setattr(owner, name, wrap(getattr(owner, name)))


def _middle_parameter(optimizer: Optimizer) -> Any:
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    return parameters[len(parameters) // 2]
