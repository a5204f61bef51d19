"""What is demanded is not skipped."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests import demands


def config(*demanded: str) -> Any:
    return SimpleNamespace(getoption={"--demand": list(demanded)}.__getitem__)


def test_what_a_machine_lacks_skips_a_test_and_fails_it_where_it_is_demanded() -> None:
    with pytest.raises(pytest.skip.Exception, match="not root"):
        demands.need(config(), demands.LAB, ["not root"])
    with pytest.raises(pytest.fail.Exception, match=r"lab: demanded, and there can be none here\. not root"):
        demands.need(config(demands.LAB), demands.LAB, ["not root"])


@pytest.mark.parametrize("demanded", [(), (demands.LAB,)])
def test_where_nothing_is_lacking_the_test_runs(demanded: tuple[str, ...]) -> None:
    demands.need(config(*demanded), demands.LAB, [])
