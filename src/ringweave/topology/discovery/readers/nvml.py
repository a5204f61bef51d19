"""What NVIDIA's driver adds of the GPUs of this machine: models and NVLinks, by the optional package nvidia-ml-py."""

from dataclasses import replace
from typing import Any

from ringweave.topology.discovery import pci
from ringweave.topology.discovery.machine import Machine, NvLinks, Worker


def add_gpus(machine: Machine, nvml: Any) -> Machine:
    """The machine with the models and NVLinks of its GPUs.

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
        return replace(worker, model=_decoded(nvml.nvmlDeviceGetName(handle)), nvlinks=_nvlinks(handle, nvml))
    except nvml.NVMLError:
        return worker


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
