"""States and reasons of a job and its nodes, in words: what is waited for, and what would help. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ringweave.files.problems import listed
from ringweave.jobs.life import going_on
from ringweave.jobs.life.observing import Cause, Group, Lack, Observed, Phase
from ringweave.jobs.life.records import Blame, Ended, Job, Loss, NodeRecord, Record
from ringweave.jobs.life.states import JobState, NodeState, Reason, reason


@dataclass(frozen=True, kw_only=True, slots=True)
class _View:
    """A job as it is to be told."""

    job: Job
    record: Record
    observed: Observed
    groups: Mapping[tuple[int, int], Group]

    def group(self, node: int) -> Group | None:
        """The group of the node's current attempt."""
        return self.groups.get((node, self.record.nodes[node].attempt))

    def is_ready(self, node: int) -> bool:
        """It is at the gate of this round, or beyond."""
        group = self.group(node)
        if group is None or self.record.nodes[node].ended is not None or group.round != self.record.round:
            return False
        return group.is_at_gate

    def names(self, nodes: Iterable[int]) -> str:
        """`node n0`, `nodes n0, n1 and 7 more`."""
        chosen = list(nodes)
        word = "node" if len(chosen) == 1 else "nodes"
        return f"{word} {listed((self.job.node_name(node) for node in chosen), len(chosen))}"


def _view(job: Job, record: Record, observed: Observed) -> _View:
    groups = {(group.node, group.attempt): group for group in observed.groups}
    return _View(job=job, record=record, observed=observed, groups=groups)


def failed(code: str, job: Job, nodes: tuple[int, ...], ends: Mapping[int, Ended]) -> Reason:
    """The reason of a job that failed on these nodes."""
    names = [job.node_name(node) for node in nodes]
    word = "node" if len(names) == 1 else "nodes"
    text = f"{word} {listed(names, len(names))}"
    return reason(code, job=job.request.name, nodes=text, node=names[0], detail=ends[nodes[0]].text)


def finished_without(job: Job, left: Mapping[int, str]) -> Reason:
    """The reason of a job that has succeeded without nodes that hang.

    Args:
        job: Which one.
        left: Node -> what is to be said of it.
    """
    names = [job.node_name(node) for node in sorted(left)]
    text = f"{'node' if len(names) == 1 else 'nodes'} {listed(names, len(names))}"
    return reason("FinishedWithout", job=job.request.name, nodes=text, node=names[0], detail=left[min(left)])


def failures(job: Job, record: Record, charged: Mapping[int, Ended]) -> str:
    """`node n1 failed (killed by SIGKILL), retry 1 of 3`, for the first of those that failed, and how many more."""
    node = min(charged)
    count, most = record.nodes[node].retries, job.request.nodes[node].max_retries
    more = f", and {len(charged) - 1} more nodes failed" if len(charged) > 1 else ""
    return f"node {job.node_name(node)} failed ({charged[node].text}), retry {count} of {most}{more}"


def blame(job: Job, blame: Blame) -> str:
    """`node n0 lost another (rank 0 lost its peer), which has not answered yet`."""
    return f"node {job.node_name(blame.node)} lost another ({blame.text}), which has not answered yet"


def nodes(job: Job, record: Record, observed: Observed) -> tuple[NodeRecord, ...]:
    """The nodes' records with state and reason."""
    view = _view(job, record, observed)
    waited_for = [node for node in job.used_nodes if not view.is_ready(node)]
    told = []
    for node, known in enumerate(record.nodes):
        state, code, detail = _node(view, node)
        mend = ""
        group = view.group(node)
        if group is not None and group.silence is not None and record.outcome is None and node in waited_for:
            code, detail, mend = "NodeSilent", group.silence.text, group.silence.mend
        others = view.names(waited_for) if code == "NodeAtGate" else ""
        words = {"job": job.request.name, "node": job.node_name(node), "attempt": known.attempt, "mend": mend}
        why = reason(code, **words, detail=detail, nodes=others) if code else None
        told.append(replace(known, state=state, reason=why))
    return tuple(told)


def _node(view: _View, node: int) -> tuple[NodeState, str, str]:
    """State, code of the reason, and detail of one node."""
    known, group = view.record.nodes[node], view.group(node)
    if not view.job.counts[node]:
        return NodeState.UNUSED, "NodeUnused", ""
    if view.record.outcome is not None:
        return _ended_node(view, known)
    if known.ended is not None and known.is_given_up:
        return NodeState.FAILED, "NodeGivenUp", known.ended.text
    if known.ended is not None:
        if view.job.desired.suspend:
            return NodeState.WAITING, "NodeSuspended", ""
        return NodeState.WAITING, "NodeLeaving", known.ended.text
    if group is None:
        return NodeState.WAITING, "NodeSuspended" if view.job.desired.suspend else "NodeToMake", ""
    return _living_node(view, group)


def _ended_node(view: _View, known: NodeRecord) -> tuple[NodeState, str, str]:
    if known.is_left_behind and known.ended is not None:
        return NodeState.STOPPED, "NodeLeftBehind", known.ended.text
    if view.record.outcome is JobState.SUCCEEDED and not known.is_given_up:
        return NodeState.SUCCEEDED, "NodeFinished", ""
    if known.ended is not None and known.ended.cause in (Cause.PROGRAM, Cause.PLACE):
        return NodeState.FAILED, "NodeFailed", known.ended.text
    return NodeState.STOPPED, "NodeStopped", ""


def _living_node(view: _View, group: Group) -> tuple[NodeState, str, str]:
    detail = group.text or "the place says no more"
    if group.round < view.record.round and group.phase.is_alive:
        return NodeState.INTERRUPTED, "NodeCalledBack", ""
    if group.phase is Phase.READY:
        is_open = view.observed.gate >= view.record.round or all(map(view.is_ready, view.job.used_nodes))
        return NodeState.READY, "NodeMayStart" if is_open else "NodeAtGate", ""
    if group.phase is Phase.RUNNING:
        return NodeState.RUNNING, "", ""
    if group.phase is Phase.PENDING:
        return NodeState.PENDING, _PENDING[group.lacks], detail
    table = {
        Phase.SUCCEEDED: (NodeState.SUCCEEDED, "NodeFinished"),
        Phase.INTERRUPTED: (NodeState.INTERRUPTED, "NodeFailing"),
        Phase.FAILED: (NodeState.FAILED, "NodeFailing"),
        Phase.STOPPED: (NodeState.FAILED, "NodeFailing"),
    }
    state, code = table[group.phase]
    return state, code, detail


_PENDING = {Lack.MEANS: "NodeCannotBegin", Lack.ROOM: "NodePending", None: "NodeBeginning"}


def job_state(job: Job, record: Record, observed: Observed) -> tuple[JobState, Reason | None]:
    """State and reason of the job; its nodes have been told already."""
    view = _view(job, record, observed)
    name = job.request.name
    if record.deleting:
        left = sorted({group.node for group in observed.groups})
        why = reason("Deleting", nodes=view.names(left) if left else "its config")
        return JobState.DELETING, _silent(view, observed.groups) or why
    living = sorted({group.node for group in observed.groups if group.phase.is_alive})
    # Of a node that hangs it may take for ever to be rid.
    if record.outcome is not None and any(not record.nodes[node].is_left_behind for node in living):
        return JobState.ENDING, _silent(view, observed.groups) or record.outcome_reason
    if record.outcome is not None:
        return record.outcome, record.outcome_reason
    if job.desired.suspend:
        nodes = view.names(living)
        why = reason("Suspending", nodes=nodes) if living else reason("Suspended", job=name)
        return JobState.SUSPENDED, _silent(view, observed.groups) or why
    return _gathering(view)


def _gathering(view: _View) -> tuple[JobState, Reason | None]:
    """Of a job that is to run."""
    record, used = view.record, view.job.used_nodes
    states = {node: record.nodes[node].state for node in used}
    if going_on.is_through(view.job, record, view.groups):
        return JobState.RUNNING, None
    failing = [node for node in used if _code(record, node) == "NodeFailing"]
    if failing:
        return JobState.RETRYING, _of(view, "FindingCause", failing)
    missing = [node for node in used if not view.is_ready(node)]
    if record.loss is not None:
        lost = [node for node in used if states[node] not in (NodeState.RUNNING, NodeState.SUCCEEDED)]
        return JobState.RUNNING, _going_on(view, lost, record.loss) if lost else None
    if missing:
        return JobState.RETRYING if record.round_cause else JobState.PENDING, _waits(view, missing)
    idle = [node for node in used if states[node] is NodeState.READY]
    return (JobState.STARTING, _of(view, "GateOpen", idle)) if idle else (JobState.RUNNING, None)


def _going_on(view: _View, lost: list[int], loss: Loss) -> Reason:
    coming = [node for node in lost if not view.record.nodes[node].is_given_up]
    return _of(view, "GoesOn" if coming else "GoesOnWithout", coming or lost, detail=loss.text)


def _silent(view: _View, groups: Iterable[Group | None]) -> Reason | None:
    """Of those whose machine does not answer; None where all do."""
    found = [(group.node, group.silence) for group in groups if group is not None and group.silence is not None]
    if not found:
        return None
    nodes, first = view.names(sorted({node for node, _ in found})), found[0][1]
    return reason("MachineSilent", nodes=nodes, detail=first.text, mend=first.mend)


def _waits(view: _View, missing: list[int]) -> Reason:
    silent = _silent(view, map(view.group, missing))
    if silent is not None:
        return silent
    for lack, code in ((Lack.MEANS, "CannotBegin"), (Lack.ROOM, "NotPlaced")):
        lacking = [node for node in missing if (group := view.group(node)) is not None and group.lacks is lack]
        if lacking:
            return _of(view, code, lacking)
    pending = [node for node in missing if view.record.nodes[node].state is NodeState.PENDING]
    if view.record.round_cause:
        return _of(view, "Replacing", missing, detail=view.record.round_cause)
    if pending:
        return _of(view, "Beginning", pending, detail=_detail(view, pending[0]))
    return _of(view, "NotReady", missing)


def _of(view: _View, code: str, nodes: list[int], detail: str | None = None) -> Reason:
    words = {"job": view.job.request.name, "node": view.job.node_name(nodes[0]), "nodes": view.names(nodes)}
    return reason(code, **words, detail=_detail(view, nodes[0]) if detail is None else detail)


def _detail(view: _View, node: int) -> str:
    group = view.group(node)
    return group.text if group and group.text else "the place says no more"


def _code(record: Record, node: int) -> str:
    why = record.nodes[node].reason
    return why.code if why else ""
