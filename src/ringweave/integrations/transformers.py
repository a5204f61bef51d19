"""Transformers' `Trainer` on `ringweave.prepare`: import it from here, before the TrainingArguments are made.

The gradient of a train step is that of one process on the whole batch, by tokens where the model counts them, over all
workers and all accumulated batches. A step that misses samples of a lost worker is gone through again inside of
`training_step`, so callbacks see each step once.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import math
from collections.abc import Generator, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import trainer as transformers_trainer
from transformers.trainer_callback import ExportableState, TrainerCallback, TrainerState

from ringweave import integrations
from ringweave.errors import TrainingError
from ringweave.integrations import accelerate, trainer_parts
from ringweave.integrations.accelerate import EvaluationLoader, TrainingLoader

VERSIONS = ("5.24", "5.25")
"""First version that was tested, and the first one that was not."""
integrations.check_version("transformers", *VERSIONS)

_LOGGER = logging.getLogger("ringweave")
_JOINED = ""
"""Stands for a checkpoint where a worker that joins later continues in the middle of an epoch."""


class Trainer(transformers.Trainer):
    """Trainer that trains on unequal workers, and under `ringweave run --elastic`.

    The batch of a train step is `per_device_train_batch_size` times the number of workers that the job was started
    with, times the accumulation steps. Without a launcher it is the Trainer of Transformers.
    """

    max_samples: int | None = None
    """Limit of samples of one batch in this worker's memory, as in `ringweave.prepare`; set it in a subclass."""

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, as one of ringweave's."""
        super().create_accelerator_and_postprocess()
        self._is_shared = trainer_parts.is_launched()
        self._prepared: tuple[nn.Module, TrainingLoader] | None = None
        self._batches: Generator[Any] = (batch for batch in ())
        """The running pass of the loader."""
        self._joined_epoch = -1
        """Epoch in which this worker has joined in the middle."""
        self._is_loss_next = False
        """The next gathered values of an evaluation are losses."""
        if not self._is_shared:
            return
        self._check_arguments()
        progress = _TrainerProgress(self)
        extra = {"trainer": progress, "schedule": _Schedule(self)}
        accelerate.attach(self.accelerator, max_samples=self.max_samples, extra_state=extra)
        gathers_objects = self.args.eval_use_gather_object
        self.gather_function = functools.partial(self.accelerator.gather_for_metrics, use_gather_object=gathers_objects)
        self.args.average_tokens_across_devices = False  # this class does it, with unequal shares too
        self._progress = progress

    @property
    def _own_accelerator(self) -> accelerate.Accelerator:
        assert isinstance(self.accelerator, accelerate.Accelerator), "it is attached"
        return self.accelerator

    def _check_arguments(self) -> None:
        """Refuse what cannot be shared out in this way."""
        refused = {
            "FSDP or DeepSpeed": self.is_deepspeed_enabled or self.is_fsdp_enabled,
            "parallelism_config": bool(self.args.parallelism_config),
            "auto_find_batch_size": self.args.auto_find_batch_size,
            "sync_each_batch": bool(self.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch")),
            "several GPUs in one process": self.args.n_gpu > 1,
        }
        for name, is_given in refused.items():
            if is_given:
                do = "Use the Trainer of transformers for it, with ringweave run --replace-backend"
                raise TrainingError("arguments of the Trainer", got=name, expected="data parallelism", do=do)

    # Preparing.

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Train; the loader is prepared together with model and optimizer."""
        if self._is_shared:
            if self._prepared is not None:
                do = "Make another Trainer, or set num_train_epochs to all epochs"
                raise TrainingError("calls of Trainer.train", got="a second one", expected="one", do=do)
            self._own_accelerator.keeps_loaders = True
            self.add_callback(self._progress)
        return super()._inner_training_loop(*args, **kwargs)

    def set_initial_training_values(self, args: Any, dataloader: DataLoader) -> Any:
        """Compute the numbers of steps, from the loader with the batches of all workers."""
        if self._is_shared:
            self._own_accelerator.keeps_loaders = False
            self._raw_loader = dataloader
            if dataloader.generator is None:
                seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
                dataloader.generator = torch.Generator().manual_seed(seed)
            dataloader = trainer_parts.whole_batch_loader(dataloader, self._own_accelerator.batch_factor)
        return super().set_initial_training_values(args, dataloader)

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: Any,
        trial: Any,
    ) -> tuple[int, int]:
        """Prepare the training; return the epoch and the batch in it at which this worker begins."""
        epoch, num_batches = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        if not self._is_shared:
            return epoch, num_batches
        loader = self._prepare_all(max_steps, resume_from_checkpoint)
        if loader.has_joined_late:
            place = loader.state_dict()
            self.state.compute_steps(self.args, max_steps)
            self.state.init_training_references(self, max_steps, num_train_epochs, trial)
            self._joined_epoch, num_batches = place["epoch"], place["position"] // loader.prepared.batch_size
            if self.state.global_step >= max_steps:
                _LOGGER.info("the others have finished the training; this worker, which joined late, ends")
                raise SystemExit(0)
            return self._joined_epoch, num_batches
        if epoch or num_batches:
            loader.start_at(epoch, num_batches)
        return epoch, num_batches

    def _prepare_all(self, max_steps: int, resume: Any) -> TrainingLoader:
        """Prepare model, optimizer, schedule and loader; a checkpoint is loaded before a worker joins the others."""
        if self._created_lr_scheduler:
            self.lr_scheduler = None  # pyrefly: ignore - as the base class does
            self._created_lr_scheduler = False
        self.create_optimizer()
        self.create_scheduler(num_training_steps=max_steps)
        if resume is not None:
            self._load_optimizer_and_scheduler(resume)
            self._load_scaler(resume)
        model, self.optimizer, loader = self.accelerator.prepare(self.model, self.optimizer, self._raw_loader)
        self.model_wrapped = model
        self._prepared = (model, loader)
        return loader

    def _prepare_for_training(self, max_steps: int, train_dataloader: DataLoader, resume_from_checkpoint: Any) -> Any:
        """Return model and loader, which are prepared already."""
        if self._prepared is None:
            return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        model, loader = self._prepared
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = loader
        return model, loader

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Run an epoch, from the batch on at which this worker has joined; end its pass, which accounts for samples."""
        if kwargs["epoch"] == self._joined_epoch and kwargs["steps_trained_in_current_epoch"]:
            kwargs["resume_from_checkpoint"] = _JOINED
        super()._run_epoch(*args, **kwargs)
        if self._prepared is not None:
            if self._prepared[1].prepared.is_last_batch:
                assert next(self._batches, None) is None, "the last batch is followed by another one"
            self._batches.close()

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint != _JOINED:
            super()._load_rng_state(checkpoint)

    # Train steps.

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        """Return the batches of a train step, each drawn when its turn comes; `training_step` counts their items."""
        if self._prepared is None:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        self._batches = epoch_iterator
        self._step = _TrainStep(self._prepared[1], num_batches)
        self._own_accelerator.before_backward = self._step.weigh_loss
        if num_batches > 1:
            return _LazyBatches(epoch_iterator, num_batches), None
        return list(_LazyBatches(epoch_iterator, 1)), None

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Compute the gradients of a batch; after the last one of a train step they are those of all samples.

        Returns:
            Loss of the train step over all workers after its last batch, and zero after the others.
        """
        if self._prepared is None:
            return super().training_step(model, inputs, num_items_in_batch)
        self.state.is_world_process_zero = self.is_world_process_zero()  # another worker's, if the first one is lost
        self._compute_gradients(model, inputs, is_last=self.accelerator.sync_gradients)
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        while self._step.misses_samples:
            model.zero_grad()
            self._repeat_step(model)
        return torch.tensor(self._step.finish(model), device=self.args.device)

    def _repeat_step(self, model: nn.Module) -> None:
        """Go through the batches of the step again, with the samples of a lost worker."""
        self._step.repeat()
        is_last = False
        while not is_last:
            inputs = next(self._batches)
            is_last = not self._step.misses_samples
            with contextlib.nullcontext() if is_last else self.accelerator.no_sync(model):
                self._compute_gradients(model, inputs, is_last=is_last)

    def _compute_gradients(self, model: nn.Module, inputs: dict[str, Any], *, is_last: bool) -> None:
        """Compute the gradients of one batch; its loss is a mean over the items of this worker."""
        count = self._count_items(inputs)
        is_divided = not self._is_loss_scaled(has_items=count is not None)
        self._step.begin_batch(count, is_last=is_last, is_divided=is_divided)
        num_items = (
            None if count is None else torch.tensor(max(count, 1.0), device=self.args.device, dtype=torch.float64)
        )
        super().training_step(model, inputs, num_items)

    def _count_items(self, inputs: dict[str, Any]) -> float | None:
        """Return the number of items, such as tokens, of this worker's part; None if the loss is not one over items."""
        count = self._get_num_items_in_batch([inputs], torch.device("cpu"))
        return None if count is None else float(count)

    def _is_loss_scaled(self, *, has_items: bool) -> bool:
        """Return whether Transformers does not divide the loss by the number of accumulated batches."""
        if self.loss_is_scaled_for_ga is not None:
            return self.loss_is_scaled_for_ga
        return (self.model_accepts_loss_kwargs and has_items) or self.compute_loss_func is not None

    # Evaluation.

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate on parts of the batches; again from its start if workers have come or gone meanwhile."""
        if not isinstance(dataloader, EvaluationLoader):
            return super().evaluation_loop(dataloader, *args, **kwargs)
        loader: Any = dataloader
        gather = self.gather_function
        while True:
            members = self._members()
            self.gather_function = functools.partial(self._gather_results, gather, dataloader)
            output = super().evaluation_loop(loader, *args, **kwargs)
            if not trainer_parts.is_elastic():
                return output
            has_changed = torch.tensor(self._members() != members, dtype=torch.int64)
            dist.all_reduce(has_changed, dist.ReduceOp.MAX)
            if not has_changed:
                return output

    def _members(self) -> tuple[str, ...]:
        return self._prepared[1].prepared.members if self._prepared else ()

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Compute the results of a batch; the loss is that of all workers' parts of it."""
        loss, logits, labels = super().prediction_step(model, inputs, *args, **kwargs)
        active = self.accelerator.gradient_state.active_dataloader
        if loss is not None and isinstance(active, EvaluationLoader):
            count = self._count_items(inputs)
            weight = (active.num_own if count is None else count) if active.num_own else 0.0
            sums = torch.tensor([float(loss) * weight if weight else 0.0, weight], dtype=torch.float64)
            dist.all_reduce(sums)
            loss = (sums[0] / sums[1]).to(loss)
            self._is_loss_next = True
        return loss, logits, labels

    def _gather_results(self, gather: Any, loader: EvaluationLoader, results: Any, **kwargs: Any) -> Any:
        """Gather the results of a batch, each sample once; its loss is known everywhere."""
        if not self._is_loss_next:
            return gather(results, **kwargs)
        self._is_loss_next = False
        return results.flatten()[:1].repeat(loader.portion.num_total)


@dataclasses.dataclass(kw_only=True, slots=True)
class _PassRecord:
    """Weights and losses of the samples of one batch, by its slots, (num_slots,) float64; zero where unknown."""

    weights: np.ndarray
    losses: np.ndarray


class _TrainStep:
    """One train step: counts the items of all its batches on all workers, and divides its gradients by their number.

    A worker's loss is a mean over its own items. Its gradients are weighted by their number over a divisor that all
    workers know, and scaled once the number of all items is. In an elastic job each sample has a slot, so that samples
    of a lost worker count once, whether it died before the numbers were exchanged or later.
    """

    def __init__(self, loader: TrainingLoader, num_batches: int) -> None:
        self._loader, self._num_batches = loader, num_batches
        self._known: list[_PassRecord] = []
        """Batches of this step, as all workers know them."""
        self._own: list[_PassRecord] = []
        """Batches of the present pass through the step, with what this worker adds."""
        self._divisor = 0.0
        self._weight, self._factor, self._is_last, self._counts_items = 0.0, 1.0, True, False

    def begin_batch(self, num_items: float | None, *, is_last: bool, is_divided: bool) -> None:
        """Begin the passes of a batch.

        Args:
            num_items: Items of this worker's part, such as tokens; None counts samples, by their fraction of the batch.
            is_last: It is the last batch of the train step.
            is_divided: The loss is divided by the number of accumulated batches.
        """
        portion = self._loader.portion
        share = len(portion.indices) / portion.num_total
        self._counts_items = num_items is not None
        self._weight = (share if num_items is None else num_items) if len(portion.indices) else 0.0
        self._factor, self._is_last = float(self._num_batches if is_divided else 1), is_last

    def weigh_loss(self, loss: Tensor) -> None:
        """Record the loss of this worker's part, and set the weight of its gradients."""
        own_loss = float(loss.detach()) * self._factor if self._weight else 0.0
        self._own.append(self._record_batch(own_loss))
        if self._is_last:
            self._exchange()
        if not self._divisor:
            whole = self._loader.prepared.batch_size if self._counts_items else 1
            self._divisor = self._total_weight if self._num_batches == 1 else float(self._num_batches * whole)
        self._loader.prepared.set_batch_weight(self._weight * self._factor, self._divisor or 1.0)

    @property
    def misses_samples(self) -> bool:
        """Samples of a lost worker are missing, and come as the next batches."""
        return self._loader.misses_samples

    def repeat(self) -> None:
        """Begin another pass through the step."""
        self._own = []

    def finish(self, model: nn.Module) -> float:
        """Divide the gradients by the number of all items; return the loss of the step."""
        total = self._total_weight
        if total and self._divisor != total:
            gradients = [each.grad for each in model.parameters() if each.grad is not None]
            torch._foreach_mul_(gradients, self._divisor / total)
        return math.fsum(float(each.losses.sum()) for each in self._known) / total if total else 0.0

    @property
    def _total_weight(self) -> float:
        return math.fsum(float(each.weights.sum()) for each in self._known)

    def _record_batch(self, loss: float) -> _PassRecord:
        """Return the record of a batch; this worker's items are spread evenly over the slots of its samples."""
        portion = self._loader.portion
        # Outside of elastic jobs one slot for each worker's part is enough, which may hold a sample twice.
        slots = np.isin(portion.batch, portion.indices) if trainer_parts.is_elastic() else np.ones(1, dtype=bool)
        each = self._weight / max(1, slots.sum())
        weights = np.where(slots, each, 0.0)
        return _PassRecord(weights=weights, losses=weights * loss)

    def _exchange(self) -> None:
        """Add up the records of all workers; slots that were known before keep their values."""
        flat = torch.from_numpy(np.concatenate([np.stack([each.weights, each.losses]) for each in self._own], axis=1))
        with self._loader.prepared.timer.wait():
            dist.all_reduce(flat)
        ends = np.cumsum([len(each.weights) for each in self._own])[:-1]
        summed = [_PassRecord(weights=rows[0], losses=rows[1]) for rows in np.split(flat.numpy(), ends, axis=1)]
        for known, new in zip(self._known, summed, strict=bool(self._known)):
            is_known = known.weights > 0
            new.weights[is_known], new.losses[is_known] = known.weights[is_known], known.losses[is_known]
        self._known = summed


class _LazyBatches:
    """Batches of a train step, drawn one by one: the loader hands out each when the one before is computed."""

    def __init__(self, batches: Iterator[Any], num_batches: int) -> None:
        self._batches, self._num_batches = batches, num_batches

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._num_batches):
            try:
                yield next(self._batches)
            except StopIteration:
                return


class _Schedule:
    """Schedule of a trainer, as part of the state that a joining worker gets."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        schedule: Any = self._trainer.lr_scheduler
        return schedule.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        schedule: Any = self._trainer.lr_scheduler
        schedule.load_state_dict(state)


class _TrainerProgress(TrainerCallback):
    """Progress of a trainer and its callbacks, as part of the state that a joining worker gets."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._logging: dict[str, Any] | None = None
        """Logging state that was received, until the training begins."""

    def state_dict(self) -> dict[str, Any]:
        """Return the progress as plain values."""
        trainer = self._trainer
        state = json.loads(json.dumps(dataclasses.asdict(trainer.state)))
        logging = {
            "loss": float(getattr(trainer, "_tr_loss", 0.0)),
            "total": float(getattr(trainer, "_total_loss_scalar", 0.0)),
            "last_logged": getattr(trainer, "_globalstep_last_logged", 0),
            "first_step": getattr(trainer, "_initial_global_step", 0),
        }
        callbacks = [each.state() for each in self._exportable()]
        return {"state": state, "logging": logging, "callbacks": json.loads(json.dumps(callbacks))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the progress of another worker."""
        trainer, self._logging = self._trainer, state["logging"]
        trainer.state = TrainerState(**state["state"])
        trainer.state.is_local_process_zero = trainer.is_local_process_zero()
        trainer.state.is_world_process_zero = trainer.is_world_process_zero()
        for callback, saved in zip(self._exportable(), state["callbacks"], strict=True):
            for name, value in saved.get("attributes", {}).items():
                setattr(callback, name, value)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Continue the running mean of the losses where the others are."""
        del args, state, control, kwargs
        if self._logging is not None:
            self._trainer._tr_loss += self._logging["loss"]
            self._trainer._total_loss_scalar = self._logging["total"]
            self._trainer._globalstep_last_logged = self._logging["last_logged"]
            self._trainer._initial_global_step = self._logging["first_step"]
            self._logging = None

    def _exportable(self) -> list[Any]:
        callbacks = self._trainer.callback_handler.callbacks
        return [each for each in callbacks if isinstance(each, ExportableState)]


_skip_first_batches = transformers_trainer.skip_first_batches


def _skip_unless_placed(dataloader: Any, num_batches: int = 0) -> Any:
    """Skip the first batches of a loader, unless it is one that knows its place."""
    return dataloader if isinstance(dataloader, TrainingLoader) else _skip_first_batches(dataloader, num_batches)


transformers_trainer.skip_first_batches = _skip_unless_placed
