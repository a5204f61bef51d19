"""Sites of mode local by measured links, on hosts that no cluster file describes."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringweave.comm.probing.network_measurement import MeasurementCache, NetworkMeasurement, ProbedLink
from ringweave.environment import WorkerEnvironment
from ringweave.planning import sites
from ringweave.topology.inference.tree import NodeSpec
from ringweave.training import preparation
from ringweave.training.rings.startup_rendezvous import add_measured_sites

HOSTS = ("a0", "a1", "b0", "b1")
CLUSTER = "\n".join(
    [
        "name: measured",
        "nodes:",
        *(
            f"- {{name: {host}, address: 10.0.0.{index}, switch: {host[0]}, nic: 1Gbit/s, devices: 1}}"
            for index, host in enumerate(HOSTS)
        ),
        "switches:",
        "- {name: a, uplink: 10Mbit/s}",
        "- {name: b, uplink: 10Mbit/s}",
    ]
)
NOW = 50_000.0


def measurement() -> NetworkMeasurement:
    """Two sites of two hosts."""
    base = NetworkMeasurement(
        time=NOW - 7200, wall_s=1.0, num_batches=1, cluster_text=CLUSTER, links=(), pairs=(), slow=None
    )
    cluster = base.cluster()
    names = {link for a in HOSTS for b in HOSTS if a != b for link in cluster.route(a, b)}
    rates = {name: 125e6 if any(host in name for host in HOSTS) else 1.25e6 for name in names}
    links = tuple(ProbedLink(name=name, rate_bytes_per_s=rate, is_proved=True) for name, rate in rates.items())
    return replace(base, links=links)


def profiles(*hosts: str) -> list[dict[str, Any]]:
    """Profiles of workers on hosts whose rates are assumed to be equal."""
    common = {"nics": [], "rate": 1.25e8, "uplinks": {}}
    return [{**common, "node": host, "address": f"10.0.0.{HOSTS.index(host)}"} for host in hosts]


def test_an_elastic_job_takes_the_sites_that_an_earlier_run_has_measured(tmp_path: Path) -> None:
    cache = MeasurementCache(tmp_path)
    cache.put([NodeSpec(name=host, address="", num_devices=1) for host in HOSTS], measurement())
    workers = profiles("b0", "a0", "a0", "b1", "a1")
    found = add_measured_sites(workers, lambda hosts: cache.get(hosts, NOW))
    assert sites.sites_of(None, found) == ((0, 3), (1, 2, 4))
    assert sites.explain_sites(None, found) == (
        "; sites by measured links: b0 b1 | a0 a1; 1Gbit/s or more inside, 10Mbit/s or less across, 100 times, in "
        "an earlier run"
    )
    assert found[1:] == workers[1:]


def test_without_a_measurement_of_all_hosts_each_is_a_site_and_the_reason_says_so(tmp_path: Path) -> None:
    cache = MeasurementCache(tmp_path)
    workers = profiles("a0", "a1", "b0")
    assert add_measured_sites(workers, lambda hosts: cache.get(hosts, NOW)) is workers, "nothing is kept"
    cache.put([NodeSpec(name=host, address="", num_devices=1) for host in HOSTS], measurement())
    later = NOW + 30 * 3600
    assert add_measured_sites(workers, lambda hosts: cache.get(hosts, later)) is workers, "it is too old"
    moved = [{**workers[0], "address": "10.9.9.9"}, *workers[1:]]
    assert add_measured_sites(moved, lambda hosts: cache.get(hosts, NOW)) is moved, "a host has another address"
    assert sites.sites_of(None, workers) == ((0,), (1,), (2,))
    assert sites.explain_sites(None, workers) == f"; {sites.UNKNOWN_SITES}"


class FakeGroup:
    """Default group of a run on hosts, with the links between them measured."""

    measured_network = measurement()
    members = SimpleNamespace(ranks=[SimpleNamespace(location=SimpleNamespace(node=host)) for host in HOSTS])


@pytest.mark.parametrize("is_assumed", [True, False])
def test_a_run_on_hosts_takes_measured_links_unless_its_cluster_file_describes_them(
    monkeypatch: pytest.MonkeyPatch, *, is_assumed: bool
) -> None:
    monkeypatch.setattr(preparation, "RingweaveProcessGroup", FakeGroup)
    monkeypatch.setattr(preparation, "dist", SimpleNamespace(group=SimpleNamespace(WORLD=FakeGroup())))
    environment = WorkerEnvironment(cluster_path=Path("cluster.yaml"), probes_described=is_assumed)
    found = preparation._find_measured_sites(environment)
    assert (found and found.nodes) == ((("a0", "a1"), ("b0", "b1")) if is_assumed else None)
