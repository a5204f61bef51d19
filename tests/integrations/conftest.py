"""Libraries that the ranks of these tests use, imported once."""

import importlib.util
import multiprocessing.forkserver
from collections.abc import Iterator

import pytest

from ringweave.testing import ranks

LIBRARIES = {
    "accelerate": ("accelerate",),
    "lightning": ("lightning.pytorch", "transformers.models.gpt2.modeling_gpt2"),
    "transformers": ("accelerate", "transformers.trainer", "transformers.models.gpt2.modeling_gpt2"),
}
"""By library: modules that its ranks import, and that take seconds."""


@pytest.fixture(scope="module")
def library(request: pytest.FixtureRequest) -> Iterator[str]:
    """Return the library that the module of tests names; its ranks come from a fork server that has imported it.

    Only here: other tests would wait for these imports.
    """
    name = request.module.LIBRARY
    for module in LIBRARIES[name]:
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            pytest.skip(f"{module.partition('.')[0]} is not installed")
    server = multiprocessing.forkserver._forkserver  # pyrefly: ignore - the standard library has no public way to stop it
    before = list(ranks.PRELOADED_MODULES)
    server._stop()
    ranks.PRELOADED_MODULES += LIBRARIES[name]
    yield name
    server._stop()
    ranks.PRELOADED_MODULES[:] = before
