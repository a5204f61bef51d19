"""The slowest part in one line."""

import pytest

from ringweave.topology import Cluster, loads
from ringweave.topology.inference.tree import MeasuredLink, slowest_part_text


def lines(text: str, **rates: float) -> str | None:
    cluster = loads(f"name: x\nnodes:\n{text}")
    return slowest_part_text(cluster, links(cluster, rates))


def links(cluster: Cluster, rates: dict[str, float]) -> list[MeasuredLink]:
    return [
        MeasuredLink(
            src=link.src,
            dst=link.dst,
            rate_bytes_per_s=rates.get(link.name, link.bandwidth_bytes_per_s),
            is_proved=True,
        )
        for link in cluster.links()
    ]


FOUR = "- {name: a, nic: 200Mbit/s, devices: 1, count: 3}\n- {name: b, nic: 50Mbit/s, devices: 1}\n"


def test_a_slow_node() -> None:
    assert lines(FOUR) == "slow: node b (link b->core) carries 50Mbit/s, a quarter of the median NIC (measured)"


def test_a_slow_direction() -> None:
    text = FOUR.replace("50M", "200M")
    assert lines(text, **{"a-2->core": 48.1e6 / 8}) == (
        "slow: link a-2->core carries 48.1Mbit/s, a quarter of the median NIC (measured)"
    )


def test_a_slow_uplink() -> None:
    text = """
- {name: a, switch: r0, nic: 400Mbit/s, devices: 1, count: 4}
- {name: b, nic: 400Mbit/s, devices: 1, count: 4}
switches: [{name: r0, uplink: 200Mbit/s}]
"""
    assert lines(text) == (
        "slow: link r0->core carries 200Mbit/s, an eighth of what the NICs on its sides do (measured)"
    )


@pytest.mark.parametrize("rate", ["200Mbit/s", "160Mbit/s"])
def test_nothing_slow(rate: str) -> None:
    assert lines(FOUR.replace("50Mbit/s", rate)) is None


def test_odd_shares_are_percent() -> None:
    assert "70% of the median NIC" in str(lines(FOUR.replace("50M", "140M")))
