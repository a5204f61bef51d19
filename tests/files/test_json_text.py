import json
import random
from pathlib import Path

import pytest

from ringweave.files import file_io
from tests.rpc.mutations import mutated

DEEP = 100_000
GOOD = json.dumps({"kind": "run_started", "of": [1, -2.5e3, None, True], "name": 'é\u2028"\\'}).encode()


@pytest.mark.parametrize(
    ("text", "got"),
    [
        ("[" * DEEP, "brackets in brackets"),
        (b'{"a":' * DEEP, "brackets in brackets"),
        ("[" * 201 + "]" * 201, "brackets in brackets, more than 200"),
        (b"\xff\xfe", "Expecting value"),
        (b'"\xe9"', "utf-8"),
        ("9" * 5000, "integer string conversion"),
        ("", "Expecting value"),
        (b" " * 65, "65 bytes, more than 64"),
        ("é" * 65, "65 characters, more than 64"),
    ],
    ids=lambda value: str(value[:12]),
)
def test_rubbish_is_a_value_error(text: str | bytes, got: str) -> None:
    most = 64 if "more than 64" in got else file_io.MAX_JSON_BYTES
    with pytest.raises(ValueError, match=got):
        file_io.parse_json(text, most)


@pytest.mark.parametrize("text", ["[" * 200 + "]" * 200, '{"a":' * 199 + '"[[{{"' + "}" * 199, json.dumps("[" * 500)])
def test_what_is_not_too_deep_is_read(text: str) -> None:
    assert file_io.parse_json(text) == json.loads(text) == file_io.parse_json(text.encode())


def test_a_file_is_read_no_further_than_it_may_go(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(b"[1]")
    assert file_io.load_json(path, 3) == [1]
    with pytest.raises(ValueError, match="a file of more than 2 bytes"):
        file_io.load_json(path, 2)
    with pytest.raises(FileNotFoundError):
        file_io.load_json(tmp_path / "absent")


def test_mutated_texts_are_read_or_refused() -> None:
    rng, num_refused = random.Random(6), 0
    for _ in range(2_000):
        try:
            file_io.parse_json(mutated(rng, GOOD))
        except ValueError:
            num_refused += 1
    assert num_refused > 1_000
