"""Joining side of `ringweave join`: asks for a seat, fetches files, runs the host service, and shows what happens."""

import contextlib
import hashlib
import os
import random
import re
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringweave import ports, relayed_address, units
from ringweave.environment import ports_of_environ
from ringweave.errors import JobError, LaunchError, RefusedError, RemoteError, RpcError, explain
from ringweave.files import file_io
from ringweave.jobs.states import JobState
from ringweave.launcher import node_context
from ringweave.launcher.output import OutputConsole, WorkerLog, WorkerStream, write_notice
from ringweave.launcher.run_dir import software_versions
from ringweave.launcher.supervise import collect_interrupts
from ringweave.platforms.hosts import host_runtime, script_files
from ringweave.platforms.hosts.join_protocol import JoinerAuthentication, JoinLine, JoinRefusedError
from ringweave.platforms.hosts.messages import HOST_ROLE, FileBytes, JoinAnswer, JoinRequest, ReadFile
from ringweave.platforms.hosts.quorum_election import Ballot
from ringweave.platforms.hosts.run_entry import ENTRY_JSON, HostConfig, HostFolder, RunEntry
from ringweave.relayed_address import is_relayed
from ringweave.rpc import Credentials, RpcClient, TlsAuthentication

CALL_TIMEOUT_S = 20.0
RETRY_S = 1.0
PATIENCE_S = 60.0
"""Time for which a joiner asks again while no leader answers."""
CALL_OUT_TIMEOUT_S = 5.0
FILE_TIMEOUT_S = 120.0
POLL_S = 0.05
REMOVAL_TIMEOUT_S = 60.0
"""Time after the end of the run in which the command that started it fetches logs; the service ends earlier."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Admission:
    """Admitted host: what it got from the run."""

    answer: JoinAnswer
    entry: RunEntry
    credentials: Sequence[Credentials]
    """Those of the host service, and of commands."""
    address: str
    port: int


def join_run(text: str, address: str | None) -> int:
    """Join a run and take part until it ends; return the exit code: 0 if it succeeded.

    Args:
        text: `HOST:PORT#TOKEN`.
        address: Address at which other hosts reach this one; None: the one from which it reaches the run.

    Raises:
        UsageError: The text is no such line.
        JobError: The run refuses this host.
        LaunchError: The run cannot be reached, or this host cannot start its part.
    """
    line = JoinLine.parse(text)
    with collect_interrupts() as interrupts:
        admission = _ask_for_seat(line, address, interrupts)
        folder = host_runtime.run_folder(admission.entry.run_id)
        node = admission.entry.hosts[admission.answer.host].node
        is_called = not is_relayed(admission.address)
        place = f"at {admission.address}" if is_called else "by relays: it calls the others, which cannot call it"
        write_notice(f"joined {admission.entry.name} as host {node}, {place}")
        try:
            _fetch_files(admission, folder)
            _start(admission, folder)
            return JoinedRun(folder, admission.entry, interrupts).follow()
        finally:
            host_runtime.end_host(folder)


def _ask_for_seat(line: JoinLine, address: str | None, interrupts: Sequence[signal.Signals]) -> _Admission:
    """Return the admission of this host; a port is held open meanwhile, so that the run can try to reach it.

    A host that the run cannot reach, but that reaches all others, asks for a relayed address.
    """
    rng, within = random.SystemRandom(), ports_of_environ(os.environ)
    port = node_context.free_port(rng, within)
    relay_port = node_context.free_port(rng, within, avoided=[port])
    request = _request(line, address or _own_address(line.address, line.port), port, relay_port)
    with ports.listen_on_all(port, backlog=64):
        answer = _repeat_call(line, request, interrupts)
    if answer.unreachable:
        problem = "" if address else _find_unreached(ENTRY_JSON.parse(answer.entry))
        if address or problem:
            raise JobError("\n".join(filter(None, (answer.unreachable, problem))))
        changes = {"address": relayed_address.draw_address(rng), "port": node_context.free_port(rng)}
        request = request.model_copy(update=changes)
        answer = _repeat_call(line, request, interrupts)
    return _Admission(
        answer=answer,
        entry=ENTRY_JSON.parse(answer.entry),
        credentials=line.token.unseal(answer.sealed),
        address=request.address,
        port=request.port,
    )


def _find_unreached(entry: RunEntry) -> str:
    """Return a line for the first host of the run that this host cannot call either; empty if it can call all."""
    for host in entry.hosts:
        if not host.address or is_relayed(host.address):
            continue
        problem = host_runtime.connection_problem(host.address, host.port, timeout_s=CALL_OUT_TIMEOUT_S)
        if problem:
            do = "Open TCP to it, or join from another host: one that cannot be called has to call all others"
            expected = f"a listener at {host.address} port {host.port}"
            return explain(f"connection from here to host {host.node}", got=problem, expected=expected, do=do)
    return ""


def _repeat_call(line: JoinLine, request: JoinRequest, interrupts: Sequence[signal.Signals]) -> JoinAnswer:
    """Return the answer of the run, which is asked again while no leader answers."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            return _call(line, request)
        except (RpcError, OSError, LaunchError) as error:
            if interrupts or isinstance(error, RefusedError) or time.monotonic() >= deadline_s:
                raise LaunchError(f"run at {line.address}:{line.port}: {error}") from error
        time.sleep(RETRY_S)


def _call(line: JoinLine, request: JoinRequest) -> JoinAnswer:
    """Return the answer of the host in the line."""
    authentication = JoinerAuthentication(line.token.authority_key)
    with RpcClient.connect(line.address, line.port, authentication, role=HOST_ROLE) as client:
        try:
            answer = client.call(request, timeout_s=CALL_TIMEOUT_S).message
        except RemoteError as error:
            if error.error == JoinRefusedError.__name__:
                raise JobError(str(error)) from error
            raise
    assert isinstance(answer, JoinAnswer)
    return answer


def _request(line: JoinLine, address: str, port: int, relay_port: int) -> JoinRequest:
    versions = software_versions()
    return JoinRequest(
        proof=line.token.proof,
        joiner=secrets.token_hex(16),
        address=address,
        port=port,
        relay_port=relay_port,
        hostname=re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:64] or "unnamed",
        ringweave=str(versions["ringweave"]),
        torch=str(versions["torch"]),
        time_s=time.time(),
        gpus=host_runtime.count_gpus(),
    )


def _own_address(host: str, port: int) -> str:
    """Return the address from which this host reaches another one; nothing is sent."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        do = "Check the network of this host, and the line"
        what = f"way to {host}"
        raise LaunchError(what, got=error.strerror or str(error), expected="one", do=do) from error


def _fetch_files(admission: _Admission, folder: HostFolder) -> None:
    """Fetch the files of the script from the first host that answers."""
    authentication = TlsAuthentication(admission.credentials[0])
    errors: list[str] = []
    for index, endpoint in enumerate(admission.entry.hosts):
        if index == admission.answer.host or not endpoint.address or is_relayed(endpoint.address):
            continue
        try:
            with RpcClient.connect(endpoint.address, endpoint.port, authentication, role=HOST_ROLE) as client:
                return _fetch_from(client, folder)
        except (RpcError, OSError) as error:
            errors.append(str(error))
    raise LaunchError("\n".join(errors))


def _fetch_from(client: RpcClient, folder: HostFolder) -> None:
    try:
        files = script_files.check_file_list(file_io.parse_json(_read_file(client, "", script_files.MAX_FILES_BYTES)))
    except ValueError as error:
        raise LaunchError(
            f"files of the run: {error}, expected their list. Run the same ringweave on all hosts."
        ) from error
    missing = {digest for _, digest, _ in files if not script_files.blob_path(digest).exists()}
    num_bytes = 0
    for digest in sorted(missing):
        content = _read_file(client, digest, script_files.MAX_FILES_BYTES - num_bytes)
        if hashlib.sha256(content).hexdigest() != digest:
            raise LaunchError(f"file of the run: changed meanwhile, expected digest {digest}. Join again.")
        script_files.save_blob(content)
        num_bytes += len(content)
    script_files.lay_out(files, folder)
    write_notice(f"files: {len(files)}, {len(missing)} of them fetched ({units.format_bytes(num_bytes)})")


def _read_file(client: RpcClient, digest: str, max_bytes: int) -> bytes:
    content = b""
    while True:
        reply = client.call(ReadFile(digest=digest, start=len(content)), timeout_s=FILE_TIMEOUT_S)
        assert isinstance(reply.message, FileBytes)
        content += bytes(reply.buffers[0]) if reply.buffers else b""
        if len(content) > max_bytes:
            most = script_files.MAX_FILES_BYTES
            raise LaunchError(
                f"files of the run: more than {most} bytes, expected less. Look at the host of the command."
            )
        if len(content) >= reply.message.size or not reply.buffers or not memoryview(reply.buffers[0]):
            return content


def _start(admission: _Admission, folder: HostFolder) -> None:
    answer, entry = admission.answer, admission.entry
    config = HostConfig(
        run_id=entry.run_id,
        index=answer.host,
        node=entry.hosts[answer.host].node,
        address=admission.address,
        port=admission.port,
        directory=str(folder.files),
        environ=answer.environ,
    )
    ballot = Ballot(term=answer.term, voted_for=answer.leader)
    host_runtime.start_host(config, entry, ballot, admission.credentials, timeout_s=PATIENCE_S)


@dataclass(slots=True)
class JoinedRun:
    """Run as a joined host sees it, until its end."""

    folder: HostFolder
    entry: RunEntry
    interrupts: Sequence[signal.Signals]
    notify: Callable[[str], object] = write_notice
    _summary: dict[str, Any] = field(
        default_factory=lambda: {"state": JobState.PENDING, "reason": "", "is_end": False, "is_at_rest": True}
    )
    _positions: dict[str, str] = field(default_factory=dict)
    _streams: dict[int, WorkerStream] = field(default_factory=dict)
    _console: OutputConsole = field(
        default_factory=lambda: OutputConsole({"stdout": sys.stdout.buffer, "stderr": sys.stderr.buffer}, {})
    )

    def follow(self) -> int:
        """Show output and states until the run ends, or this host leaves it; return the exit code."""
        shown = ""
        while not self.interrupts:
            self._look()
            text = f"{self._summary['state']}: {self._summary['reason']}".removesuffix(": ")
            if text != shown:
                self.notify(f"{self.entry.name} is {text}")
                shown = text
            if self._has_ended():
                has_succeeded = self._summary["state"] == JobState.SUCCEEDED
                self._wait_for_removal()
                return 0 if has_succeeded else 1
            if not self.folder.host_config.exists():
                self.notify(f"{self.entry.name} was removed")
                return 1
            time.sleep(POLL_S)
        self._tell_leaving()
        return 1

    def _look(self) -> None:
        """Read state and output; keep the service alive."""
        with contextlib.suppress(FileNotFoundError, ValueError):  # being removed
            self._summary = host_runtime.read_summary(self.folder) or self._summary
        pieces, content = host_runtime.read_new_logs(self.folder, self._positions)
        for key, end, text in host_runtime.split_pieces(pieces, content):
            self._stream(int(key.rpartition("/")[2])).feed(text)
            self._positions[key] = end
        if not self._summary["is_end"]:
            host_runtime.ensure_service(self.folder, host_runtime.clean_environ())

    def _has_ended(self) -> bool:
        return bool(self._summary["is_end"] and self._summary["is_at_rest"])

    def _wait_for_removal(self) -> None:
        """Wait until the command that started the run has fetched the logs, or the service has ended by itself."""
        deadline_s = time.monotonic() + REMOVAL_TIMEOUT_S
        while not self.interrupts and time.monotonic() < deadline_s and self.folder.host_config.exists():
            if not host_runtime.is_service_running(self.folder):
                return
            self._look()
            time.sleep(POLL_S)

    def _tell_leaving(self) -> None:
        if self.entry.job.request.elastic is not None:
            self.notify(f"leaves {self.entry.name}; the other hosts go on")
        else:
            self.notify(f"leaves {self.entry.name}, which fails without this host: it is not elastic")

    def _stream(self, rank: int) -> WorkerStream:
        if rank not in self._streams:
            self._streams[rank] = WorkerStream(self._console, "stdout", rank, WorkerLog(Path(os.devnull)))
        return self._streams[rank]
