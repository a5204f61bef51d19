"""Generated pages of docs/reference are what the code says; `pytest --update-golden` writes them."""

from pathlib import Path

import pytest

from tools import reference_pages


@pytest.mark.parametrize("name", ["cli.md", "job-states.md", "events.md"])
def test_the_page_is_what_the_code_says(name: str, check_golden, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    check_golden(Path(reference_pages.FOLDER) / name, reference_pages.reference_pages()[name])


def test_every_generated_page_is_compared() -> None:
    assert set(reference_pages.reference_pages()) == {"cli.md", "job-states.md", "events.md"}
