"""What an API server, or a proxy before it, answers."""

import pytest

from ringweave.platforms.kubernetes import api_client


@pytest.mark.parametrize("content", [b"<html>", b"\xff\xfe", b"[" * 100_000, b"9" * 5000])
def test_what_is_no_json_says_so(content: bytes) -> None:
    assert api_client._parse_answer(content)["reason"] == "NotJson"


def test_what_is_no_object_is_a_message() -> None:
    assert api_client._parse_answer(b"[1]") == {"message": "[1]"}
    assert api_client._parse_answer(b"") == {}
