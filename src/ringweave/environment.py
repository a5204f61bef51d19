"""Environment variables of workers: every `RINGWEAVE_*` name, and the typed values that they carry."""

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ringweave.errors import UsageError, shorten
from ringweave.ports import PortRange, parse_ports

CLUSTER = "RINGWEAVE_CLUSTER"
NODE = "RINGWEAVE_NODE"
RUN_DIR = "RINGWEAVE_RUN_DIR"
REPLACE_BACKEND = "RINGWEAVE_REPLACE_BACKEND"
SCHEDULE = "RINGWEAVE_SCHEDULE"
WIRE = "RINGWEAVE_WIRE"
MAX_LOSS_INCREASE = "RINGWEAVE_MAX_LOSS_INCREASE"
MODE = "RINGWEAVE_MODE"
PROBE = "RINGWEAVE_PROBE"
MAX_MEASUREMENT_AGE_S = 24 * 3600.0
"""Age from which on a measured network is measured anew: rewiring a cluster must not require knowing the cache."""
FINDINGS = "RINGWEAVE_FINDINGS"
"""Folder of probe results, in place of the user's; `ringweave lab run` sets it to the lab's own."""
TUNING = "RINGWEAVE_TUNING"
LEADER_PER_NIC = "RINGWEAVE_LEADER_PER_NIC"
DEVICE_PATH = "RINGWEAVE_DEVICE_PATH"
CPU_QUOTA = "RINGWEAVE_CPU_QUOTA"
"""Processors of this process where no control group tells; a lab with a duty cycle sets it."""
START_METHOD = "RINGWEAVE_START_METHOD"
"""Start of workers: `fork`, from a process that has imported what they need, or `spawn`, each by itself."""
SERVER = "RINGWEAVE_SERVER"
CREDENTIALS = "RINGWEAVE_CREDENTIALS"
DATA = "RINGWEAVE_DATA"
EVENTS = "RINGWEAVE_EVENTS"
LOG_MAX_SIZE = "RINGWEAVE_LOG_MAX_SIZE"
LOG_MAX_FILES = "RINGWEAVE_LOG_MAX_FILES"
"""Limits of each log and each event log on the disk: size of a file, number of files."""
MEMBER = "RINGWEAVE_MEMBER"
COORDINATORS = "RINGWEAVE_COORDINATORS"
PORTS = "RINGWEAVE_PORTS"
ENCRYPT = "RINGWEAVE_ENCRYPT"
"""`on` encrypts the collectives, the store and Gloo between nodes, by the certificate in RINGWEAVE_CREDENTIALS."""
TORCHRUN_ID = "TORCHELASTIC_RUN_ID"
"""Variable of torchrun's: set for its workers, and not in its own process."""

EXACT = "exact"
AUTO_WIRE = "auto"
WIRES = (EXACT, "bf16", "int8", "int4", AUTO_WIRE)
"""Formats in which gradients may be asked to pass slow links; `auto` takes one that the forecast finds worth it."""

_NEVER, _ALWAYS = "never", "always"
_FORK, _SPAWN = "fork", "spawn"

DEVICE_PATHS = (AUTO, BRIDGE, NATIVE) = ("auto", "bridge", "native")
"""Ways of device tensors: the choice is left open, through host memory by schedules, or by NCCL."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerEnvironment:
    """Ringweave's own part of a worker's environment; honoured under any launcher."""

    cluster_path: Path | None = None
    """The cluster file; None: the machines are not described."""
    node: str | None = None
    """Name of this worker's node; None: it is found from host name or address."""
    run_dir: Path | None = None
    """Folder of events and run.json. `ringweave run` and jobs set it; under torchrun the user or rank 0 does."""
    replace_backend: bool = False
    """Groups of no name, and of an explicit "gloo" or "nccl", are of ringweave; under any launcher."""
    schedule: str | None = None
    """Name of the schedule that every large enough collective must use; None: the planner chooses."""
    wire: str = EXACT
    """Wire format of gradients on slow links, one of WIRES; every rank needs the same. Under `ringweave.prepare` its
    argument counts; else it holds for all large float32 sums, and for what the stages of a pipeline exchange."""
    max_loss_increase: str | None = None
    """Loss at equal samples that `auto` may give up for speed, such as `0.5%`; None: it takes nothing that costs some.
    """
    mode: str | None = None
    """Training mode of `ringweave.prepare` if the script leaves it open; None leaves it open too."""
    probes: bool = True
    """Measure the network when a group of several nodes is formed, if it is not described and there are no results of
    the last day; RINGWEAVE_PROBE=never turns it off."""
    probes_described: bool = False
    """Measure it also if a cluster file describes it, whose rates are assumed: RINGWEAVE_PROBE=always."""
    tuning: bool | None = None
    """Autotuning: plans follow measured trials. None: only among several nodes, where the results of earlier trials are
    kept. A forced schedule overrides it."""
    leader_per_nic: bool = False
    """Plan with a leader for each NIC of a node that has enough workers; the first rank's environment counts."""
    device_path: str = AUTO
    """Way of device tensors, one of DEVICE_PATHS; every rank needs the same."""
    server: str | None = None
    """`host:port` of the job's parameter server, with a comma and that of its standby if it has one; None: there is no
    server."""
    credentials: str | None = None
    """Location of this process's credentials: `fd:N`, an inherited descriptor, or the path of a file of its owner's."""
    data: str | None = None
    """Location of the training data from the job file; None if it gives none."""
    events: Path | None = None
    """Event log of a worker without a run directory; None: it writes no events."""
    member: str | None = None
    """Name of this process among the members of an elastic job, `SLOT.INCARNATION`."""
    coordinators: tuple[tuple[str, int], ...] = ()
    """(host, port) of an elastic job's coordinators, the active one first; empty if the job is not elastic."""
    encrypts: bool = False
    """Connections between nodes use TLS, by this process's credentials; every rank needs the same."""
    ports: PortRange | None = None
    """Ports of this worker's listeners, but for torch's own; None: any free ones."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> "WorkerEnvironment":
        """Read the variables; an empty one counts as absent.

        Raises:
            UsageError: RINGWEAVE_DEVICE_PATH names no way, RINGWEAVE_WIRE no format, RINGWEAVE_MAX_LOSS_INCREASE no
                percentage, RINGWEAVE_PORTS no range, or RINGWEAVE_ENCRYPT is neither `on` nor `off`.
        """
        cluster, run_dir, events = environ.get(CLUSTER), environ.get(RUN_DIR), environ.get(EVENTS)
        return cls(
            cluster_path=Path(cluster) if cluster else None,
            node=environ.get(NODE) or None,
            run_dir=Path(run_dir) if run_dir else None,
            replace_backend=environ.get(REPLACE_BACKEND) == "1",
            schedule=environ.get(SCHEDULE) or None,
            wire=check_wire(environ.get(WIRE) or EXACT, where=WIRE),
            max_loss_increase=check_max_loss_increase(environ.get(MAX_LOSS_INCREASE) or None, where=MAX_LOSS_INCREASE),
            mode=environ.get(MODE) or None,
            probes=environ.get(PROBE) != _NEVER,
            probes_described=environ.get(PROBE) == _ALWAYS,
            tuning={"0": False, "1": True}.get(environ.get(TUNING, "")),
            leader_per_nic=environ.get(LEADER_PER_NIC) == "1",
            device_path=_check_device_path(environ.get(DEVICE_PATH) or AUTO),
            server=environ.get(SERVER) or None,
            credentials=environ.get(CREDENTIALS) or None,
            data=environ.get(DATA) or None,
            events=Path(events) if events else None,
            member=environ.get(MEMBER) or None,
            coordinators=_parse_addresses(environ.get(COORDINATORS, "")),
            encrypts=_parse_encrypt(environ),
            ports=ports_of_environ(environ),
        )

    @property
    def describes_links(self) -> bool:
        """A cluster file of the user describes the links."""
        return self.cluster_path is not None and not self.probes_described

    def to_environ(self) -> dict[str, str]:
        """Return the environment variables; absent values are left out."""
        pairs = {
            CLUSTER: str(self.cluster_path or ""),
            NODE: self.node or "",
            RUN_DIR: str(self.run_dir or ""),
            REPLACE_BACKEND: "1" if self.replace_backend else "",
            SCHEDULE: self.schedule or "",
            WIRE: self.wire if self.wire != EXACT else "",
            MAX_LOSS_INCREASE: self.max_loss_increase or "",
            MODE: self.mode or "",
            PROBE: _NEVER if not self.probes else _ALWAYS if self.probes_described else "",
            TUNING: {False: "0", True: "1", None: ""}[self.tuning],
            LEADER_PER_NIC: "1" if self.leader_per_nic else "",
            DEVICE_PATH: self.device_path if self.device_path != AUTO else "",
            SERVER: self.server or "",
            CREDENTIALS: self.credentials or "",
            DATA: self.data or "",
            EVENTS: str(self.events or ""),
            MEMBER: self.member or "",
            COORDINATORS: ",".join(f"{host}:{port}" for host, port in self.coordinators),
            ENCRYPT: "on" if self.encrypts else "",
            PORTS: str(self.ports or ""),
        }
        return {name: value for name, value in pairs.items() if value}

    @property
    def events_path(self) -> Path | None:
        """Event log that this worker writes to: its run's, or the given one; None if there is none."""
        return self.run_dir / "events.jsonl" if self.run_dir else self.events


def ports_of_environ(environ: Mapping[str, str]) -> PortRange | None:
    """Return the range of RINGWEAVE_PORTS; None if it is not set.

    Raises:
        UsageError: It is no range.
    """
    text = environ.get(PORTS)
    return parse_ports(text, where=PORTS) if text else None


def _parse_encrypt(environ: Mapping[str, str]) -> bool:
    value = environ.get(ENCRYPT) or "off"
    if value not in ("on", "off"):
        raise UsageError(ENCRYPT, got=value, expected="on or off", do="Correct or unset it")
    return value == "on"


def forks_workers(environ: Mapping[str, str]) -> bool:
    """Return whether workers may be forked from a process that has imported what they need.

    Raises:
        UsageError: RINGWEAVE_START_METHOD is neither `fork` nor `spawn`.
    """
    value = environ.get(START_METHOD) or _FORK
    if value not in (_FORK, _SPAWN):
        raise UsageError(START_METHOD, got=value, expected=f"{_FORK} or {_SPAWN}", do="Correct or unset it")
    return value == _FORK


def check_wire(wire: str, *, where: str) -> str:
    """Return the name if gradients can be asked to travel so.

    Raises:
        UsageError: They cannot.
    """
    if wire not in WIRES:
        raise UsageError("wire format", got=wire, expected=f"one of {', '.join(WIRES)}", do="Correct it", where=where)
    return wire


def check_max_loss_increase(text: str | None, *, where: str) -> str | None:
    """Return the text if it is a percentage, or None.

    Raises:
        UsageError: It is none.
    """
    if text is not None:
        from ringweave.units import parse_percent  # late: every process of torch loads this module

        parse_percent(text, "largest loss increase", where=where)
    return text


def _check_device_path(value: str) -> str:
    if value not in DEVICE_PATHS:
        raise UsageError(DEVICE_PATH, got=value, expected=f"one of {', '.join(DEVICE_PATHS)}", do="Correct or unset it")
    return value


def _parse_addresses(text: str) -> tuple[tuple[str, int], ...]:
    """Parse (host, port) of each `host:port`."""
    parts = [part.rpartition(":") for part in text.split(",") if part]
    return tuple((host, int(port)) for host, _, port in parts)


def cpu_quota_of_environ(environ: Mapping[str, str]) -> float | None:
    """Return the processors that `RINGWEAVE_CPU_QUOTA` leaves a process; None if it is not set.

    Raises:
        UsageError: It is no positive number.
    """
    text = environ.get(CPU_QUOTA)
    if not text:
        return None
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    do = "Unset it: a lab sets it itself"
    raise UsageError(CPU_QUOTA, got=shorten(text), expected="a positive number of processors", do=do)


def is_same_minor(one: str | None, other: str | None) -> bool:
    """Return whether two versions of torch may be mixed in a run: equal but for patch release and build."""
    return (one or "").split(".")[:2] == (other or "").split(".")[:2]
