"""Jobs as lines for people. Pure."""

from collections.abc import Sequence
from datetime import UTC, datetime

from ringweave import units
from ringweave.launch.services.views import JobView, NodeView

_DEVICES = {"cuda": "GPUs", "cpu": "CPU workers"}


def jobs(found: Sequence[JobView], now: float, *, wide: bool) -> list[str]:
    """A row for each job."""
    if not found:
        return ["no jobs"]
    head = ("name", "state", "workers", "nodes", "requester", "age")
    rows = [(*head, "mode", "why") if wide else head]
    for job in found:
        row = (
            job.name,
            str(job.state),
            str(job.workers),
            str(len(job.used_nodes)),
            job.requester,
            units.show_span(now - job.created_s),
        )
        rows.append((*row, job.mode, job.reason.text if job.reason else "") if wide else row)
    return table(rows)


def status(job: JobView, now: float, *, wide: bool) -> list[str]:
    """A job and its nodes; in a wide table with what each node waits for."""
    workers = f"{job.workers} {_DEVICES.get(job.device, job.device)} on {_counted(len(job.used_nodes), 'node')}"
    lines = [
        f"{job.name}: {job.state} for {units.show_span(now - job.since_s)}",
        f"{workers} of {job.place}, asked for by {job.requester} {units.show_span(now - job.created_s)} ago",
    ]
    if job.reason:
        lines += [f"why    {job.reason.text}", f"helps  {job.reason.helps}"]
    head = ("node", "workers", "state", "attempt", "retries", "iterations", "last loss")
    rows: list[tuple[str, ...]] = [(*head, "why") if wide else head]
    for node in job.nodes:
        rows.append((*_node(node), node.reason.text if node.reason else "") if wide else _node(node))
    files = [f"files  {job.files}"] if job.files else []
    return [*lines, "", *table(rows), *([""] if files else []), *files]


def why(job: JobView) -> list[str]:
    """What the job and each of its nodes wait for, what happened, and what helps."""
    if job.reason is None:
        return [f"{job.name} is {job.state}: it waits for nothing."]
    lines = [f"{job.name} is {job.state}: {job.reason.text}.", f"  {job.reason.helps}."]
    for node in job.nodes:
        if node.reason is not None:
            lines += [f"node {node.name} is {node.state}: {node.reason.text}.", f"  {node.reason.helps}."]
        for attempt in node.attempts:
            if attempt.text:
                charged = ", one retry" if attempt.charged else ""
                lines.append(f"  attempt {attempt.attempt} ended: {attempt.text} ({attempt.cause}{charged})")
    return lines


def events(job: JobView) -> list[str]:
    """What happened, oldest first."""
    if not job.events:
        return ["no events"]
    return table([("time", "kind", "what"), *((clock(each.time_s), each.kind, each.text) for each in job.events)])


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns two spaces apart, the last one as wide as it is."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return ["  ".join([*map(str.ljust, row, widths), row[-1]]).rstrip() for row in rows]


def clock(time_s: float) -> str:
    """`2026-11-21 13:05:07Z`."""
    return f"{datetime.fromtimestamp(time_s, tz=UTC):%Y-%m-%d %H:%M:%S}Z"


def _node(node: NodeView) -> tuple[str, ...]:
    if not node.workers:
        return (node.name, f"0 of {node.capacity}", str(node.state), "", "", "", "")
    return (
        node.name,
        f"{node.workers} of {node.capacity}",
        str(node.state),
        str(node.attempts[-1].attempt),
        f"{node.retries} of {node.max_retries}",
        "-" if node.iterations is None else str(node.iterations),
        "-" if node.last_loss is None else f"{node.last_loss:.4f}",
    )


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
