from pathlib import Path

import pytest

from ringweave.errors import UsageError
from ringweave.topology import discovery
from ringweave.topology.discovery import safe_xml

MACHINE = '<topology version="2.0"><object type="Machine" os_index="0">{}</object></topology>'
LAUGHS = '<!DOCTYPE t [<!ENTITY a "ha"><!ENTITY b "&a;&a;">]><topology>&b;</topology>'
SWITCH = '<system version="1"><cpu numaid="{}">{}</cpu></system>'

WRONG = {
    "empty": ("", "'an empty file', expected XML of hwloc or of NCCL"),
    "truncated": ('<topology version="2.0">\n<object type="Machine">', "it ends inside <object> of line 2"),
    "html": ("<html><p>Not found</p></html>", "'html', expected <topology> of hwloc or <system> of NCCL"),
    "text": ("no such file\n", "expected well-formed XML"),
    "crossed": ("<topology><a></topology></a>\n\n", "mismatched tag"),
    "entities": (LAUGHS, "EntitiesForbidden"),
    "version": ('<topology version="9.1"/>', "'9.1', expected 1, 2.x or 3.x"),
    "no machine": ('<topology version="2.0"/>', "'0 objects of type Machine', expected exactly one"),
    "no type": (MACHINE.format("<object/>"), 'expected an object with the attribute "type"'),
    "address": (
        MACHINE.format('<object type="PCIDev" pci_type="0200 [1:2]" pci_busid="0"/>'),
        "0200 [1:2]",
    ),
    "bus": (MACHINE.format('<object type="Bridge" pci_busid="x"/>'), "expected an address such as 0000:01:00.0"),
    "numa": (MACHINE.format('<object type="NUMANode" os_index="-1"/>'), "os_index of a NUMA node: '-1'"),
    "nccl version": ('<system version="2"/>', "version of NCCL's format: '2'"),
    "no cpu": ('<system version="1"/>', "a system without cpu"),
    "numaid": (SWITCH.format("x", ""), "numaid of a cpu element: 'x'"),
    "no busid": (SWITCH.format("0", "<pci/>"), "'no busid', expected a busid"),
    "class": (SWITCH.format("0", '<pci busid="0000:01:00.0" class="gpu"/>'), "class of a pci element: 'gpu'"),
    "deep": ("<a>" * 200, "100 inside each other"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said(name: str, tmp_path: Path) -> None:
    content, text = WRONG[name]
    path = tmp_path / "machine.xml"
    path.write_text(content)
    with pytest.raises(UsageError, match="expected") as caught:
        discovery.read_file(path)
    assert text in str(caught.value)
    assert str(path) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="expected a file that can be read"):
        discovery.read_file(tmp_path / "none.xml")


def test_a_file_that_is_too_large() -> None:
    with pytest.raises(UsageError, match="more than 32 MiB"):
        safe_xml.parse_xml(b" " * (safe_xml.MAX_XML_BYTES + 1), "large.xml")


def test_every_cut_of_a_file_is_refused_in_one_line() -> None:
    content = (Path(__file__).parent / "files" / "hwloc-format-1.xml").read_bytes()
    for end in range(0, len(content) - 15, 97):
        with pytest.raises(UsageError, match="topology file") as caught:
            safe_xml.parse_xml(content[:end], "cut.xml")
        assert len(str(caught.value).splitlines()) == 1
