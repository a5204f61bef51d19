"""Lightning's Fabric on `ringweave.prepare`: importing this module makes `strategy="ringweave"` known to it.

Lightning starts no process and makes no process group: the launcher and ringweave do. The batch of a train step is the
loader's batch size times the number of processes that the job was started with, and each worker computes its share.
Under `ringweave run --elastic` the group begins with the training, and number and rank of the processes are those of
the present membership. The Trainer's strategy in `lightning` shares the first half of this module.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import strategies
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ringweave import integrations, training
from ringweave.comm import default_group
from ringweave.errors import TrainingError
from ringweave.integrations import trainer_parts
from ringweave.integrations.trainer_parts import PartLoader, PreparedLoader
from ringweave.training import SharedLoader

VERSIONS = ("2.6", "2.7")
"""First version that was tested, and the first one that was not."""
integrations.check_version("lightning", *VERSIONS)


class LaunchedProcesses(ClusterEnvironment):
    """Processes that a launcher has started; in an elastic job they are those of the present membership."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        return int(os.environ.get("MASTER_PORT", "0"))

    @staticmethod
    def detect() -> bool:
        return trainer_parts.is_launched()

    def world_size(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))

    def set_world_size(self, size: int) -> None:
        """Do nothing: the launcher knows it."""

    def global_rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the launcher knows it."""

    def local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", "0"))

    def node_rank(self) -> int:
        return int(os.environ.get("GROUP_RANK", "0"))


class LaunchedStrategy:
    """Processes, collectives and preparation of both kinds of strategy; a base before Lightning's DDPStrategy."""

    cluster_environment: Any
    parallel_devices: Any
    _ddp_kwargs: dict[str, Any]
    _prepared: SharedLoader | None
    _options: dict[str, Any]

    def __init__(
        self,
        *args: Any,
        weight: Sequence[float] | Callable[[Any], float] | None = None,
        max_samples: int | None = None,
        extra_state: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Create it; `weight`, `max_samples` and `extra_state` are those of `ringweave.prepare`."""
        super().__init__(*args, **kwargs)
        if self.cluster_environment is None:
            self.cluster_environment = LaunchedProcesses()
        self._options = {"weight": weight, "max_samples": max_samples, "extra_state": extra_state}
        self._prepared = None
        self._batch_factor = int(os.environ.get("WORLD_SIZE", "1"))
        """Processes that the job was started with: batches depend on it."""

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Make it known by its name."""
        strategy_registry.register("ringweave", cls, description="Unequal shares and elastic training by ringweave")

    @property
    def root_device(self) -> torch.device:
        """Device of this process; on a CPU there is one for all."""
        return self.parallel_devices[self.cluster_environment.local_rank() % len(self.parallel_devices)]

    def _configure_launcher(self) -> None:
        """Start no processes: the launcher has."""

    def _make_group(self) -> None:
        if not trainer_parts.is_elastic():
            default_group.ensure_process_group(os.environ)

    def _prepare_all(
        self, module: nn.Module, optimizer: Optimizer, loader: DataLoader, extra: Mapping[str, Any], **options: Any
    ) -> DistributedDataParallel:
        """Let ringweave wrap the model; return it."""
        given = {**self._options, **options}
        given["extra_state"] = {**extra, **(self._options["extra_state"] or {})}
        parallel, _, self._prepared = training.prepare(
            module, optimizer, loader, trainer_parts.mode_of_launcher(), ddp=self._ddp_kwargs, **given
        )
        return parallel

    def _evaluation_slice(self, num_samples: int) -> slice:
        """Return this process's slice of so many samples: by the present shares once there are some."""
        if self._prepared is None:
            return trainer_parts.equal_slice(num_samples)
        return self._prepared.evaluation_slice(num_samples)

    # Collectives; waiting in them is no time of computing.

    def _waiting(self) -> AbstractContextManager:
        return contextlib.nullcontext() if self._prepared is None else self._prepared.timer.wait()

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        with self._waiting():
            super().barrier(*args, **kwargs)  # pyrefly: ignore - of DDPStrategy

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        with self._waiting():
            return super().broadcast(obj, src)  # pyrefly: ignore - of DDPStrategy

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        with self._waiting():
            return super().all_gather(tensor, group, sync_grads)  # pyrefly: ignore - of DDPStrategy

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all processes, or any of them, decide so."""
        found = torch.tensor(int(decision), device=self.root_device)
        return bool(self._all_reduce(found, None, "min" if all else "max"))

    def _all_reduce(self, tensor: Any, group: Any, operation: Any) -> Any:
        """Reduce a tensor in place, over the processes that take part; a mean of whole numbers is no whole number."""
        if not isinstance(tensor, Tensor) or not dist.is_initialized():
            return tensor
        if isinstance(operation, str):
            operation = getattr(dist.ReduceOp, "AVG" if operation.lower() == "mean" else operation.upper())
        if operation == dist.ReduceOp.AVG and not tensor.is_floating_point():
            tensor = tensor.double()
        with self._waiting():
            dist.all_reduce(tensor, operation, group=group)
        return tensor


class RingweaveFabricStrategy(LaunchedStrategy, strategies.DDPStrategy):
    """Strategy of Fabric; model, optimizer and first loader are prepared once all of them are set up.

    In an elastic job the loop is as with `ringweave.prepare`: missing samples come as further batches.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._backward_sync_control = _SharedBackwardSync()
        self._module: _SharedModule | None = None
        self._optimizer: Optimizer | None = None
        self._loader: _FabricLoader | None = None
        self._schedule: Any = None

    @property
    def distributed_sampler_kwargs(self) -> None:  # pyrefly: ignore - of the base; None leaves samplers as they are
        return None

    def _setup_distributed(self) -> None:
        self._make_group()
        self._set_world_ranks()

    def setup_module(self, module: nn.Module) -> nn.Module:  # pyrefly: ignore - the base returns its DDP
        """Return the model, which is prepared once its optimizer and loader are there; as it is if it is not trained.

        Raises:
            TrainingError: There are several models to train.
        """
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return module
        _check_single("models to train with Fabric", self._module)
        self._module = _SharedModule(module)
        self._prepare_if_complete()
        return self._module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer.

        Raises:
            TrainingError: There are several.
        """
        _check_single("optimizers of Fabric", self._optimizer)
        self._optimizer = optimizer
        self._prepare_if_complete()
        return optimizer

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None) -> Any:
        """Set up model and optimizer; the schedule goes along with the state that joining workers get."""
        self._schedule = scheduler
        return super().setup_module_and_optimizers(module, optimizers, scheduler)

    def process_dataloader(self, dataloader: DataLoader) -> Any:
        """Return a loader that hands out this process's parts: the first one to train with, others for evaluation."""
        whole = trainer_parts.whole_batch_loader(dataloader, self._batch_factor)
        if self._loader is not None:
            return PartLoader(whole, self._evaluation_slice) if trainer_parts.has_index(dataloader) else dataloader
        self._loader = _FabricLoader(whole)
        self._prepare_if_complete()
        return self._loader

    def _prepare_if_complete(self) -> None:
        if self._module is None or self._optimizer is None or self._loader is None:
            return
        extra = {} if self._schedule is None else {"schedule": self._schedule}
        self._module.begin_training(self._prepare_all(self._module.module, self._optimizer, self._loader.raw, extra))
        assert self._prepared is not None, "prepared"
        self._loader.begin_training(self._prepared)
        self._set_world_ranks()

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over all processes, each with the same weight."""
        return self._all_reduce(tensor, group, reduce_op)

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        return super().get_module_state_dict(_unshared(module))

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        super().load_module_state_dict(_unshared(module), state_dict, strict)

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint; a worker that has joined later has the state of the others, and loads nothing."""
        if state and self._prepared is not None and self._prepared.has_joined_late:
            return {}
        return super().load_checkpoint(path, state, *args, **kwargs)


class _SharedModule(nn.Module):
    """Model whose passes go through DDP once it is prepared."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._parallel: list[DistributedDataParallel] = []

    @property
    def parallel(self) -> DistributedDataParallel | None:
        return self._parallel[0] if self._parallel else None

    def begin_training(self, parallel: DistributedDataParallel) -> None:
        """Let the passes go through DDP from here on."""
        self._parallel = [parallel]  # in a list, as it is no part of this module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute a pass.

        Raises:
            TrainingError: It is one of the training, and there is no optimizer or no loader yet.
        """
        if self.parallel is None and self.training and torch.is_grad_enabled():
            do = "Call fabric.setup(model, optimizer) and fabric.setup_dataloaders(loader) before the first batch"
            raise TrainingError("training with Fabric", got="a pass", expected="model, optimizer and loader", do=do)
        return (self.module if self.parallel is None else self.parallel)(*args, **kwargs)


class _SharedBackwardSync(_BackwardSyncControl):
    """Control of the passes whose gradients are not summed."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager:
        parallel = module.parallel if isinstance(module, _SharedModule) else None
        return parallel.no_sync() if enabled and parallel is not None else contextlib.nullcontext()


class _FabricLoader(PreparedLoader):
    """Loader of the training of Fabric; until there is a training it knows its length alone."""

    def __init__(self, raw: DataLoader) -> None:
        self.raw, self.dataset = raw, raw.dataset

    def begin_training(self, prepared: SharedLoader) -> None:
        super().__init__(prepared)

    def __len__(self) -> int:
        return len(self.raw)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.prepared)


def _unshared(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, _SharedModule) else module


def _check_single(what: str, present: object) -> None:
    if present is not None:
        do = 'Use strategy="ddp" for several, which runs on ringweave\'s backend under ringweave run'
        raise TrainingError(what, got="a second one", expected="one", do=do)


if "ringweave" not in strategies.STRATEGY_REGISTRY:
    RingweaveFabricStrategy.register_strategies(strategies.STRATEGY_REGISTRY)
