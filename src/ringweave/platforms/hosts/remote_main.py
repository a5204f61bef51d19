"""Program that a command runs on a host over ssh: answers its requests, and ends with its connection.

python -m ringweave.platforms.hosts.remote_main
"""

import json
import os
import platform
import pwd
import random
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from ringweave import environment, ports, rpc
from ringweave.errors import LaunchError, RingweaveError, UnknownJobError
from ringweave.files import file_io
from ringweave.launcher import node_context
from ringweave.launcher.run_dir import software_versions
from ringweave.platforms.hosts import host_runtime, script_files
from ringweave.platforms.hosts.messages import RunStatusRequest, RunVerb
from ringweave.platforms.hosts.quorum_election import Ballot
from ringweave.platforms.hosts.run_entry import (
    ENTRY_JSON,
    HOST_CONFIG_JSON,
    HostFolder,
    find_run_folders,
    hosts_state_folder,
)
from ringweave.platforms.hosts.ssh import HELLO, MAX_PAYLOAD_BYTES, MEASURE_TIMEOUT_S
from ringweave.ports import parse_ports
from ringweave.topology import cgroups
from ringweave.topology.discovery import sysfs

JOINED_LOG_INTERVAL_S = 0.3
"""Interval between two calls of a host that has joined, whose logs come over another host."""
LOCAL_CALL_TIMEOUT_S = 8.0
PROBING_MODULE = "ringweave.comm.probing"
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
        "gpus": host_runtime.count_gpus(),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "max_open_files": open_files,
        "free_disk": free,
        "state_folder": str(state),
        "machine": platform.machine(),
        "kernel_ports": [kernel.low, kernel.high],
    }


def own_addresses() -> list[str]:
    """Return the addresses of this host's interfaces but loopback."""
    families = (socket.AF_INET, socket.AF_INET6)
    found = [each.address for nic in psutil.net_if_addrs().values() for each in nic if each.family in families]
    return [each for each in found if not each.startswith(("127.", "::1", "fe80"))]


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
    }


class RemoteProgram:
    """Answers the requests of one command."""

    def __init__(self) -> None:
        self._listeners: list[socket.socket] = []
        self._readers: dict[str, host_runtime.HostLogReader] = {}
        self._verbs: Mapping[str, Callable[[Mapping[str, Any], bytes], Answer]] = {
            "has_file": self._has_file,
            "missing_blobs": self._missing_blobs,
            "put_blob": self._put_blob,
            "lay_out": self._lay_out,
            "open_port": self._open_port,
            "unreachable": self._unreachable,
            "measure": self._measure,
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
        while line := sys.stdin.buffer.readline(file_io.MAX_JSON_BYTES):
            request = file_io.parse_json(line)
            payload = sys.stdin.buffer.read(max(0, min(int(request.get("size", 0)), MAX_PAYLOAD_BYTES)))
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
        return {
            "missing": [digest for digest in request["digests"] if not script_files.blob_path(digest).exists()]
        }, b""

    def _put_blob(self, request: Mapping[str, Any], payload: bytes) -> Answer:
        script_files.save_blob(payload)
        return {}, b""

    def _lay_out(self, request: Mapping[str, Any], payload: bytes) -> Answer:
        folder = host_runtime.run_folder(request["run_id"])
        script_files.lay_out(request["files"], folder)
        return {"directory": str(folder.files)}, b""

    def _open_port(self, request: Mapping[str, Any], payload: bytes) -> Answer:
        """Listen on a free port until the service starts, so that other hosts can try to reach it."""
        within = parse_ports(request["ports"], where="--ports") if request.get("ports") else None
        port = node_context.free_port(random.SystemRandom(), within)
        self._listeners.append(ports.listen_on_all(port, backlog=64))
        return {"port": port}, b""

    def _unreachable(self, request: Mapping[str, Any], payload: bytes) -> Answer:
        """Return for each address the reason why this host cannot connect to it; empty if it can."""
        endpoints = request["endpoints"]
        with ThreadPoolExecutor(max_workers=max(1, min(64, len(endpoints)))) as pool:
            found = pool.map(lambda each: host_runtime.connection_problem(each[0], each[1], timeout_s=3.0), endpoints)
            return {"reasons": list(found)}, b""

    def _measure(self, request: Mapping[str, Any], payload: bytes) -> Answer:
        """Measure the links with the other hosts, for later runs on them; the first host returns the measurement."""
        for listener in self._listeners:
            listener.close()
        with tempfile.TemporaryDirectory(prefix="ringweave-") as folder:
            cluster, credentials = Path(folder) / "cluster.yaml", Path(folder) / "credentials.json"
            cluster.write_text(request["cluster"], encoding="utf-8")
            rpc.Credentials.from_text(payload).save(credentials)
            environ = {
                **host_runtime.clean_environ(),
                **request["environ"],
                environment.CREDENTIALS: str(credentials),
                environment.ENCRYPT: "on",
            }
            age = ("--max-age", str(environment.MAX_MEASUREMENT_AGE_S))
            argv = (sys.executable, "-P", "-m", PROBING_MODULE, "--json", "--cluster", str(cluster), *age)
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
            try:
                done = subprocess.run(argv, env=environ, timeout=MEASURE_TIMEOUT_S, check=False, **pipes)
            except subprocess.TimeoutExpired as error:
                raise LaunchError(f"no end within {MEASURE_TIMEOUT_S:g} s") from error
        if done.returncode != 0:
            lines = done.stderr.decode(errors="replace").strip().splitlines()
            raise LaunchError((lines or [f"exit code {done.returncode}"])[-1].removeprefix("ringweave: error: "))
        return {}, done.stdout

    def _start(self, request: Mapping[str, Any], payload: bytes) -> Answer:
        """Write this host's part of the run, and start its service; return when the service listens."""
        for listener in self._listeners:
            listener.close()
        host_runtime.start_host(
            HOST_CONFIG_JSON.parse(request["config"]),
            ENTRY_JSON.parse(request["entry"]),
            Ballot(term=1, voted_for=HOST_CONFIG_JSON.parse(request["config"]).first_leader),
            [rpc.Credentials.from_text(request[key]) for key in ("credentials", "command")],
        )
        return {}, b""

    def _ensure(self, request: Mapping[str, Any], payload: bytes) -> Answer:
        """Start the service of a run that this host belongs to; return whether there is such a run."""
        folder = host_runtime.run_folder(request["run_id"])
        host_runtime.ensure_service(folder, host_runtime.clean_environ())
        return {"found": folder.host_config.exists()}, b""

    def _status(self, request: Mapping[str, Any], payload: bytes) -> Answer:
        folder = known_run(request["run_id"])
        status = host_runtime.call_service(folder, RunStatusRequest())
        return {"entry": folder.entry.read_text(encoding="utf-8") if status is None else status.entry}, b""

    def _apply_verb(self, request: Mapping[str, Any], payload: bytes) -> Answer:
        folder = known_run(request["run_id"])
        host_runtime.ensure_service(folder, host_runtime.clean_environ())
        deadline_s = time.monotonic() + LOCAL_CALL_TIMEOUT_S
        words = {"workers": request.get("workers"), "request_id": request.get("request_id", "")}
        message = RunVerb(verb=request["verb_name"], **words)
        while (status := host_runtime.call_service(folder, message)) is None:
            if time.monotonic() >= deadline_s:
                raise LaunchError(f"host service: no answer, expected one. See {folder.service_log}.")
            time.sleep(0.1)
        return {"before": status.before}, b""

    def _logs(self, request: Mapping[str, Any], payload: bytes) -> Answer:
        """Return what the logs have got since the given positions: of this host, or of `host`, which has joined."""
        folder, positions = host_runtime.run_folder(request["run_id"]), request["positions"]
        events = request.get("events", "none")
        deadline_s = time.monotonic() + min(float(request.get("wait_s", 0.0)), 5.0)
        while True:
            summary = host_runtime.read_summary(folder)  # before the logs, so that no line of an ended job is missed
            if (host := request.get("host")) is None:
                pieces, content = host_runtime.read_new_logs(folder, positions, events)
            else:
                answer, content = self._reader(folder).read(host, positions, events)
                pieces, summary = answer.pieces, {**summary, "is_at_rest": answer.is_at_rest} if summary else {}
            is_news = pieces or summary.get("version") != request.get("version")
            if is_news or time.monotonic() >= deadline_s:
                if not summary.get("is_end", True):
                    host_runtime.ensure_service(folder, host_runtime.clean_environ())
                return {"pieces": pieces, **summary}, content
            time.sleep(0.05 if host is None else JOINED_LOG_INTERVAL_S)

    def _fetch(self, request: Mapping[str, Any], payload: bytes) -> Answer:
        """Return what `archive_files` packs: of this host, or of `host`, which has joined."""
        folder, host = host_runtime.run_folder(request["run_id"]), request.get("host")
        if host is None:
            return {}, host_runtime.archive_files(folder)
        return {}, self._reader(folder).fetch(host)

    def _reader(self, folder: HostFolder) -> host_runtime.HostLogReader:
        return self._readers.setdefault(folder.run_id, host_runtime.HostLogReader(folder))

    def _abort(self, request: Mapping[str, Any], payload: bytes) -> Answer:
        """Kill what runs of a run here, and remove its files."""
        host_runtime.end_host(host_runtime.run_folder(request["run_id"]))
        return {}, b""

    def _exists(self, request: Mapping[str, Any], payload: bytes) -> Answer:
        return {"exists": host_runtime.run_folder(request["run_id"]).root.exists()}, b""

    def _runs(self, request: Mapping[str, Any], payload: bytes) -> Answer:
        folders = find_run_folders(hosts_state_folder())
        return {"runs": [[folder.run_id, name] for folder in folders if (name := folder.find_name())]}, b""


def known_run(run_id: str) -> HostFolder:
    """Return the folder of a run on this host.

    Raises:
        UnknownJobError: There is none.
    """
    folder = host_runtime.run_folder(run_id)
    if not folder.host_config.exists():
        do = "It has been removed, or was never started here"
        raise UnknownJobError("run", got=run_id, expected="one of this host", do=do)
    return folder


if __name__ == "__main__":
    RemoteProgram().serve()
