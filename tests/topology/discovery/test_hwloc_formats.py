from pathlib import Path

from ringweave.topology import discovery


def test_format_1_of_hwloc_has_the_same_leader_and_the_socket_as_one_more_edge() -> None:
    old = discovery.read_file(Path(__file__).parent / "files" / "hwloc-format-1.xml")
    found = discovery.choose_leader(old)
    assert old.workers[found.leader].name == "NUMA 0"
    assert [each.path and each.path.num_hops for each in found.candidates] == [3, 5]
    assert [each.path and each.path.path_class for each in found.candidates] == ["PHB", "SYS"]
