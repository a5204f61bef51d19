"""The cluster file as its authors write it: which keys there are, and what to say of keys and values that do not fit.

Pydantic checks keys and types only; what values mean is checked once, by the dataclasses that are built from them.
"""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from ringweave.topology import rules
from ringweave.topology.problems import Path, Problem, ProblemsError, closest, dotted


def _written_out(devices: Any) -> Any:
    """The short form `devices: 2` as two devices of the usual kind."""
    is_count = isinstance(devices, int) and not isinstance(devices, bool)
    return [{} for _ in range(devices)] if is_count and 1 <= devices <= rules.MAX_DEVICES else devices


def _given(value: Any) -> Any:
    """A key without a value is a slip of the pen, not a way to leave the key out."""
    if value is None:
        raise PydanticCustomError("empty", "no value")
    return value


_Given = BeforeValidator(_given)


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class NicEntry(_Entry):
    """One item of `nics`."""

    name: str = Field(description=rules.NIC_NAME, examples=["eth0"])
    rate: str = Field(description=rules.RATE, examples=["400Mbit/s"])
    numa: Annotated[int | None, _Given] = Field(default=None, description=rules.NUMA, examples=["0"])
    rdma: bool = Field(default=False, description="true or false", examples=["false"])
    nearest: list[int] = Field(default=[], description=rules.NEAREST, examples=["[1, 0]"])


class DeviceEntry(_Entry):
    """One item of `devices`."""

    kind: str = Field(default="cpu", description=rules.KIND, examples=["cpu"])
    speed: float = Field(default=1.0, description=rules.SPEED, examples=["1.0"])
    numa: Annotated[int | None, _Given] = Field(default=None, description=rules.NUMA, examples=["0"])


class NodeEntry(_Entry):
    """One item of `nodes`: a node, or `count` nodes that are alike."""

    name: str = Field(description=rules.NODE_NAME, examples=["a0"])
    switch: Annotated[str | None, _Given] = Field(default=None, description="the name of a switch", examples=["r0"])
    address: Annotated[str | None, _Given] = Field(default=None, description=rules.ADDRESS, examples=["10.0.0.1"])
    nic: Annotated[str | None, _Given] = Field(default=None, description=rules.RATE, examples=["400Mbit/s"])
    nics: Annotated[list[NicEntry] | None, _Given] = Field(
        default=None, description=f"a list of {rules.NICS}", examples=["[{name: eth0, rate: 400Mbit/s}]"]
    )
    devices: Annotated[list[DeviceEntry], BeforeValidator(_written_out)] = Field(
        description=f"{rules.DEVICES}, as a number or as a list", examples=["2"]
    )
    count: Annotated[int | None, _Given] = Field(
        default=None, description=f"a whole number from 1 to {rules.MAX_NODES}", examples=["4"]
    )


class SwitchEntry(_Entry):
    """One item of `switches`."""

    name: str = Field(description=rules.NAME, examples=["r0"])
    uplink: str = Field(description=rules.RATE, examples=["200Mbit/s"])
    parent: Annotated[str | None, _Given] = Field(
        default=None, description="the name of another switch", examples=["r1"]
    )


class ClusterEntry(_Entry):
    """The whole file."""

    name: str = Field(description=rules.NAME, examples=["two-racks"])
    nodes: list[NodeEntry] = Field(description="a list of nodes", examples=["[{name: a0, nic: 400Mbit/s, devices: 2}]"])
    switches: list[SwitchEntry] = Field(
        default=[], description="a list of switches", examples=["[{name: r0, uplink: 200Mbit/s}]"]
    )
    latency: Annotated[str | None, _Given] = Field(default=None, description=rules.LATENCY, examples=["50us"])


_MODELS: dict[Path, type[_Entry]] = {
    (): ClusterEntry,
    ("nodes",): NodeEntry,
    ("nodes", "nics"): NicEntry,
    ("nodes", "devices"): DeviceEntry,
    ("switches",): SwitchEntry,
}


def read(value: Any) -> ClusterEntry:
    """The entries of a file whose keys and types are right.

    Raises:
        ProblemsError: Lists unknown keys, missing keys and values of the wrong type.
    """
    try:
        return ClusterEntry.model_validate(value)
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False)
        raise ProblemsError(tuple(_problem(item) for item in _without_consequences(details))) from error


def _without_consequences(details: list[ErrorDetails]) -> list[ErrorDetails]:
    """A mistyped required key is both unknown and missing; only the first is worth saying."""
    mistyped = {
        (*item["loc"][:-1], key)
        for item in details
        if item["type"] == "extra_forbidden"
        for key in _fields(item["loc"][:-1])
        if f'"{key}"' in _suggestion(item["loc"])
    }
    return [item for item in details if item["type"] != "missing" or item["loc"] not in mistyped]


def _problem(item: ErrorDetails) -> Problem:
    path, key = item["loc"], str(item["loc"][-1]) if item["loc"] else ""
    if item["type"] == "extra_forbidden":
        keys = ", ".join(_fields(path[:-1]))
        do = _suggestion(path) or "Remove it, or write one of these keys"
        return Problem(path=path, what=f"unknown key {_place(path[:-1])}", got=key, expected=f"one of {keys}", do=do)
    if not path or isinstance(path[-1], int):
        keys = ", ".join(_fields(path))
        expected, do = f"a map with the keys {keys}", "Write key: value pairs"
        return Problem(path=path, what=dotted(path) or "cluster file", got=item["input"], expected=expected, do=do)
    description, example = _described(path)
    if item["type"] == "missing":
        what, expected = f"missing key {_place(path[:-1])}", f"{key} ({description})"
        return Problem(path=path, what=what, got=item["input"], expected=expected, do=f'Add "{key}: {example}"')
    return Problem(path=path, what=key, got=item["input"], expected=description, do=f'Write it like "{key}: {example}"')


def _described(path: Path) -> tuple[str, str]:
    info = _fields(path[:-1])[str(path[-1])]
    return str(info.description), str((info.examples or [""])[0])


def _fields(path: Path) -> dict[str, Any]:
    model = _MODELS[tuple(part for part in path if isinstance(part, str))]
    return dict(model.model_fields)


def _suggestion(path: Path) -> str:
    return closest(path[-1], _fields(path[:-1]))


def _place(path: Path) -> str:
    return f"in {dotted(path)}" if path else "at the top of the file"
