"""Kubelet for tests that runs the containers of Pods as local processes, with their files and logs.

Volumes become folders, the environment names the container's paths, and there is no isolation. Service names resolve to
Pods as in a cluster: see `naming`."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from base64 import b64decode
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ringweave.platforms.kubernetes import api_client, objects
from ringweave.platforms.kubernetes.api_client import ApiError, KubernetesClient, Object
from ringweave.platforms.kubernetes.objects import WORKER_CONTAINER
from tests.fakes.kubernetes.naming import sitecustomize

_KUBELET_POLL_S = 0.05
_VOLUME_REFRESH_S = 1.0
"""Interval between updates of mounted volumes; a kubelet takes a minute."""


@dataclass(slots=True)
class _RunningContainer:
    """Started container."""

    process: subprocess.Popen[bytes]
    folder: Path
    pod: Object
    started_s: float
    address: str
    """Loopback address, unique to the Pod."""
    is_end_reported: bool = False
    """Its end was reported."""
    volumes_written_s: float = 0.0
    """Time at which its volumes were last written."""


class ProcessKubelet:
    """Kubelet that runs the Pods of one namespace as local processes."""

    def __init__(self, client: KubernetesClient, namespace: str, root: Path) -> None:
        """Put the files of Pods below `root`."""
        self.client, self._namespace, self._root = client, namespace, root
        self._containers: dict[str, _RunningContainer] = {}
        self._hosts = root / "hosts"

    async def run_until_cancelled(self) -> None:
        """Start, watch and end containers until cancelled; then kill the remaining ones."""
        try:
            while True:
                await self._sync_pods()
                await asyncio.sleep(_KUBELET_POLL_S)
        finally:
            for container in self._containers.values():
                if container.process.poll() is None:
                    container.process.kill()
                container.process.wait()

    def signal_pod(self, pod: str, signum: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to all processes of a Pod at once; the default is like the loss of its machine."""
        found = next(each for each in self._containers.values() if each.pod["metadata"]["name"] == pod)
        for process in [*psutil.Process(found.process.pid).children(recursive=True), found.process]:
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                process.send_signal(signum)

    def logs(self, pod: Mapping[str, Any], params: Mapping[str, str]) -> AsyncIterator[bytes] | None:
        """Return the output so far, for the fake API server."""
        found = self._containers.get(pod["metadata"]["uid"])
        return None if found is None else self._read_log(found, follow=params.get("follow") == "true")

    async def _read_log(self, container: _RunningContainer, *, follow: bool) -> AsyncIterator[bytes]:
        with (container.folder / "log").open("rb") as log:
            while True:
                is_over = not follow or container.process.poll() is not None
                yield log.read()
                if is_over:
                    return
                await asyncio.sleep(_KUBELET_POLL_S)

    async def _sync_pods(self) -> None:
        pods = await self.client.list(api_client.PODS, self._namespace, labelSelector=objects.JOB_LABEL)
        pods_by_uid = {pod["metadata"]["uid"]: pod for pod in pods}
        for uid, pod in pods_by_uid.items():
            container = self._containers.get(uid)
            if container is None and "deletionTimestamp" not in pod["metadata"]:
                await self._start_container(uid, pod)
            elif container is not None:
                await self._update_container(container, pod)
        for uid in self._containers.keys() - pods_by_uid.keys():
            self._end_container(self._containers[uid])

    async def _start_container(self, uid: str, pod: Object) -> None:
        folder = self._root / uid
        address = f"127.0.{len(self._containers) // 250}.{len(self._containers) % 250 + 2}"
        environ = await self._mount_volumes(pod, folder, address)
        if environ is None:
            return
        with (folder / "log").open("wb") as log:
            command = [sys.executable, *pod["spec"]["containers"][0]["command"][1:]]
            process = subprocess.Popen(command, env=environ, stdout=log, stderr=log, start_new_session=True)
        container = _RunningContainer(process=process, folder=folder, pod=pod, started_s=time.time(), address=address)
        self._containers[uid] = container
        self._write_hosts()
        started = {"startedAt": objects.format_time(container.started_s)}
        await self._write_status(pod, {"phase": "Running", "podIP": address}, {"running": started})

    async def _mount_volumes(self, pod: Object, folder: Path, address: str) -> dict[str, str] | None:
        """Return the container's environment after mounting its volumes; None if one of them does not exist yet."""
        spec = pod["spec"]
        volumes = {}
        for volume in spec["volumes"]:
            claim = volume.get("persistentVolumeClaim")
            path = self._root / "claims" / claim["claimName"] if claim else folder / volume["name"]
            path.mkdir(parents=True, exist_ok=True)
            volumes[volume["name"]] = path
            try:
                await self._write_volume(path, volume)
            except ApiError:
                return None
        mounts = {mount["mountPath"]: str(volumes[mount["name"]]) for mount in spec["containers"][0]["volumeMounts"]}
        last_words = folder / "last-words"
        last_words.touch()
        given = {item["name"]: item.get("value", address) for item in spec["containers"][0]["env"]}
        container_environ = {name: mounts.get(value, value) for name, value in given.items()}
        path = os.pathsep.join([str(Path(sitecustomize.__file__).parent), os.environ.get("PYTHONPATH", "")])
        of_names = {sitecustomize.HOSTS_VARIABLE: str(self._hosts), "PYTHONPATH": path.rstrip(os.pathsep)}
        return {**os.environ, **container_environ, **of_names, "RINGWEAVE_TERMINATION_LOG": str(last_words)}

    def _write_hosts(self) -> None:
        """Write the host table of the headless Services: all Pods whose container has not ended."""
        lines = []
        for container in self._containers.values():
            spec = container.pod["spec"]
            if not container.is_end_reported:
                lines.append(f"{container.address} {spec['hostname']}.{spec['subdomain']}.{self._namespace}.svc\n")
        temporary = self._hosts.with_suffix(".new")
        temporary.write_text("".join(lines), encoding="utf-8")
        temporary.replace(self._hosts)

    async def _write_volume(self, path: Path, volume: Mapping[str, Any]) -> None:
        """Write the files of a volume as its object has them now, each atomically."""
        for name, text in (await self._volume_files(volume)).items():
            temporary = path.with_name(f"{path.name}.{name}")
            temporary.write_text(text)
            temporary.replace(path / name)

    async def _volume_files(self, volume: Mapping[str, Any]) -> dict[str, str]:
        if "configMap" in volume:
            return (await self.client.get(api_client.CONFIG_MAPS, self._namespace, volume["configMap"]["name"]))["data"]
        if "secret" in volume:
            found = await self.client.get(api_client.SECRETS, self._namespace, volume["secret"]["secretName"])
            return {name: b64decode(value).decode() for name, value in found["data"].items()}
        return {}

    async def _update_container(self, container: _RunningContainer, pod: Object) -> None:
        deadline_s = pod["spec"].get("activeDeadlineSeconds")
        is_late = deadline_s is not None and time.time() > container.started_s + deadline_s
        if container.process.poll() is None:
            if is_late:
                container.process.terminate()
            elif time.time() >= container.volumes_written_s + _VOLUME_REFRESH_S:
                container.volumes_written_s = time.time()
                for volume in pod["spec"]["volumes"]:
                    with contextlib.suppress(ApiError):  # files of a deleted object stay
                        await self._write_volume(container.folder / volume["name"], volume)
            return
        if container.is_end_reported:
            return
        container.is_end_reported = True
        self._write_hosts()
        code = container.process.returncode
        ended = {
            "exitCode": 128 - code if code < 0 else code,
            "reason": "Completed" if code == 0 else "Error",
            "startedAt": objects.format_time(container.started_s),
            "finishedAt": objects.format_time(time.time()),
            "message": (container.folder / "last-words").read_text(),
        }
        await self._write_status(pod, {"phase": "Failed" if code else "Succeeded"}, {"terminated": ended})

    async def _write_status(self, pod: Object, status: Object, state: Object) -> None:
        whole = {
            "name": WORKER_CONTAINER,
            "image": "",
            "imageID": "",
            "restartCount": 0,
            "ready": False,
            "state": state,
        }
        body = {"status": {**status, "containerStatuses": [whole]}}
        try:
            name = pod["metadata"]["name"]
            await self.client.patch(api_client.PODS, self._namespace, name, body, subresource="status")
        except ApiError as error:
            if not error.is_not_found:
                raise

    def _end_container(self, container: _RunningContainer) -> None:
        """End the container of a deleted Pod."""
        if container.process.poll() is None:
            container.process.terminate()
        elif not container.is_end_reported or container.folder.exists():
            container.is_end_reported = True
            self._write_hosts()
            shutil.rmtree(container.folder, ignore_errors=True)
