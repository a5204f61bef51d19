import re
from pathlib import Path

import pytest

from ringweave.rpc.framing import FrameKind

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "rpc-protocol.md").read_text()


def test_the_pages_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(code, {"__name__": "page"})  # noqa: S102
    assert capsys.readouterr().out == "3\n"


def test_the_page_names_every_kind_of_frame() -> None:
    assert ", ".join(f"{kind.name} {kind.value}" for kind in FrameKind) in PAGE
