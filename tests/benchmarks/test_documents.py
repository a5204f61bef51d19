import json
from pathlib import Path

import pytest

from ringweave.errors import UsageError
from ringweave_bench import results

RACKS = {
    "cluster": "two-racks",
    "results": [
        {
            "system": "gloo",
            "bytes": 1_000_000,
            "median_s": 2.0,
            "iqr_s": 0.1,
            "fraction_of_bound": 0.5,
            "order": "block",
        }
    ],
}


def test_documents_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps(RACKS))
    assert results.load_results(str(path)) == RACKS


@pytest.mark.parametrize(
    ("content", "got"),
    [
        (None, "'No such file or directory'"),
        ("{", "'JSONDecodeError'"),
        ("[" * 100_000, "'ValueError'"),
        ("[]", "'another document'"),
        ('{"cluster": "c"}', "'another document'"),
        ('{"cluster": "c", "results": []}', "'a document without results'"),
        ('{"cluster": "c", "results": [{"system": "gloo"}]}', "'a document without results'"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: str | None, got: str) -> None:
    path = tmp_path / "r.json"
    if content is not None:
        path.write_text(content)
    expected = (
        rf"result of a benchmark: {got}, expected a JSON document that `ringweave bench` wrote with --out\. "
        rf"Give such files\. \[{path}\]"
    )
    with pytest.raises(UsageError, match=expected):
        results.load_results(str(path))
