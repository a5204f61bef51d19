"""Entry point of `torch.backends`: `import torch` registers the backend, so scripts need no line about ringweave."""

import atexit
import functools
import inspect
import ipaddress
import logging
import os
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from ringweave import ports
from ringweave.environment import ENCRYPT, WorkerEnvironment
from ringweave.errors import UsageError

_DEVICES = ("cpu", "cuda")
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_STORE_BACKLOG = 1024


def register() -> None:
    """Make the backend "ringweave" known to torch.distributed.

    It imports nothing heavy and never raises: a failure here would break `import torch` for all users. With a run
    directory, as under `ringweave run`, or with RINGWEAVE_REPLACE_BACKEND=1 the backend also becomes the default of
    groups that name none.
    """
    try:
        _register(WorkerEnvironment.from_environ(os.environ))
    except Exception:
        logging.getLogger("ringweave").exception(
            "backend ringweave could not be registered with this torch; torch itself is not affected"
        )


def _register(environment: WorkerEnvironment) -> None:
    import torch.distributed as dist

    if not dist.is_available():
        return
    dist.Backend.register_backend("ringweave", _create_group, extended_api=True, devices=list(_DEVICES))
    _replace(("monitored_barrier",), _with_own_monitored_barrier)
    _replace(("batch_isend_irecv",), _with_grouped_messages)
    if environment.run_dir is None and not (environment.replace_backend or environment.encrypts):
        return
    dist.Backend.default_device_backend_map.update(dict.fromkeys(_DEVICES, "ringweave"))
    rendezvous: Any = sys.modules["torch.distributed.rendezvous"]
    rendezvous._create_c10d_store = _with_store_at_its_address(rendezvous._create_c10d_store)
    atexit.register(_end_record)
    if environment.replace_backend or environment.encrypts:
        _replace_named_backends()


def _with_store_at_its_address(function: Any) -> Any:
    """Let the store of rank 0 listen at MASTER_ADDR alone, where torch would listen at all addresses of the machine.

    If MASTER_ADDR is a name, or no address of this machine, others may reach the machine at another address: then torch
    listens as it does without ringweave.
    """

    @functools.wraps(function)
    def create_store(hostname: str, port: int, rank: int, world_size: int, timeout: Any, use_libuv: bool = True) -> Any:
        import torch.distributed as dist

        if WorkerEnvironment.from_environ(os.environ).encrypts:
            return _create_encrypted_store(function, hostname, port, rank, world_size, timeout, use_libuv)
        is_in_agent = os.environ.get(_AGENT_STORE) == str(True)  # torchrun's own process listens
        listener = None if rank != 0 or is_in_agent else _listen_at(hostname, port)
        if listener is None:
            return function(hostname, port, rank, world_size, timeout, use_libuv)
        made = {"world_size": world_size, "timeout": timeout, "use_libuv": use_libuv, "multi_tenant": True}
        return dist.TCPStore(hostname, port, is_master=True, master_listen_fd=listener.detach(), **made)

    return create_store


def _create_encrypted_store(
    function: Any, hostname: str, port: int, rank: int, world_size: int, timeout: Any, use_libuv: bool
) -> Any:
    """Return the store of a run whose nodes talk by TLS: it listens on loopback, behind a door at MASTER_ADDR.

    A store of torchrun's own process stays plain: that process has no certificate.
    """
    from ringweave.comm.transport import tunnel

    if os.environ.get(_AGENT_STORE) == str(True):
        return function(hostname, port, rank, world_size, timeout, use_libuv)
    ways = tunnel.tunnel_for(WorkerEnvironment.from_environ(os.environ))
    assert ways is not None, "the run is encrypted"
    import torch.distributed as dist

    made = {"world_size": world_size, "timeout": timeout, "use_libuv": use_libuv, "multi_tenant": True}
    if rank != 0:
        return dist.TCPStore(tunnel.LOOPBACK, ways.open_store_gate(hostname, port), is_master=False, **made)
    store_port, listener = ways.listen_for_store(hostname, port)
    own: dict[str, Any] = {} if listener is None else {"master_listen_fd": listener.detach()}
    return dist.TCPStore(tunnel.LOOPBACK, store_port, is_master=True, **own, **made)


def _listen_at(host: str, port: int) -> socket.socket | None:
    """Return a listener at an address of this machine; None if that is not one, or is taken.

    A store of this process may have taken it, which torch finds again then.
    """
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        return ports.defer_accept(socket.create_server((host, port), family=family, backlog=_STORE_BACKLOG))
    except (ValueError, OSError):
        return None


def _end_record() -> None:
    """Complete run.json if this process is torchrun: it has loaded its launcher, which no worker does."""
    if "torch.distributed.launcher.api" in sys.modules:
        from ringweave.comm import torchrun

        torchrun.end_record()


def _create_group(options: object, backend_options: object) -> object:
    from ringweave.comm import backend

    return backend.create_group(options, backend_options)


def _with_own_monitored_barrier(function: Any) -> Any:
    from torch.distributed import distributed_c10d

    @functools.wraps(function)
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        is_member = not distributed_c10d._rank_not_in_group(group)
        if not is_member or distributed_c10d.get_backend(group) != "ringweave":
            function(group, timeout, wait_all_ranks)
            return
        limit = timedelta(seconds=timeout) if isinstance(timeout, float) else timeout  # as torch's function does
        own: Any = distributed_c10d._get_default_group() if group is None else group
        own.monitored_barrier(limit, wait_all_ranks=wait_all_ranks)

    return monitored_barrier


def _replace_named_backends() -> None:
    """Replace gloo or nccl, where named, by ringweave: RINGWEAVE_REPLACE_BACKEND=1, and where a run is encrypted."""
    _replace(("init_process_group", "new_group"), _with_own_backend)


def _replace(names: tuple[str, ...], wrap: Callable[[Any], Any]) -> None:
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    for name in names:
        replaced = wrap(getattr(distributed_c10d, name))
        for module in (distributed_c10d, dist):
            setattr(module, name, replaced)


def new_native_group(ranks: list[int], backend: str) -> Any:
    """Make a group of torch's own "gloo" or "nccl", as `dist.new_group` does, whatever replaces them in scripts.

    In an encrypted run it is one of ringweave: torch's own would connect plainly.
    """
    import torch.distributed as dist

    new_group: Any = dist.new_group
    if WorkerEnvironment.from_environ(os.environ).encrypts:
        return new_group(ranks, backend="ringweave")
    return getattr(new_group, "of_torch", new_group)(ranks, backend=backend)


def _with_own_backend(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        arguments = inspect.signature(function).bind(*args, **kwargs)
        named = arguments.arguments.get("backend")
        if named is not None and _is_native_backend(named):
            arguments.arguments["backend"] = "ringweave"  # which hands the options of NCCL on
        elif named is not None and str(named).lower() != "ringweave":
            _refuse_plain_backend(str(named))
        return function(*arguments.args, **arguments.kwargs)

    replaced: Any = call
    replaced.of_torch = function
    return replaced


def _refuse_plain_backend(named: str) -> None:
    """Refuse a backend of others in an encrypted run."""
    if WorkerEnvironment.from_environ(os.environ).encrypts:
        do = f"Name gloo, nccl or none, or run with --encrypt off ({ENCRYPT})"
        expected = "ringweave, which encrypts what leaves a node"
        raise UsageError("backend of an encrypted run", got=named, expected=expected, do=do)


def _with_grouped_messages(function: Any) -> Any:
    """Let a batch of sends and receives in a group of ours be grouped, as in torch's own groups."""

    @functools.wraps(function)
    def call(p2p_op_list: Any) -> Any:
        native: Any = sys.modules.get("ringweave.comm.native_backend")  # without it no group is ours
        group = native.group_of_batch(p2p_op_list) if native else None
        return function(p2p_op_list) if group is None else native.start_grouped(group, p2p_op_list)

    return call


def _is_native_backend(named: str) -> bool:
    """Return True if every backend in "gloo", "nccl" or "cpu:gloo,cuda:nccl" runs inside ours."""
    return {part.rpartition(":")[2] for part in str(named).lower().split(",")} <= {"gloo", "nccl"}
