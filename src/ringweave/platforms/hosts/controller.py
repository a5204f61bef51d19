"""Controller of a run: on the leader, brings all hosts from their observed to the wanted state."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Protocol

from ringweave.errors import JobError, LaunchError, RpcError
from ringweave.jobs import records
from ringweave.jobs.reconcile import reconcile
from ringweave.jobs.records import (
    DesiredJobState,
    EndCause,
    GroupPhase,
    JobAction,
    ObservedGroup,
    ObservedJobState,
)
from ringweave.jobs.request import ELASTIC_SERVER_MODES
from ringweave.launcher import scale_requests
from ringweave.launcher.scale_requests import ScaleAnswer, ScaleLimits, WantedWorkers
from ringweave.platforms.agent import agent_channel
from ringweave.platforms.agent.agent_channel import AgentStatus
from ringweave.platforms.agent.job_config import JobConfig, RendezvousResult
from ringweave.platforms.hosts.messages import HostAction, HostReport
from ringweave.platforms.hosts.quorum_election import no_leader_error
from ringweave.platforms.hosts.run_entry import RunEntry, RunEvent, ScaleRecord

HOST_LOST_S = 10.0
"""Silence after which the worker group of a host counts as lost. A host service that was killed is back earlier. An
elastic run does not wait for this: its members exclude lost ones by themselves."""
VOTER_LOST_S = 12.0
"""Silence after which a host does not count for the quorum any more, until it answers again."""
ACTION_RETRY_S = 0.5
MAX_GROWN_WORKERS = 1000
"""Number of workers up to which an elastic run may grow: each gets eight certificates before the run begins, since
nobody can issue any later; and a coordinator takes 1024 connections."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostView:
    """Host as the leader knows it."""

    report: HostReport | None
    """Last report; None before the first one of this term."""
    is_heard: bool
    """It has answered within `HOST_LOST_S`."""
    is_awaited: bool = False
    """Its first report of this term may still come."""


class HostActions(Protocol):
    """Actions of the host service that the controller uses."""

    @property
    def entry(self) -> RunEntry: ...

    def host_views(self) -> Sequence[HostView]:
        """Return the hosts, in the order of the entry."""
        ...

    def commit_entry(self, entry: RunEntry) -> None:
        """Save the entry on a quorum of the hosts.

        Raises:
            LaunchError: There is no quorum.
        """
        ...

    def act_on_host(self, host: int, action: HostAction, secrets: Mapping[str, str]) -> None:
        """Let a host apply an action; `secrets` are the credentials of its processes, for a released barrier.

        Raises:
            RpcError: The host does not answer, or the action failed there.
            LaunchError, OSError: The same on this host.
        """
        ...

    def take_secrets(self, host: int, round_: int) -> Mapping[str, str]: ...

    def forget_run(self) -> None:
        """Let all hosts remove their files, and end."""
        ...


class RunController:
    """Reconciles one run, one step at a time; it keeps no state that a new leader would need."""

    def __init__(self, actions: HostActions, term: int, index: int, clock: Callable[[], float] = time.time) -> None:
        self._actions, self._term, self._index, self._clock = actions, term, index, clock

    def step(self) -> float:
        """Look once and act; return the seconds until the next step, unless something changes before."""
        views, entry, now = self._actions.host_views(), self._actions.entry, self._clock()
        if any(view.is_awaited for view in views):
            return ACTION_RETRY_S
        observed = observe_hosts(entry, views)
        todo = reconcile(entry.job, observed, now)
        is_busy = False
        try:
            self._release_newcomers(views)
        except (OSError, LaunchError, RpcError) as error:
            print(f"credentials of a joined host: {error}", file=sys.stderr, flush=True)
        for action in todo:
            if isinstance(action, records.RequeueAt):
                continue
            try:
                is_busy = self._apply(action, views, now) or is_busy
            except (OSError, LaunchError, RpcError) as error:
                print(f"{type(action).__name__}: {error}", file=sys.stderr, flush=True)
                return ACTION_RETRY_S
        wake_s = next((action.at_s for action in todo if isinstance(action, records.RequeueAt)), None)
        return 0.0 if is_busy else ACTION_RETRY_S if wake_s is None else max(0.0, min(ACTION_RETRY_S, wake_s - now))

    def _apply(self, action: JobAction, views: Sequence[HostView], now: float) -> bool:
        """Apply an action; return whether there was anything to do now."""
        entry = self._actions.entry
        match action:
            case records.SaveRecord(record=record, events=events):
                self._actions.commit_entry(entry.with_record(record, events, now))
            case records.ForgetJob():
                self._actions.forget_run()
            case records.CreateConfig() | records.DeleteConfig():
                wanted = isinstance(action, records.CreateConfig)
                for host, view in enumerate(views):
                    if view.is_heard and view.report is not None and view.report.has_config is not wanted:
                        self._act(host, type(action).__name__)
            case records.ReleaseBarrier(round=round_):
                self._release_barrier(round_, views)
            case records.CreateGroup() | records.RestartGroup() | records.StopGroup() | records.DeleteGroup():
                host = entry.host_of_node(action.node)
                if not views[host].is_heard:
                    return False  # it is done as soon as the host answers
                self._act(host, type(action).__name__, asdict(action))
            case _:
                raise AssertionError(f"unknown action {action}")
        return True

    def _act(self, host: int, name: str, fields: Mapping[str, int] | None = None) -> None:
        action = HostAction(term=self._term, leader=self._index, name=name, fields=dict(fields or {}))
        self._actions.act_on_host(host, action, {})

    def _release_barrier(self, round_: int, views: Sequence[HostView]) -> None:
        """Publish the rendezvous result of a round on all hosts, each with the credentials of its own processes."""
        entry = self._actions.entry
        config = entry.origin.config(entry.job)
        secrets: Mapping[str, str] = {}
        rendezvous = entry.rendezvous
        if rendezvous is None or rendezvous.round != round_:
            offers = find_offers(entry, views, round_)
            rendezvous = agent_channel.rendezvous_result(config, round_, offers)
            if rendezvous is None:
                return
            issuer = find_issuer(entry, offers)
            secrets = self._actions.take_secrets(issuer, round_) if issuer is not None else {}
            # The credentials are distributed before the result is saved: a new leader would not find them again.
            self._send_release(rendezvous, secrets, views, issuer)
            self._actions.commit_entry(replace(entry, rendezvous=rendezvous))
            return
        self._send_release(rendezvous, secrets, views)

    def _release_newcomers(self, views: Sequence[HostView]) -> None:
        """Let hosts that have joined a training run take part: publish their addresses, and send their credentials.

        The issuer has kept the credentials of late nodes. If it is lost, newcomers wait for the next round.
        """
        entry = self._actions.entry
        rendezvous = entry.rendezvous
        if rendezvous is None or rendezvous.round != entry.job.record.round:
            return
        offers = find_offers(entry, views, rendezvous.round)
        newcomers = [host for host in find_newcomers(entry, views) if entry.hosts[host].node in offers]
        if not newcomers:
            return
        addresses = agent_channel.node_addresses(offers) | dict(rendezvous.addresses)
        changed = replace(rendezvous, addresses=addresses)
        issuer = find_issuer(entry, offers)
        secrets = self._actions.take_secrets(issuer, rendezvous.round) if issuer is not None else {}
        self._actions.commit_entry(replace(entry, rendezvous=changed))
        for host in newcomers:
            self._release_host(host, changed, secrets)

    def _send_release(
        self,
        rendezvous: RendezvousResult,
        secrets: Mapping[str, str],
        views: Sequence[HostView],
        issuer: int | None = None,
    ) -> None:
        """Send it to all hosts; the issuer of the credentials is the last, since it then keeps only its own."""
        for host in sorted(range(len(views)), key=lambda host: host == issuer):
            if views[host].is_heard:
                self._release_host(host, rendezvous, secrets, is_issuer=host == issuer)

    def _release_host(
        self, host: int, rendezvous: RendezvousResult, secrets: Mapping[str, str], *, is_issuer: bool = False
    ) -> None:
        """Send it to one host with its own credentials; the issuer also keeps those of late nodes."""
        entry = self._actions.entry
        config, used = entry.origin.config(entry.job), entry.job.used_nodes
        late = [used[each] for each in range(len(used)) if entry.hosts[each].node in rendezvous.late_nodes]
        own: dict[str, str] = {}
        for node in (used[host], *(late if is_issuer else ())):
            own |= select_secrets(config, node, secrets)
        text = agent_channel.RENDEZVOUS_JSON.dump(rendezvous)
        action = HostAction(term=self._term, leader=self._index, name="ReleaseBarrier", rendezvous=text)
        self._actions.act_on_host(host, action, own)


def observe_hosts(entry: RunEntry, views: Sequence[HostView]) -> ObservedJobState:
    """Return the state of the job from the reports of its hosts."""
    groups: list[ObservedGroup] = []
    reported = [group for view in views if view.is_heard and view.report is not None for group in view.report.groups]
    for host, view in enumerate(views):
        known = view.report.groups if view.report is not None else _recorded_groups(entry, host)
        for group in known:
            is_alive = view.is_heard or _is_member(group, reported)
            groups.append(group if is_alive else _lost_group(group, entry.hosts[host].node))
    groups = _with_idle_ended(entry, groups)
    newcomers = find_newcomers(entry, views)
    heard = [view.report for view in views if view.is_heard and view.report is not None]
    settled = [
        view.report
        for host, view in enumerate(views)
        if view.is_heard and view.report is not None and host not in newcomers
    ]
    return ObservedJobState(
        has_config=any(report.has_config for report in heard),
        is_config_incomplete=not all(report.has_config for report in heard),
        released_round=min((report.released_round for report in settled), default=0),
        groups=tuple(groups),
        late_nodes=frozenset(entry.job.used_nodes[host] for host in newcomers),
    )


def scale_run(entry: RunEntry, views: Sequence[HostView], workers: int, now: float, request_id: str = "") -> RunEntry:
    """Return the entry with another number of workers that the run shall have; of its last request, as it is.

    `request_id`: id of the request, which may be sent again after a lost answer.

    Raises:
        JobError: The run is not elastic, cannot have so many, or does not train.
        NotLeaderError: The leader is new, and has not heard from all hosts yet.
    """
    job, bounds, last = entry.job, entry.bounds, entry.scaled
    if last is not None and request_id and last.request_id == request_id:
        return entry
    if job.request.elastic is None or bounds is None:
        do = "Start it again with ringweave run --elastic"
        raise JobError("run", got=entry.name, expected="a run with --elastic MIN:MAX", do=do)
    num_slots = entry.origin.config(job).num_slots
    has_rings = job.request.mode in ELASTIC_SERVER_MODES
    why = "the number of workers in its rings" if has_rings else "the places on its hosts"
    if num_slots >= MAX_GROWN_WORKERS:
        why = "the workers for which certificates were issued at its start"
    if refusal := ScaleLimits(bounds=bounds, num_slots=num_slots, reason=why).refusal(workers):
        raise JobError(refusal)
    if job.record.outcome is not None or job.record.deleting or job.desired != DesiredJobState():
        do = "Start it again with more workers"
        raise JobError("run", got=f"{entry.name}, which ends", expected="a run that trains", do=do)
    if any(view.is_awaited for view in views):
        raise no_leader_error()
    known = [group.generation for view in views if view.report is not None for group in view.report.groups]
    if max(known, default=(0, 0)) == (0, 0):
        do = "Wait for the event generation_begun; scripts without prepare keep their workers"
        raise JobError("run", got="no member yet", expected="workers that have called ringweave.prepare", do=do)
    number, before = 1 if last is None else last.wanted.number + 1, entry.num_wanted
    text = scale_requests.describe_answer(scale_answer(before, workers))
    event = RunEvent(key=f"scaled/{number}", time_s=now, kind="Scaled", text=text)
    scaled = ScaleRecord(
        wanted=WantedWorkers(workers=workers, number=number),
        before=before,
        most=max(workers, entry.most_wanted),
        request_id=request_id,
    )
    return replace(entry, scaled=scaled, events=(*entry.events, event)[-records.MAX_EVENTS :])


def scale_answer(before: int, workers: int) -> ScaleAnswer:
    """Return what follows from another number of workers."""
    starting, leaving = tuple(range(before, workers)), tuple(range(workers, before))
    return ScaleAnswer(workers=workers, before=before, starting=starting, leaving=leaving)


def _with_idle_ended(entry: RunEntry, groups: Sequence[ObservedGroup]) -> list[ObservedGroup]:
    """Let groups that shall have no workers have succeeded once all others have: nothing else tells them the end."""
    if entry.scaled is None:
        return list(groups)
    running = [group for group in groups if group.phase is GroupPhase.RUNNING and not group.members]
    idle = [group for group in running if not entry.wanted_ranks(group.node)]
    others = [each for each in groups if each not in idle and each.round == entry.job.record.round]
    phases = {each.phase for each in others}
    if GroupPhase.SUCCEEDED not in phases or GroupPhase.RUNNING in phases:
        return list(groups)
    ended_s = max((each.ended_s for each in others if each.ended_s is not None), default=None)
    return [replace(each, phase=GroupPhase.SUCCEEDED, ended_s=ended_s) if each in idle else each for each in groups]


def find_newcomers(entry: RunEntry, views: Sequence[HostView]) -> list[int]:
    """Return the joining hosts of an elastic run that are not there yet, or take no part in the round yet."""
    if entry.job.request.elastic is None:
        return []
    is_released = entry.rendezvous is not None and entry.rendezvous.round == entry.job.record.round
    found = []
    for host in sorted({seat.host for seat in entry.seats}):
        report = views[host].report
        has_round = report is not None and report.released_round >= entry.job.record.round
        if not views[host].is_heard or (is_released and not has_round):
            found.append(host)
    return found


def _recorded_groups(entry: RunEntry, host: int) -> tuple[ObservedGroup, ...]:
    """Return the group that a host without a report had when another host led."""
    node, record = entry.job.used_nodes[host], entry.job.record
    known = record.nodes[node]
    if not known.seen or known.ended is not None:
        return ()
    return (ObservedGroup(node=node, attempt=known.attempt, round=record.round, phase=GroupPhase.RUNNING),)


def _is_member(group: ObservedGroup, reported: Sequence[ObservedGroup]) -> bool:
    """Return whether the coordinators know the workers of a group of an elastic run, so that only its host is silent.

    A host service that was killed on a busy machine is silent for a while, and its workers train on.
    """
    knowing = [each for each in reported if each.generation > (0, 0)]
    return bool(group.members and knowing) and not any(set(group.members) & set(each.evicted) for each in knowing)


def _lost_group(group: ObservedGroup, node: str) -> ObservedGroup:
    if not group.phase.is_alive:
        return group
    text = f"host {node} does not answer"
    return replace(group, phase=GroupPhase.FAILED, cause=EndCause.PLATFORM, text=text, is_terminating=False)


def find_offers(entry: RunEntry, views: Sequence[HostView], round_: int) -> dict[str, AgentStatus]:
    """Return the statuses of the ready nodes of a round, by node name."""
    config = entry.origin.config(entry.job)
    statuses = [status for view in views if view.report is not None for status in view.report.statuses]
    return {
        config.node(node).name: status
        for node, _, status in statuses
        if status.round == round_ and status.master_address is not None
    }


def find_issuer(entry: RunEntry, offers: Mapping[str, AgentStatus]) -> int | None:
    """Return the host whose agent has issued the credentials of the round; None if no process needs any."""
    names = [host.node for host in entry.hosts]
    config = entry.origin.config(entry.job)
    if config.coordinator_nodes:
        return names.index(config.coordinator_nodes[0])
    server = next((name for name, status in offers.items() if status.server is not None), None)
    issuer = config.master_node if server is None and config.encrypts else server
    return None if issuer is None else names.index(issuer)


def select_secrets(config: JobConfig, node: int, secrets: Mapping[str, str]) -> dict[str, str]:
    """Return the credentials of the processes of one node."""
    holders = config.credential_holders(node)
    return {file: text for file, text in secrets.items() if file.split(".")[0] in holders}
