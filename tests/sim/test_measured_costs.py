"""Costs of processors from a file: what it says replaces what is assumed, and mistakes are named."""

import dataclasses
import json
from pathlib import Path

import pytest

from ringweave.errors import UsageError
from ringweave.sim import HostModel, scenario


def written(folder: Path, document: object) -> Path:
    path = folder / "costs.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def test_costs_replace_what_is_assumed(tmp_path: Path) -> None:
    path = written(tmp_path, {"kind": "measured", "costs": {"message_s": 4e-6, "inside_message_s": 0}})
    assert scenario.load_host_costs(path) == dataclasses.replace(
        HostModel.assumed(), message_s=4e-6, inside_message_s=0
    )


def test_the_file_of_the_bench_can_be_read() -> None:
    found = sorted(Path("bench/results/simulated").glob("*-processor-costs.json"))
    assert found
    for path in found:
        assert scenario.load_host_costs(path).message_s > 0


@pytest.mark.parametrize("document", ["no JSON", [], {"message_s": 1e-6}, {"costs": 3}, "[" * 100_000])
def test_a_file_of_another_kind(tmp_path: Path, document: object) -> None:
    with pytest.raises(UsageError) as refused:
        scenario.load_host_costs(written(tmp_path, document))
    assert str(refused.value).startswith("costs of processors: '")
    assert str(refused.value).endswith(
        'expected a JSON document with "costs". Write one with bench/simulation/processor_costs.py --out.'
    )


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"costs of processors: '.*assume', expected a file. Name a file, or take none"
    ):
        scenario.load_host_costs(tmp_path / "assume")


def test_an_unknown_cost(tmp_path: Path) -> None:
    path = written(tmp_path, {"costs": {"mesage_s": 1e-6}})
    expected = (
        "cost of processors: 'mesage_s', expected message_s, inside_message_s, wake_s, kernel_s_per_byte, "
        f'inside_s_per_byte, combine_s_per_byte, start_s. Did you mean "message_s"? [{path}]'
    )
    with pytest.raises(UsageError) as refused:
        scenario.load_host_costs(path)
    assert str(refused.value) == expected


@pytest.mark.parametrize("value", [-1, "1us", True, None, [1]])
def test_a_cost_that_is_no_time(tmp_path: Path, value: object) -> None:
    path = written(tmp_path, {"costs": {"message_s": value}})
    with pytest.raises(UsageError) as refused:
        scenario.load_host_costs(path)
    assert str(refused.value) == (f"message_s: {value!r}, expected seconds, not negative. Measure it again. [{path}]")
