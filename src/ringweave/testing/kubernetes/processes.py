"""A kubelet for tests that runs the containers of Pods as processes of this machine, with their files and their logs.

Volumes become folders, the container's paths are told to the program by its environment, and there is no isolation.
Names that the job's Service has for Pods are found as in a cluster: see `naming`.
"""

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

from ringweave.launch.kubernetes import names
from ringweave.launch.kubernetes.api import kinds
from ringweave.launch.kubernetes.api.client import Client, Object
from ringweave.launch.kubernetes.api.failures import ApiError
from ringweave.launch.kubernetes.objects.pods import CONTAINER
from ringweave.launch.kubernetes.resource import times
from ringweave.testing.kubernetes.naming import sitecustomize

_LOOK_S = 0.05
_MOUNT_S = 1.0
"""From one look at the objects of volumes to the next; a kubelet takes a minute."""


@dataclass(slots=True)
class _Container:
    """One that was started."""

    process: subprocess.Popen[bytes]
    folder: Path
    pod: Object
    started_s: float
    address: str
    """Of loopback, and no other Pod's."""
    is_told: bool = False
    """That it has ended."""
    mounted_s: float = 0.0
    """When its volumes were last made as their objects are."""


class ProcessKubelet:
    """Runs the Pods of one namespace."""

    def __init__(self, client: Client, namespace: str, root: Path) -> None:
        """Files of Pods go below `root`."""
        self.client, self._namespace, self._root = client, namespace, root
        self._containers: dict[str, _Container] = {}
        self._hosts = root / "hosts"

    async def serve(self) -> None:
        """Start, watch and end containers until cancelled; none is left then."""
        try:
            while True:
                await self._look()
                await asyncio.sleep(_LOOK_S)
        finally:
            for container in self._containers.values():
                if container.process.poll() is None:
                    container.process.kill()
                container.process.wait()

    def kill(self, pod: str, how: signal.Signals = signal.SIGKILL) -> None:
        """Send all processes of the Pod of this name a signal at once: killed, as when its machine is lost."""
        found = next(each for each in self._containers.values() if each.pod["metadata"]["name"] == pod)
        for process in [*psutil.Process(found.process.pid).children(recursive=True), found.process]:
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                process.send_signal(how)

    def logs(self, pod: Mapping[str, Any], params: Mapping[str, str]) -> AsyncIterator[bytes] | None:
        """What it printed so far, for the fake API server."""
        found = self._containers.get(pod["metadata"]["uid"])
        return None if found is None else self._read(found, follow=params.get("follow") == "true")

    async def _read(self, container: _Container, *, follow: bool) -> AsyncIterator[bytes]:
        with (container.folder / "log").open("rb") as log:
            while True:
                is_over = not follow or container.process.poll() is not None
                yield log.read()
                if is_over:
                    return
                await asyncio.sleep(_LOOK_S)

    async def _look(self) -> None:
        pods = await self.client.list(kinds.PODS, self._namespace, labelSelector=names.JOB_LABEL)
        there = {pod["metadata"]["uid"]: pod for pod in pods}
        for uid, pod in there.items():
            container = self._containers.get(uid)
            if container is None and "deletionTimestamp" not in pod["metadata"]:
                await self._start(uid, pod)
            elif container is not None:
                await self._tend(container, pod)
        for uid in self._containers.keys() - there.keys():
            self._end(self._containers[uid])

    async def _start(self, uid: str, pod: Object) -> None:
        folder = self._root / uid
        address = f"127.0.{len(self._containers) // 250}.{len(self._containers) % 250 + 2}"
        environ = await self._mounted(pod, folder, address)
        if environ is None:
            return
        with (folder / "log").open("wb") as log:
            command = [sys.executable, *pod["spec"]["containers"][0]["command"][1:]]
            process = subprocess.Popen(command, env=environ, stdout=log, stderr=log, start_new_session=True)
        container = _Container(process=process, folder=folder, pod=pod, started_s=time.time(), address=address)
        self._containers[uid] = container
        self._write_hosts()
        started = {"startedAt": times.show(container.started_s)}
        await self._write(pod, {"phase": "Running", "podIP": address}, {"running": started})

    async def _mounted(self, pod: Object, folder: Path, address: str) -> dict[str, str] | None:
        """The container's environment, its volumes made; None where one is not there yet."""
        spec = pod["spec"]
        volumes = {}
        for volume in spec["volumes"]:
            claim = volume.get("persistentVolumeClaim")
            path = self._root / "claims" / claim["claimName"] if claim else folder / volume["name"]
            path.mkdir(parents=True, exist_ok=True)
            volumes[volume["name"]] = path
            try:
                await self._fill(path, volume)
            except ApiError:
                return None
        mounts = {mount["mountPath"]: str(volumes[mount["name"]]) for mount in spec["containers"][0]["volumeMounts"]}
        last_words = folder / "last-words"
        last_words.touch()
        given = {item["name"]: item.get("value", address) for item in spec["containers"][0]["env"]}
        placed = {name: mounts.get(value, value) for name, value in given.items()}
        path = os.pathsep.join([str(Path(sitecustomize.__file__).parent), os.environ.get("PYTHONPATH", "")])
        of_names = {sitecustomize.TABLE: str(self._hosts), "PYTHONPATH": path.rstrip(os.pathsep)}
        return {**os.environ, **placed, **of_names, "RINGWEAVE_LAST_WORDS": str(last_words)}

    def _write_hosts(self) -> None:
        """What the headless Services say now: of each Pod whose container has not ended."""
        lines = []
        for container in self._containers.values():
            spec = container.pod["spec"]
            if not container.is_told:
                lines.append(f"{container.address} {spec['hostname']}.{spec['subdomain']}.{self._namespace}.svc\n")
        beside = self._hosts.with_suffix(".new")
        beside.write_text("".join(lines), encoding="utf-8")
        beside.replace(self._hosts)

    async def _fill(self, path: Path, volume: Mapping[str, Any]) -> None:
        """The files of a volume as its object has them now; each is there at any time, as it was or as it is."""
        for name, text in (await self._texts(volume)).items():
            beside = path.with_name(f"{path.name}.{name}")
            beside.write_text(text)
            beside.replace(path / name)

    async def _texts(self, volume: Mapping[str, Any]) -> dict[str, str]:
        if "configMap" in volume:
            return (await self.client.get(kinds.CONFIG_MAPS, self._namespace, volume["configMap"]["name"]))["data"]
        if "secret" in volume:
            found = await self.client.get(kinds.SECRETS, self._namespace, volume["secret"]["secretName"])
            return {name: b64decode(value).decode() for name, value in found["data"].items()}
        return {}

    async def _tend(self, container: _Container, pod: Object) -> None:
        deadline_s = pod["spec"].get("activeDeadlineSeconds")
        is_late = deadline_s is not None and time.time() > container.started_s + deadline_s
        if container.process.poll() is None:
            if is_late:
                container.process.terminate()
            elif time.time() >= container.mounted_s + _MOUNT_S:
                container.mounted_s = time.time()
                for volume in pod["spec"]["volumes"]:
                    with contextlib.suppress(ApiError):  # what is gone stays as it was
                        await self._fill(container.folder / volume["name"], volume)
            return
        if container.is_told:
            return
        container.is_told = True
        self._write_hosts()
        code = container.process.returncode
        ended = {
            "exitCode": 128 - code if code < 0 else code,
            "reason": "Completed" if code == 0 else "Error",
            "startedAt": times.show(container.started_s),
            "finishedAt": times.show(time.time()),
            "message": (container.folder / "last-words").read_text(),
        }
        await self._write(pod, {"phase": "Failed" if code else "Succeeded"}, {"terminated": ended})

    async def _write(self, pod: Object, status: Object, state: Object) -> None:
        whole = {"name": CONTAINER, "image": "", "imageID": "", "restartCount": 0, "ready": False, "state": state}
        body = {"status": {**status, "containerStatuses": [whole]}}
        try:
            name = pod["metadata"]["name"]
            await self.client.patch(kinds.PODS, self._namespace, name, body, subresource="status")
        except ApiError as error:
            if not error.is_gone:
                raise

    def _end(self, container: _Container) -> None:
        """Of a Pod that is gone."""
        if container.process.poll() is None:
            container.process.terminate()
        elif not container.is_told or container.folder.exists():
            container.is_told = True
            self._write_hosts()
            shutil.rmtree(container.folder, ignore_errors=True)
