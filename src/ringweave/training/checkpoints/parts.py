"""What may be part of a checkpoint, and how it is put back."""

from typing import Any

from torch import nn

from ringweave.errors import TrainingError, explain
from ringweave.params.ring.optimizer import PushedOptimizer
from ringweave.training.checkpoints.disk import Saved
from ringweave.training.rings.elastic.optimizer import KeptOptimizer
from ringweave.training.rings.resuming import ServedLoader

SERVER = "parameter server"
"""Name of the part that the server of rings has."""


def check(keep: int, parts: dict[str, Any]) -> None:
    """Refuse what cannot be saved.

    Raises:
        TrainingError: For the first such part, or a number of checkpoints that is none.
    """
    if keep < 1:
        raise TrainingError(
            explain("checkpoints to keep", got=keep, expected="at least 1", do="Three leave a way back")
        )
    is_served = any(isinstance(part, ServedLoader) for part in parts.values())
    for name, part in parts.items():
        if isinstance(part, ServedLoader):
            continue
        if not callable(getattr(part, "state_dict", None)) or not callable(getattr(part, "load_state_dict", None)):
            do = "Leave it out; a loader has them when it comes from ringweave.prepare"
            expected = "an object with state_dict and load_state_dict"
            raise _refusal(name, type(part).__name__, expected, do)
        if isinstance(part, (PushedOptimizer, KeptOptimizer)) and not is_served:
            do = "Give Checkpoints loader=loader: by it the server's state is saved, and put back"
            raise _refusal(name, "the optimizer of a ring, without its loader", "both of them", do)
        if isinstance(part, nn.Module) and any(_is_sharded(each) for each in (*part.modules(), *part.parameters())):
            do = "Save a sharded model with torch.distributed.checkpoint"
            raise _refusal(name, "a sharded model", "one that every rank has whole", do)


def check_names(saved: Saved, states: dict[str, Any], parts: dict[str, Any]) -> None:
    """Compare the parts of a checkpoint with those that are to have its states.

    Raises:
        TrainingError: They are others.
    """
    if states.keys() == parts.keys():
        return
    do = "Give Checkpoints the parts that it was saved with"
    if (SERVER in states) != (SERVER in parts):
        do = "Go on in the modes that it was saved in: rings (ps-hra and ps) keep their state in a server"
    names = [", ".join(sorted(each)) or "none" for each in (states, parts)]
    raise TrainingError(explain("parts of a checkpoint", got=names[0], expected=names[1], do=do, where=str(saved.path)))


def load(saved: Saved, name: str, part: Any, state: Any) -> None:
    """Put a part where it was.

    Raises:
        TrainingError: The state does not fit it.
    """
    try:
        part.load_state_dict(state)
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TrainingError(
            explain(
                f"part {name} of a checkpoint",
                got=str(error)[:300],
                expected="the state of one that is built alike",
                do="Go on with the model and the options that saved it, or into another folder",
                where=str(saved.path),
            )
        ) from error


def _refusal(name: str, got: str, expected: str, do: str) -> TrainingError:
    return TrainingError(explain(f"part {name} of checkpoints", got=got, expected=expected, do=do))


def _is_sharded(part: object) -> bool:
    return hasattr(part, "__tensor_flatten__") or type(part).__name__ == "FullyShardedDataParallel"
