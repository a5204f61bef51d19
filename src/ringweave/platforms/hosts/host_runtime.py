"""Runtime of a run on one host: its worker groups in the host's job folder, and the start of its host service."""

import contextlib
import gzip
import io
import os
import shutil
import signal
import socket
import sys
import tarfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from ringweave import rpc
from ringweave.errors import JobError, LaunchError, RemoteError, RingweaveError, RpcError
from ringweave.files import file_io, rotation
from ringweave.jobs import records
from ringweave.launcher.scale_requests import WantedWorkers
from ringweave.param_server import leadership
from ringweave.param_server.leadership import LeadershipRecord, LogAnswer, RoundLeadership
from ringweave.platforms import api
from ringweave.platforms.agent import agent_channel
from ringweave.platforms.api import EventLines, LogQuery
from ringweave.platforms.hosts import join_protocol, messages
from ringweave.platforms.hosts.messages import HOST_ROLE, HostReport
from ringweave.platforms.hosts.quorum_election import Ballot
from ringweave.platforms.hosts.run_entry import WANTED_JSON, HostConfig, HostFolder, RunEntry, hosts_state_folder
from ringweave.platforms.local import job_folder
from ringweave.platforms.local.job_runtime import LocalJobRuntime
from ringweave.relayed_address import is_relayed

LOCAL_CALL_TIMEOUT_S = 8.0
LEADERSHIP_TIMEOUT_S = 3.0
"""Time for an answer about leadership; shorter than that of the server's process for its node agent."""
JOINER_PROBE_TIMEOUT_S = 3.0
FETCH_TIMEOUT_S = 100.0
START_TIMEOUT_S = 15.0
MAX_FETCHED_FILE_BYTES = 64 * 2**20
MAX_FETCHED_BYTES = 512 * 2**20
MAX_FETCHED_FILES = 20_000
_MAX_TAR_BYTES = MAX_FETCHED_BYTES + MAX_FETCHED_FILES * 2048
"""An archive with its headers and the padding of files."""
AGENT_COMMAND = (sys.executable, "-P", "-m", "ringweave.platforms.hosts.agent_main")
SERVICE_MODULE = "ringweave.platforms.hosts.service"
RELAY_MODULE = "ringweave.platforms.hosts.relay"
_GROUP_ACTIONS = {
    each.__name__: each for each in (records.CreateGroup, records.RestartGroup, records.StopGroup, records.DeleteGroup)
}


class HostJobRuntime:
    """Worker groups of a run on this host. Every action may be repeated."""

    def __init__(self, folder: HostFolder, config: HostConfig, entry: RunEntry) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._wanted: WantedWorkers | None = None
        job_config = replace(entry.origin.config(entry.job), directory=config.directory, script_text=None)
        self._inner = LocalJobRuntime(
            folder.job, job_config, agent=AGENT_COMMAND, environ={**os.environ, **config.environ}
        )

    def report(self) -> HostReport:
        """Return the present state of the groups."""
        with self._lock:  # a group that is just being created looks like one that is gone
            observed = self._inner.observe()
        statuses = []
        for group in self._folder.job.groups():
            status, _ = group.read_state()
            if status is not None:
                statuses.append((group.node, group.attempt, status))
        return HostReport(
            has_config=observed.has_config,
            released_round=observed.released_round,
            groups=observed.groups,
            statuses=tuple(statuses),
        )

    def apply(self, action: messages.HostAction, secrets: Mapping[str, str]) -> None:
        """Apply an action of the leader; `secrets` are the credentials of this host's processes that came with it.

        Raises:
            LaunchError: The action is not known here.
            OSError: Files cannot be written.
        """
        with self._lock:
            self._apply(action, secrets)

    def _apply(self, action: messages.HostAction, secrets: Mapping[str, str]) -> None:
        if action.name in _GROUP_ACTIONS:
            self._inner.apply(_GROUP_ACTIONS[action.name](**action.fields))
        elif action.name == "CreateConfig":
            self._inner.apply(records.CreateConfig(counts=()))
        elif action.name == "DeleteConfig":
            self._inner.apply(records.DeleteConfig())
        elif action.name == "ReleaseBarrier":
            self._release_barrier(action, secrets)
        else:
            raise LaunchError(f"action {action.name}: unknown, expected one of this version. Update this host.")

    def publish_wanted(self, wanted: WantedWorkers | None) -> None:
        """Tell the node agents of this host the number of workers that the run shall have, if it is another one."""
        if wanted == self._wanted:
            return
        self._wanted = wanted
        if wanted is not None:
            file_io.replace_text(self._folder.wanted, WANTED_JSON.dump(wanted))
            for group in self._folder.job.groups():
                job_folder.notify(group.wakeup)

    def take_secrets(self, round_: int) -> dict[str, str]:
        """Return the credentials that an agent of this host has issued in a round: file name -> content."""
        folder = self._secrets(round_)
        return {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.json"))}

    def _release_barrier(self, action: messages.HostAction, secrets: Mapping[str, str]) -> None:
        """Keep the credentials of this host's own processes, then publish the rendezvous result."""
        rendezvous = agent_channel.RENDEZVOUS_JSON.parse(action.rendezvous)
        if secrets:
            self._save_secrets(rendezvous.round, secrets)
        file_io.replace_text(self._folder.job.rendezvous, action.rendezvous, is_durable=True)
        for group in self._folder.job.groups():
            job_folder.notify(group.wakeup)

    def _save_secrets(self, round_: int, secrets: Mapping[str, str]) -> None:
        wanted = self._secrets(round_)
        for other in self._folder.job.secrets.glob("round-*"):
            if other != wanted:
                shutil.rmtree(other, ignore_errors=True)
        wanted.mkdir(parents=True, exist_ok=True, mode=0o700)
        for path in wanted.glob("*.json"):
            if path.name not in secrets:
                path.unlink()
        for name, text in secrets.items():
            if Path(name).name == name:
                descriptor = os.open(wanted / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
                with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                    file.write(text)

    def _secrets(self, round_: int) -> Path:
        return self._folder.job.secrets / f"round-{round_}"


def ensure_service(folder: HostFolder, environ: Mapping[str, str]) -> None:
    """Start the host service if none runs; does nothing for a run that is being removed.

    Raises:
        LaunchError: It cannot be started.
    """
    _ensure_process(folder, environ, SERVICE_MODULE, folder.service_lock)


def ensure_relay(folder: HostFolder, entry: RunEntry, environ: Mapping[str, str]) -> None:
    """Start the relay of this host if a host of the run needs one and none runs here, as `ensure_service` does.

    Raises:
        LaunchError: It cannot be started.
    """
    if any(is_relayed(host.address) for host in entry.hosts):
        _ensure_process(folder, environ, RELAY_MODULE, folder.relay_lock)


def end_relay(folder: HostFolder) -> None:
    """Let the relay of this host end once the connections that it leads have ended."""
    for pid in job_folder.lock_holders(folder.relay_lock):
        if pid != os.getpid():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)


def _ensure_process(folder: HostFolder, environ: Mapping[str, str], module: str, lock_path: Path) -> None:
    try:
        if not folder.host_config.exists():
            return
        lock = job_folder.try_lock_file(lock_path)
        if lock is None:
            return
        try:
            argv = (sys.executable, "-P", "-m", module, str(folder.root))
            job_folder.spawn_locked(argv, environ, lock=lock, log=folder.service_log)
        finally:
            os.close(lock)
    except OSError as error:
        if not folder.host_config.exists():
            return
        raise LaunchError(f"{module} could not be started: {error}. [{folder.root}]") from error


def connection_problem(address: str, port: int, *, timeout_s: float) -> str:
    """Return the reason why a connection cannot be made; empty if it can."""
    try:
        socket.create_connection((address, port), timeout=timeout_s).close()
    except OSError as error:
        return str(error) or type(error).__name__
    return ""


def find_joiner_problem(request: messages.JoinRequest) -> str:
    """Return the text for a joiner that cannot be called; empty if it can, or if it asks for a relayed address."""
    if is_relayed(request.address):
        return ""
    problem = connection_problem(request.address, request.port, timeout_s=JOINER_PROBE_TIMEOUT_S)
    return join_protocol.unreachable_text(request, problem) if problem else ""


def is_service_running(folder: HostFolder) -> bool:
    """Return whether the host service of a run runs here."""
    return folder.host_config.exists() and job_folder.is_lock_held(folder.service_lock)


def start_host(
    config: HostConfig,
    entry: RunEntry,
    ballot: Ballot,
    credentials: Sequence[rpc.Credentials],
    timeout_s: float = START_TIMEOUT_S,
) -> None:
    """Write this host's part of a run, and start its service; return when the service listens.

    Raises:
        LaunchError: The service does not start.
    """
    folder = run_folder(config.run_id)
    if not folder.host_config.exists():
        folder.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        for each, path in zip(credentials, (folder.credentials, folder.command_credentials), strict=True):
            path.unlink(missing_ok=True)
            each.save(path)
        folder.save_ballot(ballot)
        folder.save_entry(entry)
        folder.save_config(config)
    ensure_service(folder, clean_environ())
    _wait_for_service(folder, config.address, config.port, timeout_s)


def _wait_for_service(folder: HostFolder, address: str, port: int, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if not connection_problem(address, port, timeout_s=1.0):
            return
        if not job_folder.is_lock_held(folder.service_lock):
            break
        time.sleep(0.02)
    lines = rotation.last_lines(folder.service_log)
    got = lines[-1] if lines else "no listener"
    do = f"Check that {address} is an address of this host, and that port {port} is free"
    raise LaunchError("host service", got=got, expected=f"one that listens on {address}:{port}", do=do)


def end_host(folder: HostFolder) -> None:
    """Kill what runs of a run on this host, and remove its files."""
    locks = [folder.service_lock, folder.relay_lock, *(group.alive_lock for group in folder.job.groups())]
    folder.host_config.unlink(missing_ok=True)  # agents start no service any more
    for pid in {pid for lock in locks for pid in job_folder.lock_holders(lock)}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder.root, ignore_errors=True)


def read_summary(folder: HostFolder) -> dict[str, Any]:
    """Return the state of a run as this host's entry says; empty once the run has been removed."""
    try:
        entry = folder.load_entry()
    except FileNotFoundError:
        return {}
    record = entry.job.record
    reason = join_protocol.waiting_reason(record.state, entry.unjoined, record.reason)
    is_at_rest = not any(job_folder.is_lock_held(group.alive_lock) for group in folder.job.groups())
    return {
        "version": list(entry.version),
        "state": str(record.state),
        "reason": reason.text if reason else "",
        "hint": reason.hint if reason else "",
        "unjoined": list(entry.unjoined),
        "is_end": record.state.is_end,
        "is_at_rest": is_at_rest,
    }


def clean_environ() -> dict[str, str]:
    """Return the environment without the variables of this ssh session."""
    return {name: value for name, value in os.environ.items() if not name.startswith("SSH_")}


def run_folder(run_id: str) -> HostFolder:
    """Return the folder of a run on this host, which may not exist."""
    if Path(run_id).name != run_id or run_id.startswith("."):
        raise LaunchError(f"run {run_id!r}: no id, expected one without slashes.")
    return HostFolder(root=hosts_state_folder() / run_id)


def count_gpus() -> int:
    """Return the number of NVIDIA GPUs that the driver knows."""
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


def is_run_process(process: psutil.Process) -> bool:
    """Return whether a process is a host service, a relay or a node agent, and so does not belong to the workers."""
    return not {SERVICE_MODULE, RELAY_MODULE, AGENT_COMMAND[-1]}.isdisjoint(process.cmdline())


def read_new_logs(
    folder: HostFolder, positions: Mapping[str, str], events: EventLines = "none"
) -> tuple[list[list[Any]], bytes]:
    """Return the new lines of each log, as `[log, cursor, number of bytes]` and the bytes one after the other.

    Args:
        folder: Folder of the run.
        positions: `NODE/ATTEMPT/ROUND/RANK`, or `.../events` -> cursor, `rotation.LogCursor`.
        events: Whether to return also event logs, or these only.
    """
    pieces: list[list[Any]] = []
    content = b""
    for name, path in api.find_logs(folder.job.runs_folder, LogQuery(events=events)):
        for key, end, text in api.read_new_text([(name, path)], positions, api.MAX_READ_BYTES - len(content)):
            pieces.append([key, end, len(text)])
            content += text
    return pieces, content


class HostLogReader:
    """Reads the logs of other hosts from one host of the run, by their host services."""

    def __init__(self, folder: HostFolder) -> None:
        self._folder = folder
        self._clients: dict[int, rpc.RpcClient] = {}

    def read(
        self, host: int, positions: Mapping[str, str], events: EventLines = "none"
    ) -> tuple[messages.LogPieces, bytes]:
        """Return the new text of the logs of a host; none if it does not answer, or has not joined."""
        message = messages.ReadLogs(positions=dict(positions), events=events)
        try:
            reply = self._client(host).call(message, timeout_s=LOCAL_CALL_TIMEOUT_S)
        except (RpcError, OSError):
            self._clients.pop(host, None)
            return messages.LogPieces(), b""
        assert isinstance(reply.message, messages.LogPieces)
        return reply.message, bytes(reply.buffers[0])

    def fetch(self, host: int) -> bytes:
        """Return what `archive_files` packs on a host.

        Raises:
            LaunchError: It does not answer.
        """
        try:
            return bytes(self._client(host).call(messages.FetchFiles(), timeout_s=FETCH_TIMEOUT_S).buffers[0])
        except (RpcError, OSError) as error:
            self._clients.pop(host, None)
            raise LaunchError(str(error)) from error

    def _client(self, host: int) -> rpc.RpcClient:
        endpoint = self._folder.load_entry().hosts[host]
        if not endpoint.address:
            raise ConnectionRefusedError(f"host {endpoint.node} has not joined")
        if host not in self._clients:
            authentication = rpc.TlsAuthentication(rpc.Credentials.load(self._folder.command_credentials))
            self._clients[host] = rpc.RpcClient.connect(
                endpoint.address, endpoint.port, authentication, role=HOST_ROLE, timeout_s=2.0
            )
        return self._clients[host]


def split_pieces(pieces: Sequence[Sequence[Any]], content: bytes) -> Iterator[tuple[str, str, bytes]]:
    """Yield key, new cursor and text of each piece that `read_new_logs` returned."""
    start = 0
    for key, end, size in pieces:
        yield key, end, content[start : start + size]
        start += size


def archive_files(folder: HostFolder) -> bytes:
    """Return events, run.json, cluster files and logs of this host as a tar archive; of long logs the newest files."""
    buffer, runs, left = io.BytesIO(), folder.job.runs_folder, MAX_FETCHED_BYTES
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        names = ("run.json", "cluster.yaml", "events.jsonl*", "logs/*.log", "logs/*.log.*")
        paths = [path for name in names for path in runs.glob(f"*/*/round-*/{name}")]
        paths += [*runs.glob("*/*/agent.log*"), *folder.root.glob(f"{folder.service_log.name}*")]
        for path in paths:
            size = path.stat().st_size if path.is_file() else 0
            is_small = size <= min(left, MAX_FETCHED_FILE_BYTES)
            if path.is_file() and is_small and len(archive.getmembers()) < MAX_FETCHED_FILES:
                left -= size
                base = runs if path.is_relative_to(runs) else folder.root
                archive.add(path, arcname=str(path.relative_to(base)), recursive=False)
    return buffer.getvalue()


def unpack_files(content: bytes, target: Path) -> None:
    """Unpack what `archive_files` of a host has packed; nothing is written of an archive that another one has made.

    Raises:
        LaunchError: It is none, or has more than such an archive may have.
        OSError: A file cannot be written.
    """
    try:
        reader: Any = _BoundedReader(content)
        with tarfile.open(fileobj=reader, mode="r|") as archive:
            _check_members(archive, target)
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as archive:
            archive.extractall(target, filter="data")
    except (EOFError, gzip.BadGzipFile, tarfile.TarError, zlib.error) as error:
        raise _archive_error(str(error) or type(error).__name__, "a tar archive, packed by gzip") from error


class _BoundedReader:
    """Reads unpacked bytes up to a limit, so that no header of an archive makes it take more."""

    def __init__(self, content: bytes) -> None:
        self._file, self._left = gzip.GzipFile(fileobj=io.BytesIO(content)), _MAX_TAR_BYTES

    def read(self, size: int) -> bytes:
        found = self._file.read(min(size, self._left + 1))
        self._left -= len(found)
        if self._left < 0:
            raise _archive_error(f"more than {_MAX_TAR_BYTES} bytes", f"at most {MAX_FETCHED_BYTES} of files")
        return found


def _check_members(archive: tarfile.TarFile, target: Path) -> None:
    """Check names and sizes, one member at a time, before any is written."""
    num_bytes = 0
    for number, member in enumerate(archive, 1):
        num_bytes += max(0, member.size)
        if not member.isreg() or not 0 <= member.size <= MAX_FETCHED_FILE_BYTES:
            what = f"{member.name!r:.80} of {member.size} bytes" if member.isreg() else f"{member.name!r:.80}, no file"
            raise _archive_error(what, f"files of at most {MAX_FETCHED_FILE_BYTES} bytes")
        if number > MAX_FETCHED_FILES or num_bytes > MAX_FETCHED_BYTES:
            raise _archive_error(
                f"{number} files of {num_bytes} bytes or more",
                f"at most {MAX_FETCHED_FILES} files of {MAX_FETCHED_BYTES} bytes together",
            )
        tarfile.data_filter(member, str(target))  # refuses what leads out of it


def _archive_error(got: str, expected: str) -> LaunchError:
    do = "Look at that host: it runs another program, or another ringweave"
    return LaunchError("files of a host", got=got, expected=expected, do=do)


def call_service(folder: HostFolder, message: rpc.RpcMessage) -> messages.RunStatus | None:
    """Call the service of a run on this host; None if it does not run.

    Raises:
        LaunchError: The service refuses.
    """
    try:
        answer = _call_own_service(folder, message, LOCAL_CALL_TIMEOUT_S)
    except RemoteError as error:
        raise (JobError if error.error == "JobError" else LaunchError)(str(error)) from error
    except (RpcError, OSError):
        return None
    assert isinstance(answer, messages.RunStatus)
    return answer


def _call_own_service(folder: HostFolder, message: rpc.RpcMessage, timeout_s: float) -> rpc.RpcMessage:
    config = folder.load_config()
    authentication = rpc.TlsAuthentication(rpc.Credentials.load(folder.command_credentials))
    with rpc.RpcClient.connect(
        config.address, config.port, authentication, role=HOST_ROLE, timeout_s=timeout_s
    ) as client:
        return client.call(message, timeout_s=timeout_s).message


def commit_leadership(
    message: messages.LeadershipRequest, change_entry: Callable[[Callable[[RunEntry], RunEntry]], None]
) -> messages.LeadershipAnswer:
    """Append a leadership record to the run's entry if it is the next one, and return the latest; None only reads.

    The entry keeps the latest record of the latest round alone, and a quorum of the hosts has it. A record counts as
    appended once a quorum has saved the entry in the term of the leader that answers; one that is appended again is
    committed again, since the first attempt may have reached too few hosts. A read record may still get lost with its
    leader: the servers decide by what they append.

    `change_entry`: commits a change of the newest entry, which is computed again where another thread was faster.

    Raises:
        LaunchError: There is no quorum; the record may or may not be appended.
    """
    wanted = None if message.record is None else leadership.parse_record(message.record)
    answers: list[LogAnswer] = []

    def change(entry: RunEntry) -> RunEntry:
        answers.append(leadership.append_to(entry.leadership, message.round, wanted))
        if not answers[-1].is_appended or wanted is None:
            return entry
        return replace(entry, leadership=RoundLeadership(round=message.round, record=wanted))

    change_entry(change)
    latest = answers[-1].latest
    text = None if latest is None else leadership.dump_record(latest)
    return messages.LeadershipAnswer(record=text, is_appended=answers[-1].is_appended)


class HostLeadershipLog:
    """Log of a round's two servers, asked of the service of this host, which asks the leader of the run."""

    def __init__(self, folder: HostFolder, round_: int) -> None:
        self._folder, self._round = folder, round_

    def latest(self) -> LeadershipRecord | None:
        found = self._call(None).record
        return None if found is None else leadership.parse_record(found)

    def append(self, record: LeadershipRecord) -> bool:
        return self._call(leadership.dump_record(record)).is_appended

    def _call(self, record: str | None) -> messages.LeadershipAnswer:
        message = messages.LeadershipRequest(round=self._round, record=record)
        try:
            answer = _call_own_service(self._folder, message, LEADERSHIP_TIMEOUT_S)
        except (RingweaveError, OSError) as error:
            do = "Nothing: it is asked again; a run needs a quorum of its hosts to change the leading server"
            expected = "an answer of the host service"
            raise leadership.log_error(str(error), expected=expected, do=do) from error
        assert isinstance(answer, messages.LeadershipAnswer)
        return answer
