"""Lightning's Trainer on `ringweave.prepare`: importing this module makes `strategy="ringweave"` known to it.

It makes the strategy known to Fabric too (`fabric.py`, which says how processes and batches are shared).
"""

import contextlib
import functools
import logging
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
import torchmetrics
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule, Trainer, strategies
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.utils.data import DataLoader, IterableDataset

from ringweave.errors import TrainingError
from ringweave.integrations import trainer_parts
from ringweave.integrations.fabric import LaunchedStrategy, RingweaveFabricStrategy
from ringweave.integrations.trainer_parts import BatchOwner, PartLoader, PreparedLoader
from ringweave.training import SharedLoader
from ringweave.training.data import order

__all__ = ["RingweaveFabricStrategy", "RingweaveStrategy"]

_LOGGER = logging.getLogger("ringweave")
_TENSOR = "ringweave.tensor"
"""Key of a tensor in a state of plain values."""


class RingweaveStrategy(LaunchedStrategy, strategies.DDPStrategy):
    """Strategy of a Trainer that trains on unequal workers, and under `ringweave run --elastic`.

    A step that misses samples of a lost worker is completed inside of the closure of the optimizer, so callbacks see
    each step once.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._training: _TrainingLoader | None = None
        self.batch_owner: BatchOwner | None = None
        """Loader of the present batch."""
        self._logs = _StepLogs()
        self._pass_number = -1
        """Number of the present batch in its train step."""
        self._uses_own_sampler: bool | None = None

    # Setting up.

    def connect(self, model: LightningModule) -> None:
        """Connect the model, before the data: only predictions use Lightning's own sampler."""
        super().connect(model)
        connector = model.trainer._accelerator_connector
        if self._uses_own_sampler is None:
            self._uses_own_sampler = connector.use_distributed_sampler
        connector.use_distributed_sampler = self._uses_own_sampler and model.trainer.predicting

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def setup_distributed(self) -> None:
        """Make the process group; in an elastic job there is none before the training is prepared."""
        reset_seed()
        self._make_group()
        self.set_world_ranks()

    def setup(self, trainer: Trainer) -> None:
        """Set up model and optimizer, and share the batches of the training out.

        Raises:
            TrainingError: An evaluation of an elastic job comes before its training.
        """
        if trainer.state.fn != TrainerFn.FITTING and not dist.is_initialized():
            do = "Call trainer.fit first, or evaluate in a run without --elastic"
            raise TrainingError(
                f"trainer.{trainer.state.fn} of an elastic job", got="no training yet", expected="one", do=do
            )
        for loop in (trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.val_loop):
            _WeightedResults.attach(loop._results, self)
        for loop in (trainer.validate_loop, trainer.test_loop):
            _WeightedResults.attach(loop._results, self)
        super().setup(trainer)
        for metric in self._metrics():
            metric.dist_sync_fn = metric.dist_sync_fn or trainer_parts.gather_parts

    def configure_ddp(self) -> None:
        """Leave the model as it is until there is an optimizer."""

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Create optimizer and schedules, and prepare them with the model and the training loader."""
        super().setup_optimizers(trainer)
        _check_trainer(trainer, self.optimizers, has_trained=self._prepared is not None)
        _set_up_data(trainer)
        if self._training is None:  # limit_train_batches=0
            return
        progress = _LoopProgress(trainer)
        extra = {f"schedule {number}": each.scheduler for number, each in enumerate(self.lr_scheduler_configs)}
        scaler = getattr(self.precision_plugin, "scaler", None)
        extra |= {"trainer": progress, **({"scaler": scaler} if scaler is not None else {})}
        # Memory is not measured: a trial of training_step would log, and call collectives.
        limit = self._options["max_samples"] or order.read_loader(self._training.raw).batch_samples
        assert self.model is not None, "connected"
        self.model = self._prepare_all(self.model, self.optimizers[0], self._training.raw, extra, max_samples=limit)
        assert self._prepared is not None, "prepared"
        self._training.begin_training(self._prepared)
        if self._prepared.is_elastic:
            self.set_world_ranks()
            progress.begin_elastic(self._prepared, self.broadcast)

    def process_dataloader(self, dataloader: object) -> object:
        """Return a loader that hands out this process's parts of each batch; a stream for evaluation as it is.

        Raises:
            TrainingError: There are several loaders to train with, or other objects than DataLoaders.
        """
        assert self.lightning_module is not None, "connected"
        trainer = self.lightning_module.trainer
        if trainer.training:
            _check_training_loader(dataloader, has_one=self._training is not None)
        is_shared = isinstance(dataloader, DataLoader) and not trainer.predicting
        if not is_shared or not (trainer.training or trainer_parts.has_index(dataloader)):
            return dataloader
        whole = trainer_parts.whole_batch_loader(dataloader, self._batch_factor)
        if not trainer.training:
            return _OwnedParts(whole, self)
        self._training = _TrainingLoader(whole, self)
        return self._training

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizer's state, and the place in the data, for which the Trainer has looked already."""
        super().load_optimizer_state_dict(checkpoint)
        assert self.lightning_module is not None, "connected"
        self.lightning_module.trainer.fit_loop._load_combined_loader_states()

    def teardown(self) -> None:
        """Take the model out of DDP."""
        self.model = self.lightning_module
        super().teardown()

    # Train steps.

    def on_train_start(self) -> None:
        """Let a worker that has joined continue where the others are."""
        if self._training is not None and self._training.progress is not None:
            self._training.progress.resume()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._pass_number += 1
        self.set_world_ranks()  # another worker is the first one, if that is lost

    def on_validation_start(self) -> None:
        """Forget the batch of the training."""
        self.batch_owner = None

    on_test_start = on_validation_start

    def on_train_end(self) -> None:
        """End the last pass, which accounts for samples."""
        if self._training is not None:
            self._training.finish()

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Compute the gradients of all samples of the step, then let the optimizer take it."""
        result = closure()  # before optimizer.step, whose time counts as the update alone
        if self._training is not None and self._prepared is not None:
            self._compute_missing(optimizer, self._training)
        output = super().optimizer_step(optimizer, lambda: result, model, **kwargs)
        self._logs.end_step()
        self._pass_number = -1
        return output

    def _compute_missing(self, optimizer: Optimizer, loader: "_TrainingLoader") -> None:
        """Go through the batches of the step again, with the samples of a lost worker."""
        assert self.lightning_module is not None, "connected"
        loop = self.lightning_module.trainer.fit_loop.epoch_loop
        first = loop.batch_idx - self._pass_number
        while loader.misses_samples:
            self._logs.is_repeated = True
            self.lightning_module.zero_grad()
            is_last, self._pass_number = False, -1
            while not is_last:
                self._pass_number += 1
                closure = self._closure_of(loader.draw(), first + self._pass_number, optimizer)
                is_last = not loader.misses_samples
                with contextlib.nullcontext() if is_last else self.block_backward_sync():
                    closure()

    def _closure_of(self, batch: Any, batch_idx: int, optimizer: Optimizer) -> Closure:
        """Return a closure that computes the gradients of a batch, as the loop of the Trainer makes it."""
        assert self.lightning_module is not None, "connected"
        trainer = self.lightning_module.trainer
        loop = trainer.fit_loop.epoch_loop
        batch = trainer.precision_plugin.convert_input(batch)
        batch = self.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
        batch = call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)
        kwargs = loop._build_kwargs(OrderedDict(), batch, batch_idx)
        optimization = loop.automatic_optimization
        return Closure(optimization._make_step_fn(kwargs), optimization._make_backward_fn(optimizer), None)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._without_placeholder():
            return super().training_step(*args, **kwargs)

    # Evaluation and logs.

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._without_placeholder():
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._without_placeholder():
            return super().test_step(*args, **kwargs)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor; the mean of a value of the present step is weighted by samples."""
        is_mean = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
        if not (is_mean and self._logs.key and isinstance(tensor, Tensor) and dist.is_initialized()):
            return self._all_reduce(tensor, group, reduce_op)
        assert self.batch_owner is not None, "it has the batch whose values are logged"
        own = self._logs.own_sums(tensor, self.batch_owner.num_own)
        sums = self._all_reduce(own, group, "sum")
        return self._logs.mean(sums, self.batch_owner.portion.num_total).to(tensor)

    @contextlib.contextmanager
    def weighing_logs(self, name: str, weight: float) -> Generator[None]:
        """Context in which `reduce` gives this process's value so much weight."""
        self._logs.key, self._logs.weight = f"{self._pass_number} {name}", weight
        try:
            yield
        finally:
            self._logs.key = ""

    @contextlib.contextmanager
    def _without_placeholder(self) -> Generator[None]:
        """Context of a step, which leaves metrics as they are if its samples are a placeholder."""
        if self.batch_owner is None or self.batch_owner.num_own:
            yield
            return
        before = [(each, each._copy_state_dict(), each._update_count, each._computed) for each in self._metrics()]
        yield
        for metric, state, update_count, computed in before:
            for name, value in state.items():
                setattr(metric, name, value)
            metric._update_count, metric._computed = update_count, computed

    def _metrics(self) -> list[torchmetrics.Metric]:
        assert self.lightning_module is not None, "connected"
        return [each for each in self.lightning_module.modules() if isinstance(each, torchmetrics.Metric)]


def _check_trainer(trainer: Trainer, optimizers: Sequence[Optimizer], *, has_trained: bool) -> None:
    """Refuse what cannot be shared out in this way."""
    module = trainer.lightning_module
    refused = {
        "a second call of fit": has_trained,
        f"{len(optimizers)} optimizers": len(optimizers) != 1,
        "LBFGS": any(isinstance(each, LBFGS) for each in optimizers),
        "manual optimization in an elastic job": trainer_parts.is_elastic() and not module.automatic_optimization,
        "reload_dataloaders_every_n_epochs": bool(getattr(trainer, "reload_dataloaders_every_n_epochs", 0)),
    }
    for name, is_given in refused.items():
        if is_given:
            do = 'Use strategy="ddp" for it, which runs on ringweave\'s backend under ringweave run'
            expected = "one fit by one optimizer, with automatic optimization"
            raise TrainingError("training by Lightning", got=name, expected=expected, do=do)


def _check_training_loader(loader: object, *, has_one: bool) -> None:
    """Refuse a loader that the Trainer would read ahead of its train step, or a second one."""
    is_stream = isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)
    if has_one or is_stream or not isinstance(loader, DataLoader):
        got = "a second one" if has_one else "a stream" if is_stream else type(loader).__name__
        do = "Give the Trainer one DataLoader of a data set with an index"
        raise TrainingError("loader of the training", got=got, expected="one DataLoader", do=do)


def _set_up_data(trainer: Trainer) -> None:
    """Let the Trainer request its loaders now; all of them in an elastic job, while there are no collectives yet."""
    trainer.fit_loop.setup_data()
    if trainer_parts.is_elastic() and trainer.enable_validation:
        trainer.validating = True
        trainer.fit_loop.epoch_loop.val_loop.setup_data()
        trainer.training = True


class _TrainingLoader(PreparedLoader):
    """Loader of the training as the Trainer expects it; until there is a training it knows its length alone."""

    progress: "_LoopProgress | None" = None
    """Progress of the others, on a worker that has joined them."""

    def __init__(self, raw: DataLoader, strategy: RingweaveStrategy) -> None:
        self.raw, self.dataset, self._strategy = raw, raw.dataset, strategy
        self._has_begun = False
        self._batches: Generator[Any] = (batch for batch in ())
        """The running pass."""

    def begin_training(self, prepared: SharedLoader) -> None:
        """Take over the loader that `prepare` has returned."""
        super().__init__(prepared)
        self._has_begun = True

    def state_dict(self) -> dict[str, int]:
        """Return the place in the data, once there is a training."""
        return super().state_dict() if self._has_begun else {}

    def __len__(self) -> int:
        return len(self.raw)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over this process's parts of the batches of the present epoch."""
        assert self._strategy.lightning_module is not None, "connected"
        self.finish()
        self.set_epoch(self._strategy.lightning_module.trainer.current_epoch)
        self._batches = cast(Generator[Any], iter(self.prepared))
        for batch in self._batches:
            self._strategy.batch_owner = self
            yield batch

    def draw(self) -> Any:
        """Return this process's part of the next missing samples of the present step."""
        return next(self._batches)

    def finish(self) -> None:
        """End the running pass, which accounts for samples if it is complete."""
        if self._has_begun and self.prepared.is_last_batch:
            assert next(self._batches, None) is None, "the last batch is followed by another one"
        self._batches.close()


class _OwnedParts(PartLoader):
    """Loader of an evaluation that tells the strategy that its batch is the present one."""

    def __init__(self, loader: DataLoader, strategy: RingweaveStrategy) -> None:
        super().__init__(loader, strategy._evaluation_slice)
        self._strategy = strategy

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            self._strategy.batch_owner = self
            yield batch


class _StepLogs:
    """Sums over all processes of the values that are logged in a train step.

    A step that is completed after the loss of a worker logs each value again, for the missing samples. The value of the
    step is that of both passes, unless the lost worker's samples are in the first one.
    """

    def __init__(self) -> None:
        self.key, self.weight = "", 0.0
        """Name and weight of the value that is logged now."""
        self.is_repeated = False
        self._known: dict[str, Tensor] = {}

    def own_sums(self, value: Tensor, num_own: int) -> Tensor:
        """Return weighted value, weight and number of samples of this process, (3,)."""
        weighted = value.detach().double() * self.weight if self.weight else value.new_zeros((), dtype=torch.float64)
        counts = torch.tensor([self.weight, num_own], dtype=torch.float64, device=value.device)
        return torch.cat([weighted.reshape(1), counts])

    def mean(self, sums: Tensor, num_total: int) -> Tensor:
        """Return the mean over all processes, of all passes of this step."""
        known = self._known.get(self.key) if self.is_repeated else None
        if known is not None:
            sums = known if known[2] >= num_total else known + sums
        self._known[self.key] = sums
        return sums[0] / sums[1] if sums[1] else sums[0]

    def end_step(self) -> None:
        self.is_repeated = False
        self._known.clear()


class _WeightedResults(_ResultCollection):
    """Logged values of a loop, weighted by this process's samples: it may have few of a batch, or none."""

    strategy: RingweaveStrategy

    @staticmethod
    def attach(results: _ResultCollection, strategy: RingweaveStrategy) -> None:
        """Turn the results of a loop into these, in place."""
        results.__class__ = _WeightedResults
        assert isinstance(results, _WeightedResults), "its class is set"
        results.strategy = strategy

    def _extract_batch_size(self, value: Any, batch_size: int | None, meta: Any) -> int:
        owner = self.strategy.batch_owner
        if self.batch is None or owner is None:
            return super()._extract_batch_size(value, batch_size, meta)
        return (owner.num_own if batch_size is None else batch_size) if owner.num_own else 0

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        meta = self[key].meta
        if self.batch is None or self.strategy.batch_owner is None:
            super().update_metrics(key, value, batch_size)
            return
        if not batch_size and isinstance(value, Tensor) and (meta.is_sum_reduction or not value.isfinite().all()):
            value = torch.zeros_like(value)
        with self.strategy.weighing_logs(key, batch_size):
            super().update_metrics(key, value, batch_size)


class _LoopProgress:
    """Progress of a Trainer and state of its callbacks, as part of the state that a joining worker gets."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._received: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the progress as plain values."""
        trainer = self._trainer
        return {
            "loops": trainer.fit_loop.state_dict(),
            "callbacks": _plain_states(call._call_callbacks_state_dict(trainer)),
            "should_stop": trainer.should_stop,
            "folders": self._folders(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the progress of another worker until the training begins."""
        self._received = state

    def begin_elastic(self, prepared: SharedLoader, broadcast: Callable[[Any], Any]) -> None:
        """Agree on the folders to write to; ringweave handles SIGTERM, with which a worker leaves after its step."""
        trainer = self._trainer
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
        trainer._signal_connector.register_signal_handlers = lambda: None
        folders = broadcast(self._folders())
        if prepared.has_joined_late and self._received is not None:
            folders = self._received["folders"]
            trainer.num_sanity_val_steps = 0
            trainer._checkpoint_connector._loaded_checkpoint = {}  # it has the others' state
            assert isinstance(trainer.strategy, RingweaveStrategy)
            assert trainer.strategy._training is not None, "prepared"
            trainer.strategy._training.progress = self
        for callback, folder in zip(self._checkpoint_callbacks(), folders["checkpoints"], strict=True):
            callback.dirpath = folder
        for logger, version in zip(self._versioned_loggers(), folders["versions"], strict=True):
            logger._version = version

    def resume(self) -> None:
        """Let the loops of a worker that has joined continue where the others are, in the middle of an epoch."""
        assert self._received is not None, "it has joined late"
        trainer, state = self._trainer, self._received
        trainer.fit_loop.load_state_dict(state["loops"])
        trainer.fit_loop.reset()
        trainer.fit_loop.epoch_loop.reset = functools.partial(_reset_joined, trainer.fit_loop.epoch_loop)
        trainer.should_stop = state["should_stop"]
        call._call_callbacks_load_state_dict(trainer, {"callbacks": _states_of_plain(state["callbacks"])})

    def _folders(self) -> dict[str, Any]:
        folders = [each.dirpath and str(each.dirpath) for each in self._checkpoint_callbacks()]
        return {"checkpoints": folders, "versions": [each.version for each in self._versioned_loggers()]}

    def _checkpoint_callbacks(self) -> list[ModelCheckpoint]:
        return [each for each in self._trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]

    def _versioned_loggers(self) -> list[Any]:
        return [each for each in self._trainer.loggers if hasattr(each, "_version")]


def _reset_joined(loop: Any) -> None:
    """Begin the epoch of a worker that has joined, once: the others have done what comes after the last batch."""
    del loop.reset
    loop.reset()
    loop.restarting = False


def _plain_states(states: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of callbacks as plain values; a state that has others is left out."""
    found = {}
    for name, state in states.items():
        try:
            found[name] = _plain(state)
        except TypeError as error:
            _LOGGER.warning("a worker that joins starts without the state of callback %s: %s", name, error)
    return found


def _plain(value: Any) -> Any:
    match value:
        case Tensor():
            return {_TENSOR: [str(value.dtype).removeprefix("torch."), value.tolist()]}
        case dict():
            if not all(isinstance(each, str) for each in value):
                raise TypeError("its keys are no texts")
            return {key: _plain(each) for key, each in value.items()}
        case list() | tuple():
            return [_plain(each) for each in value]
        case None | bool() | int() | float() | str():
            return value
    raise TypeError(f"it has a {type(value).__name__}")


def _states_of_plain(value: Any) -> Any:
    match value:
        case dict() if value.keys() == {_TENSOR}:
            dtype, content = value[_TENSOR]
            return torch.tensor(content, dtype=getattr(torch, dtype))
        case dict():
            return {key: _states_of_plain(each) for key, each in value.items()}
        case list():
            return [_states_of_plain(each) for each in value]
    return value


if "ringweave" not in strategies.StrategyRegistry:
    RingweaveStrategy.register_strategies(strategies.StrategyRegistry)
