"""Optimizers of torch that the server runs, and the RPC form of their options."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ringweave.errors import TrainingError
from ringweave.files.problems import suggest_closest
from ringweave.param_server.messages import OptimizerOption, ParameterGroup

OPTIMIZER_NAMES = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adadelta")
"""Optimizers of torch.optim that need only gradients."""
_LOCAL_OPTIONS = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})
"""Options that each process chooses itself: the way and place of the computation, and parameter names."""
_FUSED_OPTIMIZERS = ("SGD", "Adam", "AdamW", "Adagrad")
"""Optimizers with one pass over the memory on the CPU, without temporary copies of the size of the model."""
_SAME_SCRIPT_HINT = "Run the same script on all ranks"


def optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    """Return the class name of an optimizer of torch; of any other with its module, as it takes other steps."""
    kind = type(optimizer)
    return kind.__name__ if kind is getattr(torch.optim, kind.__name__, None) else f"{kind.__module__}.{kind.__name__}"


def check_optimizer_name(name: str) -> str:
    """Return `name` itself if the server can run that optimizer.

    Raises:
        TrainingError: It cannot.
    """
    if name not in OPTIMIZER_NAMES:
        do = suggest_closest(name, OPTIMIZER_NAMES) or "Use one of them, or mode balanced, which takes any"
        raise TrainingError("optimizer", got=name, expected=f"one of {', '.join(OPTIMIZER_NAMES)}", do=do)
    return name


def has_taken_steps(states: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether an optimizer with this state has taken steps; Adagrad has state before its first step."""
    return any(
        float(state["step"]) > 0 if "step" in state else any(value is not None for value in state.values())
        for state in states
    )


def check_fresh(states: Iterable[Mapping[str, Any]]) -> None:
    """Refuse an optimizer state that the server's optimizer would silently lack.

    Raises:
        TrainingError: It has taken steps.
    """
    if has_taken_steps(states):
        raise TrainingError(
            "state of the optimizer",
            got="of steps that it has taken",
            expected="none: in this mode the optimizer is the parameter server's, which begins anew",
            do="Go on from a checkpoint of ringweave.Checkpoints, which has the server's, or use mode balanced",
        )


def group_options(group: Mapping[str, Any]) -> dict[str, OptimizerOption]:
    """Return the options of a parameter group for RPC.

    Raises:
        TrainingError: One is no plain value.
    """
    return {name: _plain_value(name, value) for name, value in group.items() if name not in _LOCAL_OPTIONS}


def make_optimizer(
    name: str, groups: Sequence[ParameterGroup], parameters: Sequence[nn.Parameter]
) -> torch.optim.Optimizer:
    """Make the optimizer as the script did.

    Raises:
        TrainingError: There is no such optimizer, or it does not take these options.
    """
    settings = [
        {**with_tuples(group.options), "params": [parameters[place] for place in group.parameters]} for group in groups
    ]
    is_fused = name in _FUSED_OPTIMIZERS and all(parameter.is_floating_point() for parameter in parameters)
    try:
        optimizer_class = getattr(torch.optim, check_optimizer_name(name))
        return optimizer_class(settings, lr=settings[0].get("lr", 0.0), **({"fused": True} if is_fused else {}))
    except (TypeError, ValueError, IndexError) as cause:
        raise TrainingError(
            f"options of {name}", got=str(cause), expected="those of the script", do="Run the same torch everywhere"
        ) from cause


def check_options(optimizer: torch.optim.Optimizer, options: Sequence[Mapping[str, OptimizerOption]]) -> None:
    """Refuse options of other groups before a step, because a step that fails halfway has taken effect already.

    Raises:
        TrainingError: They belong to other groups, or one is no value of its kind.
    """
    if len(options) != len(optimizer.param_groups) or not all(_is_number(each.get("lr")) for each in options):
        raise TrainingError(
            "options of the optimizer's groups",
            got=[sorted(given) for given in options],
            expected=f"those of {len(optimizer.param_groups)} groups, a number as lr among them",
            do=_SAME_SCRIPT_HINT,
        )
    for group, given in zip(optimizer.param_groups, options, strict=True):
        for name, value in given.items():
            if name in _LOCAL_OPTIONS or (name in group and not _is_same_kind(value, group[name])):
                expected = "nothing, it is the server's own" if name in _LOCAL_OPTIONS else f"one like {group[name]!r}"
                raise TrainingError(f"option {name}", got=value, expected=expected, do=_SAME_SCRIPT_HINT)


def adjust_options(
    optimizer: torch.optim.Optimizer, options: Sequence[Mapping[str, OptimizerOption]], factor: float
) -> None:
    """Set the present options of each group, and scale the length of the next step.

    An option that the group does not know is a scheduler's own (`initial_lr`) and is left out.

    Raises:
        TrainingError: They belong to other groups.
    """
    check_options(optimizer, options)
    for group, given in zip(optimizer.param_groups, options, strict=True):
        group.update({name: value for name, value in with_tuples(given).items() if name in group})
        group["lr"] = group["lr"] * factor


def warm_up_optimizer() -> None:
    """Make torch load what a first step needs, before any ring waits for it."""
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.AdamW([parameter], fused=True).step()


def _is_same_kind(value: OptimizerOption, known: object) -> bool:
    """Return whether a value may replace a known one: schedulers change numbers, and nothing else."""
    if known is None:
        return True
    if isinstance(known, (tuple, list)):
        return isinstance(value, list) and len(value) == len(known)
    if _is_number(known):
        return _is_number(value)
    return isinstance(value, type(known))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def with_tuples(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options that have passed through JSON, with tuples in place of lists, as optimizers have them."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}


def _plain_value(name: str, value: object) -> OptimizerOption:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (tuple, list)) and all(map(_is_number, value)):
        return [float(each) for each in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TrainingError(
        f"option {name} of the optimizer", got=value, expected="a number, a text or None", do="Leave it out"
    )
