"""The server's whole state in one safetensors file: parameters, optimizer, books.

Copied between two pushes, written beside the pushes that follow, complete or not at all: a new file is renamed into its
place when it is on the disk.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ringweave.errors import TrainingError, explain
from ringweave.files import durable
from ringweave.params.flat import Flat
from ringweave.params.messages import Setup
from ringweave.params.rules import Progress, Receipt
from ringweave.params.serving.model import GatheredModel

_FORMAT = 3
_KEY, _CHECK = "ringweave", "check"


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The state of a server at one version."""

    setup: Setup
    version: int
    pushed: dict[int, Receipt]
    """The last receipt of each ring, so that a push that was acknowledged is not applied again."""
    parameters: list[Tensor]
    """At the start of the present train step."""
    progress: Progress
    gathered: list[Tensor]
    """The sum of the gradients of the present train step; empty if there are none."""
    groups: list[dict[str, Any]]
    """The optimizer's, without the parameters."""
    state: dict[str, Tensor]
    """The optimizer's, by `block.name`; tensors only."""
    scalars: dict[str, float]
    """Likewise; numbers."""


def take(model: GatheredModel, version: int, pushed: Mapping[int, Receipt]) -> Snapshot:
    """A copy of the state now."""
    found = model.optimizer.state_dict()
    entries = {f"{place}.{name}": value for place, each in found["state"].items() for name, value in each.items()}
    groups = [{key: value for key, value in group.items() if key != "params"} for group in found["param_groups"]]
    return Snapshot(
        setup=model.setup,
        version=version,
        pushed=dict(pushed),
        parameters=[view.clone() for view in model.start.views],
        progress=replace(model.progress, present=set(model.progress.present)),
        gathered=[view.clone() for view in model.gathered.views] if model.gathered else [],
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
        "progress": {**asdict(snapshot.progress), "present": sorted(snapshot.progress.present)},
        "groups": snapshot.groups,
        "scalars": snapshot.scalars,
    }
    tensors = {f"parameter.{place}": each.contiguous() for place, each in enumerate(snapshot.parameters)}
    tensors |= {f"gathered.{place}": each.contiguous() for place, each in enumerate(snapshot.gathered)}
    tensors |= {f"state.{key}": each for key, each in snapshot.state.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    text = json.dumps(books)
    save_file(tensors, partial, metadata={_KEY: text, _CHECK: _check(text, tensors)})
    with partial.open("rb") as file:
        durable.sync(file)
    partial.replace(path)
    durable.sync_folder(path.parent)


def load(path: Path) -> Snapshot:
    """What `save` wrote.

    Raises:
        TrainingError: The file is damaged, or is something else.
    """
    try:
        with safe_open(path, framework="pt") as file:
            text, stated = file.metadata()[_KEY], file.metadata()[_CHECK]
            _compare(stated, _check(text, {key: file.get_tensor(key) for key in file.keys()}))  # noqa: SIM118
            books = json.loads(text)
            setup = Setup.model_validate(books["setup"])
            state = {key: file.get_tensor(f"state.{key}") for key in _below(file.keys(), "state.")}
            parameters = [file.get_tensor(f"parameter.{place}") for place in range(len(setup.tensors))]
            progress = _progress_of(books["progress"])
            gathered = [file.get_tensor(f"gathered.{place}") for place in range(len(_below(file.keys(), "gathered.")))]
        return Snapshot(
            setup=setup,
            version=books["version"],
            pushed={receipt["ring"]: Receipt(**receipt) for receipt in books["pushed"]},
            parameters=parameters,
            progress=progress,
            gathered=gathered,
            groups=books["groups"],
            state=state,
            scalars=books["scalars"],
        )
    except (SafetensorError, OSError, LookupError, TypeError, ValueError, AttributeError, RecursionError) as cause:
        raise TrainingError(
            explain(
                "snapshot of the parameter server",
                got=str(cause)[:200],
                expected="a whole file that ringweave server wrote",
                do="Use the one before it",
                where=str(path),
            )
        ) from cause


def restore(snapshot: Snapshot) -> GatheredModel:
    """The model as it was."""
    model = GatheredModel(snapshot.setup, _flat_of(snapshot.setup, snapshot.parameters), snapshot.progress)
    if snapshot.gathered:
        model.gathered = _flat_of(snapshot.setup, snapshot.gathered)
    state: dict[int, dict[str, Any]] = {}
    for key, value in [*snapshot.state.items(), *snapshot.scalars.items()]:
        place, _, name = key.partition(".")
        state.setdefault(int(place), {})[name] = value
    places = [group["params"] for group in model.optimizer.state_dict()["param_groups"]]
    groups = [{**_tupled(kept), "params": own} for kept, own in zip(snapshot.groups, places, strict=True)]
    model.optimizer.load_state_dict({"state": state, "param_groups": groups})
    return model


def _flat_of(setup: Setup, tensors: list[Tensor]) -> Flat:
    flat = Flat(setup.tensors)
    for view, tensor in zip(flat.views, tensors, strict=True):
        view.copy_(tensor)
    return flat


def _progress_of(book: Mapping[str, Any]) -> Progress:
    numbers = {name: value for name, value in book.items() if name != "present"}
    return Progress(present=set(book["present"]), **numbers)


def _check(text: str, tensors: Mapping[str, Tensor]) -> str:
    """xxh3 (64 bits) of the books and of every tensor's name, kind, shape and bytes, in hexadecimal."""
    found = xxhash.xxh3_64(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        found.update(tensor.flatten().view(torch.uint8).numpy().data if tensor.numel() else b"")
    return found.hexdigest()


def _compare(stated: str, found: str) -> None:
    if stated != found:
        raise ValueError(f"check {found} instead of {stated}")


def _tupled(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in group.items()}


def _below(keys: list[str], prefix: str) -> list[str]:
    return [key.removeprefix(prefix) for key in keys if key.startswith(prefix)]
