"""Program that a command runs on a host over ssh: answers its requests, and ends with its connection.

python -m ringweave.platforms.hosts.remote_main
"""

import contextlib
import hashlib
import io
import json
import os
import platform
import pwd
import random
import resource
import shutil
import signal
import socket
import sys
import tarfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import platformdirs
import psutil

from ringweave import ports, rpc
from ringweave.errors import LaunchError, RingweaveError, UnknownJobError, explain
from ringweave.launcher import node_context
from ringweave.launcher.run_dir import software_versions
from ringweave.platforms.hosts import host_runtime
from ringweave.platforms.hosts.messages import RunStatusRequest, RunVerb
from ringweave.platforms.hosts.quorum_election import Ballot
from ringweave.platforms.hosts.run_entry import (
    HostFolder,
    find_run_folders,
    hosts_state_folder,
    parse_entry,
    parse_host_config,
)
from ringweave.platforms.hosts.ssh import HELLO, MAX_PAYLOAD_BYTES
from ringweave.platforms.local import job_folder
from ringweave.ports import parse_ports
from ringweave.topology import cgroups
from ringweave.topology.discovery import sysfs

START_TIMEOUT_S = 15.0
LOCAL_CALL_TIMEOUT_S = 8.0
MAX_FETCHED_FILE_BYTES = 64 * 2**20
Answer = tuple[dict[str, Any], bytes]


def describe_host() -> dict[str, Any]:
    """Return what a command has to know of this host before it starts anything."""
    connection = os.environ.get("SSH_CONNECTION", "").split()
    _, open_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    state = hosts_state_folder()
    free = shutil.disk_usage(next(each for each in (state, *state.parents) if each.exists())).free
    kernel = ports.kernel_ports()
    return {
        **software_versions(),
        "executable": sys.executable,
        "time": time.time(),
        "hostname": socket.gethostname(),
        "user": pwd.getpwuid(os.geteuid()).pw_name,
        "address": connection[2] if len(connection) == 4 else "127.0.0.1",
        "addresses": own_addresses(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory": psutil.virtual_memory().total,
        "gpus": count_gpus(),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "max_open_files": open_files,
        "free_disk": free,
        "machine": platform.machine(),
        "kernel_ports": [kernel.low, kernel.high],
    }


def own_addresses() -> list[str]:
    """Return the addresses of this host's interfaces but loopback."""
    families = (socket.AF_INET, socket.AF_INET6)
    found = [each.address for nic in psutil.net_if_addrs().values() for each in nic if each.family in families]
    return [each for each in found if not each.startswith(("127.", "::1", "fe80"))]


def count_gpus() -> int:
    """Return the number of NVIDIA GPUs that the driver knows."""
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


def host_facts() -> dict[str, Any]:
    """Return what `ringweave doctor` shows of this host beside `describe_host`."""
    nics = {
        name: {"bytes_per_s": link.rate_bytes_per_s, "addresses": list(link.addresses)}
        for name, link in sysfs.observe_link_facts().items()
        if link.is_up and not link.is_loopback
    }
    return {
        "nics": nics,
        "memory_limit": cgroups.memory_limit_bytes(),
        "free_memory": psutil.virtual_memory().available,
        "state_folder": str(hosts_state_folder()),
    }


class RemoteProgram:
    """Answers the requests of one command."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None
        self._verbs: Mapping[str, Callable[[Mapping[str, Any], bytes], Answer]] = {
            "has_file": self._has_file,
            "missing_blobs": self._missing_blobs,
            "put_blob": self._put_blob,
            "lay_out": self._lay_out,
            "open_port": self._open_port,
            "unreachable": self._unreachable,
            "facts": lambda request, payload: (host_facts(), b""),
            "clock": lambda request, payload: ({"time": time.time()}, b""),
            "start": self._start,
            "ensure": self._ensure,
            "status": self._status,
            "verb": self._apply_verb,
            "logs": self._logs,
            "fetch": self._fetch,
            "abort": self._abort,
            "exists": self._exists,
            "runs": self._runs,
        }

    def serve(self) -> None:
        """Answer until the connection ends."""
        sys.stdout.buffer.write(HELLO + json.dumps(describe_host()).encode() + b"\n")
        sys.stdout.buffer.flush()
        while line := sys.stdin.buffer.readline():
            request = json.loads(line)
            payload = sys.stdin.buffer.read(min(int(request.get("size", 0)), MAX_PAYLOAD_BYTES))
            try:
                answer, content = self._verbs[request["verb"]](request, payload)
            except (RingweaveError, OSError) as error:
                answer, content = {"error": str(error), "kind": type(error).__name__}, b""
            sys.stdout.buffer.write(json.dumps({**answer, "size": len(content)}).encode() + b"\n" + content)
            sys.stdout.buffer.flush()

    def _has_file(self, request: Mapping[str, Any], payload: bytes) -> Answer:
        """Return whether a file of the command is here with the same content, so that its folder is shared."""
        try:
            return {"found": Path(request["path"]).read_bytes() == payload}, b""
        except OSError:
            return {"found": False}, b""

    def _missing_blobs(self, request: Mapping[str, Any], payload: bytes) -> Answer:
        return {"missing": [digest for digest in request["digests"] if not blob_path(digest).exists()]}, b""

    def _put_blob(self, request: Mapping[str, Any], payload: bytes) -> Answer:
        path = blob_path(hashlib.sha256(payload).hexdigest())
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_bytes(payload)
        temporary.replace(path)
        return {}, b""

    def _lay_out(self, request: Mapping[str, Any], payload: bytes) -> Answer:
        """Lay the files of a run out in its folder, from the blobs."""
        root = run_folder(request["run_id"]).files
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        for relative, digest, mode in request["files"]:
            path = (root / relative).resolve()
            if not path.is_relative_to(root.resolve()):
                raise LaunchError(f"file {relative}: outside of the folder, expected a path below it.")
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(blob_path(digest), path)
            path.chmod(mode & 0o777)
        return {"directory": str(root)}, b""

    def _open_port(self, request: Mapping[str, Any], payload: bytes) -> Answer:
        """Listen on a free port until the service starts, so that other hosts can try to reach it."""
        within = parse_ports(request["ports"], where="--ports") if request.get("ports") else None
        port = node_context.free_port(random.SystemRandom(), within)
        self._listener = socket.create_server(("", port), backlog=64)
        return {"port": port}, b""

    def _unreachable(self, request: Mapping[str, Any], payload: bytes) -> Answer:
        """Return for each address the reason why this host cannot connect to it; empty if it can."""
        endpoints = request["endpoints"]
        with ThreadPoolExecutor(max_workers=max(1, min(64, len(endpoints)))) as pool:
            found = pool.map(lambda each: connection_problem(each[0], each[1], timeout_s=3.0), endpoints)
            return {"reasons": list(found)}, b""

    def _start(self, request: Mapping[str, Any], payload: bytes) -> Answer:
        """Write this host's part of the run, and start its service; return when the service listens."""
        config, entry = parse_host_config(request["config"]), parse_entry(request["entry"])
        if self._listener is not None:
            self._listener.close()
        folder = run_folder(config.run_id)
        if not folder.host_config.exists():
            folder.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            for key, path in (("credentials", folder.credentials), ("command", folder.command_credentials)):
                path.unlink(missing_ok=True)
                rpc.Credentials.from_text(request[key]).save(path)
            folder.save_ballot(Ballot(term=1, voted_for=config.first_leader))
            folder.save_entry(entry)
            folder.save_config(config)
        host_runtime.ensure_service(folder, clean_environ())
        self._wait_for_service(folder, config.address, config.port)
        return {}, b""

    def _wait_for_service(self, folder: HostFolder, address: str, port: int) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            if not connection_problem(address, port, timeout_s=1.0):
                return
            if not job_folder.is_lock_held(folder.service_lock):
                break
            time.sleep(0.02)
        lines = folder.service_log.read_text(encoding="utf-8", errors="replace").splitlines()
        got = lines[-1] if lines else "no listener"
        do = f"Check that {address} is an address of this host, and that port {port} is free"
        raise LaunchError(explain("host service", got=got, expected=f"one that listens on {address}:{port}", do=do))

    def _ensure(self, request: Mapping[str, Any], payload: bytes) -> Answer:
        """Start the service of a run that this host belongs to; return whether there is such a run."""
        folder = run_folder(request["run_id"])
        host_runtime.ensure_service(folder, clean_environ())
        return {"found": folder.host_config.exists()}, b""

    def _status(self, request: Mapping[str, Any], payload: bytes) -> Answer:
        folder = known_run(request["run_id"])
        status = host_runtime.call_service(folder, RunStatusRequest())
        if status is None:
            return {"entry": folder.entry.read_text(encoding="utf-8"), "leader": None, "silent": []}, b""
        return {"entry": status.entry, "leader": status.leader, "silent": list(status.silent_hosts)}, b""

    def _apply_verb(self, request: Mapping[str, Any], payload: bytes) -> Answer:
        folder = known_run(request["run_id"])
        host_runtime.ensure_service(folder, clean_environ())
        deadline_s = time.monotonic() + LOCAL_CALL_TIMEOUT_S
        while (status := host_runtime.call_service(folder, RunVerb(verb=request["verb_name"]))) is None:
            if time.monotonic() >= deadline_s:
                raise LaunchError(f"host service: no answer, expected one. See {folder.service_log}.")
            time.sleep(0.1)
        return {"entry": status.entry, "leader": status.leader, "silent": list(status.silent_hosts)}, b""

    def _logs(self, request: Mapping[str, Any], payload: bytes) -> Answer:
        """Return what the logs of this host have got since the given positions."""
        folder, positions = run_folder(request["run_id"]), request["positions"]
        deadline_s = time.monotonic() + min(float(request.get("wait_s", 0.0)), 5.0)
        while True:
            summary = read_summary(folder)  # before the logs, so that no line of an ended job is missed
            pieces, content = host_runtime.read_new_logs(folder, positions)
            is_news = pieces or summary.get("version") != request.get("version")
            if is_news or time.monotonic() >= deadline_s:
                if not summary.get("is_end", True):
                    host_runtime.ensure_service(folder, clean_environ())
                return {"pieces": pieces, **summary}, content
            time.sleep(0.05)

    def _fetch(self, request: Mapping[str, Any], payload: bytes) -> Answer:
        """Return events, run.json, cluster files and service logs of this host as a tar archive."""
        folder, buffer = run_folder(request["run_id"]), io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
            names = ("events.jsonl", "run.json", "cluster.yaml")
            paths = [path for name in names for path in (folder.job.root / "runs").glob(f"*/*/round-*/{name}")]
            paths += (folder.job.root / "runs").glob("*/*/agent.log")
            paths += (folder.job.root / "runs").glob("*/*/round-*/logs/*.log")
            for path in [*paths, folder.service_log]:
                if path.is_file() and path.stat().st_size <= MAX_FETCHED_FILE_BYTES:
                    base = folder.job.root / "runs" if path != folder.service_log else folder.root
                    archive.add(path, arcname=str(path.relative_to(base)), recursive=False)
        return {}, buffer.getvalue()

    def _abort(self, request: Mapping[str, Any], payload: bytes) -> Answer:
        """Kill what runs of a run here, and remove its files."""
        folder = run_folder(request["run_id"])
        locks = [folder.service_lock, *(group.alive_lock for group in folder.job.groups())]
        folder.host_config.unlink(missing_ok=True)  # agents start no service any more
        for pid in {pid for lock in locks for pid in job_folder.lock_holders(lock)}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder.root, ignore_errors=True)
        return {}, b""

    def _exists(self, request: Mapping[str, Any], payload: bytes) -> Answer:
        return {"exists": run_folder(request["run_id"]).root.exists()}, b""

    def _runs(self, request: Mapping[str, Any], payload: bytes) -> Answer:
        folders = find_run_folders(hosts_state_folder())
        return {"runs": [[folder.run_id, folder.load_entry().name] for folder in folders]}, b""


def read_summary(folder: HostFolder) -> dict[str, Any]:
    """Return the state of a run as this host's entry says; empty once the run has been removed."""
    try:
        entry = folder.load_entry()
    except FileNotFoundError:
        return {}
    record = entry.job.record
    is_at_rest = not any(job_folder.is_lock_held(group.alive_lock) for group in folder.job.groups())
    return {
        "version": list(entry.version),
        "state": str(record.state),
        "reason": record.reason.text if record.reason else "",
        "hint": record.reason.hint if record.reason else "",
        "is_end": record.state.is_end,
        "is_at_rest": is_at_rest,
    }


def connection_problem(address: str, port: int, *, timeout_s: float) -> str:
    """Return the reason why a connection cannot be made; empty if it can."""
    try:
        socket.create_connection((address, port), timeout=timeout_s).close()
    except OSError as error:
        return str(error) or type(error).__name__
    return ""


def clean_environ() -> dict[str, str]:
    """Return the environment without the variables of this ssh session."""
    return {name: value for name, value in os.environ.items() if not name.startswith("SSH_")}


def run_folder(run_id: str) -> HostFolder:
    """Return the folder of a run on this host, which may not exist."""
    if Path(run_id).name != run_id or run_id.startswith("."):
        raise LaunchError(f"run {run_id!r}: no id, expected one without slashes.")
    return HostFolder(root=hosts_state_folder() / run_id)


def known_run(run_id: str) -> HostFolder:
    """Return the folder of a run on this host.

    Raises:
        UnknownJobError: There is none.
    """
    folder = run_folder(run_id)
    if not folder.host_config.exists():
        do = "It has been removed, or was never started here"
        raise UnknownJobError(explain("run", got=run_id, expected="one of this host", do=do))
    return folder


def blob_path(digest: str) -> Path:
    """Return the path of a file's content in this host's cache."""
    return platformdirs.user_cache_path("ringweave") / "files" / digest[:2] / digest


if __name__ == "__main__":
    RemoteProgram().serve()
