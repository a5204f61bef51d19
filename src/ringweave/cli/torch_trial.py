"""Trial of torch, started as a script in a process of its own, because torch may crash or hang.

It prints one JSON document: check -> [state, what was seen]. It imports torch by name, because an import contract
forbids the command line to import torch.
"""

import contextlib
import gc
import importlib
import json
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

TIMEOUT_S = 20
SCHEDULE = "ring"
"""Forced schedule: inside one machine, small messages would use the native backend."""
NUM_ELEMENTS = 2**16
_ENGINE_MODULES = ("ringweave.comm.backend", "ringweave.comm.tuning.selector", "ringweave.comm.engine.engine")
"""Modules of the backend and of its first scheduled collective."""


def main() -> None:
    """Try torch, then what depends on it."""
    for name in [name for name in os.environ if name.startswith("RINGWEAVE_")]:
        del os.environ[name]  # they belong to a run, or to later runs, of the user
    os.environ["RINGWEAVE_SCHEDULE"] = SCHEDULE
    gc.disable()  # this process ends soon, and collections take a tenth of its time while torch is imported
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        is_absent = isinstance(error, ModuleNotFoundError) and error.name == "torch"
        print(json.dumps({"torch": ["missing" if is_absent else "broken", str(error)]}))
        return
    found = {"torch": ["ok", torch.__version__], "gpus": _try_gpus(torch)}
    dist = importlib.import_module("torch.distributed")
    found["nccl"] = _try_nccl(torch, dist)
    print(json.dumps(found | _try_backends(torch, dist)), flush=True)


def _try_gpus(torch: Any) -> list[str]:
    count = torch.cuda.device_count()
    if count:
        return ["ok", ", ".join(torch.cuda.get_device_name(index) for index in range(count))]
    if Path("/dev/nvidiactl").exists():
        return ["broken", f"a driver is loaded, but torch {torch.__version__} sees no GPU"]
    return ["missing", "none"]


def _try_nccl(torch: Any, dist: Any) -> list[str]:
    if not dist.is_nccl_available():
        return ["missing", "torch was built without it"]
    return ["ok", ".".join(str(part) for part in torch.cuda.nccl.version())]


def _try_backends(torch: Any, dist: Any) -> dict[str, list[str]]:
    """Try both backends with two processes on this machine; the second is a fork of this one."""
    absent = {} if dist.is_gloo_available() else {"gloo": ["missing", "torch was built without it"]}
    if "ringweave" not in dist.Backend.backend_list:
        absent["backend"] = ["broken", "not registered on import torch"]
    trials = {"gloo": _try_gloo, "backend": _try_ringweave}
    with contextlib.suppress(Exception):  # an error comes again in the trial of the backend
        for name in _ENGINE_MODULES:  # before the fork, so that they are imported once
            importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        child = os.fork()
        try:
            found = {name: _run_trial(trial, torch, dist, int(child == 0), folder) for name, trial in trials.items()}
        finally:
            if child == 0:
                os._exit(0)
            os.waitpid(child, 0)
    return found | absent


def _run_trial(
    trial: Callable[[Any, Any, str, int], list[str]], torch: Any, dist: Any, rank: int, folder: str
) -> list[str]:
    try:
        return trial(torch, dist, f"file://{folder}/{trial.__name__}", rank)
    except Exception as error:  # any exception is the answer
        return ["broken", f"allreduce of 2 processes: {error}".splitlines()[0]]
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _try_gloo(torch: Any, dist: Any, store: str, rank: int) -> list[str]:
    total = _allreduce(torch, dist, "gloo", store, rank, 1)
    return ["ok", "allreduce of 2 processes over loopback"] if total == 3.0 else ["broken", f"1 + 2 gave {total}"]


def _try_ringweave(torch: Any, dist: Any, store: str, rank: int) -> list[str]:
    """Reduce a message that is large enough for a schedule, and check that a schedule carried it."""
    total = _allreduce(torch, dist, "ringweave", store, rank, NUM_ELEMENTS)
    if total != 3.0:
        return ["broken", f"1 + 2 gave {total}"]
    counts = dist.group.WORLD.collectives_by_schedule()
    if SCHEDULE not in counts:
        return ["broken", f"256 KiB went by {', '.join(counts) or 'nothing'}, not by {SCHEDULE}"]
    return ["ok", f"allreduce of 256 KiB by {SCHEDULE}, 2 processes"]


def _allreduce(torch: Any, dist: Any, backend: str, store: str, rank: int, num_elements: int) -> float:
    """Return the sum of 1 and 2 in all elements; nan if the elements differ."""
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=TIMEOUT_S))
    tensor = torch.full((num_elements,), float(rank + 1))
    dist.all_reduce(tensor)
    return tensor[0].item() if bool((tensor == tensor[0]).all()) else float("nan")


if __name__ == "__main__":
    main()
