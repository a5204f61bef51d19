import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringweave import topology
from ringweave.errors import ClusterError
from ringweave.testing.clusters import clusters
from ringweave.topology import Cluster, Device, Nic, Node, Switch
from tests import effort

CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"

FULL = """\
name: two-racks
nodes:
  - name: a0
    switch: r0
    address: 10.99.0.1
    nics: [{name: eth0, rate: 400Mbit/s, numa: 0, rdma: false}]
    devices: [{kind: cpu, speed: 1.0, numa: 0}, {kind: cpu, speed: 0.5}]
  - name: b
    nic: 400Mbit/s
    devices: 2
    count: 4
switches:
  - {name: r0, uplink: 200Mbit/s}
latency: 50us
"""


def test_the_full_form_and_the_short_forms_mean_what_the_format_says():
    like = {"devices": (Device(), Device()), "nics": (Nic(name="eth0", rate_bytes_per_s=50e6),)}
    first = Node(
        name="a0",
        switch="r0",
        address="10.99.0.1",
        nics=(Nic(name="eth0", rate_bytes_per_s=50e6, numa=0, rdma=False),),
        devices=(Device(kind="cpu", speed=1.0, numa=0), Device(kind="cpu", speed=0.5)),
    )
    assert topology.loads(FULL) == Cluster(
        name="two-racks",
        nodes=(first, *(Node(name=f"b-{index}", **like) for index in range(4))),
        switches=(Switch(name="r0", uplink_bytes_per_s=25e6),),
        latency_s=50e-6,
    )


def test_switches_and_latency_may_be_left_out():
    cluster = topology.loads("name: pair\nnodes: [{name: a, nic: 1Gbit/s, devices: 1, count: 2}]\n")
    assert cluster.switches == ()
    assert cluster.latency_s == 50e-6


def test_a_list_of_switches_may_be_empty():
    assert topology.loads("name: one\nnodes: [{name: a, nic: 1Gbit/s, devices: 1}]\nswitches: []\n").switches == ()


@pytest.mark.slow
@settings(max_examples=effort.share_of(160))
@given(clusters())
def test_a_written_cluster_reads_back_equal(cluster):
    assert topology.loads(topology.dumps(cluster)) == cluster


def test_like_nodes_are_written_with_count():
    text = topology.dumps(topology.loads(FULL))
    assert text == FULL.replace(
        "    nics: [{name: eth0, rate: 400Mbit/s, numa: 0, rdma: false}]\n"
        "    devices: [{kind: cpu, speed: 1.0, numa: 0}, {kind: cpu, speed: 0.5}]\n",
        "    nics: [{name: eth0, rate: 400Mbit/s, numa: 0}]\n"
        "    devices: [{kind: cpu, numa: 0}, {kind: cpu, speed: 0.5}]\n",
    )


def test_like_nodes_with_addresses_are_written_one_by_one():
    cluster = topology.loads("name: c\nnodes: [{name: a, nic: 1Gbit/s, devices: 1, count: 2}]")
    nodes = tuple(dataclasses.replace(node, address=f"10.0.0.{index}") for index, node in enumerate(cluster.nodes, 1))
    text = topology.dumps(dataclasses.replace(cluster, nodes=nodes))
    assert "count" not in text
    assert topology.loads(text).nodes == nodes


@pytest.mark.parametrize("path", sorted(CLUSTERS.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_example_clusters_are_legal_and_named_after_their_files(path):
    cluster = topology.load(path)
    assert cluster.name == path.stem
    assert topology.loads(topology.dumps(cluster)) == cluster


def test_a_file_with_a_byte_order_mark_and_windows_line_ends_is_legal(tmp_path):
    path = tmp_path / "windows.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + FULL.replace("\n", "\r\n").encode())
    assert topology.load(path) == topology.loads(FULL)


def test_a_missing_file_is_named_with_the_one_that_was_meant(tmp_path):
    (tmp_path / "two-racks.yaml").write_text(FULL)
    with pytest.raises(ClusterError, match=r"No such file.*two-rack\.yaml") as caught:
        topology.load(tmp_path / "two-rack.yaml")
    assert f'Did you mean "{tmp_path}/two-racks.yaml"?' in str(caught.value)


def test_a_missing_file_in_a_missing_folder_is_an_error_too(tmp_path):
    with pytest.raises(ClusterError, match=r"Give the path of a cluster file .*nowhere/c\.yaml"):
        topology.load(tmp_path / "nowhere" / "c.yaml")


def test_a_folder_is_not_a_cluster_file(tmp_path):
    with pytest.raises(ClusterError, match=r"Is a directory.*Give the path of a cluster file"):
        topology.load(tmp_path)


def test_a_path_that_cannot_be_a_path_is_an_error_on_one_line():
    with pytest.raises(ClusterError, match=r"embedded null byte") as caught:
        topology.load("a\0b\nc")
    assert "\n" not in str(caught.value)


def test_bytes_that_are_not_utf8_are_named_with_their_line(tmp_path):
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"name: x\n# caf\xe9\n")
    with pytest.raises(ClusterError, match=r"b'\\xe9', expected UTF-8 text\. Save the file as UTF-8\. .*latin\.yaml:2"):
        topology.load(path)


def test_a_file_of_absurd_length_is_not_read_to_its_end():
    with pytest.raises(ClusterError, match=r"more than 16777216 bytes.*Use count"):
        topology.load("/dev/zero")


def test_an_error_prints_the_path_as_given(tmp_path, monkeypatch):
    (tmp_path / "c.yaml").write_text("name: 5\nnodes: []\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ClusterError, match=r"\[c\.yaml:1: name\]"):
        topology.load("c.yaml")


WORDS = "name|nodes|switches|nic|devices|a0|r0|400Mbit/s|2|1e3|&a|*a|!!int|!x|<<|...|%YAML 1.1\n---\n|\n---\n"
MARKS = "{}[],'\"~|>#-:?%\\@`\n\t "
fragments = st.sampled_from([*WORDS.split("|"), *MARKS, ": ", "  ", "- "])


@st.composite
def damaged(draw):
    """A good file with something written into the middle of it, over some of it."""
    start = draw(st.integers(0, len(FULL)))
    end = draw(st.integers(start, min(start + 8, len(FULL))))
    return FULL[:start] + draw(fragments | st.text(max_size=3)) + FULL[end:]


def refusal_of(path_or_text):
    """The text of the ClusterError; empty where there is a cluster; anything else gets through and fails the test."""
    read = topology.load if isinstance(path_or_text, Path) else topology.loads
    try:
        cluster = read(path_or_text)
    except ClusterError as error:
        return str(error)
    assert isinstance(cluster, Cluster)
    return ""


@pytest.mark.slow
@settings(max_examples=effort.share_of(600))
@given(st.text(max_size=200) | st.lists(fragments, max_size=40).map("".join) | damaged())
def test_any_text_is_a_cluster_or_a_cluster_error(text):
    assert len(refusal_of(text)) < 2000


@settings(max_examples=effort.share_of(200))
@given(content=st.binary(max_size=200))
def test_any_bytes_are_a_cluster_error_that_names_the_file(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_bytes(content)
    assert "fuzz.yaml" in refusal_of(path)
