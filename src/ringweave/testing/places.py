"""A place for worker groups that exists in memory only: what a launcher does, with a clock that the test moves.

Groups go from PENDING over READY to RUNNING and end when told so by the test. The place keeps an account of what no
place may ever do, so that a test only has to ask `broken_rules`.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from ringweave.jobs.life import actions
from ringweave.jobs.life.actions import Action
from ringweave.jobs.life.observing import Cause, Group, Observed, Phase
from ringweave.jobs.life.records import Job

Key = tuple[int, int]


@dataclass(slots=True)
class FakePlace:
    """One job and what there is of it."""

    job: Job | None
    """With its saved record; None once it is forgotten."""
    clock_s: float = 0.0
    config: bool = False
    gate: int = 0
    groups: dict[Key, Group] = field(default_factory=dict)
    created: list[Key] = field(default_factory=list)
    """Every group that was ever made, in order."""
    event_keys: list[str] = field(default_factory=list)
    broken_rules: list[str] = field(default_factory=list)
    _ready: dict[int, set[int]] = field(default_factory=dict)
    """Round -> nodes that have been ready for it."""

    def observe(self) -> Observed:
        """What a launcher would see now."""
        return Observed(config=self.config, gate=self.gate, groups=tuple(self.groups.values()))

    def do(self, action: Action) -> None:
        """What a launcher would do."""
        match action:
            case actions.SaveRecord(record=record, events=events):
                assert self.job is not None
                self.job = replace(self.job, record=record)
                self.event_keys += [event.key for event in events]
            case actions.CreateConfig():
                self.config = True
            case actions.CreateGroup():
                self._create(action)
            case actions.Regather(node=node, attempt=attempt, round=round_):
                self._change((node, attempt), phase=Phase.PENDING, round=round_, ended_s=None, text="called back")
            case actions.OpenGate(round=round_):
                self._rule(self.config, "a gate was opened without a config")
                self.gate = max(self.gate, round_)
            case actions.StopGroup(node=node, attempt=attempt):
                self._change((node, attempt), phase=Phase.STOPPED, ended_s=self.clock_s)
            case actions.DeleteGroup(node=node, attempt=attempt):
                self._change((node, attempt), leaving=True)
            case actions.DeleteConfig():
                self.config, self.gate = False, 0
            case actions.Forget():
                self._rule(not self.groups and not self.config, "a job was forgotten while something of it was left")
                self.job = None
            case actions.Wake():
                pass

    def pass_time(self, seconds: float = 1.0) -> None:
        """Let every group take its next step by itself; those that were told to go are gone."""
        self.clock_s += seconds
        self.groups = {key: group for key, group in self.groups.items() if not group.leaving}
        for key in list(self.groups):
            self.step(key)

    def step(self, key: Key) -> None:
        """One group's next step by itself."""
        group = self.groups[key]
        if group.leaving:
            return
        if group.phase is Phase.PENDING:
            self.groups[key] = replace(group, phase=Phase.READY, text="")
            self._ready.setdefault(group.round, set()).add(group.node)
        elif group.phase is Phase.READY and self.gate >= group.round:
            assert self.job is not None
            missing = set(self.job.used_nodes) - self._ready[group.round]
            self._rule(not missing, f"node {group.node} started round {group.round} before {missing} were ready")
            self.groups[key] = replace(group, phase=Phase.RUNNING)

    def end(self, key: Key, cause: Cause | None = None, text: str = "") -> None:
        """The group ends: well without a cause, else badly; who trains with it is interrupted, unless elastic."""
        group = self.groups[key]
        was_running = group.phase is Phase.RUNNING
        if cause is None:
            self._change(key, phase=Phase.SUCCEEDED, ended_s=self.clock_s, exit_code=0)
            return
        exit_code = 1 if cause is Cause.PROGRAM else None
        ended: dict[str, Any] = {
            "cause": cause,
            "text": text or f"ended by {cause}",
            "exit_code": exit_code,
            "ended_s": self.clock_s,
        }
        self._change(key, phase=Phase.FAILED, **ended)
        is_elastic = self.job is not None and self.job.request.elastic is not None
        if was_running and not is_elastic:
            for other, peer in self.groups.items():
                if peer.phase is Phase.RUNNING and peer.round == group.round:
                    self._change(other, phase=Phase.INTERRUPTED, ended_s=self.clock_s, text="lost its peer")

    def lose(self, key: Key) -> None:
        """The group is gone without a word."""
        del self.groups[key]

    def _create(self, action: actions.CreateGroup) -> None:
        key = (action.node, action.attempt)
        if key in self.groups:
            return
        others = [attempt for node, attempt in self.groups if node == action.node]
        self._rule(not others, f"node {action.node} got attempt {action.attempt} beside {others}")
        self._rule(key not in self.created or self._was_unseen(key), f"{key} was made twice")
        self._rule(self.config, "a group was made without a config")
        self.created.append(key)
        self.groups[key] = Group(node=action.node, attempt=action.attempt, round=action.round, phase=Phase.PENDING)

    def _was_unseen(self, key: Key) -> bool:
        return self.job is not None and not self.job.record.nodes[key[0]].seen

    def _change(self, key: Key, **changes: Any) -> None:
        if key in self.groups and not self.groups[key].leaving:
            self.groups[key] = replace(self.groups[key], **changes)

    def _rule(self, is_kept: bool, text: str) -> None:
        if not is_kept:
            self.broken_rules.append(text)
