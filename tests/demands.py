"""What some tests need of a machine: where it is missing they are skipped, or fail if it is demanded, as in .ci/run."""

from collections.abc import Sequence

import pytest

BROWSER = "browser"
LAB = "lab"
KNOWN = (BROWSER, LAB)


def need(config: pytest.Config, what: str, problems: Sequence[str]) -> None:
    """Skips the test if there are problems; fails it if `--demand` names what it needs."""
    if not problems:
        return
    text = " ".join(problems)
    if what in config.getoption("--demand"):
        pytest.fail(f"{what}: demanded, and there can be none here. {text}", pytrace=False)
    pytest.skip(text)
