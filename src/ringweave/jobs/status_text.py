"""States and reasons of a job and its nodes for people: what each waits for and what would help. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ringweave.files.problems import shorten_names
from ringweave.jobs import failures
from ringweave.jobs.records import (
    AttemptEnd,
    EndCause,
    GroupPhase,
    Job,
    JobRecord,
    NodeLoss,
    NodeRecord,
    ObservedGroup,
    ObservedJobState,
    PeerBlame,
    PendingCause,
)
from ringweave.jobs.states import JobState, NodeState, Reason, make_reason


@dataclass(frozen=True, kw_only=True, slots=True)
class _StatusContext:
    """Job, record and observation to describe."""

    job: Job
    record: JobRecord
    observed: ObservedJobState
    groups: Mapping[tuple[int, int], ObservedGroup]

    def current_group(self, node: int) -> ObservedGroup | None:
        """Return the group of the node's current attempt."""
        return self.groups.get((node, self.record.nodes[node].attempt))

    def is_at_barrier(self, node: int) -> bool:
        """Return whether the node is at the barrier of this round, or beyond."""
        group = self.current_group(node)
        if group is None or self.record.nodes[node].ended is not None or group.round != self.record.round:
            return False
        return group.is_at_barrier

    def format_nodes(self, nodes: Iterable[int]) -> str:
        """Return `node n0`, or `nodes n0, n1 and 7 more`."""
        chosen = list(nodes)
        word = "node" if len(chosen) == 1 else "nodes"
        return f"{word} {shorten_names((self.job.node_name(node) for node in chosen), len(chosen))}"


def _make_context(job: Job, record: JobRecord, observed: ObservedJobState) -> _StatusContext:
    groups = {(group.node, group.attempt): group for group in observed.groups}
    return _StatusContext(job=job, record=record, observed=observed, groups=groups)


def failed_reason(code: str, job: Job, nodes: tuple[int, ...], ends: Mapping[int, AttemptEnd]) -> Reason:
    """Return the reason of a job that failed on these nodes."""
    names = [job.node_name(node) for node in nodes]
    word = "node" if len(names) == 1 else "nodes"
    text = f"{word} {shorten_names(names, len(names))}"
    return make_reason(code, job=job.request.name, nodes=text, node=names[0], detail=ends[nodes[0]].text)


def finished_without_reason(job: Job, abandoned: Mapping[int, str]) -> Reason:
    """Return the reason of a job that has succeeded without hanging nodes.

    Args:
        job: The job.
        abandoned: Node -> text about it.
    """
    names = [job.node_name(node) for node in sorted(abandoned)]
    text = f"{'node' if len(names) == 1 else 'nodes'} {shorten_names(names, len(names))}"
    return make_reason(
        "CompletedWithoutNodes", job=job.request.name, nodes=text, node=names[0], detail=abandoned[min(abandoned)]
    )


def format_failures(job: Job, record: JobRecord, charged: Mapping[int, AttemptEnd]) -> str:
    """Return `node n1 failed (killed by SIGKILL), retry 1 of 3` for the first failed node, and the number of others."""
    node = min(charged)
    count, most = record.nodes[node].retries, job.request.nodes[node].max_retries
    more = f", and {len(charged) - 1} more nodes failed" if len(charged) > 1 else ""
    return f"node {job.node_name(node)} failed ({charged[node].text}), retry {count} of {most}{more}"


def format_blame(job: Job, blame: PeerBlame) -> str:
    """Return `node n0 lost another (rank 0 lost its peer), which has not answered yet`."""
    return f"node {job.node_name(blame.node)} lost another ({blame.text}), which has not answered yet"


def update_node_states(job: Job, record: JobRecord, observed: ObservedJobState) -> tuple[NodeRecord, ...]:
    """Return the nodes' records with updated state and reason."""
    view = _make_context(job, record, observed)
    missing = [node for node in job.used_nodes if not view.is_at_barrier(node)]
    updated = []
    for node, known in enumerate(record.nodes):
        state, code, detail = _node_state(view, node)
        fix = ""
        group = view.current_group(node)
        if group is not None and group.unresponsive is not None and record.outcome is None and node in missing:
            code, detail, fix = "NodeUnreachable", group.unresponsive.text, group.unresponsive.fix
        others = view.format_nodes(missing) if code == "NodeAtBarrier" else ""
        words = {"job": job.request.name, "node": job.node_name(node), "attempt": known.attempt, "fix": fix}
        why = make_reason(code, **words, detail=detail, nodes=others) if code else None
        updated.append(replace(known, state=state, reason=why))
    return tuple(updated)


def _node_state(view: _StatusContext, node: int) -> tuple[NodeState, str, str]:
    """Return state, code of the reason and detail of one node."""
    known, group = view.record.nodes[node], view.current_group(node)
    if not view.job.counts[node]:
        return NodeState.UNUSED, "NodeUnused", ""
    if view.record.outcome is not None:
        return _ended_node_state(view, known)
    if known.ended is not None and known.is_excluded:
        return NodeState.FAILED, "NodeBackoffLimitExceeded", known.ended.text
    if known.ended is not None:
        if view.job.desired.suspend:
            return NodeState.WAITING, "NodeSuspended", ""
        return NodeState.WAITING, "NodeTerminating", known.ended.text
    if group is None:
        return NodeState.WAITING, "NodeSuspended" if view.job.desired.suspend else "NodeNotCreated", ""
    return _live_node_state(view, group)


def _ended_node_state(view: _StatusContext, known: NodeRecord) -> tuple[NodeState, str, str]:
    if known.is_abandoned and known.ended is not None:
        return NodeState.STOPPED, "NodeAbandoned", known.ended.text
    if view.record.outcome is JobState.SUCCEEDED and not known.is_excluded:
        return NodeState.SUCCEEDED, "NodeCompleted", ""
    if known.ended is not None and known.ended.cause in (EndCause.PROGRAM, EndCause.PLATFORM):
        return NodeState.FAILED, "NodeFailed", known.ended.text
    return NodeState.STOPPED, "NodeStopped", ""


def _live_node_state(view: _StatusContext, group: ObservedGroup) -> tuple[NodeState, str, str]:
    detail = group.text or "the platform gives no detail"
    if group.round < view.record.round and group.phase.is_alive:
        return NodeState.INTERRUPTED, "NodeRestarting", ""
    if group.phase is GroupPhase.READY:
        is_open = view.observed.released_round >= view.record.round or all(map(view.is_at_barrier, view.job.used_nodes))
        return NodeState.READY, "NodeReleased" if is_open else "NodeAtBarrier", ""
    if group.phase is GroupPhase.RUNNING:
        return NodeState.RUNNING, "", ""
    if group.phase is GroupPhase.PENDING:
        return NodeState.PENDING, _PENDING_REASONS[group.pending_cause], detail
    table = {
        GroupPhase.SUCCEEDED: (NodeState.SUCCEEDED, "NodeCompleted"),
        GroupPhase.INTERRUPTED: (NodeState.INTERRUPTED, "NodeFailing"),
        GroupPhase.FAILED: (NodeState.FAILED, "NodeFailing"),
        GroupPhase.STOPPED: (NodeState.FAILED, "NodeFailing"),
    }
    state, code = table[group.phase]
    return state, code, detail


_PENDING_REASONS = {
    PendingCause.PREREQUISITE: "NodeCannotStart",
    PendingCause.CAPACITY: "NodeUnschedulable",
    None: "NodeInitializing",
}


def job_state(job: Job, record: JobRecord, observed: ObservedJobState) -> tuple[JobState, Reason | None]:
    """Return state and reason of the job. The states of its nodes must be up to date."""
    view = _make_context(job, record, observed)
    name = job.request.name
    if record.deleting:
        left = sorted({group.node for group in observed.groups})
        why = make_reason("Deleting", nodes=view.format_nodes(left) if left else "its config")
        return JobState.DELETING, _unresponsive_reason(view, observed.groups) or why
    living = sorted({group.node for group in observed.groups if group.phase.is_alive})
    # A hanging node may never be gone, so it is not waited for.
    if record.outcome is not None and any(not record.nodes[node].is_abandoned for node in living):
        return JobState.ENDING, _unresponsive_reason(view, observed.groups) or record.outcome_reason
    if record.outcome is not None:
        return record.outcome, record.outcome_reason
    if job.desired.suspend:
        nodes = view.format_nodes(living)
        why = make_reason("Suspending", nodes=nodes) if living else make_reason("Suspended", job=name)
        return JobState.SUSPENDED, _unresponsive_reason(view, observed.groups) or why
    return _active_job_state(view)


def _active_job_state(view: _StatusContext) -> tuple[JobState, Reason | None]:
    """Return state and reason of a job that should run."""
    record, used = view.record, view.job.used_nodes
    states = {node: record.nodes[node].state for node in used}
    if failures.is_finishing(view.job, record, view.groups):
        return JobState.RUNNING, None
    failing_nodes = [node for node in used if _reason_code(record, node) == "NodeFailing"]
    if failing_nodes:
        return JobState.RETRYING, _nodes_reason(view, "DeterminingCause", failing_nodes)
    missing = [node for node in used if not view.is_at_barrier(node)]
    if record.loss is not None:
        lost = [node for node in used if states[node] not in (NodeState.RUNNING, NodeState.SUCCEEDED)]
        return JobState.RUNNING, _continuing_reason(view, lost, record.loss) if lost else None
    if missing:
        return JobState.RETRYING if record.round_cause else JobState.PENDING, _waiting_reason(view, missing)
    idle = [node for node in used if states[node] is NodeState.READY]
    return (JobState.STARTING, _nodes_reason(view, "BarrierReleased", idle)) if idle else (JobState.RUNNING, None)


def _continuing_reason(view: _StatusContext, lost: list[int], loss: NodeLoss) -> Reason:
    replaceable = [node for node in lost if not view.record.nodes[node].is_excluded]
    return _nodes_reason(
        view, "Degraded" if replaceable else "DegradedWithoutRetries", replaceable or lost, detail=loss.text
    )


def _unresponsive_reason(view: _StatusContext, groups: Iterable[ObservedGroup | None]) -> Reason | None:
    """Return the reason of groups on unresponsive machines; None if there are none."""
    found = [
        (group.node, group.unresponsive) for group in groups if group is not None and group.unresponsive is not None
    ]
    if not found:
        return None
    nodes, first = view.format_nodes(sorted({node for node, _ in found})), found[0][1]
    return make_reason("MachineUnreachable", nodes=nodes, detail=first.text, fix=first.fix)


def _waiting_reason(view: _StatusContext, missing: list[int]) -> Reason:
    unresponsive = _unresponsive_reason(view, map(view.current_group, missing))
    if unresponsive is not None:
        return unresponsive
    for lack, code in ((PendingCause.PREREQUISITE, "CannotStart"), (PendingCause.CAPACITY, "Unschedulable")):
        lacking = [
            node for node in missing if (group := view.current_group(node)) is not None and group.pending_cause is lack
        ]
        if lacking:
            return _nodes_reason(view, code, lacking)
    pending = [node for node in missing if view.record.nodes[node].state is NodeState.PENDING]
    if view.record.round_cause:
        return _nodes_reason(view, "Restarting", missing, detail=view.record.round_cause)
    if pending:
        return _nodes_reason(view, "Initializing", pending, detail=_group_detail(view, pending[0]))
    return _nodes_reason(view, "NotReady", missing)


def _nodes_reason(view: _StatusContext, code: str, nodes: list[int], detail: str | None = None) -> Reason:
    words = {"job": view.job.request.name, "node": view.job.node_name(nodes[0]), "nodes": view.format_nodes(nodes)}
    return make_reason(code, **words, detail=_group_detail(view, nodes[0]) if detail is None else detail)


def _group_detail(view: _StatusContext, node: int) -> str:
    group = view.current_group(node)
    return group.text if group and group.text else "the platform gives no detail"


def _reason_code(record: JobRecord, node: int) -> str:
    why = record.nodes[node].reason
    return why.code if why else ""
