"""The cluster file as its authors write it: which keys there are, and what to say of keys and values that do not fit.

Pydantic checks keys and types only; what values mean is checked once, by the dataclasses that are built from them.
"""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from ringweave.files import schema
from ringweave.topology import rules


def _written_out(devices: Any) -> Any:
    """The short form `devices: 2` as two devices of the usual kind."""
    is_count = isinstance(devices, int) and not isinstance(devices, bool)
    return [{} for _ in range(devices)] if is_count and 1 <= devices <= rules.MAX_DEVICES else devices


class NicEntry(schema.Entry):
    """One item of `nics`."""

    name: str = Field(description=rules.NIC_NAME, examples=["eth0"])
    rate: str = Field(description=rules.RATE, examples=["400Mbit/s"])
    numa: Annotated[int | None, schema.GIVEN] = Field(default=None, description=rules.NUMA, examples=["0"])
    rdma: bool = Field(default=False, description="true or false", examples=["false"])
    nearest: list[int] = Field(default=[], description=rules.NEAREST, examples=["[1, 0]"])


class DeviceEntry(schema.Entry):
    """One item of `devices`."""

    kind: str = Field(default="cpu", description=rules.KIND, examples=["cpu"])
    speed: float = Field(default=1.0, description=rules.SPEED, examples=["1.0"])
    numa: Annotated[int | None, schema.GIVEN] = Field(default=None, description=rules.NUMA, examples=["0"])


class NodeEntry(schema.Entry):
    """One item of `nodes`: a node, or `count` nodes that are alike."""

    name: str = Field(description=rules.NODE_NAME, examples=["a0"])
    switch: Annotated[str | None, schema.GIVEN] = Field(
        default=None, description="the name of a switch", examples=["r0"]
    )
    address: Annotated[str | None, schema.GIVEN] = Field(default=None, description=rules.ADDRESS, examples=["10.0.0.1"])
    nic: Annotated[str | None, schema.GIVEN] = Field(default=None, description=rules.RATE, examples=["400Mbit/s"])
    nics: Annotated[list[NicEntry] | None, schema.GIVEN] = Field(
        default=None, description=f"a list of {rules.NICS}", examples=["[{name: eth0, rate: 400Mbit/s}]"]
    )
    devices: Annotated[list[DeviceEntry], BeforeValidator(_written_out)] = Field(
        description=f"{rules.DEVICES}, as a number or as a list", examples=["2"]
    )
    count: Annotated[int | None, schema.GIVEN] = Field(
        default=None, description=f"a whole number from 1 to {rules.MAX_NODES}", examples=["4"]
    )


class SwitchEntry(schema.Entry):
    """One item of `switches`."""

    name: str = Field(description=rules.NAME, examples=["r0"])
    uplink: str = Field(description=rules.RATE, examples=["200Mbit/s"])
    parent: Annotated[str | None, schema.GIVEN] = Field(
        default=None, description="the name of another switch", examples=["r1"]
    )


class ClusterEntry(schema.Entry):
    """The whole file."""

    name: str = Field(description=rules.NAME, examples=["two-racks"])
    nodes: list[NodeEntry] = Field(description="a list of nodes", examples=["[{name: a0, nic: 400Mbit/s, devices: 2}]"])
    switches: list[SwitchEntry] = Field(
        default=[], description="a list of switches", examples=["[{name: r0, uplink: 200Mbit/s}]"]
    )
    latency: Annotated[str | None, schema.GIVEN] = Field(default=None, description=rules.LATENCY, examples=["50us"])


def read(value: Any) -> ClusterEntry:
    """The entries of a file whose keys and types are right.

    Raises:
        ProblemsError: Lists unknown keys, missing keys and values of the wrong type.
    """
    return schema.read(ClusterEntry, value, "cluster file")
