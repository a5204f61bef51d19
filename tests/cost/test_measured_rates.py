import json
from pathlib import Path

import pytest

from ringweave import topology
from ringweave.cost import network
from ringweave.errors import UsageError

CLUSTER = topology.loads("name: pair\nnodes: [{name: a, nic: 1Gbit/s, devices: 1, count: 2}]\n")


def test_findings_of_probing(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    links = [{"name": "a-0->core", "rate_bytes_per_s": 1e6, "is_proved": True}]
    path.write_text(json.dumps({"kind": "measured", "links": links}))
    assert network.load_measured_rates(path, CLUSTER) == {"a-0->core": 1e6}


def test_links_that_a_benchmark_could_not_measure_keep_their_rate(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    links = [
        {"link": "a-0->core", "raw_bytes_per_s": 9, "measured_bytes_per_s": 8},
        {"link": "core->a-0", "raw_bytes_per_s": 9, "measured_bytes_per_s": None},
    ]
    path.write_text(json.dumps({"links": links, "results": []}))
    assert network.load_measured_rates(path, CLUSTER) == {"a-0->core": 8.0}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "--rates: '{path}', expected a file that can be read. No such file or directory."),
        ("{", "--rates: '{path}', expected a JSON document with measured \"links\". Give findings of probing, or a"),
        ("[]", "expected a JSON document with measured"),
        ('{"links": []}', "expected a JSON document with measured"),
        ('{"links": [1]}', "expected a JSON document with measured"),
        ('{"links": [{"name": "a-0->core"}]}', "expected a JSON document with measured"),
        (
            '{"links": [{"name": "a-0->cor", "rate_bytes_per_s": 1}]}',
            "link: 'a-0->cor', expected a link of the cluster.",
        ),
        (
            '{"links": [{"name": "s1->b", "rate_bytes_per_s": 1}]}',
            "a link of the cluster. Give the cluster file that",
        ),
        ('{"links": [{"name": [], "rate_bytes_per_s": 1}]}', "measured link: [], expected a link of the cluster."),
        (
            '{"links": [{"name": "a-0->core", "rate_bytes_per_s": 0}]}',
            "measured rate of a-0->core: 0, expected a positive number of bytes per second. Measure it again, or leave "
            "it out. [{path}]",
        ),
        ('{"links": [{"name": "a-0->core", "rate_bytes_per_s": "1"}]}', "measured rate of a-0->core: '1', expected"),
        (
            '{"links": [{"name": "a-0->core", "rate_bytes_per_s": Infinity}]}',
            "rate of a-0->core: inf, expected",
        ),
    ],
)
def test_wrong_files(content: str | None, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # texts shorten a path that is long
    path = Path("x.json")
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError) as caught:
        network.load_measured_rates(path, CLUSTER)
    shown = str(caught.value).replace(str(path), "{path}").replace(repr(str(path)), "'{path}'")
    assert text in shown
