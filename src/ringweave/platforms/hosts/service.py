"""Host service: one process on each host of a run, for the length of the run.

    python -m ringweave.platforms.hosts.service RUN_FOLDER

It keeps a copy of the run's entry, starts and observes the worker groups of its host, votes, and, on the leader,
controls the run. It may be killed at any time: the host's node agent starts another one.
"""

import contextlib
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ringweave import rpc
from ringweave.errors import JobError, LaunchError, NotLeaderError, RemoteError, RingweaveError, RpcError
from ringweave.files import rotation
from ringweave.jobs import admission
from ringweave.jobs.advance import is_finished
from ringweave.launcher.run_dir import software_versions
from ringweave.platforms.hosts import host_runtime, join_protocol, messages, quorum_election
from ringweave.platforms.hosts.controller import HOST_LOST_S, VOTER_LOST_S, HostView, RunController, scale_run
from ringweave.platforms.hosts.host_runtime import HostJobRuntime
from ringweave.platforms.hosts.join_protocol import JoinListener, print_refusal
from ringweave.platforms.hosts.messages import COMMAND_ROLE, HOST_ROLE, HostAction, HostAnswer, HostReport
from ringweave.platforms.hosts.quorum_election import EntryVersion, Leadership, is_quorum
from ringweave.platforms.hosts.run_entry import ENTRY_JSON, HostFolder, RunEntry, ScaleRecord, StaleEntryError
from ringweave.platforms.hosts.script_files import FileOffer
from ringweave.platforms.local import job_folder
from ringweave.rpc import RpcCall, RpcClient, RpcHandler, RpcLimits, RpcReply, RpcServer

TICK_S = 0.1
"""Interval between two looks at this host."""
CONTACT_WAIT_S = 0.5
"""Time for which a host may hold a contact of its leader until its report changes."""
CONTACT_TIMEOUT_S = 2.0
RECONNECT_S = 0.25
COMMIT_TIMEOUT_S = 3.0
ACTION_TIMEOUT_S = 10.0
VOTE_TIMEOUT_S = 1.0
ORPHAN_TIMEOUT_S = 900.0
"""Silence of all leaders after which a host without worker groups ends its service: the run may be over elsewhere."""
MAX_CHANGE_ATTEMPTS = 20
"""Attempts at a change of the entry that other threads change at the same time."""
FILE_PIECE_BYTES = 4 * 2**20
LINGER_S = 15.0
"""Time after the end of the run for which the service stays, for commands that read its outcome."""


class LeaderLink:
    """Connection of the leader to another host: hands over the entry, and receives reports."""

    def __init__(self, service: "HostService", host: int, term: int) -> None:
        self._service, self._host, self._term = service, host, term
        self._client: RpcClient | None = None
        self._lock = threading.Lock()
        self.report: HostReport | None = None
        self.entry_version: EntryVersion = (-1, 0)
        self._report_version = -1
        threading.Thread(target=self._run, name=f"link to host {host}", daemon=True).start()

    def push_entry(self) -> None:
        """Hand the newest entry over now, if the host answers; else the link's own thread connects again."""
        with contextlib.suppress(RingweaveError, OSError):
            self._contact(self._connected(), wait_s=0.0)

    def take_secrets(self, round_: int) -> dict[str, str]:
        """Return the credentials that an agent of the host has issued.

        Raises:
            RpcError: The host does not answer, or the call failed there.
        """
        message = messages.TakeSecrets(term=self._term, leader=self._service.index, round=round_)
        return messages.unpack_secrets(self._connected().call(message, timeout_s=ACTION_TIMEOUT_S).buffers)

    def apply(self, action: HostAction, secrets: Mapping[str, str]) -> None:
        """Let the host apply an action, and take its report; `secrets` are the credentials of its processes.

        Raises:
            RpcError: The host does not answer, or the action failed there.
        """
        client = self._connected()
        buffers = messages.pack_secrets(secrets)
        answer = client.call(action, buffers, timeout_s=ACTION_TIMEOUT_S).message
        assert isinstance(answer, HostAnswer)
        self._take_answer(client, answer)

    def _run(self) -> None:
        while self._service.leads(self._term):
            try:
                self._contact(self._connected(), wait_s=CONTACT_WAIT_S)
            except (RingweaveError, OSError):
                self._drop()
                time.sleep(RECONNECT_S)
        self._drop()

    def _connected(self) -> RpcClient:
        with self._lock:
            if self._client is None or self._client.failure is not None:
                endpoint = self._service.entry.hosts[self._host]
                self._client = RpcClient.connect(
                    endpoint.address,
                    endpoint.port,
                    self._service.authentication,
                    role=HOST_ROLE,
                    limits=RpcLimits(handshake_s=CONTACT_TIMEOUT_S),
                    timeout_s=CONTACT_TIMEOUT_S,
                )
                self.entry_version, self._report_version = (-1, 0), -1  # its service may be another one
            return self._client

    def _drop(self) -> None:
        with self._lock:
            if self._client is not None:
                self._client.abort()
                self._client = None

    def _contact(self, client: RpcClient, wait_s: float) -> None:
        entry, sent_s = self._service.entry, time.monotonic()
        text = ENTRY_JSON.dump(entry) if self.entry_version != entry.version else None
        message = messages.LeaderContact(
            term=self._term,
            leader=self._service.index,
            entry=text,
            known_report=self._report_version,
            wait_s=wait_s if text is None else 0.0,
        )
        answer = client.call(message, timeout_s=wait_s + CONTACT_TIMEOUT_S).message
        assert isinstance(answer, HostAnswer)
        self._take_answer(client, answer)
        self._service.note_contact(self._host, self._term, answer.term, sent_s)

    def _take_answer(self, client: RpcClient, answer: HostAnswer) -> None:
        """Note an answer, unless a newer one was noted before it: two threads wait for answers."""
        if not answer.is_accepted:
            self._service.note_newer_term(answer.term)
            return
        with self._lock:
            if client is not self._client:
                return
            self.entry_version = max(self.entry_version, answer.entry_version)
            if answer.report is None or answer.report_version <= self._report_version:
                return
            self.report, self._report_version = answer.report, answer.report_version
        self._service.wake()


class HostService:
    """State of one host in the run; all threads share it under one lock."""

    # A long constructor: it loads the files of this host, and begins with empty tables.
    def __init__(self, folder: HostFolder, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = folder, clock
        self._config = folder.load_config()
        self.index = self._config.index
        self.entry = folder.load_entry()
        ballot = folder.load_ballot()
        self.authentication = rpc.TlsAuthentication(rpc.Credentials.load(folder.credentials))
        leader = self._config.first_leader if ballot.term <= 1 else None
        self._leadership = Leadership(self.index, self.entry.voters, ballot, clock(), leader)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._commit_lock, self._observe_lock = threading.Lock(), threading.Lock()
        self._runtime = HostJobRuntime(folder, self._config, self.entry)
        self._files = FileOffer(folder, Path(self._config.directory))
        self._report, self._report_version = HostReport(), 0
        self._links: dict[int, LeaderLink] = {}
        self._links_term = -1
        self._controller: RunController | None = None
        self._is_forgotten = False
        self._finished_s: float | None = None
        self._used_s = self._leads_since_s = clock()
        folder.job.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._wakeup = job_folder.Wakeup(folder.job.wakeup)

    def run(self) -> None:
        """Serve until the run is removed, or has ended and no command has asked for a while."""
        server = RpcServer(
            self.authentication,
            self._handlers(),
            roles=(HOST_ROLE, COMMAND_ROLE),
            write_event=print_refusal,
            on_handler_error=_print_handler_error,
            on_peer_exit=self._peer_exited,
        )
        joins = JoinListener(rpc.Credentials.load(self._folder.credentials), self.admit_joiner)
        try:
            host_runtime.ensure_relay(self._folder, self.entry, os.environ)
            with server.start(self._config.address, self._config.port):
                if self._config.join_port:
                    joins.start(self._config.address, self._config.join_port)
                self._observe()
                while not self._is_over():
                    joins.cut_late()
                    host_runtime.ensure_relay(self._folder, self.entry, os.environ)
                    self._wakeup.wait(self._tick())
        finally:
            joins.close()
        host_runtime.end_relay(self._folder)
        if self._is_forgotten:
            shutil.rmtree(self._folder.root, ignore_errors=True)

    # What the controller uses.

    def host_views(self) -> list[HostView]:
        """Return the hosts, in the order of the entry."""
        heard = self._leadership.hosts_heard(self._clock(), HOST_LOST_S)
        is_new = self._clock() - self._leads_since_s < HOST_LOST_S
        views = []
        for host in range(len(self.entry.hosts)):
            link = self._links.get(host)
            report = self._report if host == self.index else link.report if link is not None else None
            is_heard = host == self.index or host in heard
            is_awaited = report is None and (is_heard or (is_new and bool(self.entry.hosts[host].address)))
            views.append(HostView(report=report, is_heard=is_heard, is_awaited=is_awaited))
        return views

    def commit_entry(self, entry: RunEntry) -> None:
        """Save the entry here and on a quorum.

        Raises:
            StaleEntryError: It was computed from another entry than the newest.
            LaunchError: There is no quorum, or this host does not lead any more.
        """
        with self._commit_lock:
            with self._lock:
                if not self._leadership.is_leader:
                    raise LaunchError("entry of the run: this host does not lead any more, expected the leader.")
                if entry.version != self.entry.version:
                    raise StaleEntryError("entry of the run: changed at the same time. It is tried again.")
                version = (self._leadership.ballot.term, self.entry.version[1] + 1)
                self.entry = replace(entry, version=version)
                self._leadership.set_voters(entry.voters)
                self._folder.save_entry(self.entry)
            self._wait_for_quorum(version)

    def act_on_host(self, host: int, action: HostAction, secrets: Mapping[str, str]) -> None:
        if host == self.index:
            self._runtime.apply(action, secrets)
            self._observe()
        else:
            self._links[host].apply(action, secrets)

    def take_secrets(self, host: int, round_: int) -> dict[str, str]:
        """Return the credentials that an agent of this host has issued."""
        if host == self.index:
            return self._runtime.take_secrets(round_)
        return self._links[host].take_secrets(round_)

    def forget_run(self) -> None:
        """Let all hosts that answer remove their files and end; then this one.

        A host that does not answer in time keeps its files, until the command removes them over ssh.
        """
        action = HostAction(term=self._links_term, leader=self.index, name="ForgetJob")
        for host, view in enumerate(self.host_views()):
            if view.is_heard and host != self.index:
                with contextlib.suppress(RpcError):
                    self._links[host].apply(action, {})
        self._is_forgotten = True

    # What the links use.

    def leads(self, term: int) -> bool:
        return self._leadership.is_leader and self._leadership.ballot.term == term and not self._is_forgotten

    def note_contact(self, host: int, term: int, their_term: int, sent_s: float) -> None:
        """Note an answer of a host to this leader."""
        with self._lock:
            if self._leadership.ballot.term == term and their_term == term:
                self._leadership.note_contact(host, sent_s)
                self._changed.notify_all()

    def note_newer_term(self, term: int) -> None:
        """Follow again: another host knows a newer term."""
        with self._lock:
            if term > self._leadership.ballot.term:
                self._leadership.step_down(term)
                self._folder.save_ballot(self._leadership.ballot)

    def wake(self) -> None:
        """Let the main loop look at once."""
        with self._lock:
            self._changed.notify_all()
        job_folder.notify(self._folder.job.wakeup)

    # The main loop.

    def _tick(self) -> float:
        """Look at this host, and act if it leads; return the seconds until the next tick."""
        scaled = self.entry.scaled
        self._runtime.publish_wanted(scaled.wanted if scaled is not None else None)
        self._observe()
        with self._lock:
            stands = self._leadership.should_stand(self._clock())
        if stands:
            self._campaign()
        if not self._leadership.is_leader:
            self._drop_leadership()
            return TICK_S
        self._keep_links()
        if not self._leadership.holds_lease(self._clock()):
            return TICK_S
        try:
            self._update_voters()
            assert self._controller is not None
            return min(TICK_S, self._controller.step())
        except LaunchError as error:
            print(f"step: {error}", file=sys.stderr, flush=True)
            return TICK_S

    def _observe(self) -> None:
        with self._observe_lock:  # so that no thread replaces a report by an older one
            report = self._runtime.report()
            with self._lock:
                if report != self._report:
                    self._report, self._report_version = report, self._report_version + 1
                    self._changed.notify_all()

    def _keep_links(self) -> None:
        term = self._leadership.ballot.term
        if self._links_term != term:
            self._links_term, self._links, self._leads_since_s = term, {}, self._clock()
            self._controller = RunController(self, term, self.index)
        for host, endpoint in enumerate(self.entry.hosts):
            if host != self.index and host not in self._links and endpoint.address:
                self._links[host] = LeaderLink(self, host, term)

    def _drop_leadership(self) -> None:
        self._links, self._controller, self._links_term = {}, None, -1

    def _update_voters(self) -> None:
        """Let silent hosts not count for the quorum, one at a time, and let hosts that answer again count."""
        heard, entry = {self.index, *self._leadership.hosts_heard(self._clock(), VOTER_LOST_S)}, self.entry
        voters = entry.voters
        gone = next((host for host in voters if host not in heard), None)
        back = next((host for host in range(len(entry.hosts)) if host in heard and host not in voters), None)
        if gone is None and back is None:
            return
        added = [] if back is None or gone is not None else [back]
        changed = tuple(sorted([*(host for host in voters if host != gone), *added]))
        self.commit_entry(replace(entry, voters=changed))

    def _wait_for_quorum(self, version: EntryVersion) -> None:
        for link in [each for each in self._links.values() if each.entry_version < version]:
            threading.Thread(target=link.push_entry, daemon=True).start()
        with self._changed:
            is_saved = self._changed.wait_for(
                lambda: not self._leadership.is_leader or is_quorum(self._hosts_with(version), self._leadership.voters),
                COMMIT_TIMEOUT_S,
            )
        if not is_saved or not self._leadership.is_leader:
            raise LaunchError("entry of the run: no quorum of the hosts has saved it. It is tried again.")

    def _hosts_with(self, version: EntryVersion) -> set[int]:
        return {self.index, *(host for host, link in self._links.items() if link.entry_version >= version)}

    def _campaign(self) -> None:
        """Stand for election if a quorum would vote for this host."""
        with self._lock:
            term = self._leadership.ballot.term + 1
            trial = messages.VoteRequest(term=term, candidate=self.index, version=self.entry.version, is_trial=True)
        willing = {self.index, *self._ask_votes(trial)}
        with self._lock:
            if self._leadership.ballot.term + 1 != term or not self._leadership.should_stand(self._clock()):
                return
            if not is_quorum(willing, self._leadership.voters):
                self._leadership.postpone_election(self._clock())
                return
            self._leadership.stand(self._clock())
            self._folder.save_ballot(self._leadership.ballot)
            self._leadership.finish_election(self._clock())
        votes = self._ask_votes(trial.model_copy(update={"is_trial": False}))
        with self._lock:
            for voter in votes:
                self._leadership.count_vote(term, voter, self._clock())
        if self._leadership.is_leader:
            print(f"leads in term {term}", file=sys.stderr, flush=True)

    def _ask_votes(self, message: messages.VoteRequest) -> list[int]:
        """Ask the other voters at the same time; return those that agree within `VOTE_TIMEOUT_S`."""
        agreed: list[int] = []
        threads = [
            threading.Thread(target=self._ask_vote, args=(host, message, agreed), daemon=True)
            for host in self._leadership.voters
            if host != self.index
        ]
        for thread in threads:
            thread.start()
        deadline_s = self._clock() + VOTE_TIMEOUT_S
        for thread in threads:
            thread.join(max(0.0, deadline_s - self._clock()))
        return list(agreed)

    def _ask_vote(self, host: int, message: messages.VoteRequest, agreed: list[int]) -> None:
        endpoint = self.entry.hosts[host]
        limits = RpcLimits(handshake_s=VOTE_TIMEOUT_S)
        where = (endpoint.address, endpoint.port, self.authentication)
        try:
            with RpcClient.connect(*where, role=HOST_ROLE, limits=limits, timeout_s=VOTE_TIMEOUT_S) as client:
                answer = client.call(message, timeout_s=VOTE_TIMEOUT_S).message
        except (RpcError, OSError):
            return
        assert isinstance(answer, messages.VoteAnswer)
        if answer.is_granted:
            agreed.append(host)
        elif not message.is_trial:
            self.note_newer_term(answer.term)

    def _is_over(self) -> bool:
        if self._is_forgotten:
            return True
        now_s = self._clock()
        if self._leadership.silence_s(now_s) > ORPHAN_TIMEOUT_S and not self._has_groups():
            return True
        if self._has_groups() or not is_finished(self.entry.job) or self.entry.job.desired.delete:
            self._finished_s = None
            return False
        self._finished_s = now_s if self._finished_s is None else self._finished_s
        return now_s - max(self._finished_s, self._used_s) >= LINGER_S

    def _has_groups(self) -> bool:
        return any(group.phase.is_alive or group.is_terminating for group in self._report.groups)

    # Handlers.

    def _handlers(self) -> Sequence[RpcHandler]:
        return (
            RpcHandler(message=messages.LeaderContact, handle=self._handle_contact),
            RpcHandler(message=messages.VoteRequest, handle=self._handle_vote),
            RpcHandler(message=HostAction, handle=self._handle_action),
            RpcHandler(message=messages.TakeSecrets, handle=self._handle_secrets),
            RpcHandler(message=messages.RunStatusRequest, handle=self._handle_status),
            RpcHandler(message=messages.RunVerb, handle=self._handle_verb),
            RpcHandler(message=messages.LeadershipRequest, handle=self._handle_leadership),
            RpcHandler(message=messages.ReadLogs, handle=self._handle_logs),
            RpcHandler(message=messages.JoinRequest, handle=lambda call: self._give_seat(call.message)),  # passed on
            RpcHandler(message=messages.ReadFile, handle=self._handle_file),
            RpcHandler(message=messages.FetchFiles, handle=self._handle_fetch),
        )

    def _handle_contact(self, call: RpcCall) -> HostAnswer:
        message: messages.LeaderContact = call.message
        with self._changed:
            if not self._accept_leader(call, message.term, message.leader):
                return self._refusal()
            if message.entry is not None:
                self._adopt_entry(ENTRY_JSON.parse(message.entry))
            self._changed.wait_for(
                lambda: self._report_version != message.known_report or call.cancelled.is_set(), message.wait_s
            )
            if message.term < self._leadership.ballot.term:
                return self._refusal()
            report = self._report if self._report_version != message.known_report else None
            return self._answer(report)

    def _handle_vote(self, call: RpcCall) -> messages.VoteAnswer:
        message: messages.VoteRequest = call.message
        self._check_host(call, message.candidate)
        with self._lock:
            ask = self._leadership.would_vote if message.is_trial else self._leadership.grant_vote
            is_granted = ask(message.term, message.candidate, message.version, self.entry.version, self._clock())
            if is_granted and not message.is_trial:
                self._folder.save_ballot(self._leadership.ballot)
            return messages.VoteAnswer(term=self._leadership.ballot.term, is_granted=is_granted)

    def _handle_action(self, call: RpcCall) -> HostAnswer:
        message: HostAction = call.message
        with self._lock:
            if not self._accept_leader(call, message.term, message.leader):
                return self._refusal()
        if message.name == "ForgetJob":
            self._is_forgotten = True
            return self._answer(None)
        self._runtime.apply(message, messages.unpack_secrets(call.buffers))
        self._observe()
        with self._lock:
            return self._answer(self._report)

    def _handle_secrets(self, call: RpcCall) -> RpcReply:
        message: messages.TakeSecrets = call.message
        with self._lock:
            if not self._accept_leader(call, message.term, message.leader):
                raise NotLeaderError("credentials of a round: asked by a former leader, expected the present one.")
        return RpcReply(messages.RoundSecrets(), messages.pack_secrets(self._runtime.take_secrets(message.round)))

    def _handle_status(self, call: RpcCall) -> messages.RunStatus:
        self._used_s = self._clock()
        return messages.RunStatus(entry=ENTRY_JSON.dump(self.entry))

    def _handle_verb(self, call: RpcCall) -> messages.RunStatus:
        message: messages.RunVerb = call.message
        self._used_s = self._clock()
        if self._leadership.holds_lease(self._clock()):
            before = self._apply_verb(message)
            return messages.RunStatus(entry=ENTRY_JSON.dump(self.entry), before=before)
        status = self._ask_leader(call)
        assert isinstance(status, messages.RunStatus)
        return status

    def _handle_leadership(self, call: RpcCall) -> rpc.RpcMessage:
        if self._leadership.holds_lease(self._clock()):
            return host_runtime.commit_leadership(call.message, self._change_entry)
        return self._ask_leader(call)

    def _ask_leader(self, call: RpcCall) -> rpc.RpcMessage:
        leader = self._leadership.leader
        if leader is None or leader == self.index or call.peer.role == HOST_ROLE:
            raise quorum_election.no_leader_error()
        return self._pass_on(leader, call.message)

    def _handle_logs(self, call: RpcCall) -> RpcReply:
        message: messages.ReadLogs = call.message
        self._used_s = self._clock()
        pieces, content = host_runtime.read_new_logs(self._folder, message.positions, message.events)
        is_at_rest = not any(group.phase.is_alive or group.is_terminating for group in self._report.groups)
        answer = messages.LogPieces(pieces=tuple((key, end, size) for key, end, size in pieces), is_at_rest=is_at_rest)
        return RpcReply(answer, [content])

    def _handle_file(self, call: RpcCall) -> RpcReply:
        message: messages.ReadFile = call.message
        size, content = self._files.read(message.digest, message.start, FILE_PIECE_BYTES)
        return RpcReply(messages.FileBytes(size=size), [content])

    def _handle_fetch(self, call: RpcCall) -> RpcReply:
        self._used_s = self._clock()
        content = host_runtime.archive_files(self._folder)
        return RpcReply(messages.FileBytes(size=len(content)), [content])

    def admit_joiner(self, request: messages.JoinRequest) -> messages.JoinAnswer:
        """Give a joiner its seat, or have the leader do it.

        Raises:
            JoinRefusedError: Its token does not count, or this host cannot take part.
            NotLeaderError: There is no leader at the moment.
            RpcError: The leader does not answer.
        """
        join_protocol.find_seat(self.entry, request, time.time())  # a wrong token takes no time of the leader
        leader = self._leadership.leader
        if leader is None or leader == self.index:
            return self._give_seat(request)
        answer = self._pass_on(leader, request)
        assert isinstance(answer, messages.JoinAnswer)
        return answer

    def _give_seat(self, request: messages.JoinRequest) -> messages.JoinAnswer:
        """Commit that the joiner has its seat, then answer with its credentials; or tell why it cannot be called."""
        if not self._leadership.holds_lease(self._clock()):
            raise quorum_election.no_leader_error()
        entry, now = self.entry, time.time()
        seat = join_protocol.find_seat(entry, request, now)
        join_protocol.check_joiner(request, entry, seat, software_versions(), now)
        problem = host_runtime.find_joiner_problem(request)
        if not problem:  # also the seat of a joiner that asks again: its commit may have failed
            self._change_entry(lambda entry: join_protocol.take_seat(entry, request, time.time())[0])
        return messages.JoinAnswer(
            entry=ENTRY_JSON.dump(self.entry),
            host=seat.host,
            sealed="" if problem else seat.sealed,
            term=self._leadership.ballot.term,
            leader=self.index,
            environ=dict(self._config.environ),
            unreachable=problem,
        )

    def _apply_verb(self, message: messages.RunVerb) -> int | None:
        """Commit a verb; return the number of workers before SCALE, as the committed entry has it."""
        scaled: ScaleRecord | None = None

        def change(entry: RunEntry) -> RunEntry:
            nonlocal scaled
            if message.verb == messages.SCALE:
                views = self.host_views()
                changed = scale_run(entry, views, message.workers or 0, time.time(), message.request_id)
                scaled = changed.scaled
                return changed
            desired = admission.apply_verb(message.verb, entry.job, time.time())
            return replace(entry, job=replace(entry.job, desired=desired))

        self._change_entry(change)
        self.wake()
        return scaled.before if scaled is not None else None

    def _change_entry(self, change: Callable[[RunEntry], RunEntry]) -> None:
        """Commit a change of the newest entry; it is computed again where another thread was faster.

        An entry without a change is only waited for, until a quorum has saved it.
        """
        for attempt in range(1, MAX_CHANGE_ATTEMPTS + 1):
            try:
                entry = self.entry
                changed = change(entry)
                self._wait_for_quorum(entry.version) if changed is entry else self.commit_entry(changed)
            except StaleEntryError:
                if attempt == MAX_CHANGE_ATTEMPTS:
                    raise
            else:
                return

    def _pass_on(self, leader: int, message: rpc.RpcMessage) -> rpc.RpcMessage:
        """Return the answer of the leader."""
        endpoint = self.entry.hosts[leader]
        with RpcClient.connect(endpoint.address, endpoint.port, self.authentication, role=HOST_ROLE) as client:
            try:
                return client.call(message, timeout_s=ACTION_TIMEOUT_S).message
            except RemoteError as error:
                if error.error == join_protocol.JoinRefusedError.__name__:
                    raise join_protocol.JoinRefusedError("leader", str(error)) from error
                if error.error == JobError.__name__:
                    raise JobError(str(error)) from error
                raise

    def _accept_leader(self, call: RpcCall, term: int, leader: int) -> bool:
        self._check_host(call, leader)
        before = self._leadership.ballot
        if not self._leadership.accept_leader(term, leader, self._clock()):
            return False
        if self._leadership.ballot != before:
            self._folder.save_ballot(self._leadership.ballot)
        return True

    def _check_host(self, call: RpcCall, index: int) -> None:
        """Refuse a command, or a host that says that it is another one."""
        is_known = index < len(self.entry.hosts) and call.peer.name == self.entry.hosts[index].node
        if call.peer.role != HOST_ROLE or not is_known:
            do = "Nothing to do if the run goes on"
            raise JobError("sender", got=str(call.peer), expected=f"host {index} of the run", do=do)

    def _adopt_entry(self, entry: RunEntry) -> None:
        if entry.run_id != self._folder.run_id or entry.version <= self.entry.version:
            return
        self.entry = entry
        self._folder.save_entry(entry)
        self._leadership.set_voters(entry.voters)

    def _answer(self, report: HostReport | None) -> HostAnswer:
        return HostAnswer(
            term=self._leadership.ballot.term,
            is_accepted=True,
            entry_version=self.entry.version,
            report_version=self._report_version,
            report=report,
        )

    def _refusal(self) -> HostAnswer:
        return HostAnswer(term=self._leadership.ballot.term, is_accepted=False, entry_version=self.entry.version)

    def _peer_exited(self, peer: rpc.Identity) -> None:
        """Note that the process of another host service has ended; if it led, another leader is elected soon."""
        names = [host.node for host in self.entry.hosts]
        if peer.role == HOST_ROLE and peer.name in names:
            with self._lock:
                self._leadership.mark_leader_gone(names.index(peer.name))


def _print_handler_error(peer: rpc.Identity, kind: str, error: Exception) -> None:
    print(f"{kind} of {peer.name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


def main(root: Path) -> None:
    """Run the host service of a folder with the inherited lock."""
    rotation.rotate_own_output()
    for signum in (signal.SIGHUP, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)
    os.chdir("/")
    HostService(HostFolder(root=root)).run()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
