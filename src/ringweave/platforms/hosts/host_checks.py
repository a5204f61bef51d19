"""Check of hosts before a run (`ringweave doctor --hosts`): their facts side by side, and what stops a run."""

import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringweave import units
from ringweave.errors import LaunchError
from ringweave.launcher.output import write_notice
from ringweave.platforms.hosts import host_list, install, start
from ringweave.platforms.hosts.host_list import HostSpec
from ringweave.platforms.hosts.run_entry import HostsOptions
from ringweave.platforms.hosts.ssh import HostConnections, HostError, NoRingweaveError, SshConnection, run_parallel

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
class HostsReport:
    """Results of all hosts, and what stops a run on them."""

    checks: tuple[HostCheck, ...]
    problems: tuple[str, ...]
    """One text for each thing that stops a run, with its fix."""

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
        return {"fit": self.is_fit, "hosts": hosts, "problems": list(self.problems)}


def check_hosts(text: str, python: str | None, *, installs: bool) -> HostsReport:
    """Check all hosts at the same time.

    `text`: hosts as `--hosts` names them.

    Raises:
        UsageError: The text names no hosts.
        HostError: The installation fails.
    """
    hosts = host_list.parse_hosts(text).hosts
    options = HostsOptions(python=python)
    if installs:
        options = install.install_on_hosts(hosts, python, write_notice)
    with HostConnections(hosts, options, connects=False) as connections:
        results = run_parallel(lambda index: _check_host(connections, index), range(len(hosts)))
        connections.open = [each for each in results if isinstance(each, SshConnection)]
        checks = run_parallel(_read_facts, hosts, results)
        errors = [str(each) for each in results if isinstance(each, HostError)]
        return HostsReport(checks=tuple(checks), problems=(*errors, *_find_problems(connections.open)))


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


def _find_problems(connections: Sequence[SshConnection]) -> list[str]:
    problems = start.find_differences(connections) if connections else []
    try:
        endpoints = run_parallel(start.open_endpoint, connections) if connections else []
        return [*problems, *start.find_unreachable(connections, endpoints)] if connections else problems
    except LaunchError as error:
        return [*problems, str(error)]


def report_text(report: HostsReport) -> str:
    """Return the report for people, at most 100 columns wide."""
    rows = [
        (label, _mark_differences([cell(check) for check in report.checks], compares))
        for label, cell, compares in _ROWS
    ]
    names = [f"{check.host.node}:{check.host.workers}" for check in report.checks]
    blocks = [_block(names, rows, some) for some in _blocks(names, rows)]
    is_marked = any(cell.endswith("*") for _, cells in rows for cell in cells)
    legend = ["* differs from most of these hosts", ""] if is_marked else []
    num = len(report.problems)
    end = (
        [f"{num} thing{'s' if num != 1 else ''} to fix:", *report.problems] if num else ["A run on these hosts works."]
    )
    return "\n".join(["\n\n".join(blocks), "", *legend, *end]) + "\n"


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
