import pytest
from hypothesis import given, settings

from ringweave import topology
from ringweave.errors import ClusterError
from ringweave.lab import bring_up, lab_layout
from ringweave.testing.clusters import clusters
from tests import effort

FIFTY = ", ".join(f"{{name: x{index}, rate: 1Gbit/s}}" for index in range(50))
RACKS = """
name: racks
nodes:
  - {name: a, switch: r0, nic: 400Mbit/s, devices: 1, count: 2}
  - {name: b, nic: 100Mbit/s, devices: 1}
switches:
  - {name: r0, uplink: 200Mbit/s, parent: top}
  - {name: top, uplink: 1Gbit/s}
"""


def laid_out(text: str, name: str = "one") -> lab_layout.LabLayout:
    return lab_layout.plan_layout(topology.loads(text), name)


def test_every_link_has_the_ends_that_send_on_it() -> None:
    planned = laid_out(RACKS)
    ends = {port.link: (port.namespace, port.interface, port.rate_bytes_per_s) for port in planned.ports()}
    assert ends == {
        "a-0->r0": ("rw-one:a-0", "eth0", 50e6),
        "r0->a-0": ("rw-one:core", "rw-n0-0", 50e6),
        "a-1->r0": ("rw-one:a-1", "eth0", 50e6),
        "r0->a-1": ("rw-one:core", "rw-n1-0", 50e6),
        "b->core": ("rw-one:b", "eth0", 12.5e6),
        "core->b": ("rw-one:core", "rw-n2-0", 12.5e6),
        "r0->top": ("rw-one:core", "rw-u0", 25e6),
        "top->r0": ("rw-one:core", "rw-d0", 25e6),
        "top->core": ("rw-one:core", "rw-u1", 125e6),
        "core->top": ("rw-one:core", "rw-d1", 125e6),
    }
    assert [port.interface for port in planned.ports("r0->top")] == ["rw-u0"]


@given(clusters())
@settings(max_examples=effort.share_of(60))
def test_ports_send_what_links_carry_and_no_name_is_used_twice(cluster: topology.Cluster) -> None:
    try:
        planned = lab_layout.plan_layout(cluster, cluster.name)
    except ClusterError:
        return
    for link in cluster.links():
        rates = [port.rate_bytes_per_s for port in planned.ports(link.name)]
        assert sum(rates) == pytest.approx(link.bandwidth_bytes_per_s)
    names = [(port.namespace, port.interface) for port in planned.ports()]
    names += [(planned.switch_namespace, bridge) for bridge in planned.bridges.values()]
    assert len(set(names)) == len(names)
    assert all(len(interface) <= 15 for _, interface in names)
    given_addresses = [address for own in planned.addresses.values() for address in own]
    assert len(set(given_addresses)) == len(given_addresses)


def test_labs_never_share_a_name() -> None:
    assert lab_layout.namespace_name("x", "y-z") != lab_layout.namespace_name("x-y", "z")
    assert lab_layout.namespace_name("two-racks", "a0") == "rw-two-racks:a0"


def test_nics_are_called_as_in_the_file_where_linux_allows_it() -> None:
    names = "lo, eth0, a-name-of-sixteen, ib0, all"
    nics = ", ".join(f"{{name: {name}, rate: 1Gbit/s}}" for name in names.split(", "))
    planned = laid_out(f"name: c\nnodes: [{{name: a, devices: 1, nics: [{nics}]}}]")
    assert planned.interfaces("a") == ["eth1", "eth0", "eth2", "ib0", "eth3"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "name: c\nnodes: [{name: a, nic: 1Gbit/s, devices: 1, count: 257}]",
            r"nodes of cluster c: 257, expected at most 256 in a lab\. Bring up a smaller cluster",
        ),
        (
            f"name: c\nnodes: [{{name: a, devices: 1, count: 20, nics: [{FIFTY}]}}]",
            r"NICs and uplinks of cluster c: 1000, expected at most 999 in a lab\. Bring up a smaller cluster",
        ),
        (
            f"name: c\nnodes: [{{name: {'a' * 60}.{'b' * 9}, nic: 1Gbit/s, devices: 1}}]",
            "name of a node: .*, expected at most 64 characters, as it becomes a host name in the lab. Shorten it.",
        ),
        (
            "name: c\nnodes: [{name: a, nic: 7kbit/s, devices: 1}]",
            "rate of NIC eth0 of node a: '7kbit/s', expected 8kbit/s to 1Tbit/s in a lab. Give it a rate that one",
        ),
        (
            "name: c\nnodes: [{name: a, nic: 1Gbit/s, switch: r, devices: 1}]\nswitches: [{name: r, uplink: 2Tbit/s}]",
            "uplink of switch r: '2Tbit/s', expected 8kbit/s to 1Tbit/s in a lab",
        ),
    ],
)
def test_what_one_machine_cannot_play_is_refused(text: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_layout, "MAX_CABLES", 999)
    with pytest.raises(ClusterError, match=expected):
        laid_out(text)


def test_a_node_with_one_nic_needs_one_table() -> None:
    assert bring_up.node_commands(laid_out(RACKS), "b") == [
        "link set dev lo up",
        "address add 10.99.0.3/16 dev eth0 noprefixroute",
        "link set dev eth0 up",
        "route add 10.99.0.0/16 dev eth0 scope link src 10.99.0.3",
    ]


def test_a_bucket_holds_a_piece_of_tcp_or_a_millisecond() -> None:
    assert bring_up.token_bucket_options(25e6) == "tbf rate 25000000bps burst 81920b limit 1048576b"
    assert bring_up.token_bucket_options(1.25e9) == "tbf rate 1250000000bps burst 1250000b limit 5000000b"


def test_every_node_knows_every_name() -> None:
    lines = bring_up.hosts_file_text(laid_out(RACKS)).splitlines()
    assert lines[:4] == ["127.0.0.1 localhost", "10.99.0.1 a-0", "10.99.0.2 a-1", "10.99.0.3 b"]
    assert "::ffff:10.99.0.3 b.lab" in lines
