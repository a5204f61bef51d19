"""What a PCI function is, by its class and makers' numbers."""

import re

NVIDIA, AMD, AMAZON = 0x10DE, 0x1002, 0x1D0F

_DISPLAY, _3D, _OTHER_DISPLAY = 0x0300, 0x0302, 0x0380
_INFINIBAND = (0x0207, 0x0C06)
_BRIDGE = 0x0604
_NETWORK, _ACCELERATOR = 0x02, 0x12
_EFA_DEVICES = range(0xEFA0, 0xEFB0)
"""Amazon's Elastic Fabric Adapter: RDMA, though of the class of Ethernet (rdma-core, providers/efa)."""

_ADDRESS = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", re.IGNORECASE)

_VERBS = re.compile(
    r"(mlx[45]_|mthca|qib|hfi1_|ipath|ehca|usnic_|efa_|rdmap|bnxt_re|irdma|i40iw|i\w*cxgb|cxgb4_|ocrdma|hns_|qedr|erdma_)"
)
"""Names of OpenFabrics devices; old files call some of these network interfaces."""


Address = tuple[int, int, int, int]
"""Domain, bus, device and function."""


def parse_address(text: str) -> Address | None:
    """Domain, bus, device and function, which sort as the bus does; None if it is no PCI address."""
    match = _ADDRESS.fullmatch(text)
    if match is None:
        return None
    domain, bus, device, function = (int(part or "0", 16) for part in match.groups())
    return domain, bus, device, function


def is_infiniband(pci_class: int) -> bool:
    """An InfiniBand controller, of the old class or the new one."""
    return pci_class in _INFINIBAND


def is_network(pci_class: int) -> bool:
    """An adapter of a network."""
    return pci_class >> 8 == _NETWORK or is_infiniband(pci_class)


def is_bridge(pci_class: int) -> bool:
    """A PCI bridge."""
    return pci_class == _BRIDGE


def is_display(pci_class: int) -> bool:
    """Has to do with graphics, be it to compute or only to show."""
    return pci_class >> 8 == _DISPLAY >> 8


def is_gpu(pci_class: int, vendor: int) -> bool:
    """A GPU that PyTorch could compute on: any display of NVIDIA's; AMD's that drive no screen (Instinct)."""
    if vendor == NVIDIA:
        return pci_class in (_DISPLAY, _3D)
    return vendor == AMD and (pci_class in (_3D, _OTHER_DISPLAY) or pci_class >> 8 == _ACCELERATOR)


def is_rdma_adapter(pci_class: int, vendor: int, device: int) -> bool:
    """Does RDMA whatever the input says of it."""
    return is_infiniband(pci_class) or (vendor == AMAZON and device in _EFA_DEVICES)


def is_verbs_name(name: str) -> bool:
    """A name that OpenFabrics devices have and network interfaces do not."""
    return _VERBS.match(name) is not None


def does_rdma(verbs_name: str) -> bool:
    """An OpenFabrics device that does RDMA: all but Cisco's usNIC, which sends datagrams only (UD)."""
    return bool(verbs_name) and not verbs_name.startswith("usnic_")
