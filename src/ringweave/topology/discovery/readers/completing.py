"""What /sys tells beyond what hwloc does, added to hwloc's machine by PCI address."""

from collections.abc import Mapping
from dataclasses import replace

from ringweave.topology.discovery import pci
from ringweave.topology.discovery.machine import Interface, Machine, Worker


def complete(machine: Machine, other: Machine) -> Machine:
    """The machine with what it leaves open and the other one tells of the same PCI functions.

    hwloc tells neither whether NICs may reach into the memory of NVIDIA's GPUs (the module nvidia_peermem) nor the
    rates of RDMA ports that have no network interface.
    """
    workers = {pci.parse_address(each.bus): each for each in other.workers if each.bus}
    interfaces = {(pci.parse_address(each.bus), name): each for each in other.interfaces for name in _names(each)}
    return replace(
        machine,
        workers=tuple(_completed(each, workers.get(pci.parse_address(each.bus))) for each in machine.workers),
        interfaces=tuple(_with_rest(each, _same(each, interfaces)) for each in machine.interfaces),
    )


def _same(nic: Interface, known: Mapping[tuple[pci.Address | None, str], Interface]) -> Interface | None:
    where = pci.parse_address(nic.bus)
    return next((known[where, name] for name in _names(nic) if where and (where, name) in known), None)


def _completed(worker: Worker, told: Worker | None) -> Worker:
    if told is None or worker.has_gpudirect is not None:
        return worker
    return replace(worker, has_gpudirect=told.has_gpudirect)


def _with_rest(nic: Interface, told: Interface | None) -> Interface:
    if told is None:
        return nic
    return replace(
        nic,
        verbs=nic.verbs or told.verbs,
        has_rdma=nic.has_rdma or told.has_rdma,
        is_infiniband=nic.is_infiniband or told.is_infiniband,
        is_up=told.is_up if nic.is_up is None else nic.is_up,
        rate_bytes_per_s=nic.rate_bytes_per_s or told.rate_bytes_per_s,
        hardware_address=nic.hardware_address or told.hardware_address,
        has_gpudirect=told.has_gpudirect if nic.has_gpudirect is None else nic.has_gpudirect,
    )


def _names(nic: Interface) -> list[str]:
    """By which it is the same in both: of the same name, else of the same OpenFabrics device."""
    return [nic.name, *filter(None, [nic.verbs])]
