"""Check of hosts before a run (`ringweave doctor --hosts`): their facts, what stops a run, rates of links."""

import os
import statistics
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ringweave import topology, units
from ringweave.environment import MAX_MEASUREMENT_AGE_S, NODE, PROBE
from ringweave.errors import LaunchError
from ringweave.files import file_io
from ringweave.launcher.output import write_notice
from ringweave.platforms.agent import job_config
from ringweave.platforms.agent.job_config import JobConfig, NodeConfig
from ringweave.platforms.hosts import host_list, install, start
from ringweave.platforms.hosts.host_list import HostList, HostSpec
from ringweave.platforms.hosts.run_entry import HostEndpoint, HostsOptions
from ringweave.platforms.hosts.ssh import (
    MEASURE_TIMEOUT_S,
    HostConnections,
    HostError,
    NoRingweaveError,
    SshConnection,
    run_parallel,
)
from ringweave.rpc import CertificateAuthority

TABLE_WIDTH = 100
_LABEL_WIDTH, _CELL_WIDTH, _GAP = 14, 26, 2


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCheck:
    """Result of one host."""

    host: HostSpec
    facts: Mapping[str, Any]
    """Facts by name, see `describe_host` and `host_facts` of remote_main; empty without ringweave there."""
    clock_offset_s: float | None
    """Its clock minus this machine's, in seconds."""
    round_trip_s: float | None
    """Time from a question over ssh to its answer."""
    is_reachable: bool
    """ssh reaches it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkCheck:
    """Rates of the links between hosts, which a run on the same hosts finds measured; or the reason why there are none.

    All numbers are measured.
    """

    reason: str = ""
    """Reason why the links were not measured; empty if they were."""
    age_s: float = 0.0
    """Age of the measurement; a run uses it up to `MAX_MEASUREMENT_AGE_S`."""
    rates: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Name of a host -> bytes per second that leave it, and that reach it."""
    slow: str | None = None
    """Slowest part of the network, in one line; None if nothing is slow."""

    @property
    def expires_in_s(self) -> float:
        return MAX_MEASUREMENT_AGE_S - self.age_s

    def document(self) -> dict[str, object]:
        """Return the part of the JSON document."""
        if self.reason:
            return {"measured": False, "reason": self.reason}
        rates = {
            name: {"out_bytes_per_s": out, "in_bytes_per_s": into, "kind": "measured"}
            for name, (out, into) in self.rates.items()
        }
        ages = {"age_s": round(self.age_s, 3), "expires_in_s": round(self.expires_in_s, 3)}
        return {"measured": True, **ages, "rates": rates, "slow": self.slow}


@dataclass(frozen=True, kw_only=True, slots=True)
class HostsReport:
    """Results of all hosts, and what stops a run on them."""

    checks: tuple[HostCheck, ...]
    problems: tuple[str, ...]
    """One text for each thing that stops a run, with its fix."""
    links: LinkCheck

    @property
    def is_fit(self) -> bool:
        """A run on these hosts works."""
        return not self.problems

    def document(self) -> dict[str, object]:
        """Return the report as one JSON document; sizes are in bytes, times in seconds."""
        hosts = [
            {
                "node": check.host.node,
                "destination": check.host.destination,
                "workers": check.host.workers,
                "reachable": check.is_reachable,
                "clock_offset_s": check.clock_offset_s,
                "round_trip_s": check.round_trip_s,
                **check.facts,
            }
            for check in self.checks
        ]
        return {
            "fit": self.is_fit,
            "hosts": hosts,
            "links": self.links.document(),
            "problems": list(self.problems),
        }


def check_hosts(text: str, python: str | None, *, installs: bool) -> HostsReport:
    """Check all hosts that ssh reaches at the same time, then measure the links between them.

    `text`: hosts as `--hosts` names them.

    Raises:
        UsageError: The text names no hosts.
        HostError: The installation fails.
    """
    named = host_list.parse_hosts(text)
    hosts = named.reached
    options = HostsOptions(python=python)
    if installs:
        options = install.install_on_hosts(hosts, python, write_notice)
    with HostConnections(hosts, options, connects=False) as connections:
        results = run_parallel(lambda index: _check_host(connections, index), range(len(hosts)))
        connections.open = [each for each in results if isinstance(each, SshConnection)]
        checks = run_parallel(_read_facts, hosts, results)
        errors = [str(each) for each in results if isinstance(each, HostError)]
        endpoints, problems = _find_problems(connections.open)
        lacking = [host.node for host, each in zip(hosts, results, strict=True) if isinstance(each, NoRingweaveError)]
        links = _check_links(named, connections.open, endpoints, lacking, [*errors, *problems])
        return HostsReport(checks=tuple(checks), problems=(*errors, *problems), links=links)


def _check_host(connections: HostConnections, index: int) -> SshConnection | HostError:
    try:
        return connections.connect(index)
    except HostError as error:
        return error


def _read_facts(host: HostSpec, result: SshConnection | HostError) -> HostCheck:
    if isinstance(result, HostError):
        is_reachable = isinstance(result, NoRingweaveError)
        return HostCheck(host=host, facts={}, clock_offset_s=None, round_trip_s=None, is_reachable=is_reachable)
    facts, clock = {**result.hello, **result.call("facts")}, result.read_clock()
    return HostCheck(
        host=host,
        facts={name: value for name, value in facts.items() if name != "time"},
        clock_offset_s=clock.offset_s,
        round_trip_s=clock.round_trip_s,
        is_reachable=True,
    )


def _find_problems(connections: Sequence[SshConnection]) -> tuple[list[HostEndpoint], list[str]]:
    """Return an open port of each host, and what stops a run."""
    if not connections:
        return [], []
    problems = start.find_differences(connections)
    try:
        endpoints = run_parallel(start.open_endpoint, connections)
        return endpoints, [*problems, *start.find_unreachable(connections, endpoints)]
    except LaunchError as error:
        return [], [*problems, str(error)]


def _check_links(
    named: HostList,
    connections: Sequence[SshConnection],
    endpoints: Sequence[HostEndpoint],
    lacking: Sequence[str],
    problems: Sequence[str],
) -> LinkCheck:
    """Measure the links as the first run would, or say why not; a failure stops no run."""
    reason = find_reason_for_no_rates(named, lacking, problems)
    if not reason and len({each.address for each in endpoints}) < len(endpoints):
        reason = "two of these hosts have the same address"
    if reason:
        return LinkCheck(reason=reason)
    write_notice(f"links between {len(endpoints)} hosts: measured now, unless they were within the last day")
    try:
        return _measure_links(connections, endpoints)
    except LaunchError as error:
        return LinkCheck(reason=str(error))


def find_reason_for_no_rates(named: HostList, lacking: Sequence[str], problems: Sequence[str]) -> str:
    """Return the reason not to measure the links; empty if there is none.

    `lacking`: names of the hosts without ringweave; `problems`: what stops a run.
    """
    if named.cluster_text is not None:
        return "a run takes the rates of the cluster file"
    if lacking:
        return f"no ringweave on {', '.join(lacking)}; add --install"
    if problems:
        return "a run on these hosts does not work yet"
    if len(named.reached) < len(named.hosts):
        return "a run measures them once the hosts called join have joined"
    if len(named.hosts) == 1:
        return "one host has none"
    return f"{PROBE}=never" if os.environ.get(PROBE) == "never" else ""


def _measure_links(connections: Sequence[SshConnection], endpoints: Sequence[HostEndpoint]) -> LinkCheck:
    """Let one process of each host measure the links; every host keeps the rates for runs.

    Raises:
        LaunchError: It failed on a host.
    """
    nodes = tuple(NodeConfig(index=index, name=each.node, workers=1) for index, each in enumerate(endpoints))
    config = JobConfig(job="doctor", device="cpu", mode="auto", nodes=nodes)
    cluster = topology.dumps(job_config.build_cluster(config, {each.node: each.address for each in endpoints}))
    authority = CertificateAuthority("doctor")

    def measure(rank: int, connection: SshConnection) -> bytes:
        environ = {
            **start.forwarded_environ(os.environ),
            "RANK": str(rank),
            "WORLD_SIZE": str(len(endpoints)),
            "MASTER_ADDR": endpoints[0].address,
            "MASTER_PORT": str(endpoints[0].port),
            NODE: endpoints[rank].node,
        }
        credentials = authority.issue("worker", str(rank)).to_text().encode()
        asked = {"cluster": cluster, "environ": environ}
        return connection.call_for_bytes("measure", credentials, timeout_s=MEASURE_TIMEOUT_S + 30.0, **asked)[1]

    return _parse_measurement(run_parallel(measure, range(len(endpoints)), connections)[0])


def _parse_measurement(text: bytes) -> LinkCheck:
    """Parse the answer of the first host, a `NetworkMeasurement`.

    Raises:
        LaunchError: It is none.
    """
    try:
        found = file_io.parse_json(text)
        links = {link["name"]: float(link["rate_bytes_per_s"]) for link in found["links"]}
        hosts = [node.name for node in topology.loads(found["cluster_text"]).nodes]
        out = {link.partition("->")[0]: rate for link, rate in links.items()}
        into = {link.partition("->")[2]: rate for link, rate in links.items()}
        rates = {name: (out[name], into[name]) for name in hosts}
        return LinkCheck(age_s=max(0.0, time.time() - float(found["time"])), rates=rates, slow=found["slow"])
    except (ValueError, KeyError, TypeError) as error:
        raise LaunchError(f"measurement of the first host: {error!r}, expected rates of all hosts.") from error


def report_text(report: HostsReport) -> str:
    """Return the report for people, at most 100 columns wide."""
    rows = [
        (label, _mark_differences([cell(check) for check in report.checks], compares))
        for label, cell, compares in _ROWS
    ]
    if report.links.rates:
        rows.append(("measured", [_rates(report.links, check.host.node) for check in report.checks]))
    names = [f"{check.host.node}:{check.host.workers}" for check in report.checks]
    blocks = [_block(names, rows, some) for some in _blocks(names, rows)]
    is_marked = any(cell.endswith("*") for _, cells in rows for cell in cells)
    legend = ["* differs from most of these hosts", ""] if is_marked else []
    notes = [_reason_row(report.links.reason), ""] if report.links.reason else []
    if report.links.slow:
        notes += [f"measured: {report.links.slow}", ""]
    num = len(report.problems)
    end = (
        [f"{num} thing{'s' if num != 1 else ''} to fix:", *report.problems] if num else ["A run on these hosts works."]
    )
    gap = [] if report.links.reason else [""]
    return "\n".join(["\n\n".join(blocks), *gap, *notes, *legend, *end]) + "\n"


def _reason_row(reason: str) -> str:
    """Return the row of the measured rates where there are none."""
    margin = " " * _LABEL_WIDTH
    return textwrap.fill(
        f"no: {reason}", TABLE_WIDTH, initial_indent=f"{'measured':{_LABEL_WIDTH}}", subsequent_indent=margin
    )


def _rates(links: LinkCheck, node: str) -> str:
    out, into = (units.show_rate(rate) for rate in links.rates[node])
    age, left = (units.show_duration(seconds) for seconds in (links.age_s, links.expires_in_s))
    return f"{out} out\n{into} in\n{age} ago, for {left} more"


def _mark_differences(cells: Sequence[str], compares: bool) -> list[str]:
    known = [cell for cell in cells if cell != "?"]
    usual = statistics.mode(known) if known else ""
    return [f"{cell} *" if compares and cell not in ("?", usual) else cell for cell in cells]


def _blocks(names: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> list[list[int]]:
    """Return the indices of the hosts of each block that fits the width."""
    blocks: list[list[int]] = []
    width = TABLE_WIDTH
    for index in range(len(names)):
        needed = _column_width(names, rows, index) + _GAP
        if width + needed > TABLE_WIDTH:
            blocks.append([])
            width = _LABEL_WIDTH
        blocks[-1].append(index)
        width += needed
    return blocks


def _column_width(names: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]], index: int) -> int:
    lines = [line for _, cells in rows for line in _cell_lines(cells[index])]
    return max(len(text) for text in (names[index], *lines))


def _block(names: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]], some: Sequence[int]) -> str:
    widths = [_column_width(names, rows, index) + _GAP for index in some]
    lines = []
    for label, cells in [("", names), *rows]:
        columns = [_cell_lines(cells[index]) for index in some]
        for number in range(max(map(len, columns))):
            texts = [column[number] if number < len(column) else "" for column in columns]
            padded = "".join(f"{text:{width}}" for text, width in zip(texts, widths, strict=True))
            lines.append(f"{label if number == 0 else '':{_LABEL_WIDTH}}{padded}".rstrip())
    return "\n".join(lines)


def _cell_lines(cell: str) -> list[str]:
    return [line for part in cell.split("\n") for line in textwrap.wrap(part, _CELL_WIDTH) or [""]] or [""]


def _fact(name: str, show: Callable[[Any], str] = str) -> Callable[[HostCheck], str]:
    return lambda check: show(check.facts[name]) if check.facts else "?"


def _size(num_bytes: int | None) -> str:
    return "none" if num_bytes is None else f"{num_bytes / 2**30:.1f} GiB"


def _nics(nics: Mapping[str, Mapping[str, Any]]) -> str:
    rates = {name: nic["bytes_per_s"] for name, nic in nics.items() if nic["addresses"]}
    return (
        "\n".join(f"{name} {units.show_rate(rate) if rate else '?'}" for name, rate in sorted(rates.items())) or "none"
    )


def _clock(check: HostCheck) -> str:
    return "?" if check.clock_offset_s is None else f"{check.clock_offset_s:+.3f} s"


def _round_trip(check: HostCheck) -> str:
    return "?" if check.round_trip_s is None else f"{1000 * check.round_trip_s:.0f} ms"


_ROWS: Sequence[tuple[str, Callable[[HostCheck], str], bool]] = (
    ("ssh", lambda check: "ok" if check.is_reachable else "no", False),
    ("user", _fact("user"), True),
    ("address", _fact("address"), False),
    ("python", _fact("python"), True),
    ("ringweave", _fact("ringweave"), True),
    ("torch", _fact("torch", lambda torch: torch or "none"), True),
    ("clock", _clock, False),
    ("round trip", _round_trip, False),
    ("CPUs", _fact("cpus"), True),
    ("GPUs", _fact("gpus"), True),
    ("memory", _fact("memory", _size), True),
    ("memory limit", _fact("memory_limit", _size), True),
    ("NICs", _fact("nics", _nics), True),
    ("open files", _fact("open_files"), True),
    ("free disk", _fact("free_disk", _size), False),
)
"""Label, cell of a host, and whether differences are marked."""
