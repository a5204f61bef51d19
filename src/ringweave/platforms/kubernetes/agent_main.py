"""Main program of a Pod's container: the node agent, with the operator's agent gateway as its channel.

    python -m ringweave.platforms.kubernetes.agent_main

Its input is in the environment and in the mounted files of the job's ConfigMap and Secret.
"""

import bisect
import http.client
import json
import os
import ssl
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import TypeAdapter

from ringweave.errors import LaunchError
from ringweave.files import file_io
from ringweave.files.rotation import LineReader
from ringweave.jobs.records import GroupPhase
from ringweave.launcher.node_context import HostContext
from ringweave.param_server import leadership
from ringweave.param_server.leadership import LeadershipLog, LeadershipRecord, LogAnswer
from ringweave.platforms.agent import agent, agent_channel
from ringweave.platforms.agent.agent import AgentAssignment
from ringweave.platforms.agent.agent_channel import AgentChannel, AgentStatus, DesiredState
from ringweave.platforms.agent.job_config import JobConfig
from ringweave.platforms.kubernetes import objects, pod_logs
from ringweave.rpc import Credentials
from ringweave.telemetry import event_lines

TAG_HEADER = "X-Ringweave-Tag"
_REQUEST_TIMEOUT_S = 60.0
"""The gateway answers within 25 s."""
_LEADERSHIP_TIMEOUT_S = 3.0
"""Time for an answer about leadership; shorter than that of the server's process for its node agent."""
GATEWAY_RETRY_S = 0.5
"""Delay before the next try to reach the gateway."""
FINAL_STATUS_TIMEOUT_S = 10.0
"""Time for sending the final status; the kubelet reports it as well."""

MAX_TERMINATION_MESSAGE_BYTES = 4096
"""Maximum size of a termination message that the kubelet reads; of a longer one it keeps the end, which does not parse.
"""

MAX_GATEWAY_ANSWER_BYTES = 4 * 2**20
"""Maximum size of an answer: a node's credentials, within the size of an API object; quoting doubles some of it."""

EVENT_INTERVAL_S = 0.5
"""Time between two looks for new events."""
LOG_UPLOAD_TIMEOUT_S = 5.0
"""Time for uploading a log before the final status; a deleted Pod has 30 s for both."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayClient:
    """Client of the operator's agent gateway, with the agent's credentials."""

    url: str
    group: str
    """`NAMESPACE/JOB/NODE/ATTEMPT`."""
    token: Callable[[], str]
    """Returns the token, read anew for each request: a Secret that is removed is created again with another token."""
    certificate: str = ""
    """Certificate of the gateway, as PEM; empty without TLS."""

    def request(
        self,
        method: str,
        path: str,
        body: str | None = None,
        tag: str = "",
        timeout_s: float = _REQUEST_TIMEOUT_S,
    ) -> tuple[int, str, str]:
        """Send a request; return status, text and tag of the answer.

        Raises:
            OSError: The gateway does not answer.
            http.client.HTTPException: The answer is no gateway's: no HTTP, no UTF-8, or too long.
        """
        url = urlsplit(self.url)
        host, port = url.hostname or "", url.port or 443
        connection: http.client.HTTPConnection
        if url.scheme == "https":
            context = ssl.create_default_context(cadata=self.certificate)
            connection = http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context)
        else:
            connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
        headers = {"Authorization": f"Bearer {self.token()}", **({TAG_HEADER: tag} if tag else {})}
        try:
            content = None if body is None else body.encode()  # http.client would write Latin-1
            connection.request(method, f"/v2/{self.group}/{path}", body=content, headers=headers)
            with connection.getresponse() as answer:
                return answer.status, _read_answer_text(answer), answer.headers.get(TAG_HEADER, "")
        finally:
            connection.close()


def _read_answer_text(answer: http.client.HTTPResponse) -> str:
    content = answer.read(MAX_GATEWAY_ANSWER_BYTES + 1)
    if len(content) > MAX_GATEWAY_ANSWER_BYTES:
        raise http.client.HTTPException(f"an answer of more than {MAX_GATEWAY_ANSWER_BYTES} bytes")
    if answer.length:
        raise http.client.IncompleteRead(content, answer.length)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise http.client.HTTPException(f"an answer that is no text ({error.reason})") from error


def _parse_desired_state(text: str) -> DesiredState | None:
    try:
        return agent_channel.DESIRED_STATE_JSON.parse(text)
    except ValueError:  # no gateway, or one of another version: poll again
        return None


def termination_message(status: AgentStatus) -> str:
    """Return the status as JSON that the kubelet reads whole, with a long text cut.

    Members are dropped first: the coordinators of other nodes know them too.
    """
    message = agent_channel.STATUS_JSON.dump(status)
    if len(message.encode()) <= MAX_TERMINATION_MESSAGE_BYTES:
        return message
    status = replace(status, members=(), evicted=())
    message = agent_channel.STATUS_JSON.dump(status)
    if len(message.encode()) <= MAX_TERMINATION_MESSAGE_BYTES:
        return message

    def cut(num_characters: int) -> str:
        return agent_channel.STATUS_JSON.dump(replace(status, text=f"{status.text[:num_characters]}..."))

    too_many = bisect.bisect(
        range(len(status.text)), MAX_TERMINATION_MESSAGE_BYTES, key=lambda count: len(cut(count).encode())
    )
    return cut(max(0, too_many - 1))


GATEWAY_TIMEOUT_S = 120.0
"""Tolerated outage of the gateway: the lease of a lost operator, and the start of the next one."""
_OK_STATUSES = (200, 204)
_GONE_STATUS = 410


class GatewayLeadershipLog:
    """Log of a round's two servers at the gateway, which keeps it in the API server."""

    def __init__(self, gateway: GatewayClient, round_: int) -> None:
        self._gateway, self._path = gateway, f"leadership/{round_}"

    def latest(self) -> LeadershipRecord | None:
        return self._ask(None).latest

    def append(self, record: LeadershipRecord) -> bool:
        return self._ask(record).is_appended

    def _ask(self, record: LeadershipRecord | None) -> LogAnswer:
        body = "" if record is None else leadership.dump_record(record)
        try:
            status, text, _ = self._gateway.request("POST", self._path, body, timeout_s=_LEADERSHIP_TIMEOUT_S)
            if status in _OK_STATUSES:
                return leadership.parse_answer(text)
            got = f"{status} {text}"
        except (OSError, ValueError, http.client.HTTPException) as error:
            got = str(error) or type(error).__name__
        do = "Nothing: it is asked again; without the operator no other server can lead"
        raise leadership.log_error(got, expected="an answer of the agent gateway", do=do)


class GatewayChannel(AgentChannel):
    """Agent channel to the gateway. Only the final status and credentials are sent synchronously."""

    def __init__(
        self,
        gateway: GatewayClient,
        config: JobConfig,
        node: int,
        *,
        home: Path | None = None,
        termination_log: Path | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Send nothing before `start_threads`.

        Args:
            gateway: Client of the operator's gateway.
            config: Config of the job.
            node: Index of this node in the request.
            home: Folder of the attempt, with the logs; None: none are marked and uploaded.
            termination_log: File of the container's termination message; None: none.
            sleep: Waits before a retry.
            clock: Monotonic clock, in seconds.
        """
        self._gateway, self._home, self._termination_log, self._sleep = gateway, home, termination_log, sleep
        self._config, self._workers = config, frozenset(f"worker-{rank}" for rank in config.ranks_of_node(node))
        self._clock = clock
        self._fetched: tuple[int, dict[str, str]] = (0, {})
        self._events: tuple[int, LineReader | None] = (0, None)
        self._printed_s = clock()
        self._desired_state = DesiredState(round=0)
        self._changed = threading.Event()
        self._unsent_status: AgentStatus | None = None
        self._status_changed = threading.Condition()

    def start_threads(self) -> None:
        """Start polling the desired state and sending statuses."""
        threading.Thread(target=self._poll_desired_state, name="desired-state", daemon=True).start()
        threading.Thread(target=self._send_statuses, name="status-reports", daemon=True).start()

    def desired_state(self) -> DesiredState:
        """Return the last desired state that arrived; at first none is wanted."""
        return self._desired_state

    def report_status(self, status: AgentStatus) -> None:
        """Send a status to the gateway; write the final one into the termination message too.

        Before, mark the start of a round in the log, and upload the log of a Pod that may be removed.
        """
        self._print_events()
        if self._home is not None and status.phase is GroupPhase.STOPPED:
            self._upload_log("\n".join(pod_logs.read_worker_logs(self._home)))
        if self._home is not None and status.phase is GroupPhase.RUNNING and status.iterations is None:
            sys.stdout.write(f"{pod_logs.ROUND_LINE_PREFIX}{status.round}\n")
            sys.stdout.flush()
            if self._events[0] != status.round:
                self._events = status.round, event_lines(agent.round_run_dir(self._home, status.round).events)
        with self._status_changed:
            self._unsent_status = status
            self._status_changed.notify_all()
        if status.phase.is_alive:
            return
        if self._termination_log is not None:
            self._termination_log.write_text(termination_message(status), encoding="utf-8")
        with self._status_changed:
            self._status_changed.wait_for(lambda: self._unsent_status is None, FINAL_STATUS_TIMEOUT_S)

    def wait_for_change(self, timeout_s: float) -> None:
        if self._clock() - self._printed_s >= EVENT_INTERVAL_S:
            self._print_events()
        self._changed.wait(timeout_s)
        self._changed.clear()

    def _print_events(self) -> None:
        """Hand new events of the round on by this Pod's log, which those who may read the logs can read."""
        self._printed_s = self._clock()
        if self._events[1] is not None:
            for line in self._events[1].read_new():
                sys.stdout.write(f"{pod_logs.EVENT_LINE_PREFIX}{line.decode(errors='replace')}")
            sys.stdout.flush()

    def _upload_log(self, text: str) -> None:
        """Upload a log to the gateway for readers after this Pod is gone; retry for a while."""
        deadline_s = time.monotonic() + LOG_UPLOAD_TIMEOUT_S
        while self._request_or_503("PUT", "log", text)[0] == 503 and time.monotonic() < deadline_s:
            self._sleep(GATEWAY_RETRY_S)

    def publish_credentials(
        self,
        round_: int,
        credentials: Mapping[str, Sequence[Credentials]],
        stop_reason: agent_channel.StopReason = agent_channel.never_stop,
    ) -> None:
        """Upload the credentials node by node. Repeating it is safe."""
        for node in self._config.nodes:
            texts = {
                f"{holder}.{incarnation}": each.to_text()
                for holder in sorted(self._config.credential_holders(node.index))
                for incarnation, each in enumerate(credentials[holder])
            }
            path = f"credentials/{round_}/{node.index}"
            self._request_credentials("PUT", path, json.dumps(texts), round_=round_, stop_reason=stop_reason)

    def leadership_log(self, round_: int) -> LeadershipLog:
        return GatewayLeadershipLog(self._gateway, round_)

    def take_credentials(
        self, round_: int, holder: str, stop_reason: agent_channel.StopReason = agent_channel.never_stop
    ) -> Credentials:
        """Return the holder's next credentials, taken for all workers of this node at once.

        Raises:
            RoundOverError: The credentials are not wanted any more, or their round is over.
            LaunchError: The gateway does not return them.
        """
        if self._fetched[0] != round_:
            self._fetched = (round_, {})
        if holder not in self._fetched[1]:
            wanted = ",".join(sorted(self._workers if holder in self._workers else {holder}))
            path = f"credentials/{round_}?holders={wanted}"
            text = self._request_credentials("POST", path, round_=round_, stop_reason=stop_reason)
            self._fetched[1].update(_parse_credential_texts(text))
        return _pop_credentials(holder, self._fetched[1])

    def _request_credentials(
        self, method: str, path: str, body: str | None = None, *, round_: int, stop_reason: agent_channel.StopReason
    ) -> str:
        """Send a request about credentials until there is a final answer, and return its text."""
        deadline_s = self._clock() + GATEWAY_TIMEOUT_S
        while True:
            if reason := stop_reason():
                raise agent_channel.RoundOverError(round_, reason)
            status, text, _ = self._request_or_503(method, path, body)
            if status in _OK_STATUSES:
                return text
            if status == _GONE_STATUS:
                raise agent_channel.RoundOverError(round_, f"{status} {text}")
            if status in (409, 413) or self._clock() >= deadline_s:
                do = "Read the operator's log: kubectl -n ringweave-system logs deploy/ringweave-operator"
                got = f"{status} {text}"
                raise LaunchError("credentials at the agent gateway", got=got, expected="acceptance", do=do)
            self._sleep(GATEWAY_RETRY_S)

    def _poll_desired_state(self) -> None:
        tag = ""
        while not self._desired_state.stop:
            status, text, new_tag = self._request_or_503("GET", "desired-state", tag=tag)
            desired = _parse_desired_state(text) if status == 200 else None
            if desired is not None:
                tag, self._desired_state = new_tag, desired
                self._changed.set()
            elif status != 204:
                self._sleep(GATEWAY_RETRY_S)

    def _send_statuses(self) -> None:
        """Send the newest status, without those that it replaced while the gateway could not be reached."""
        while True:
            with self._status_changed:
                self._status_changed.wait_for(lambda: self._unsent_status is not None)
                unsent = self._unsent_status
            assert unsent is not None
            status, _, _ = self._request_or_503("PUT", "status", agent_channel.STATUS_JSON.dump(unsent))
            if status not in (204, 410):
                self._sleep(GATEWAY_RETRY_S)
                continue
            with self._status_changed:
                if self._unsent_status is unsent:
                    self._unsent_status = None
                    self._status_changed.notify_all()

    def _request_or_503(self, method: str, path: str, body: str | None = None, tag: str = "") -> tuple[int, str, str]:
        try:
            return self._gateway.request(method, path, body, tag)
        except (OSError, http.client.HTTPException) as error:
            return 503, str(error) or type(error).__name__, ""


def _parse_credential_texts(text: str) -> dict[str, str]:
    """Parse the gateway's answer. An error does not show the text, since it holds keys."""
    try:
        return _CREDENTIAL_TEXTS_ADAPTER.validate_json(file_io.bounded(text, MAX_GATEWAY_ANSWER_BYTES))
    except ValueError:
        raise _bad_credentials_error(f"{len(text)} characters that are not credentials", "") from None


def _pop_credentials(holder: str, texts: dict[str, str]) -> Credentials:
    if holder not in texts:
        raise _bad_credentials_error("credentials of other workers", holder)
    return Credentials.from_text(texts.pop(holder), where=holder)


def _bad_credentials_error(got: str, where: str) -> LaunchError:
    what, do = "credentials from the agent gateway", "Run the same ringweave in the operator and in its Pods"
    return LaunchError(what, got=got, expected="the requested credentials", do=do, where=where)


_CREDENTIAL_TEXTS_ADAPTER = TypeAdapter(dict[str, str])


TERMINATION_LOG = "/dev/termination-log"
_EXIT_CODES = {GroupPhase.SUCCEEDED: 0, GroupPhase.STOPPED: 143}


def main(environ: Mapping[str, str]) -> int:
    """Run the agent of this Pod until its workers have ended; return the container's exit code."""
    data = {path.name: path.read_text() for path in _config_files(Path(environ["RINGWEAVE_CONFIG_DIR"]))}
    config = objects.parse_config_data(data)
    namespace, job, node, attempt = environ["RINGWEAVE_POD"].split("/")
    gateway = GatewayClient(
        url=environ["RINGWEAVE_GATEWAY"],
        group=f"{namespace}/{job}/{node}/{attempt}",
        token=(Path(environ["RINGWEAVE_SECRET_DIR"]) / objects.TOKEN_KEY).read_text,
        certificate=environ.get("RINGWEAVE_GATEWAY_CA", ""),
    )
    home = Path(environ["RINGWEAVE_HOME"])
    assignment = AgentAssignment(
        config=config,
        node=int(node),
        attempt=int(attempt),
        home=home,
        cpus_shared_by=config.node(int(node)).workers,
        node_context=HostContext(environ.get("POD_IP") or "127.0.0.1"),
        host=objects.pod_dns_name(job, int(node), namespace),
    )
    os.chdir(config.directory or home)
    termination_log = Path(environ.get("RINGWEAVE_TERMINATION_LOG", TERMINATION_LOG))
    channel = GatewayChannel(
        gateway,
        config,
        int(node),
        home=home,
        termination_log=termination_log if termination_log.exists() else None,
    )
    channel.start_threads()
    hidden = {"RINGWEAVE_GATEWAY_CA", "RINGWEAVE_SECRET_DIR", "RINGWEAVE_GATEWAY"}
    phase = agent.run_agent(assignment, channel, {name: value for name, value in environ.items() if name not in hidden})
    return _EXIT_CODES.get(phase, 1)


def _config_files(folder: Path) -> list[Path]:
    """Return the files of a mounted ConfigMap's keys, without the kubelet's own links beside them."""
    return [path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")]


if __name__ == "__main__":
    sys.exit(main(os.environ))
