"""Accelerate on `ringweave.prepare`: an `Accelerator` whose `prepare` gives each worker its share of every batch.

Importing this module changes how Accelerate makes its process group: it is ringweave's. Under `ringweave run --elastic`
there is none before `prepare`, and the number and the rank of the processes are those of the present membership.
"""

import contextlib
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate import state as accelerate_state
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import operations
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from ringweave import integrations, training
from ringweave.comm import default_group
from ringweave.errors import TrainingError
from ringweave.integrations import trainer_parts
from ringweave.integrations.trainer_parts import BatchOwner, PartLoader, PreparedLoader
from ringweave.training import SharedLoader

VERSIONS = ("1.15", "1.16")
"""First version that was tested, and the first one that was not."""
integrations.check_version("accelerate", *VERSIONS)

TrainingTriple = tuple[nn.Module, Optimizer, DataLoader]
"""Model, optimizer and training loader of a call of `prepare`."""


class Accelerator(accelerate.Accelerator):
    """Accelerator that trains on unequal workers, and under `ringweave run --elastic`.

    `prepare` gets model, optimizer and training loader in one call. The batch of a train step is that of Accelerate:
    the loader's batch size times the number of processes that the job was started with, or the loader's batch size with
    `split_batches`. Loaders that come after the first one are for evaluation.
    """

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
        self._init_ringweave(weight=weight, max_samples=max_samples, extra_state=dict(extra_state or {}))

    def _init_ringweave(self, **options: Any) -> None:
        self.ringweave_options = options
        self.training_loader: TrainingLoader | None = None
        """Loader of the training, once prepared."""
        self.keeps_loaders = False
        """`prepare` returns a loader alone as it is."""
        self.before_backward: Callable[[Tensor], object] = lambda _: None
        """Called with each loss before its backward pass."""
        self.initial_num_processes = self.num_processes
        """Processes that the job was started with: batches and schedules depend on it."""

    @property
    def batch_factor(self) -> int:
        """Batch of a train step, as a multiple of the loader's batch size."""
        return 1 if self.split_batches else self.initial_num_processes

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare all objects, and return them in the same order.

        Raises:
            TrainingError: A model to train comes without its optimizer and loader, or there are several.
            UsageError: The mode is one with a parameter server.
        """
        if not trainer_parts.is_launched():
            return super().prepare(*args, device_placement=device_placement)
        places = [None] * len(args) if device_placement is None else device_placement
        found = dict(enumerate(args))
        models = [index for index, each in found.items() if isinstance(each, nn.Module) and _is_trained(each)]
        optimizers = [index for index, each in found.items() if isinstance(each, Optimizer)]
        loaders = [index for index, each in found.items() if isinstance(each, DataLoader)]
        if models or optimizers:
            triple = _single_triple(models, optimizers, loaders)
            schedulers = [each for each in args if isinstance(each, LRScheduler)]
            model, optimizer, loader = (args[index] for index in triple)
            prepared = self._prepare_training((model, optimizer, loader), places[triple[0]], schedulers)
            found.update(zip(triple, prepared, strict=True))
        for index, each in enumerate(args):
            if found[index] is each and isinstance(each, nn.Module):  # one that is not trained
                found[index] = self.prepare_model(each, device_placement=places[index], evaluation_mode=True)
            elif found[index] is each:
                found[index] = self._prepare_one(each, first_pass=True, device_placement=places[index])
            if isinstance(each, LRScheduler):
                found[index] = self._prepare_one(each)
        return found[0] if len(args) == 1 else tuple(found.values())

    def _prepare_training(
        self, triple: TrainingTriple, placement: bool | None, schedulers: Sequence[LRScheduler]
    ) -> tuple[nn.Module, Optimizer, "TrainingLoader"]:
        """Let Accelerate place the model and add mixed precision, and ringweave do the rest."""
        model, optimizer, loader = triple
        placed = self.prepare_model(model, device_placement=placement, evaluation_mode=True)
        accelerated: Any = self.prepare_optimizer(optimizer)
        extra: dict[str, Any] = {f"scheduler {number}": each for number, each in enumerate(schedulers)}
        if self.scaler is not None and self.scaler.is_enabled():
            extra["scaler"] = self.scaler
        options: dict[str, Any] = {
            **self.ringweave_options,
            "extra_state": {**extra, **self.ringweave_options["extra_state"]},
        }
        parallel, _, prepared = training.prepare(
            placed,
            accelerated.optimizer,
            trainer_parts.whole_batch_loader(loader, self.batch_factor),
            trainer_parts.mode_of_launcher(),
            ddp=self.ddp_handler.to_kwargs() if self.ddp_handler is not None else {},
            **options,
        )
        self._models[-1] = parallel
        self.training_loader = TrainingLoader(prepared, self.device)
        self.register_for_checkpointing(self.training_loader)
        return parallel, accelerated, self.training_loader

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Prepare a loader for evaluation; a stream, and one before the training is prepared, as Accelerate does."""
        if self.keeps_loaders or isinstance(data_loader, EvaluationLoader):
            return data_loader
        if self.training_loader is None or not trainer_parts.has_index(data_loader):
            return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        return EvaluationLoader(
            trainer_parts.whole_batch_loader(data_loader, self.batch_factor), self.training_loader.prepared, self.device
        )

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare a schedule; it takes as many steps for each train step as the job had processes at its start."""
        if not trainer_parts.is_launched() or getattr(scheduler, "_is_accelerate_prepared", False):
            return super().prepare_scheduler(scheduler)
        prepared: Any = super().prepare_scheduler(scheduler)
        prepared.__class__ = _SteadyScheduler
        prepared.num_steps = self.batch_factor
        prepared.split_batches = True
        return prepared

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Compute gradients as Accelerate does."""
        self.before_backward(loss)
        super().backward(loss, **kwargs)

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Generator[None]:
        """Context in which gradients are not summed; also while this process is the only one."""
        with model.no_sync() if isinstance(model, DistributedDataParallel) else contextlib.nullcontext():
            yield

    def gather(self, tensor: Any) -> Any:
        """Gather tensors along their first dimension, which may differ between processes."""
        if not trainer_parts.is_launched():
            return super().gather(tensor)
        return operations.recursively_apply(trainer_parts.gather_rows, tensor, error_on_other_type=True)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather the results of one batch from all processes, each sample once."""
        active = self.gradient_state.active_dataloader
        if isinstance(active, BatchOwner) and not active.num_own:
            input_data = operations.recursively_apply(lambda rows: rows[:0], input_data)
        return super().gather_for_metrics(input_data, use_gather_object)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Let the next pass begin after so many batches."""
        if not isinstance(dataloader, TrainingLoader):
            return super().skip_first_batches(dataloader, num_batches)
        dataloader.start_at(dataloader.prepared.next_epoch, num_batches)
        return dataloader

    def load_state(self, input_dir: str | None = None, load_kwargs: dict | None = None, **kwargs: Any) -> None:
        """Load a checkpoint; a worker that has joined later has the state of the others, and loads nothing."""
        if self.training_loader is None or not self.training_loader.has_joined_late:
            super().load_state(input_dir, load_kwargs, **kwargs)


def attach(accelerator: accelerate.Accelerator, **options: Any) -> Accelerator:
    """Turn an accelerator into ringweave's, in place; nothing may be prepared yet.

    Args:
        accelerator: Accelerator of the library.
        options: `weight`, `max_samples` and `extra_state` of `ringweave.prepare`.
    """
    accelerator.__class__ = Accelerator
    assert isinstance(accelerator, Accelerator), "its class is set"
    accelerator._init_ringweave(**{"weight": None, "max_samples": None, "extra_state": {}, **options})
    return accelerator


class TrainingLoader(PreparedLoader, DataLoaderStateMixin):
    """Loader of the training as Accelerate expects it: it moves batches to the device and knows the last one."""

    def __init__(self, prepared: SharedLoader, device: torch.device) -> None:
        super().__init__(prepared)
        self.device, self.total_batch_size = device, prepared.batch_size
        self.gradient_state = accelerate_state.GradientState()

    def __iter__(self) -> Iterator[Any]:
        """Iterate over this process's parts of the batches of the next epoch."""
        self.begin()
        try:
            with contextlib.closing(iter(self.prepared)) as batches:  # pyrefly: ignore - both are generators
                for batch in batches:
                    self.end_of_dataloader = self.prepared.is_last_batch
                    yield operations.send_to_device(batch, self.device)
        finally:
            self.end()

    def begin(self) -> None:
        """Start a pass; no sample of it is doubled."""
        self.reset()
        self.remainder = 0
        self.gradient_state._add_dataloader(self)


class EvaluationLoader(PartLoader, DataLoaderStateMixin):
    """Loader of an evaluation, with parts in proportion to the present shares."""

    def __init__(self, loader: DataLoader, prepared: SharedLoader, device: torch.device) -> None:
        super().__init__(loader, prepared.evaluation_slice)
        self._device, self.total_batch_size = device, loader.batch_size
        self.gradient_state = accelerate_state.GradientState()

    def __iter__(self) -> Iterator[Any]:
        """Iterate over this process's parts, and know the last one."""
        self.reset()
        self.remainder = 0
        self.gradient_state._add_dataloader(self)
        try:
            for number, batch in enumerate(super().__iter__(), start=1):
                self.end_of_dataloader = number == len(self)
                yield operations.send_to_device(batch, self._device)
        finally:
            self.end()


class _SteadyScheduler(AcceleratedScheduler):
    """Schedule whose steps do not depend on the present number of processes."""

    num_steps = 1

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Take the steps of one train step, if it was taken; a schedule with an end takes none after it."""
        is_skipped = self.step_with_optimizer and not self.gradient_state.sync_gradients
        for _ in range(1 if is_skipped or not self.step_with_optimizer else self.num_steps):
            end = getattr(self.scheduler, "total_steps", None)
            if end is None or self.scheduler._step_count <= end:
                super().step(*args, **kwargs)


def _single_triple(models: list[int], optimizers: list[int], loaders: list[int]) -> tuple[int, int, int]:
    """Return the places of model, optimizer and training loader in a call of `prepare`."""
    if len(models) != 1 or len(optimizers) != 1 or not loaders:
        got = f"{len(models)} models to train, {len(optimizers)} optimizers and {len(loaders)} loaders"
        do = "Give prepare the model, its optimizer and its training loader in one call, the loader before others"
        raise TrainingError(
            "objects of Accelerator.prepare", got=got, expected="one of each, and further loaders", do=do
        )
    return models[0], optimizers[0], loaders[0]


def _is_trained(model: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in model.parameters())


def _make_own_group(original: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor of PartialState that trains in ringweave's group, or without one in an elastic job."""

    def construct(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        if "RANK" not in os.environ or accelerate_state.PartialState._shared_state:
            original(self, cpu, **kwargs)
            return
        if kwargs.get("backend") == "ringweave":
            del kwargs["backend"]
        cpu = cpu or not torch.accelerator.is_available()
        if trainer_parts.is_elastic():
            with _group_of_environment():
                original(self, cpu, **kwargs)
            return
        default_group.ensure_process_group(os.environ)
        original(self, cpu, **kwargs)

    return construct


@contextlib.contextmanager
def _group_of_environment() -> Generator[None]:
    """Let torch.distributed say what the launcher has set, as if there were a group."""
    environ = os.environ
    said: dict[str, Any] = {
        "is_initialized": lambda: True,
        "get_world_size": lambda *_: int(environ["WORLD_SIZE"]),
        "get_rank": lambda *_: int(environ["RANK"]),
    }
    before = {name: getattr(dist, name) for name in said}
    try:
        for name, function in said.items():
            setattr(dist, name, function)
        yield
    finally:
        for name, function in before.items():
            setattr(dist, name, function)


def _of_membership(name: str, read: Callable[[], int]) -> property:
    """Return an attribute of Accelerate's state: in an elastic job that of the present membership."""

    def get(self: Any) -> int:
        if trainer_parts.is_elastic() and dist.is_initialized():
            return read()
        if name not in self.__dict__:
            raise AttributeError(name)
        return self.__dict__[name]

    def set_value(self: Any, value: int) -> None:
        self.__dict__[name] = value

    return property(get, set_value)


def _wait_in_group(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a barrier that passes before an elastic job has a group: each worker prepares its data alone."""

    def wait(self: Any) -> None:
        if dist.is_initialized() or not trainer_parts.is_elastic():
            original(self)

    return wait


def _adapt_states() -> None:
    """Adapt the state classes of Accelerate, once."""
    partial: Any = accelerate_state.PartialState
    partial.__init__ = _make_own_group(partial.__init__)
    partial.wait_for_everyone = _wait_in_group(partial.wait_for_everyone)
    for each in (partial, accelerate_state.AcceleratorState):
        each.num_processes = _of_membership("num_processes", dist.get_world_size)
        each.process_index = _of_membership("process_index", dist.get_rank)


_adapt_states()
