"""Libraries that the ranks of these tests use, imported once."""

import importlib.util
from collections.abc import Iterator
from multiprocessing import forkserver

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
    own = forkserver.ForkServer()
    with pytest.MonkeyPatch.context() as patch:
        # The standard library has one server, and no public way to another.
        patch.setattr(forkserver, "_forkserver", own)
        for each in ("ensure_running", "get_inherited_fds", "connect_to_new_process", "set_forkserver_preload"):
            patch.setattr(forkserver, each, getattr(own, each))
        patch.setattr(ranks, "PRELOADED_MODULES", [*ranks.PRELOADED_MODULES, *LIBRARIES[name]])
        yield name
        own._stop()
