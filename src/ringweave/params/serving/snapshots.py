"""The server's whole state in one safetensors file: parameters, optimizer, books.

Taken between two pushes by holding the version and copying the optimizer's state, written beside the pushes that
follow, complete or not at all: a new file is renamed into its place when it is on the disk.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pydantic
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ringweave.errors import TrainingError, explain
from ringweave.params.flat import Flat
from ringweave.params.messages import Setup
from ringweave.params.rules import Receipt
from ringweave.params.serving.model import VersionedModel

_FORMAT = 1
_KEY = "ringweave"


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The state of a server at one version."""

    setup: Setup
    version: int
    pushed: dict[int, Receipt]
    """The last receipt of each ring, so that a push that was acknowledged is not applied again."""
    parameters: list[Tensor]
    groups: list[dict[str, Any]]
    """The optimizer's, without the parameters."""
    state: dict[str, Tensor]
    """The optimizer's, by `place.name`; tensors only."""
    scalars: dict[str, float]
    """Likewise; numbers."""


def take(model: VersionedModel, version: int, pushed: Mapping[int, Receipt], holder: object) -> Snapshot:
    """The state now. Until `model.release(holder)` the parameters in it stay as they are, without a copy."""
    found = model.optimizer.state_dict()
    entries = {f"{place}.{name}": value for place, each in found["state"].items() for name, value in each.items()}
    groups = [{key: value for key, value in group.items() if key != "params"} for group in found["param_groups"]]
    return Snapshot(
        setup=model.setup,
        version=version,
        pushed=dict(pushed),
        parameters=model.hold(holder).views,
        groups=groups,
        state={key: value.clone() for key, value in entries.items() if isinstance(value, Tensor)},
        scalars={key: value for key, value in entries.items() if isinstance(value, (int, float))},
    )


def save(snapshot: Snapshot, path: Path) -> None:
    """Write it, in place of an earlier one of that name.

    Raises:
        OSError: The disk does not take it; an earlier file is as it was.
    """
    books = {
        "format": _FORMAT,
        "version": snapshot.version,
        "setup": snapshot.setup.model_dump(mode="json"),
        "pushed": [asdict(receipt) for receipt in snapshot.pushed.values()],
        "groups": snapshot.groups,
        "scalars": snapshot.scalars,
    }
    tensors = {f"parameter.{place}": each.contiguous() for place, each in enumerate(snapshot.parameters)}
    tensors |= {f"state.{key}": each for key, each in snapshot.state.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    save_file(tensors, partial, metadata={_KEY: json.dumps(books)})
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.replace(path)


def load(path: Path) -> Snapshot:
    """What `save` wrote.

    Raises:
        TrainingError: The file is damaged, or is something else.
    """
    try:
        with safe_open(path, framework="pt") as file:
            books = json.loads(file.metadata()[_KEY])
            setup = Setup.model_validate(books["setup"])
            state = {key: file.get_tensor(f"state.{key}") for key in _below(file.keys(), "state.")}
            parameters = [file.get_tensor(f"parameter.{place}") for place in range(len(setup.tensors))]
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, pydantic.ValidationError) as cause:
        raise TrainingError(
            explain(
                "snapshot of the parameter server",
                got=str(cause)[:200],
                expected="a whole file that ringweave server wrote",
                do="Use the one before it",
                where=str(path),
            )
        ) from cause
    return Snapshot(
        setup=setup,
        version=books["version"],
        pushed={receipt["ring"]: Receipt(**receipt) for receipt in books["pushed"]},
        parameters=parameters,
        groups=books["groups"],
        state=state,
        scalars=books["scalars"],
    )


def restore(snapshot: Snapshot) -> VersionedModel:
    """The model as it was."""
    flat = Flat(snapshot.setup.tensors)
    for view, parameter in zip(flat.views, snapshot.parameters, strict=True):
        view.copy_(parameter)
    model = VersionedModel(snapshot.setup, flat)
    state: dict[int, dict[str, Any]] = {}
    for key, value in [*snapshot.state.items(), *snapshot.scalars.items()]:
        place, _, name = key.partition(".")
        state.setdefault(int(place), {})[name] = value
    places = [group["params"] for group in model.optimizer.state_dict()["param_groups"]]
    groups = [{**_tupled(kept), "params": own} for kept, own in zip(snapshot.groups, places, strict=True)]
    model.optimizer.load_state_dict({"state": state, "param_groups": groups})
    return model


def _tupled(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in group.items()}


def _below(keys: list[str], prefix: str) -> list[str]:
    return [key.removeprefix(prefix) for key in keys if key.startswith(prefix)]
