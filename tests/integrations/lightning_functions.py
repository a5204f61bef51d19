"""Training of a small GPT on ragged sequences by Lightning's Trainer or Fabric, on ranks and in one process."""

import os
import tempfile
import warnings
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor
from torch.utils.data import DataLoader, Sampler
from torchmetrics import MeanMetric

from tests.integrations.accelerate_functions import SEED, count_tokens, mean_loss
from tests.integrations.lightning_cases import Case, Outcome
from tests.integrations.trainer_functions import Sequences, collate, make_model

NUM_SAMPLES, NUM_EVALUATED = 43, 19
"""The last batch of both has one sample, so some workers have none of it."""


class Gpt(LightningModule):
    """Model whose loss is a mean over tokens, in float64 where the Trainer lets it."""

    def __init__(self, *, is_manual: bool = False) -> None:
        super().__init__()
        self.model = make_model()
        self.accuracy = MeanMetric()
        self.automatic_optimization = not is_manual

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss, shared = mean_loss(self.model, batch), {"on_step": True, "on_epoch": True, "sync_dist": True}
        self.log("loss", loss, batch_size=count_tokens(batch), **shared)
        self.log("length", batch["attention_mask"].double().sum(1).mean(), **shared)
        if not self.automatic_optimization:
            optimizer, schedule = self.optimizers(), self.lr_schedulers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            schedule.step()
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        outputs = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        predicted, labels = outputs.logits[:, :-1].argmax(-1), batch["labels"][:, 1:]
        self.accuracy.update((predicted == labels)[labels != -100].double())
        self.log("val_accuracy", self.accuracy)
        self.log("val_loss", mean_loss(self.model, batch), sync_dist=True, batch_size=count_tokens(batch))

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Memory(Logger):
    """Logger that keeps everything."""

    name, version, root_dir = "memory", 0, None

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.lines.append((step or 0, {key: float(value) for key, value in metrics.items()}))

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass


def make_trainer(case: Case, folder: str, strategy: Any, callbacks: list[Callback] | None = None) -> Trainer:
    warnings.simplefilter("ignore")
    return Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        precision=case.precision,
        max_epochs=case.num_epochs,
        accumulate_grad_batches=case.accumulate,
        gradient_clip_val=None if case.is_manual else 0.3,
        limit_val_batches=1.0 if case.evaluates else 0,
        log_every_n_steps=1,
        logger=Memory(),
        callbacks=callbacks,
        enable_checkpointing=any(isinstance(each, ModelCheckpoint) for each in callbacks or []),
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )


def make_loaders(batch: int, sampler: Any = None) -> tuple[DataLoader, DataLoader]:
    """Return the loaders of training and evaluation of a script."""
    generator = torch.Generator().manual_seed(SEED)
    order = {"shuffle": True, "generator": generator} if sampler is None else {"sampler": sampler}
    loader = DataLoader(Sequences(NUM_SAMPLES), batch_size=batch, collate_fn=collate, **order)
    return loader, DataLoader(Sequences(NUM_EVALUATED), batch_size=batch, collate_fn=collate)


def outcome(trainer: Trainer, module: LightningModule, **more: Any) -> Outcome:
    logger: Any = trainer.logger
    return Outcome(
        parameters=[each.detach().numpy().copy() for each in module.parameters()],
        log=list(logger.lines),
        metrics={name: float(value) for name, value in trainer.callback_metrics.items()},
        global_step=trainer.global_step,
        learning_rate=trainer.optimizers[0].param_groups[0]["lr"],
        backend=dist.get_backend() if dist.is_initialized() else "",
        ranks=(trainer.global_rank, trainer.world_size),
        **more,
    )


class Shares(Callback):
    """Sets the shares of the ranks before the first batch."""

    def __init__(self, shares: tuple[int, ...]) -> None:
        self._shares = shares

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self._shares:
            trainer.strategy._prepared.source.membership.balancer.reset_shares(0, self._shares, None)


def train_on_ranks(case: Case, folder: str = "", checkpoint: str | None = None) -> Outcome:
    from ringweave.integrations.lightning import RingweaveStrategy

    os.environ.update(LOCAL_RANK=os.environ["RANK"])
    module, strategy = Gpt(is_manual=case.is_manual), RingweaveStrategy(weight=count_tokens)
    callbacks: list[Callback] = [Shares(case.shares)]
    if folder:
        callbacks.append(ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1))
    with tempfile.TemporaryDirectory() as root:
        trainer = make_trainer(case, root, strategy, callbacks)
        trainer.fit(module, *make_loaders(case.batch), ckpt_path=checkpoint)
        assert strategy._prepared is not None
        assert strategy._prepared.account is not None
        is_exact = strategy._prepared.account.is_exact
        found = outcome(trainer, module, is_exact=is_exact)
        if case.evaluates:
            (tested,) = trainer.test(module, make_loaders(case.batch)[1], verbose=False)
            assert all(abs(tested[name] - found.metrics[name]) < 1e-6 for name in tested), (tested, found.metrics)
        return found


class Order(Sampler):
    """The order in which ringweave shuffles the samples."""

    num_passes = 0

    def __init__(self) -> None:
        pass

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __iter__(self) -> Any:
        from ringweave.planning import balancing

        self.num_passes += 1
        return iter(balancing.shuffle_indices(NUM_SAMPLES, SEED, self.num_passes - 1).tolist())


def train_alone(case: Case) -> Outcome:
    """Train with Lightning itself, as a process that no launcher has started."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    module = Gpt(is_manual=case.is_manual)
    with tempfile.TemporaryDirectory() as root:
        trainer = make_trainer(case, root, "auto")
        trainer.fit(module, *make_loaders(case.num_ranks * case.batch, Order()))
        return outcome(trainer, module)


def train_elastically(case: Case, faults: dict[str, tuple[int, str]], pause_s: float) -> Outcome:
    """Train as a member of an elastic job, telling each step; steps are longer while members are missing.

    `faults` are member -> (steps that it has taken, moment) of its death.
    """
    import time

    from ringweave.integrations.lightning import RingweaveStrategy
    from tests.fakes.elastic_job import own_member, send_message

    slot = own_member().partition(".")[0]
    os.environ.update(RANK=slot, LOCAL_RANK=slot)
    fault, num_taken = faults.get(own_member(), (-1, "")), 0

    def die(moment: str) -> None:
        if fault == (num_taken, moment):
            os.kill(os.getpid(), 9)

    class Mortal(Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            die("optimizer")

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            nonlocal num_taken
            if trainer.fit_loop._should_accumulate():
                return
            num_taken += 1
            send_message(("done", trainer.global_step, members()))
            die("after")
            if trainer.global_step > 2 and len(members()) < case.num_ranks:
                time.sleep(pause_s)

        def on_validation_batch_start(self, *args: Any) -> None:
            die("evaluation")

    module = Gpt()
    weights = [count_tokens(collate([each])) for each in Sequences(NUM_SAMPLES)]
    strategy = RingweaveStrategy(weight=weights)
    module.model.lm_head.register_forward_pre_hook(lambda *_: die("forward"))
    module.model.lm_head.weight.register_hook(lambda _: die("backward"))

    def members() -> tuple[str, ...]:
        assert strategy._prepared is not None
        return strategy._prepared.members

    with tempfile.TemporaryDirectory() as root:
        stopping = EarlyStopping("loss_epoch", patience=1000)
        trainer = make_trainer(case, root, strategy, [Mortal(), stopping, ModelCheckpoint(monitor="loss_epoch")])
        trainer.fit(module, *make_loaders(case.batch))
        loader = strategy._prepared
        assert loader is not None
        assert loader.account is not None
        return outcome(trainer, module, is_exact=loader.account.is_exact, has_joined_late=loader.has_joined_late)


def train_by_fabric(case: Case, is_elastic: bool = False, faults: dict[str, int] | None = None) -> Outcome:
    """Train by an ordinary loop of Fabric; `faults` are member -> batches that it has computed when it dies."""
    from ringweave.integrations.lightning import RingweaveFabricStrategy
    from tests.fakes.elastic_job import own_member

    slot = own_member().partition(".")[0] if is_elastic else os.environ["RANK"]
    os.environ.update(RANK=slot, LOCAL_RANK=slot)
    warnings.simplefilter("ignore")
    weights = [count_tokens(collate([each])) for each in Sequences(NUM_SAMPLES)]
    strategy = RingweaveFabricStrategy(weight=weights)
    fabric = Fabric(accelerator="cpu", strategy=strategy, precision=case.precision)
    fabric.launch()
    dies_after = (faults or {}).get(own_member(), -1) if is_elastic else -1
    return _run_fabric(case, fabric, make_loaders(case.batch), strategy, dies_after)


def _run_fabric(case: Case, fabric: Fabric, loaders: Any, strategy: Any = None, dies_after: int = -1) -> Outcome:
    torch.set_default_dtype(torch.float64)  # Fabric converts outputs to it
    raw = make_model()
    optimizer = torch.optim.AdamW(raw.parameters(), lr=0.01)
    module, optimizer = fabric.setup(raw, optimizer)
    loader, evaluation = fabric.setup_dataloaders(*loaders)
    num_done = 0

    def die(_: Tensor) -> None:
        if num_done == dies_after:
            os.kill(os.getpid(), 9)

    raw.lm_head.weight.register_hook(die)
    for _ in range(case.num_epochs):
        for number, batch in enumerate(loader):
            is_accumulating = (number + 1) % case.accumulate != 0
            with fabric.no_backward_sync(module, enabled=is_accumulating):
                fabric.backward(mean_loss(module, batch) / case.accumulate)
            if not is_accumulating:
                fabric.clip_gradients(module, optimizer, max_norm=0.3)
                optimizer.step()
                optimizer.zero_grad()
            num_done += 1
    correct = torch.zeros(2, dtype=torch.float64)
    for batch in evaluation:
        with torch.no_grad():
            logits = module(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        labels = batch["labels"][:, 1:]
        if strategy is None or evaluation._dataloader.num_own:
            hits = (logits[:, :-1].argmax(-1) == labels)[labels != -100]
            correct += torch.tensor([hits.sum(), hits.numel()])
    correct = fabric.all_reduce(correct, reduce_op="sum")
    prepared = strategy._prepared if strategy is not None else None
    return Outcome(
        parameters=[each.detach().numpy().copy() for each in module.parameters()],
        metrics={"val_accuracy": float(correct[0] / correct[1])},
        is_exact=prepared is None or prepared.account.is_exact,
        ranks=(fabric.global_rank, fabric.world_size),
        backend=dist.get_backend() if dist.is_initialized() else "",
    )


def train_by_fabric_alone(case: Case) -> Outcome:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    warnings.simplefilter("ignore")
    fabric = Fabric(accelerator="cpu", devices=1, precision=case.precision)
    fabric.launch()
    return _run_fabric(case, fabric, make_loaders(case.num_ranks * case.batch, Order()))


def refusals() -> dict[str, str]:
    """Texts of the errors for what cannot be shared out, on a rank."""
    from ringweave.errors import RingweaveError
    from ringweave.integrations.lightning import RingweaveStrategy

    os.environ.update(LOCAL_RANK=os.environ["RANK"])
    found: dict[str, str] = {}

    def note(name: str, function: Any, *args: Any) -> None:
        try:
            function(*args)
        except RingweaveError as error:
            found[name] = str(error)

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            return iter(Sequences(4))

    class Second(Gpt):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters()), torch.optim.SGD(self.parameters())]

    loader, evaluation = make_loaders(2)
    with tempfile.TemporaryDirectory() as root:
        trainer = make_trainer(Case(num_epochs=1), root, "ringweave")
        assert isinstance(trainer.strategy, RingweaveStrategy), "the name is known"
        trainer.fit(Gpt(), loader, evaluation)
        note("twice", trainer.fit, Gpt(), loader, evaluation)
        for name, module, data in (
            ("stream", Gpt(), DataLoader(Stream(), batch_size=2, collate_fn=collate)),
            ("two loaders", Gpt(), [loader, loader]),
            ("two optimizers", Second(is_manual=True), loader),
        ):
            trainer = make_trainer(Case(evaluates=False), root, "ringweave")
            trainer.gradient_clip_val = None
            note(name, trainer.fit, module, data)
    fabric = Fabric(accelerator="cpu", strategy="ringweave")
    fabric.launch()
    module, _ = fabric.setup(make_model(), torch.optim.SGD(make_model().parameters()))
    note("no loader", lambda: module(**collate([Sequences(1)[0]])))
    note("two models", fabric.setup, make_model())
    return found
