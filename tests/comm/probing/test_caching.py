"""Findings that are kept: for how long, of which nodes, where, and what a broken file costs."""

from dataclasses import replace
from pathlib import Path

import pytest

from ringweave.comm.probing import measure, network_measurement
from ringweave.comm.probing.network_measurement import MeasurementCache
from ringweave.topology.inference.tree import NodeSpec
from tests.comm.probing.parts import FOUND, group


def test_findings_are_kept_for_a_while(tmp_path: Path) -> None:
    cache, hosts = MeasurementCache(tmp_path / "probes"), measure.group_hosts(group(2)[0])
    assert cache.get(hosts, 1000.0) is None
    cache.put(hosts, FOUND)
    assert cache.get(hosts, 1010.0, max_age_s=20.0) == FOUND
    assert cache.get(hosts, 1030.0, max_age_s=20.0) is None, "too old"
    assert cache.get(hosts, 990.0) is None, "from the future"
    assert cache.get(measure.group_hosts(group(3)[0]), 1010.0) is None, "of other nodes"
    assert cache.get(hosts[1:], 1010.0) == FOUND, "of more nodes"
    assert [path.suffix for path in (tmp_path / "probes").iterdir()] == [".json"]


def test_the_newest_findings_are_taken_be_they_of_these_nodes_or_of_more(tmp_path: Path) -> None:
    cache, hosts = MeasurementCache(tmp_path), measure.group_hosts(group(2)[0])
    ages = {10: hosts, 4: [*hosts, NodeSpec(name="x", address=None, num_devices=1)], 7: [hosts[0]]}
    for age, of_nodes in ages.items():
        cache.put(of_nodes, replace(FOUND, time=1000.0 - age))
    for known in (cache, MeasurementCache(tmp_path)):
        assert known.get(hosts, 1000.0) == replace(FOUND, time=996.0)
        assert known.get(hosts, 995.0) == replace(FOUND, time=993.0)
        assert known.get(hosts, 991.0) == replace(FOUND, time=990.0)


@pytest.mark.parametrize("text", ["", "{", "{}", FOUND.to_json().replace("1Gbit/s", "fast")])
def test_a_broken_file_is_told_of_and_ignored(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    cache, hosts = MeasurementCache(tmp_path), measure.group_hosts(group(2)[0])
    cache.path(hosts).write_text(text)
    assert cache.get(hosts, 1000.0) is None
    assert "cannot be read and is ignored" in caplog.text


def test_a_folder_that_cannot_be_written_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    MeasurementCache(tmp_path / "file").put(measure.group_hosts(group(2)[0]), FOUND)
    assert "cannot be kept" in caplog.text


def test_caches_are_where_they_belong() -> None:
    assert network_measurement.default_cache_folder({"XDG_CACHE_HOME": "/c", "HOME": "/h"}) == Path(
        "/c/ringweave/probes"
    )
    assert network_measurement.default_cache_folder({"XDG_CACHE_HOME": "/c", "RINGWEAVE_FINDINGS": "/f"}) == Path("/f")
    assert network_measurement.default_cache_folder({"HOME": "/h"}) == Path("/h/.cache/ringweave/probes")


def test_a_folder_that_cannot_be_written_does_not_have_the_next_group_measure_again(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    hosts = measure.group_hosts(group(2)[0])
    network_measurement.process_cache(tmp_path / "file").put(hosts, FOUND)
    later = network_measurement.process_cache(tmp_path / "file")
    assert later.get(hosts, 1010.0) == FOUND
    assert later.get(hosts[:1], 1010.0) == FOUND, "of more nodes"
    assert later.get(hosts, 1030.0, max_age_s=20.0) is None, "too old"
    assert MeasurementCache(tmp_path / "file").get(hosts, 1010.0) is None, "only in this process"
