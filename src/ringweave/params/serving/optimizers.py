"""Optimizers of torch that the server runs, and their options as they travel."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ringweave.errors import TrainingError, explain
from ringweave.files.problems import closest
from ringweave.params.messages import Group, Option

NAMES = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adadelta")
"""Those of torch.optim that need no more than gradients."""
_OF_THE_MACHINE = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})
"""How and where to compute is each process's own affair, and so is what a script calls its parameters."""
_FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
"""Those with one pass over the memory on the CPU, without temporary copies of the size of the model."""
_SAME_SCRIPT = "Run the same script on all ranks"


def name_of(optimizer: torch.optim.Optimizer) -> str:
    """Its class's name where that is torch's own, else with its module: a script's own SGD takes other steps."""
    kind = type(optimizer)
    return kind.__name__ if kind is getattr(torch.optim, kind.__name__, None) else f"{kind.__module__}.{kind.__name__}"


def check_name(name: str) -> str:
    """`name` itself if the server can run that optimizer.

    Raises:
        TrainingError: It cannot.
    """
    if name not in NAMES:
        do = closest(name, NAMES) or "Use one of them, or mode balanced, which takes any"
        raise TrainingError(explain("optimizer", got=name, expected=f"one of {', '.join(NAMES)}", do=do))
    return name


def has_moved(states: Iterable[Mapping[str, Any]]) -> bool:
    """Whether an optimizer with this state of its parameters has taken steps: Adagrad makes its state before."""
    return any(
        float(state["step"]) > 0 if "step" in state else any(value is not None for value in state.values())
        for state in states
    )


def check_fresh(states: Iterable[Mapping[str, Any]]) -> None:
    """Refuse what the server's optimizer would silently go on without.

    Raises:
        TrainingError: It has taken steps.
    """
    if has_moved(states):
        raise TrainingError(
            explain(
                "state of the optimizer",
                got="of steps that it has taken",
                expected="none: in this mode the optimizer is the parameter server's, which begins anew",
                do="Go on from a checkpoint of ringweave.Checkpoints, which has the server's, or use mode balanced",
            )
        )


def options_of(group: Mapping[str, Any]) -> dict[str, Option]:
    """The options of a group of parameters, to be sent.

    Raises:
        TrainingError: One is no plain value.
    """
    return {name: _plain(name, value) for name, value in group.items() if name not in _OF_THE_MACHINE}


def make(name: str, groups: Sequence[Group], parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer, as the script made it.

    Raises:
        TrainingError: No such optimizer, or it does not take these options.
    """
    settings = [
        {**_taken(group.options), "params": [parameters[place] for place in group.parameters]} for group in groups
    ]
    is_fused = name in _FUSED and all(parameter.is_floating_point() for parameter in parameters)
    try:
        made = getattr(torch.optim, check_name(name))
        return made(settings, lr=settings[0].get("lr", 0.0), **({"fused": True} if is_fused else {}))
    except (TypeError, ValueError, IndexError) as cause:
        raise TrainingError(
            explain(
                f"options of {name}", got=str(cause), expected="those of the script", do="Run the same torch everywhere"
            )
        ) from cause


def check(optimizer: torch.optim.Optimizer, options: Sequence[Mapping[str, Option]]) -> None:
    """Refuse options that are not of this optimizer's groups: a step that fails halfway has counted already.

    Raises:
        TrainingError: They belong to other groups, or one is no value of its kind.
    """
    if len(options) != len(optimizer.param_groups) or not all(_is_number(each.get("lr")) for each in options):
        raise TrainingError(
            explain(
                "options of the optimizer's groups",
                got=[sorted(given) for given in options],
                expected=f"those of {len(optimizer.param_groups)} groups, a number as lr among them",
                do=_SAME_SCRIPT,
            )
        )
    for group, given in zip(optimizer.param_groups, options, strict=True):
        for name, value in given.items():
            if name in _OF_THE_MACHINE or (name in group and not _is_of_its_kind(value, group[name])):
                expected = "nothing, it is the server's own" if name in _OF_THE_MACHINE else f"one like {group[name]!r}"
                raise TrainingError(explain(f"option {name}", got=value, expected=expected, do=_SAME_SCRIPT))


def adjust(optimizer: torch.optim.Optimizer, options: Sequence[Mapping[str, Option]], factor: float) -> None:
    """Give each group its options of now, and scale the length of the next step.

    What the group does not know is a scheduler's own (`initial_lr`) and is left out.

    Raises:
        TrainingError: They belong to other groups.
    """
    check(optimizer, options)
    for group, given in zip(optimizer.param_groups, options, strict=True):
        group.update({name: value for name, value in _taken(given).items() if name in group})
        group["lr"] = group["lr"] * factor


def warm_up() -> None:
    """Make torch load what a first step loads, before anybody waits for it."""
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.AdamW([parameter], fused=True).step()


def _is_of_its_kind(value: Option, known: object) -> bool:
    """Whether a value may stand where that one does: schedulers change numbers, and nothing else."""
    if known is None:
        return True
    if isinstance(known, (tuple, list)):
        return isinstance(value, list) and len(value) == len(known)
    if _is_number(known):
        return _is_number(value)
    return isinstance(value, type(known))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _taken(options: Mapping[str, Option]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}


def _plain(name: str, value: object) -> Option:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (tuple, list)) and all(map(_is_number, value)):
        return [float(each) for each in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TrainingError(
        explain(f"option {name} of the optimizer", got=value, expected="a number, a text or None", do="Leave it out")
    )
