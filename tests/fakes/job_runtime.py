"""In-memory job runtime with a clock that the test moves; records broken rules.

Groups go from PENDING over READY to RUNNING and end when the test says so. Violations of the rules that hold for every
platform are collected in `broken_rules`."""

from dataclasses import dataclass, field, replace
from typing import Any

from ringweave.jobs import records
from ringweave.jobs.records import EndCause, GroupPhase, Job, JobAction, ObservedGroup, ObservedJobState

FakeGroupKey = tuple[int, int]


@dataclass(slots=True)
class FakeJobRuntime:
    """Fake runtime of one job."""

    job: Job | None
    """The job with its saved record; None once it is forgotten."""
    clock_s: float = 0.0
    has_config: bool = False
    released_round: int = 0
    groups: dict[FakeGroupKey, ObservedGroup] = field(default_factory=dict)
    created: list[FakeGroupKey] = field(default_factory=list)
    """All groups ever created, in order."""
    event_keys: list[str] = field(default_factory=list)
    broken_rules: list[str] = field(default_factory=list)
    _ready_nodes: dict[int, set[int]] = field(default_factory=dict)
    """Round -> nodes that have been ready for it."""

    def observe(self) -> ObservedJobState:
        """Return the observation, as a platform would."""
        return ObservedJobState(
            has_config=self.has_config, released_round=self.released_round, groups=tuple(self.groups.values())
        )

    def apply(self, action: JobAction) -> None:
        """Execute an action, as a platform would."""
        match action:
            case records.SaveRecord(record=record, events=events):
                assert self.job is not None
                self.job = replace(self.job, record=record)
                self.event_keys += [event.key for event in events]
            case records.CreateConfig():
                self.has_config = True
            case records.CreateGroup():
                self._create_group(action)
            case records.RestartGroup(node=node, attempt=attempt, round=round_):
                self._change_group(
                    (node, attempt), phase=GroupPhase.PENDING, round=round_, ended_s=None, text="called back"
                )
            case records.ReleaseBarrier(round=round_):
                self._check_rule(self.has_config, "a gate was opened without a config")
                self.released_round = max(self.released_round, round_)
            case records.StopGroup(node=node, attempt=attempt):
                self._change_group((node, attempt), phase=GroupPhase.STOPPED, ended_s=self.clock_s)
            case records.DeleteGroup(node=node, attempt=attempt):
                self._change_group((node, attempt), is_terminating=True)
            case records.DeleteConfig():
                self.has_config, self.released_round = False, 0
            case records.ForgetJob():
                self._check_rule(
                    not self.groups and not self.has_config, "a job was forgotten while something of it was left"
                )
                self.job = None
            case records.RequeueAt():
                pass

    def pass_time(self, seconds: float = 1.0) -> None:
        """Advance the clock and every group by one step; terminating groups are gone."""
        self.clock_s += seconds
        self.groups = {key: group for key, group in self.groups.items() if not group.is_terminating}
        for key in list(self.groups):
            self.advance_group(key)

    def advance_group(self, key: FakeGroupKey) -> None:
        """Advance one group by one step."""
        group = self.groups[key]
        if group.is_terminating:
            return
        if group.phase is GroupPhase.PENDING:
            self.groups[key] = replace(group, phase=GroupPhase.READY, text="")
            self._ready_nodes.setdefault(group.round, set()).add(group.node)
        elif group.phase is GroupPhase.READY and self.released_round >= group.round:
            assert self.job is not None
            missing = set(self.job.used_nodes) - self._ready_nodes[group.round]
            self._check_rule(not missing, f"node {group.node} started round {group.round} before {missing} were ready")
            self.groups[key] = replace(group, phase=GroupPhase.RUNNING)

    def end_group(self, key: FakeGroupKey, cause: EndCause | None = None, text: str = "") -> None:
        """End a group, as failed if there is a cause. Its running peers are interrupted unless the job is elastic."""
        group = self.groups[key]
        was_running = group.phase is GroupPhase.RUNNING
        if cause is None:
            self._change_group(key, phase=GroupPhase.SUCCEEDED, ended_s=self.clock_s, exit_code=0)
            return
        exit_code = 1 if cause is EndCause.PROGRAM else None
        ended: dict[str, Any] = {
            "cause": cause,
            "text": text or f"ended by {cause}",
            "exit_code": exit_code,
            "ended_s": self.clock_s,
        }
        self._change_group(key, phase=GroupPhase.FAILED, **ended)
        is_elastic = self.job is not None and self.job.request.elastic is not None
        if was_running and not is_elastic:
            for other, peer in self.groups.items():
                if peer.phase is GroupPhase.RUNNING and peer.round == group.round:
                    self._change_group(other, phase=GroupPhase.INTERRUPTED, ended_s=self.clock_s, text="lost its peer")

    def lose_group(self, key: FakeGroupKey) -> None:
        """Remove a group without a final status."""
        del self.groups[key]

    def _create_group(self, action: records.CreateGroup) -> None:
        key = (action.node, action.attempt)
        if key in self.groups:
            return
        others = [attempt for node, attempt in self.groups if node == action.node]
        self._check_rule(not others, f"node {action.node} got attempt {action.attempt} beside {others}")
        self._check_rule(key not in self.created or self._was_unseen(key), f"{key} was made twice")
        self._check_rule(self.has_config, "a group was made without a config")
        self.created.append(key)
        self.groups[key] = ObservedGroup(
            node=action.node, attempt=action.attempt, round=action.round, phase=GroupPhase.PENDING
        )

    def _was_unseen(self, key: FakeGroupKey) -> bool:
        return self.job is not None and not self.job.record.nodes[key[0]].seen

    def _change_group(self, key: FakeGroupKey, **changes: Any) -> None:
        if key in self.groups and not self.groups[key].is_terminating:
            self.groups[key] = replace(self.groups[key], **changes)

    def _check_rule(self, is_kept: bool, text: str) -> None:
        if not is_kept:
            self.broken_rules.append(text)
