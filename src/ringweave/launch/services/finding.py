"""Finding the service that `--on NAME` means: ours, or an entry point of the group `ringweave.services`.

An entry point names a function that is called with the environment and returns a `Service`:

    [project.entry-points."ringweave.services"]
    ours = "our_package.service:open_service"

An address is a service elsewhere, by the remote protocol of docs/services.md.
"""

import importlib
import importlib.metadata
from collections.abc import Callable, Mapping

from ringweave.errors import LaunchError, UsageError, explain
from ringweave.files.problems import closest
from ringweave.launch.services.service import Service

GROUP = "ringweave.services"
OURS = {
    "local": "ringweave.launch.local.jobs.service:open_service",
    "slurm": "ringweave.launch.slurm.service:open_service",
    "kubernetes": "ringweave.launch.kubernetes.service:open_service",
}
"""Ours are not entry points: they are there without looking through all that is installed."""

EXTRAS = ("kubernetes",)
"""Those of ours that need an extra of the same name."""

Open = Callable[[Mapping[str, str]], Service]


def open_service(name: str, environ: Mapping[str, str]) -> Service:
    """The service of that name.

    Args:
        name: `local`, `slurm`, `kubernetes`, the name of an entry point, or an address.
        environ: Where it finds its settings.

    Raises:
        UsageError: There is none of that name.
        LaunchError: It is there and cannot be loaded.
    """
    if "://" in name:
        from ringweave.launch.services import remote  # brings an HTTP client

        return remote.open_service(name, environ)
    if name in OURS:
        return _function(OURS[name], name)(environ)
    found = {entry.name: entry for entry in importlib.metadata.entry_points(group=GROUP)}
    if name in found:
        return _function(found[name].value, name)(environ)
    names = sorted({*OURS, *found})
    do = closest(name, names) or f"Install a package with an entry point {name} in the group {GROUP}"
    raise UsageError(explain("service", got=name, expected=f"one of {', '.join(names)}", do=do, where="--on"))


def _function(path: str, name: str) -> Open:
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        needed = f"it with pip install 'ringweave[{name}]'" if name in EXTRAS else "what it needs"
        do = f"Install {needed}, or choose another with --on"
        text = explain(f"service {name}", got=str(error), expected="a module that can be loaded", do=do, where=path)
        raise LaunchError(text) from error
