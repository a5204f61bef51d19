"""What NVIDIA's driver adds of this machine's GPUs: models, UUIDs, NVLinks; by the optional package nvidia-ml-py."""

import contextlib
from dataclasses import replace
from typing import Any

from ringweave.topology.discovery import pci
from ringweave.topology.discovery.machine import Machine, NvLinks, Worker


def add_gpus(machine: Machine, nvml: Any) -> Machine:
    """The machine with the models, UUIDs and NVLinks of its GPUs.

    Args:
        machine: What was found so far; GPUs are matched by PCI address.
        nvml: The module `pynvml`, or None where it is not installed; then the machine is as it was.
    """
    if nvml is None or not any(worker.kind == "cuda" for worker in machine.workers):
        return machine
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return replace(machine, remarks=(*machine.remarks, f"NVML tells nothing of the GPUs: {error}"))
    try:
        return replace(machine, workers=tuple(_told(worker, nvml) for worker in machine.workers))
    finally:
        nvml.nvmlShutdown()


def _told(worker: Worker, nvml: Any) -> Worker:
    if worker.kind != "cuda":
        return worker
    try:
        handle = nvml.nvmlDeviceGetHandleByPciBusId(worker.bus.encode())
        told = replace(worker, model=_decoded(nvml.nvmlDeviceGetName(handle)), nvlinks=_nvlinks(handle, nvml))
        return replace(told, uuids=(_decoded(nvml.nvmlDeviceGetUUID(handle)), *_instances(handle, nvml)))
    except nvml.NVMLError:
        return worker


def _instances(handle: Any, nvml: Any) -> list[str]:
    """UUIDs of a GPU's instances by MIG; none where it has none, or cannot have any."""
    found: list[str] = []
    try:
        for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            with contextlib.suppress(nvml.NVMLError):  # that place is free
                found.append(_decoded(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))))
    except nvml.NVMLError:
        return []
    return found


def _nvlinks(handle: Any, nvml: Any) -> NvLinks | None:
    peers = []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            if nvml.nvmlDeviceGetNvLinkState(handle, link):
                peers.append(_peer(_decoded(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId)))
        except nvml.NVMLError:
            break
    return NvLinks(num_links=len(peers), peers=tuple(dict.fromkeys(peers))) if peers else None


def _peer(address: str) -> str:
    parsed = pci.parse_address(address)
    return address if parsed is None else "{:04x}:{:02x}:{:02x}.{:x}".format(*parsed)


def _decoded(text: str | bytes) -> str:
    """Older releases of the package give bytes."""
    return text.decode(errors="replace") if isinstance(text, bytes) else text
