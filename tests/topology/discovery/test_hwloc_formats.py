from pathlib import Path

from ringweave.topology import discovery


def test_format_1_of_hwloc_has_the_same_leader_and_the_socket_as_one_more_edge() -> None:
    old = discovery.read_file(Path(__file__).parent / "files" / "hwloc-format-1.xml")
    found = discovery.choose(old)
    assert old.workers[found.leader].name == "NUMA 0"
    assert [each.way and each.way.num_hops for each in found.candidates] == [3, 5]
    assert [each.way and each.way.kind for each in found.candidates] == ["PHB", "SYS"]
