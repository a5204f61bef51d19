"""What works of torch, tried for real. Run as a file by a process of its own, as torch may crash or hang.

Prints one JSON document: check -> [state, what was seen]. It imports torch by name, because the command line itself
never does, and a contract says so.
"""

import importlib
import json
import os
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

TIMEOUT_S = 20


def main() -> None:
    """Try torch, then what depends on it."""
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        is_absent = isinstance(error, ModuleNotFoundError) and error.name == "torch"
        print(json.dumps({"torch": ["missing" if is_absent else "broken", str(error)]}))
        return
    found = {"torch": ["ok", torch.__version__], "gpus": _gpus(torch)}
    dist = importlib.import_module("torch.distributed")
    is_known = "ringweave" in dist.Backend.backend_list
    found["backend"] = (
        ["ok", "registered on import torch"] if is_known else ["broken", "not registered on import torch"]
    )
    found["nccl"] = _nccl(torch, dist)
    found["gloo"] = _gloo(torch, dist)
    print(json.dumps(found), flush=True)


def _gpus(torch: Any) -> list[str]:
    count = torch.cuda.device_count()
    if count:
        return ["ok", ", ".join(torch.cuda.get_device_name(index) for index in range(count))]
    if Path("/dev/nvidiactl").exists():
        return ["broken", f"a driver is loaded, but torch {torch.__version__} sees no GPU"]
    return ["missing", "none"]


def _nccl(torch: Any, dist: Any) -> list[str]:
    if not dist.is_nccl_available():
        return ["missing", "torch was built without it"]
    return ["ok", ".".join(str(part) for part in torch.cuda.nccl.version())]


def _gloo(torch: Any, dist: Any) -> list[str]:
    """An allreduce of two processes over loopback; the second is a fork of this one."""
    if not dist.is_gloo_available():
        return ["missing", "torch was built without it"]
    with tempfile.TemporaryDirectory() as folder:
        child = os.fork()
        try:
            total = _allreduce(torch, dist, rank=1 if child == 0 else 0, store=f"file://{folder}/store")
        except Exception as error:  # whatever it is, it is the answer
            return ["broken", f"allreduce over loopback: {error}".splitlines()[0]]
        finally:
            if child == 0:
                os._exit(0)
            os.waitpid(child, 0)
    return ["ok", "allreduce of 2 processes over loopback"] if total == 3.0 else ["broken", f"1 + 2 gave {total}"]


def _allreduce(torch: Any, dist: Any, *, rank: int, store: str) -> float:
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=TIMEOUT_S))
    tensor = torch.full((1,), float(rank + 1))
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor.item()


if __name__ == "__main__":
    main()
