"""Which GPUs of a machine a job's workers see: what CUDA_VISIBLE_DEVICES says, and what the driver lists."""

from collections.abc import Sequence
from dataclasses import replace

from ringweave.files.problems import listed
from ringweave.topology.discovery import building
from ringweave.topology.discovery.machine import Machine, Worker

NAME = "CUDA_VISIBLE_DEVICES"


def limit(machine: Machine, setting: str | None) -> Machine:
    """The machine with the GPUs that PyTorch sees as its workers, in the order in which LOCAL_RANK counts them.

    Numbers count the GPUs that NVML lists (in a container fewer than are in the tree), by PCI address; where NVML tells
    nothing, those of the tree. As CUDA does it, the first entry that is no GPU ends the list, and so does an instance
    of MIG, of which a process can use one. Where no GPU is left the workers are processors.

    Args:
        machine: With what NVML told of its GPUs.
        setting: Of CUDA_VISIBLE_DEVICES: numbers, UUIDs or beginnings of UUIDs, of GPUs or of MIG's instances; None
            where it is not set.

    Source: CUDA C++ Programming Guide, environment variables; NVIDIA MIG User Guide, device names.
    """
    gpus = [worker for worker in machine.workers if worker.kind == "cuda"]
    known = [worker for worker in gpus if worker.uuids]
    if not gpus:
        return machine
    if setting is not None and not known and any(_is_uuid(entry) for entry in _entries(setting)):
        told = f"{NAME}={setting} names UUIDs, which only NVML tells (ringweave[gpu]): all GPUs are taken"
        return replace(machine, remarks=(*machine.remarks, told))
    seen = (known or gpus) if setting is None else _visible(known or gpus, _entries(setting))
    if seen == gpus:
        return machine
    why = "NVML lists" if setting is None else f"{NAME}={setting} leaves"
    names = listed([worker.name for worker in seen], len(seen)) or "no GPU"
    workers = seen or building.processors(machine.parts)[0]
    told = f"{why} {names} of {len(gpus)} GPUs to the workers"
    return replace(machine, workers=tuple(workers), remarks=(*machine.remarks, told))


def _visible(gpus: Sequence[Worker], entries: Sequence[str]) -> list[Worker]:
    found: list[Worker] = []
    for entry in entries:
        gpu = _gpu(gpus, entry)
        if gpu is None or gpu in found:
            break
        found.append(gpu)
        if entry.startswith("MIG-"):
            break
    return found


def _gpu(gpus: Sequence[Worker], entry: str) -> Worker | None:
    if entry.isdecimal():
        return gpus[int(entry)] if int(entry) < len(gpus) else None
    if not _is_uuid(entry):
        return None
    # Up to release 450 of the driver an instance is MIG-GPU-<UUID of the GPU>/<GPU instance>/<compute instance>.
    start = entry.removeprefix("MIG-").partition("/")[0] if entry.startswith("MIG-GPU-") else entry
    fitting = [gpu for gpu in gpus if any(uuid.startswith(start) for uuid in gpu.uuids)]
    return fitting[0] if len(fitting) == 1 else None


def _is_uuid(entry: str) -> bool:
    return entry.startswith(("GPU-", "MIG-"))


def _entries(setting: str) -> list[str]:
    return [entry.strip() for entry in setting.split(",")]
