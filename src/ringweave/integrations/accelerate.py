"""Accelerate on `ringweave.prepare`: an `Accelerator` whose `prepare` gives each worker its share of every batch.

Importing this module changes how Accelerate makes its process group: it is ringweave's. Under `ringweave run --elastic`
there is none before `prepare`, and the number and the rank of the processes are those of the present membership.
"""

import abc
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
from torch.utils.data import DataLoader, IterableDataset

from ringweave import integrations, training
from ringweave.comm import default_group
from ringweave.environment import WorkerEnvironment
from ringweave.errors import TrainingError, UsageError, explain
from ringweave.planning import modes
from ringweave.training import SharedLoader
from ringweave.training.data import order, sources
from ringweave.training.data.order import Portion
from ringweave.training.elastic.script_collectives import MAX_INPUT_BYTES

VERSIONS = ("1.15", "1.16")
"""First version that was tested, and the first one that was not."""
integrations.check_version("accelerate", *VERSIONS)

TrainingTriple = tuple[nn.Module, Optimizer, DataLoader]
"""Model, optimizer and training loader of a call of `prepare`."""


def is_launched() -> bool:
    """Return True if a launcher has started this process, or it has a process group."""
    return "RANK" in os.environ or dist.is_initialized()


def is_elastic() -> bool:
    """Return True if this process is a worker of an elastic job."""
    return bool(WorkerEnvironment.from_environ(os.environ).coordinators)


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
        if not is_launched():
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
            whole_batch_loader(loader, self.batch_factor),
            _mode_of_launcher(),
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
        if self.training_loader is None or not _has_index(data_loader):
            return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        return EvaluationLoader(
            whole_batch_loader(data_loader, self.batch_factor), self.training_loader.prepared, self.device
        )

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare a schedule; it takes as many steps for each train step as the job had processes at its start."""
        if not is_launched() or getattr(scheduler, "_is_accelerate_prepared", False):
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
        """Gather tensors along their first dimension, which may differ between processes.

        Under `--elastic` pieces of up to 1 MiB are sent, so that a worker that dies meanwhile ends nothing.
        """
        if not is_launched():
            return super().gather(tensor)
        return operations.recursively_apply(_gather_rows, tensor, error_on_other_type=True)

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


class BatchOwner(abc.ABC):
    """Loader that knows this process's portion of its present batch."""

    @property
    @abc.abstractmethod
    def portion(self) -> Portion:
        """This process's portion of the present batch."""

    @property
    def num_own(self) -> int:
        """Samples of its own; none while it computes a placeholder sample, whose results count nowhere."""
        return len(self.portion.indices)


class TrainingLoader(BatchOwner, DataLoaderStateMixin):
    """Loader of the training as Accelerate expects it: it moves batches to the device and knows the last one."""

    def __init__(self, prepared: SharedLoader, device: torch.device) -> None:
        self.prepared, self.device = prepared, device
        self.gradient_state = accelerate_state.GradientState()
        self.dataset, self.total_batch_size = prepared.dataset, prepared.batch_size

    def __len__(self) -> int:
        """Train steps, or batches to accumulate, in a whole epoch."""
        return len(self.prepared)

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

    @property
    def portion(self) -> Portion:
        """This process's portion of the present batch."""
        assert self.prepared.latest_portion is not None, "a batch was handed out"
        return self.prepared.latest_portion

    @property
    def misses_samples(self) -> bool:
        """The last train step misses samples of a lost worker, which come as the next batches."""
        return self.prepared.misses_samples

    @property
    def has_joined_late(self) -> bool:
        """This worker joined while others were training."""
        return self.prepared.has_joined_late

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, which begins in the middle where it was resumed or joined there."""
        if self.prepared.is_elastic or epoch != self.prepared.next_epoch:
            self.prepared.set_epoch(epoch)

    def start_at(self, epoch: int, num_batches: int) -> None:
        """Let the next pass begin in this epoch, after so many batches."""
        position = num_batches * self.prepared.batch_size
        self.prepared.load_state_dict({**self.prepared.state_dict(), "epoch": epoch, "position": position})

    def state_dict(self) -> dict[str, int]:
        return self.prepared.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.prepared.load_state_dict(state)


class EvaluationLoader(BatchOwner, DataLoaderStateMixin):
    """Loader of an evaluation: each pass hands out every batch in parts, in proportion to the present shares."""

    def __init__(self, loader: DataLoader, prepared: SharedLoader, device: torch.device) -> None:
        self._loader, self._prepared, self._device = loader, prepared, device
        self.gradient_state = accelerate_state.GradientState()
        self.dataset, self.total_batch_size = loader.dataset, loader.batch_size
        self._portion: Portion | None = None

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over this process's parts; one without samples of a batch gets a placeholder sample."""
        portions = [self._own_portion(indices) for indices in self._batches()]
        loader = sources.with_batch_sampler(self._loader, [each.samples_to_load for each in portions])
        self.reset()
        self.remainder = 0
        self.gradient_state._add_dataloader(self)
        try:
            for number, (batch, self._portion) in enumerate(zip(loader, portions, strict=True), start=1):
                self.end_of_dataloader = number == len(portions)
                yield operations.send_to_device(batch, self._device)
        finally:
            self.end()

    @property
    def portion(self) -> Portion:
        """This process's portion of the present batch."""
        assert self._portion is not None, "a batch was handed out"
        return self._portion

    def _batches(self) -> Iterator[Any]:
        samples = torch.tensor(order.evaluation_samples(self._loader), dtype=torch.int64).numpy()
        assert self._loader.batch_size is not None, "checked with the samples"
        for first in range(0, len(samples), self._loader.batch_size):
            yield samples[first : first + self._loader.batch_size]

    def _own_portion(self, indices: Any) -> Portion:
        return Portion(indices=indices[self._prepared.evaluation_slice(len(indices))], batch=indices)


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


def whole_batch_loader(loader: DataLoader, factor: int) -> DataLoader:
    """Return the loader with `factor` times its batch size: that of a train step, from that of each process."""
    if factor == 1 or loader.batch_size is None or type(loader.batch_sampler) is not torch.utils.data.BatchSampler:
        return loader  # `prepare` refuses batches of no fixed size
    sampler: dict[str, Any] = {} if isinstance(loader.dataset, IterableDataset) else {"sampler": loader.sampler}
    return DataLoader(
        loader.dataset,
        batch_size=factor * loader.batch_size,
        drop_last=loader.drop_last,
        **sampler,
        **sources.loading_options(loader),
    )


def _mode_of_launcher() -> str:
    """Return the mode: that of the launcher, else balanced.

    Raises:
        UsageError: It is one with a parameter server.
    """
    mode = WorkerEnvironment.from_environ(os.environ).mode or modes.AUTO
    if mode in modes.SERVER_MODES:
        do = "Start the trainer with --mode balanced, or write the loop yourself with ringweave.prepare"
        raise UsageError(explain("mode of a trainer", got=mode, expected="sync, balanced or auto", do=do))
    return modes.BALANCED if mode == modes.AUTO else mode


def _single_triple(models: list[int], optimizers: list[int], loaders: list[int]) -> tuple[int, int, int]:
    """Return the places of model, optimizer and training loader in a call of `prepare`."""
    if len(models) != 1 or len(optimizers) != 1 or not loaders:
        got = f"{len(models)} models to train, {len(optimizers)} optimizers and {len(loaders)} loaders"
        do = "Give prepare the model, its optimizer and its training loader in one call, the loader before others"
        raise TrainingError(
            explain("objects of Accelerator.prepare", got=got, expected="one of each, and further loaders", do=do)
        )
    return models[0], optimizers[0], loaders[0]


def _is_trained(model: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in model.parameters())


def _has_index(loader: DataLoader) -> bool:
    is_regular = type(loader.batch_sampler) in (torch.utils.data.BatchSampler, type(None))
    return loader.batch_size is not None and is_regular and not isinstance(loader.dataset, IterableDataset)


def _gather_rows(rows: Tensor) -> Tensor:
    """Gather rows from all processes, which may have different numbers of them.

    In an elastic job the output of a worker that is catching up is a copy of another one's: by the sender's rank, which
    is sent beside the number of rows, each counts once.
    """
    rows = rows[None] if rows.ndim == 0 else rows.contiguous()
    headers = [each.tolist() for each in _all_gather(torch.tensor([dist.get_rank(), len(rows)], device=rows.device))]
    most = max(num_rows for _, num_rows in headers)
    padded = torch.cat([rows, rows.new_zeros((most - len(rows), *rows.shape[1:]))])
    pieces = [_all_gather(piece) for piece in padded.flatten().split(max(1, MAX_INPUT_BYTES // rows.element_size()))]
    num_outputs = min(len(headers), *(len(piece) for piece in pieces))
    senders = {headers[index][0]: index for index in reversed(range(num_outputs))}
    gathered = [
        torch.cat([piece[index] for piece in pieces]).view(padded.shape)[: headers[index][1]]
        for _, index in sorted(senders.items())
    ]
    return torch.cat(gathered)


def _all_gather(tensor: Tensor) -> list[Tensor]:
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)
    return gathered


def _make_own_group(original: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor of PartialState that trains in ringweave's group, or without one in an elastic job."""

    def construct(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        if "RANK" not in os.environ or accelerate_state.PartialState._shared_state:
            original(self, cpu, **kwargs)
            return
        if kwargs.get("backend") == "ringweave":
            del kwargs["backend"]
        cpu = cpu or not torch.accelerator.is_available()
        if is_elastic():
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
        if is_elastic() and dist.is_initialized():
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
        if dist.is_initialized() or not is_elastic():
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
