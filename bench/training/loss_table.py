"""Loss that each inexact method costs, beside synchronous training at equal samples: no network, no lab.

    python bench/training/loss_table.py --table          # the table that `--mode auto` reads; some minutes
    python bench/training/loss_table.py --tasks gpt --wires --inner-steps 16 64 --formats int4 --outer 0.7/0.5 1/0
    python bench/training/loss_table.py --wires --inner-steps 16 --formats exact --elastic means fragments

One process trains a model on whole batches, then with each method on the same batches from the same first weights:

- wire formats: several ranks compute their parts of a batch, the codecs encode each gradient with its residual, and the
  sum is rounded with the residual of its owner, as the direct schedule does between nodes;
- mode `local`: each site has a copy of the model and its own optimizer, takes its part of every batch, and exchanges
  outer gradients with the code of the mode (`ringweave.training.outer_optimizer`). An outer step is applied one round
  after it began, as in a job;
- `--elastic`: the sites are those of an elastic job, with the code of its rings and of its parameter server
  (`ringweave.training.rings.ring_worker`), without a network. `means`: each push has the changes of all parameters, and
  the first site has its answer before the second one pushes.

Tasks: a byte-level GPT on the sources of the standard library, each sequence once, and a small network on digits of
scikit-learn, for some epochs. Prints the held-out loss above that of synchronous training, mean over tasks and seeds,
and the spread of each task. `--table` writes them into the package. Exit code 1 if int8 loses more than 0.5 % or bf16
more than 0.1 % in the mean.
"""

import argparse
import copy
import dataclasses
import datetime
import functools
import itertools
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from ringweave import rpc
from ringweave.param_server.client import RingClient
from ringweave.param_server.service import ParameterService
from ringweave.planning import loss_table
from ringweave.planning.sites import RoundSplit
from ringweave.schedules import wire_formats
from ringweave.training import Asynchronous, Local, outer_optimizer
from ringweave.training.options import Script
from ringweave.training.outer_optimizer import OuterGradient, OuterOptimizer
from ringweave.training.rings import ring_formation
from ringweave.training.rings.ring_progress import RingCursor, UnpushedSamples
from ringweave.training.rings.ring_worker import RingWorker

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
sys.path.insert(0, str(Path(__file__).parent))

import local_in_lab as lab_bench

ALLOWED = {"bf16": 0.001, "int8": 0.005}
TABLE = Path(loss_table.__file__).parent / loss_table.FILE
PIXELS, DIGIT_WIDTH, NUM_DIGITS, HELD_OUT_ONE_IN = 8, 64, 10, 5
MEAN_PIXEL, PIXEL_DEVIATION, MAX_EPOCHS = 4.9, 6.0, 64
Rows = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Method:
    """Way of training."""

    wire: str = ""
    """Wire format of gradients; empty in mode local."""
    local: Local | None = None
    num_sites: int = 0
    elastic: str = ""
    """Pushes of the sites of an elastic job: `means` or `fragments`; empty: sites of a fixed membership."""

    def __str__(self) -> str:
        if self.local is None:
            return f"wire {self.wire}"
        outer = f"{self.local.outer_lr:g}/{self.local.outer_momentum:g}"
        if self.elastic == "means":
            return f"local --elastic, {self.num_sites} sites, means, {self.local.inner_steps} inner steps"
        name = "local --elastic" if self.elastic else "local"
        return f"{name}, {self.num_sites} sites, {self.local.wire}, {self.local.inner_steps} inner steps, outer {outer}"

    def key(self) -> dict[str, Any]:
        """Return what the table knows it by."""
        if self.local is None:
            return {"method": "wire", "format": self.wire}
        names = {"format": self.local.wire, "inner_steps": self.local.inner_steps, "num_sites": self.num_sites}
        return {"method": "local", **names}


@dataclass(frozen=True, kw_only=True)
class Task:
    """Model and data."""

    make: Callable[[argparse.Namespace, int], tuple[Any, torch.optim.Optimizer]]
    """Model with `forward(inputs, targets)`, its loss, and optimizer, the same for the same seed."""
    corpus: Callable[[int], tuple[TensorDataset, Rows]]
    """Samples to train on, and held-out ones, in the order of the seed."""
    batch: int
    """Samples of a train step."""


class DigitClassifier(nn.Module):
    """Two layers on images of 8 x 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self._layers = nn.Sequential(nn.Linear(PIXELS**2, DIGIT_WIDTH), nn.ReLU(), nn.Linear(DIGIT_WIDTH, NUM_DIGITS))

    def forward(self, images: torch.Tensor, digits: torch.Tensor) -> torch.Tensor:
        """Return the loss, (), from images (samples, 64) and digits (samples,)."""
        return nn.functional.cross_entropy(self._layers(images), digits)


def make_classifier(_: argparse.Namespace, seed: int) -> tuple[DigitClassifier, torch.optim.AdamW]:
    """Return the model with the weights of that seed, and its optimizer."""
    torch.manual_seed(seed)
    model = DigitClassifier()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


@functools.cache
def digits(seed: int) -> tuple[TensorDataset, Rows]:
    """Return images and digits to train on, epoch after epoch, and held-out ones."""
    images, targets = (torch.from_numpy(each) for each in load_digits(return_X_y=True))
    images = (images.float() - MEAN_PIXEL) / PIXEL_DEVIATION
    is_held_out = torch.arange(len(images)) % HELD_OUT_ONE_IN == 0
    trained, generator = (~is_held_out).nonzero()[:, 0], torch.Generator().manual_seed(seed)
    order = torch.cat([trained[torch.randperm(len(trained), generator=generator)] for _ in range(MAX_EPOCHS)])
    return TensorDataset(images[order], targets[order]), (images[is_held_out], targets[is_held_out])


TASKS = {
    "gpt": Task(make=lab_bench.make, corpus=functools.cache(lab_bench.corpus), batch=16),
    "digits": Task(make=make_classifier, corpus=digits, batch=64),
}


class SitesInOneProcess:
    """Sites of equal speed, each with its model, optimizer and outer state."""

    def __init__(self, task: Task, options: argparse.Namespace, method: Method, seed: int) -> None:
        settings = method.local or Local()
        self._wire, self._num_done = settings.format, 0
        made = [task.make(options, seed) for _ in range(method.num_sites)]
        self.models, self._optimizers = zip(*made, strict=True)
        fragments = min(settings.fragments, settings.inner_steps or 1)
        equal = RoundSplit(batch_samples=task.batch, inner_steps=1, speeds=(1.0,) * method.num_sites)
        for each in self._optimizers:
            derived = equal.inner_lr_factor(0, is_scale_invariant=outer_optimizer.is_scale_invariant(each))
            outer_optimizer.scale_learning_rates(each, functools.partial(float, settings.inner_lr_factor or derived))
        self._outer = [OuterOptimizer(model, settings, fragments) for model in self.models]
        for each in self._outer:
            each.take_parameters_once()
        self._round_steps = -(-(settings.inner_steps or 1) // fragments)
        self._fragments, self._running = fragments, list[OuterGradient]()
        self._num_steps = 0

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Do a train step: an inner step of each site with its part of the batch, and an outer one if it is due."""
        parts = zip(inputs.chunk(len(self.models)), targets.chunk(len(self.models)), strict=True)
        for model, optimizer, part in zip(self.models, self._optimizers, parts, strict=True):
            lab_bench.step(model, optimizer, *part)
        self._num_steps += 1
        if self._num_steps % self._round_steps == 0:
            self._end_outer_step()
            self._begin_outer_step([self._num_done % self._fragments])

    def finish(self) -> nn.Module:
        """End with the outer step of all fragments that ends an epoch; return the model that all sites have then."""
        self._end_outer_step()
        self._begin_outer_step(range(self._fragments))
        self._end_outer_step()
        return self.models[0]

    def _begin_outer_step(self, fragments: "range | list[int]") -> None:
        self._running = [outer.begin_step(fragments) for outer in self._outer]
        self._num_done += 1

    def _end_outer_step(self) -> None:
        messages = [gradient.encode(self._wire) for gradient in self._running]
        for outer, gradient in zip(self._outer, self._running, strict=False):
            gradient.set_mean(self._wire, messages, [1.0] * len(messages))
            outer.apply_step(gradient)
        self._running = []


class ServiceConnection:
    """Connection to a parameter server in this process; a call that waits does so in its own thread."""

    def __init__(self, service: ParameterService, ring: int) -> None:
        self._handlers = {each.message: each for each in service.handlers()}
        self._peer = rpc.Identity(job="bench", role="worker", name=str(ring))

    def start(self, message: Any, content: Any = (), *, timeout_s: float, into: Any = None) -> "ServiceConnection":
        """Return the call, which begins when it is waited for."""
        begun = copy.copy(self)
        begun.wait = functools.partial(self.call, message, content, timeout_s=timeout_s, into=into)
        return begun

    def call(self, message: Any, content: Any = (), *, timeout_s: float, into: Any = None) -> rpc.RpcReply:
        """Return the answer."""
        handler = self._handlers[type(message)]
        deadline_s = time.monotonic() + timeout_s
        call = rpc.RpcCall(peer=self._peer, message=message, buffers=list(content), deadline_s=deadline_s)
        answer = handler.handle(call)
        reply = answer if isinstance(answer, rpc.RpcReply) else rpc.RpcReply(answer)
        for room, sent in zip(into or (), reply.buffers, strict=True):
            room[:] = sent
        return reply


class RingInOneProcess:
    """Ring of one worker: the exchanges that `RingWorker` asks for."""

    starts_pushes_at_once = is_representative = is_connected = True
    misses_samples = False

    def __init__(self, service: ParameterService, ring: int) -> None:
        self.cursor, self.samples = RingCursor(ring=ring), UnpushedSamples()
        connection: Any = ServiceConnection(service, ring)
        self._client = RingClient([lambda: connection], ring)

    def client(self) -> RingClient:
        """Return the client of the server."""
        return self._client

    def last_words(self) -> str:
        """Return no report: no ring is lost."""
        return ""

    def broadcast_from_first(self, fetch: Callable[[], Any], tensors: Any = ()) -> Any:
        """Return what the only worker fetches."""
        del tensors
        return fetch()

    def change_atomically(self, change: Callable[[], None]) -> None:
        """Change at once: nobody joins."""
        change()


class ElasticSitesInOneProcess:
    """Sites of equal speed that exchange through a parameter server, as in an elastic job."""

    def __init__(self, task: Task, options: argparse.Namespace, method: Method, seed: int) -> None:
        local, num = method.local or Local(), method.num_sites
        made = [task.make(options, seed) for _ in range(num)]
        self.models, self._optimizers = zip(*made, strict=True)
        self._means, service = method.elastic == "means", ParameterService()
        script: Any = argparse.Namespace(local=local, parameters=list(self.models[0].parameters()))
        script.fragments_between = functools.partial(Script.fragments_between, script)
        settings = Asynchronous(local_steps=local.elastic_inner_steps) if self._means else local.as_asynchronous()
        rings = [[ring] for ring in range(num)]
        setup = ring_formation.build_server_setup(self.models[0], self._optimizers[0], rings, settings)
        setup = setup if self._means else ring_formation.with_outer_optimizer(setup, script)
        self._rings = [RingInOneProcess(service, ring) for ring in range(num)]
        ring_formation.start_server_job(self._rings[0].client(), setup, script.parameters)
        self._workers = [
            RingWorker(ring, list(model.parameters()), local_steps=settings.local_steps, fragments=setup.fragments)
            for ring, model in zip(self._rings, self.models, strict=True)
        ]
        for worker, optimizer in zip(self._workers, self._optimizers, strict=True):
            worker.refresh()
            is_invariant = outer_optimizer.is_scale_invariant(optimizer)
            outer_optimizer.scale_learning_rates(optimizer, functools.partial(float, num**0.5 if is_invariant else 1.0))

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Do a train step: a local step of each site with its part of the batch, and a push if it is due."""
        num = len(self.models)
        parts = zip(inputs.chunk(num), targets.chunk(num), strict=True)
        for model, optimizer, part in zip(self.models, self._optimizers, parts, strict=True):
            lab_bench.step(model, optimizer, *part)
        for ring, worker in zip(self._rings, self._workers, strict=True):
            assert worker.changes is not None, "it takes local steps"
            ring.samples.add(len(inputs) // num, 1 / num)
            worker.changes.count_step()
            if self._means:
                worker.changes.wait_answered()

    def finish(self) -> nn.Module:
        """End the epoch: all push what they have, then take the same parameters; return the model."""
        for worker in self._workers:
            worker.go_idle()
        for worker in self._workers:
            worker.refresh()
        return self.models[0]


class RanksInOneProcess:
    """Ranks with one model, each with its residual; the last residual is that of the rank that owns the sum."""

    def __init__(self, task: Task, options: argparse.Namespace, method: Method, seed: int) -> None:
        self._format, self._num_ranks = wire_formats.format_named(method.wire), options.ranks
        self._model, self._optimizer = task.make(options, seed)
        self._parameters = list(self._model.parameters())
        count = sum(parameter.numel() for parameter in self._parameters)
        self._residuals = torch.zeros(options.ranks + 1, count)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Do a train step with the decoded mean of the ranks' gradients."""
        total = torch.zeros_like(self._residuals[-1])
        parts = zip(inputs.chunk(self._num_ranks), targets.chunk(self._num_ranks), self._residuals, strict=False)
        for *rows, residual in parts:
            self._optimizer.zero_grad()
            self._model(*rows).backward()
            gradients = [each.grad.flatten() for each in self._parameters]  # pyrefly: ignore - after a backward pass
            total += self._rounded(torch.cat(gradients) / self._num_ranks, residual)
        total = self._rounded(total, self._residuals[-1])
        sizes = [each.numel() for each in self._parameters]
        for parameter, part in zip(self._parameters, total.split(sizes), strict=True):
            parameter.grad = part.view(parameter.shape)
        self._optimizer.step()

    def finish(self) -> nn.Module:
        """Return the model."""
        return self._model

    def _rounded(self, values: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        wire_formats.encode(self._format, values.numpy(), None, residual=residual.numpy(), rounds=True)
        return values


class OneProcess:
    """Synchronous training on whole batches, whose steps those of exact modes equal."""

    def __init__(self, task: Task, options: argparse.Namespace, seed: int) -> None:
        self._model, self._optimizer = task.make(options, seed)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Do a train step."""
        lab_bench.step(self._model, self._optimizer, inputs, targets)

    def finish(self) -> nn.Module:
        """Return the model."""
        return self._model


def main() -> None:
    """Train all combinations; print what they lose."""
    options = parse_options()
    rows = []
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:

        def losses(method: Method | None) -> dict[str, list[float]]:
            runs = [pool.submit(train, options, task, method, seed) for task in options.tasks for seed in options.seeds]
            found = iter([run.result() for run in runs])
            return {task: list(itertools.islice(found, len(options.seeds))) for task in options.tasks}

        synchronous = losses(None)
        print(f"measured, synchronous: {synchronous}", flush=True)
        for method in methods_of(options):
            increase = {
                task: [round(loss / base - 1, 6) for loss, base in zip(found, synchronous[task], strict=True)]
                for task, found in losses(method).items()
            }
            rows.append({**method.key(), "increase": increase})
            print(f"measured, {method}: {shown(increase)}", flush=True)
    if options.table:
        write_table(options, rows)
    if options.out is not None:
        options.out.write_text(json.dumps(rows, indent=2) + "\n")
    means = {row["format"]: mean_of(row["increase"]) for row in rows if row["method"] == "wire"}
    sys.exit(any(means.get(name, 0.0) > limit for name, limit in ALLOWED.items()))


def mean_of(increase: dict[str, list[float]]) -> float:
    """Return the mean over tasks and seeds."""
    return statistics.mean(itertools.chain.from_iterable(increase.values()))


def parse_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="write the package's table; wants all methods")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS), help="tasks")
    parser.add_argument("--wires", nargs="*", default=["bf16", "int8", "int4"], help="wire formats of gradients")
    parser.add_argument("--inner-steps", type=int, nargs="*", default=[1, 4, 16, 64, 256], help="of an outer step")
    parser.add_argument("--formats", nargs="+", default=["exact", "int8", "int4", "int2"], help="of outer gradients")
    parser.add_argument("--outer", nargs="+", default=[""], help="LR/MOMENTUM of the outer optimizer")
    parser.add_argument("--fragments", type=int, default=Local().fragments, help="parts of the parameters")
    kinds = ("means", "fragments")
    parser.add_argument("--elastic", nargs="+", default=[], choices=kinds, help="sites of an elastic job instead")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of weights and order")
    parser.add_argument("--sites", type=int, default=2, help="number of sites")
    parser.add_argument("--ranks", type=int, default=4, help="simulated ranks of wire formats")
    parser.add_argument("--train-steps", type=int, default=512, help="train steps")
    parser.add_argument("--layers", type=int, default=1, help="blocks of the GPT")
    parser.add_argument("--width", type=int, default=32, help="width of the GPT")
    parser.set_defaults(sample_ms=0.0)
    parser.add_argument("--jobs", type=int, default=1, help="processes that train at a time")
    parser.add_argument("--out", type=Path, help="file for the losses, as JSON")
    return parser.parse_args()


def methods_of(options: argparse.Namespace) -> list[Method]:
    """Return the methods to measure."""
    found = [Method(wire=name) for name in options.wires]
    for wire, steps, outer in itertools.product(options.formats, options.inner_steps, options.outer):
        rates = dict(zip(("outer_lr", "outer_momentum"), map(float, outer.split("/")), strict=True)) if outer else {}
        settings = Local(inner_steps=steps, wire=wire, fragments=options.fragments, **rates)
        found += [Method(local=settings, num_sites=options.sites, elastic=each) for each in options.elastic or [""]]
    return found


def train(options: argparse.Namespace, name: str, method: Method | None, seed: int) -> float:
    """Return the held-out loss after the train steps."""
    torch.set_num_threads(1)
    task = TASKS[name]
    samples, held_out = task.corpus(seed)
    if method is None:
        trained = OneProcess(task, options, seed)
    else:
        of_local = ElasticSitesInOneProcess if method.elastic else SitesInOneProcess
        trained = (of_local if method.local else RanksInOneProcess)(task, options, method, seed)
    for number in range(options.train_steps):
        first = number * task.batch
        trained.step(*(each[first : first + task.batch] for each in samples.tensors))
    return lab_bench.held_out_loss(trained.finish(), held_out)


def shown(increase: dict[str, list[float]]) -> str:
    """Return the mean over tasks and seeds, and the spread of each task."""
    spreads = [f"{task} {min(each):+.2%} to {max(each):+.2%}" for task, each in increase.items()]
    return f"{mean_of(increase):+.3%} ({', '.join(spreads)})"


def write_table(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Write the table into the package."""
    names = ("train_steps", "layers", "width", "ranks", "seeds")
    settings = {name: getattr(options, name) for name in names} | {"context": lab_bench.CONTEXT}
    settings |= {"batch": {name: task.batch for name, task in TASKS.items()}}
    kept = {each.name: getattr(Local(), each.name) for each in dataclasses.fields(Local)}
    document = {
        "measured_by": "bench/training/loss_table.py --table",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "meaning": "held-out loss / that of synchronous training after the same samples - 1, of each seed",
        "settings": settings,
        "local": {name: kept[name] for name in loss_table.LOCAL_SETTINGS},
    }
    text = json.dumps(document, indent=2)[:-2] + ',\n  "rows": [\n    '
    TABLE.write_text(text + ",\n    ".join(map(json.dumps, rows)) + "\n  ]\n}\n")


if __name__ == "__main__":
    main()
