"""Versions of libraries that the modules for them accept."""

import importlib.metadata

import pytest

from ringweave import integrations
from ringweave.errors import UsageError


@pytest.mark.parametrize("version", ["5.24", "5.24.0", "5.24.1.post1", "5.24.0rc1"])
def test_a_tested_version_is_accepted(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    integrations.check_version("transformers", "5.24", "5.25")


@pytest.mark.parametrize("version", ["5.23.9", "5.25", "5.25.0.dev0", "4.56.2", "6.0"])
def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    text = (
        f"version of transformers: '{version}', expected from 5.24 on and below 5.25. Install transformers>=5.24,<5.25"
    )
    with pytest.raises(UsageError, match=text.replace(".", r"\.")):
        integrations.check_version("transformers", "5.24", "5.25")
