"""Memory guard of a worker: measures the bytes of its batches, and computes a share that is too large in microbatches.

The guard sits between DDP and the model, so a script's loop sees one batch, one loss, one backward pass and one step,
whatever the microbatches. The first batch of training is measured on some of its samples, by the script's own model
under its own autocast, before the pass that counts. A share that does not fit at once is computed in microbatches: all
but the last drop their activations, and the backward pass repeats their forward passes one after the other. The same
happens after an out-of-memory error, in the forward or the backward pass, with smaller microbatches. Other ranks wait
for this one meanwhile, as for any slow one.

Source: the caching of outputs and gradients is that of Gao et al., Scaling Deep Contrastive Learning Batch Size under
Memory Limited Setup (2021).
"""

import atexit
import contextlib
import dataclasses
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer
from torch.utils import _pytree as pytree

from ringweave.environment import WorkerEnvironment
from ringweave.files import file_io
from ringweave.planning.balancing import MemoryLimit, MemoryUse
from ringweave.planning.balancing.memory import RESERVE
from ringweave.telemetry import event_writer
from ringweave.training.gradients import SampleWeights
from ringweave.training.memory import meters, microbatches
from ringweave.training.memory.meters import MemoryMeter
from ringweave.training.memory.microbatches import CannotSplitError, Microbatch, ModelCall
from ringweave.training.options import Script

_LOGGER = logging.getLogger("ringweave")
_TRIAL_GROWTH = 4
"""Factor from one size of the trial to the next."""
_AMPLE_FRACTION = 0.5
"""The trial ends when a whole batch of all ranks is predicted to use less than this fraction of the memory."""
_AFTER_OOM = 0.7
"""Factor on the samples at once, of this process or the next one in its slot, after an out-of-memory error."""
_MAX_RECORD_BYTES = 4096
_REPORTED_CHANGE = 0.05
"""Smallest change of the limit that is reported again."""
_ROOMY = 2.0
"""Freed memory is kept between passes if so many times the share fits: kept pieces of other sizes leave holes."""
_MAX_REPORTED = 2**31
"""Larger numbers of samples are reported as this one."""


class OomRecord:
    """Record of a worker's out-of-memory errors for its next process, in a file of the run directory.

    A process that the kernel kills cannot say so. The next one sees that the kernel's count has grown.
    """

    def __init__(self, path: Path | None, num_oom_kills: int) -> None:
        """Read the record; `path` None keeps none."""
        self._path, self._num_oom_kills = path, num_oom_kills
        self.factor = 1.0
        """Part of the memory for samples that is still used, by the errors so far."""
        known = _read_record(path)
        if known is not None:
            self.factor = known[1] * (_AFTER_OOM if num_oom_kills > known[0] else 1.0)
        self._write()

    @classmethod
    def of_worker(cls, environment: WorkerEnvironment, environ: Mapping[str, str], num_oom_kills: int) -> "OomRecord":
        """Return the record of this worker's slot; without a folder for it nothing is kept."""
        folder = environment.run_dir or (environment.events_path.parent if environment.events_path else None)
        slot = (environment.member or environ.get("RANK", "0")).partition(".")[0]
        return cls(folder / f"memory-{slot}.json" if folder else None, num_oom_kills)

    def record_exit(self, error: BaseException | None) -> None:
        """Record the exception that ends this process, if memory is the reason."""
        if microbatches.is_out_of_memory(error):
            self.factor *= _AFTER_OOM
            self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        try:
            file_io.replace_text(self._path, json.dumps([self._num_oom_kills, self.factor]))
        except OSError as error:
            _LOGGER.warning("record of out-of-memory errors: %s. The next process does not know of them.", error)


def _read_record(path: Path | None) -> tuple[int, float] | None:
    if path is None:
        return None
    try:
        num_oom_kills, factor = file_io.load_json(path, _MAX_RECORD_BYTES)
        return int(num_oom_kills), min(1.0, max(1e-6, float(factor)))
    except (OSError, ValueError, TypeError):
        return None


class _ProtectedPass:
    """Passes of one call: forward in microbatches; backward with smaller ones where memory does not suffice."""

    def __init__(self, guard: "MemoryGuard", call: ModelCall, sizes: Sequence[int]) -> None:
        self._guard, self._call = guard, call
        self._parts: list[Microbatch] = []
        self._indices: list[int] = []
        """Indices of the leaves that depend on parameters."""
        self._used_parameters: set[Tensor] = set()
        for size in sizes:
            self._parts.append(self._microbatch(self._parts[-1].until if self._parts else 0, size))

    def forward(self) -> Any:
        """Return the output of all samples; its gradients come back to `backward`.

        Raises:
            CannotSplitError: The outputs of the microbatches cannot be put together.
        """
        *repeated, last = self._parts
        for part in repeated:
            part.random_states = microbatches.random_states(self._guard.device)
            with self._guard.dropping_activations():
                part.leaves = pytree.tree_leaves(self._call.of_range(part.first, part.until))
            self._note_used(part)
            part.leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in part.leaves]
        with torch.enable_grad():
            output = self._call.of_range(last.first, last.until)
        last.leaves, spec = pytree.tree_flatten(output)
        last.is_kept = True
        if any(not isinstance(leaf, (Tensor, str, int, float, type(None))) for leaf in last.leaves):
            if repeated:
                raise CannotSplitError
            return output  # of a class of the script's own, with a graph that the script may follow
        if any(len(part.leaves) != len(last.leaves) for part in repeated):
            raise CannotSplitError
        merged = [
            microbatches.merge_leaf(self._parts, index) if repeated else leaf for index, leaf in enumerate(last.leaves)
        ]
        for part in repeated:
            part.leaves = []
        self._indices = [
            index for index, leaf in enumerate(last.leaves) if isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        if self._indices:
            self._note_used(last)
            outputs = [merged[index].detach() for index in self._indices]
            returned = _PassFunction.apply(self, outputs, *(self._guard.parameters[index] for index in self._used()))
            for index, leaf in zip(self._indices, returned, strict=True):
                merged[index] = leaf
        return pytree.tree_unflatten(merged, spec)

    def _note_used(self, part: Microbatch) -> None:
        """Note the parameters that these outputs depend on, if DDP looks for those that a pass does not use."""
        if self._guard.finds_unused:
            self._used_parameters |= microbatches.used_parameters(part.leaves)

    def _used(self) -> list[int]:
        """Return the indices of the parameters that DDP is to wait for."""
        parameters = self._guard.parameters
        used = self._used_parameters
        return [index for index in range(len(parameters)) if not self._guard.finds_unused or parameters[index] in used]

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of the parameters that are used, from those of the outputs."""
        sums: list[Tensor | None] = [None] * len(self._guard.parameters)
        pending = list(self._parts)
        while pending:  # the last one first, since its activations take memory
            part = pending.pop()
            found = self._try_gradients_of(part, gradients)
            part.leaves = []
            if found is None:
                self._guard.lower(part.num_samples)
                half = part.num_samples // 2
                pending += [
                    self._microbatch(part.first, half),
                    self._microbatch(part.first + half, part.num_samples - half),
                ]
                continue
            for index, gradient in enumerate(found):
                sums[index] = _add(sums[index], gradient)
        return [sums[index] for index in self._used()]

    def _try_gradients_of(self, part: Microbatch, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None] | None:
        """Return the gradients of the parameters by some samples; None if memory suffices only for fewer samples."""
        try:
            return self._gradients_of(part, gradients)
        except Exception as error:
            if (
                not microbatches.is_out_of_memory(error)
                or part.num_samples < 2
                or not self._guard.is_splittable(self._call)
            ):
                raise
            return None

    def _gradients_of(self, part: Microbatch, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        if part.is_kept:
            part.is_kept = False
            return self._differentiate(part, part.leaves, gradients)
        guard = self._guard
        restored = microbatches.restored_random_states(guard.device, part.random_states)
        with microbatches.preserved_buffers(guard.module), restored, torch.enable_grad():
            leaves = pytree.tree_leaves(self._call.of_range(part.first, part.until))
        return self._differentiate(part, leaves, gradients)

    def _differentiate(
        self, part: Microbatch, leaves: Sequence[Any], gradients: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        outputs, own = [], []
        for index, gradient in zip(self._indices, gradients, strict=True):
            leaf = leaves[index]
            if gradient is None or not leaf.requires_grad or (leaf.ndim == 0 and not part.fraction):
                continue
            outputs.append(leaf)
            own.append(self._gradient_of_part(part, leaf, gradient))
        if not outputs:
            return [None] * len(self._guard.parameters)
        with self._guard.unweighted():
            return torch.autograd.grad(outputs, self._guard.parameters, own, allow_unused=True)

    def _gradient_of_part(self, part: Microbatch, leaf: Tensor, gradient: Tensor) -> Tensor:
        """Return the part of an output's gradient that belongs to these samples."""
        if part.num_samples == self._call.num_samples:
            return gradient
        if leaf.ndim == 0:
            return gradient * part.fraction
        rows = gradient.shape[0] // self._call.num_samples
        return gradient[part.first * rows : part.until * rows]

    def _microbatch(self, first: int, size: int) -> Microbatch:
        is_whole = size == self._call.num_samples
        fraction = 1.0 if is_whole else self._guard.weights.fraction_of_range(first, first + size)
        return Microbatch(first=first, until=first + size, fraction=fraction)


def _add(total: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    """Return the sum in memory of its own: autograd's gradients may share theirs."""
    if total is None or gradient is None:
        return gradient if total is None else total
    return total + gradient


class _PassFunction(torch.autograd.Function):
    """Node of a protected pass in the script's graph."""

    @staticmethod
    def forward(ctx: Any, protected: _ProtectedPass, outputs: list[Tensor], *parameters: Tensor) -> tuple[Tensor, ...]:
        del parameters  # they connect the node with the gradients that DDP waits for
        ctx.protected = protected
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyrefly: ignore - the decorator's type
        return (None, None, *ctx.protected.backward(grad_outputs))


class MemoryGuard:
    """Guard of one model under DDP: measures, and decides for each forward pass of the script how it is computed."""

    def __init__(
        self,
        parallel: DistributedDataParallel,
        optimizer: Optimizer,
        weights: SampleWeights,
        meter: MemoryMeter,
        memory_factor: float,
        on_limit: Callable[[MemoryLimit, MemoryUse | None, float], object],
    ) -> None:
        """Create it; samples use as much of the memory for them as `memory_factor` says, after earlier errors.

        `on_limit` gets each new limit, the use that it follows from, and the bytes of the memory.
        """
        self.weights, self._meter, self._on_limit = weights, meter, on_limit
        self.module, self._optimizer = parallel.module, optimizer
        self.finds_unused = bool(parallel.find_unused_parameters)
        """DDP waits for no gradient of parameters that a pass does not use; found in the output's graph."""
        self.parameters = [each for each in parallel.module.parameters() if each.requires_grad]
        self._run_module: Callable[..., Any] = parallel._run_ddp_forward
        self._memory_factor = memory_factor
        self._has_measured = self._is_off = False
        self._use: MemoryUse | None = None
        self._limit: MemoryLimit | None = None
        self._ceiling = float("inf")
        """Most samples at once by the errors so far."""
        self._output_bytes = 0.0
        self._last_pass: tuple[int, tuple[int, ...]] | None = None
        """Samples of the last pass, and of its microbatches."""
        self._last_sizes: tuple[int, ...] = ()
        self._num_proven = 0
        """Samples of the largest pass that has been computed at once."""
        self._can_split: bool | None = None
        self._keeps_freed = True
        """Freed memory may be kept: it has not come near the limit."""

    @property
    def device(self) -> torch.device:
        return self.parameters[0].device

    def attach(self, parallel: DistributedDataParallel) -> None:
        """Let the forward passes of DDP go through the guard."""
        parallel._run_ddp_forward = self._run  # pyrefly: ignore - a method of DDP, replaced on this object

    def lower(self, num_samples: int) -> None:
        """Lower the limit: so many samples at once were too many."""
        self._meter.release_freed()
        at_once = num_samples + (self._limit.whole_samples - self._limit.room(0) if self._limit else 0)
        self._ceiling = min(self._ceiling, _AFTER_OOM * at_once)
        _LOGGER.warning("out of memory with %d samples at once: from now on at most %.3g", num_samples, self._ceiling)
        self._set_limit()

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """Compute a forward pass of the script."""
        num_samples = self.weights.num_samples if self.weights.num_total else 0
        if not num_samples or self._is_off or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self._run_module(*args, **kwargs)
        self._learn_from_last_pass()
        call = ModelCall.of_script(self._run_module, args, kwargs, num_samples)
        if call is None:
            return self._run_module(*args, **kwargs)
        if not self._has_measured:
            self._has_measured = True
            self._measure(call)
        if self._is_off:
            return call.whole()
        while True:
            sizes = self._sizes(call)
            if sizes != self._last_sizes:
                self._meter.release_freed()
                self._last_sizes = sizes
            has_memory, output = self._try_compute(call, sizes)
            if has_memory:
                self._last_pass = num_samples, sizes
                return output
            self.lower(max(sizes))

    def _sizes(self, call: ModelCall) -> tuple[int, ...]:
        sizes = (call.num_samples,) if self._limit is None else self._limit.split(call.num_samples)
        return sizes if len(sizes) == 1 or self.is_splittable(call) else (call.num_samples,)

    def _try_compute(self, call: ModelCall, sizes: tuple[int, ...]) -> tuple[bool, Any]:
        """Compute a forward pass; return whether memory sufficed, and the output."""
        try:
            return True, self._compute(call, sizes)
        except Exception as error:
            if not microbatches.is_out_of_memory(error) or max(sizes) == 1 or self._can_split is False:
                raise
            return False, None

    def _compute(self, call: ModelCall, sizes: tuple[int, ...]) -> Any:
        if len(sizes) == 1 and call.num_samples <= self._num_proven:
            return call.whole()
        try:
            return _ProtectedPass(self, call, sizes).forward()
        except CannotSplitError:
            self._can_split = False
            return call.whole()

    def _learn_from_last_pass(self) -> None:
        """Correct the use by the peak since the last pass began, if it is higher than predicted."""
        last, self._last_pass = self._last_pass, None
        peak = self._meter.peak_bytes()
        self._meter.reset_peak()
        if last is None or self._use is None or self._limit is None:
            return
        num_samples, sizes = last
        if len(sizes) == 1:
            self._num_proven = max(self._num_proven, num_samples)
        if self._meter.counts_freed:
            if peak > (1 - RESERVE) * self._meter.limit_bytes():
                self._keeps_freed = False
                self._set_limit()
            return
        limit, at_once = self._limit, float(max(sizes))
        if len(sizes) > 1:
            at_once += limit.split_samples + limit.waiting_samples * num_samples
        fixed_bytes = peak - self._use.sample_bytes * at_once
        if fixed_bytes > self._use.fixed_bytes:
            self._use = dataclasses.replace(self._use, fixed_bytes=fixed_bytes)
            self._set_limit()

    def _set_limit(self) -> None:
        """Compute the limit from the use and the errors so far; report it."""
        gradient_bytes = sum(each.nbytes for each in self.parameters)
        memory_bytes = self._meter.limit_bytes()
        if self._use is None:
            limit = MemoryLimit(whole_samples=self._ceiling)
        else:
            limit = MemoryLimit.of_bytes(self._use, memory_bytes, 2 * gradient_bytes, self._output_bytes)
            at_once = min(self._memory_factor * limit.whole_samples, self._ceiling)
            limit = dataclasses.replace(limit, whole_samples=at_once)
        self._limit = limit
        is_roomy = limit.whole_samples >= _ROOMY * self.weights.num_samples
        self._meter.keep_freed(is_kept=self._keeps_freed and is_roomy)
        self._on_limit(limit, self._use, memory_bytes)

    # Measuring.

    def _measure(self, call: ModelCall) -> None:
        """Measure the use on growing numbers of the call's samples, none of which is predicted not to fit."""
        beside_bytes = self._bytes_to_come()
        self._meter.keep_freed(is_kept=False)
        try:
            with self.preserved_state():
                measured = self._run_trials(call, beside_bytes)
        except Exception as error:  # the script's own code, which may still work outside of a trial
            _LOGGER.warning("memory is not measured, and shares are not split: %s: %s", type(error).__name__, error)
            self._is_off = True
            measured = []
        self._meter.reset_peak()
        if len(measured) < 2:
            return
        use = MemoryUse.fit(measured)
        least = call.sample_bytes + self._output_bytes
        fixed_bytes = use.fixed_bytes + beside_bytes
        self._use = MemoryUse(fixed_bytes=fixed_bytes, sample_bytes=max(use.sample_bytes, least))
        self._output_bytes += call.sample_bytes
        self._set_limit()

    def _run_trials(self, call: ModelCall, beside_bytes: float) -> list[tuple[int, float]]:
        measured: list[tuple[int, float]] = []
        budget = (1 - RESERVE) * self._meter.limit_bytes() - beside_bytes
        size = min(2, call.num_samples)
        try:
            self._run_trial(call, size)  # loads and compiles what the first pass needs
            self._meter.release_freed()
            self._meter.reset_peak()
            base = self._meter.peak_bytes()
            measured.append((0, base))
            budget = base + self._memory_factor * (budget - base)
            while True:
                self._run_trial(call, size)
                measured.append((size, self._meter.peak_bytes()))
                next_size = self._next_size(measured[-2:], call.num_samples, budget)
                if next_size <= size:
                    return measured[1:] if len(measured) > 2 else measured
                size = next_size
        except Exception as error:
            if not microbatches.is_out_of_memory(error):
                raise
            self.lower(size)
            return measured

    def _next_size(self, latest: Sequence[tuple[int, float]], num_samples: int, budget: float) -> int:
        """Return the next number of samples to measure; 0 if no more are needed."""
        use = MemoryUse.fit(latest)
        if use.peak_bytes(self.weights.num_total) < _AMPLE_FRACTION * budget and latest[0][0]:
            return 0
        fitting = int((budget - use.fixed_bytes) / use.sample_bytes)
        return min(_TRIAL_GROWTH * latest[-1][0], num_samples, fitting)

    def _run_trial(self, call: ModelCall, size: int) -> None:
        """Compute gradients of the first samples, by the mean square of the outputs; they are dropped."""
        self._meter.release_freed()
        self._meter.reset_peak()
        leaves = pytree.tree_leaves(call.of_range(0, size))
        tensors = [each for each in leaves if isinstance(each, Tensor) and each.requires_grad]
        self._output_bytes = 3 * sum(each.nbytes for each in tensors) / size
        if tensors:
            loss = torch.stack([each.float().square().mean() for each in tensors]).sum()
            with self.unweighted():
                torch.autograd.grad(loss, self.parameters, allow_unused=True)

    def _bytes_to_come(self) -> float:
        """Return the bytes that the trial does not see: the buckets of a reduction, and the optimizer's first state."""
        num_bytes = sum(each.nbytes for each in self.parameters)
        if self._optimizer.state:
            return num_bytes
        momentum = self._optimizer.defaults.get("momentum", 1.0) if isinstance(self._optimizer, SGD) else 2.0
        return num_bytes * (1 + math.ceil(momentum))  # Adam's two tensors, unless it is SGD

    def is_splittable(self, call: ModelCall) -> bool:
        """Return whether the model treats samples one by one, by its outputs for two samples; checked once."""
        if self._can_split is None:
            if call.num_samples < 2:
                return False
            with self.preserved_state(), microbatches.evaluating(self.module), torch.no_grad():
                try:
                    self._can_split = self._has_same_outputs(call)
                except Exception as error:
                    if microbatches.is_out_of_memory(error):
                        raise
                    self._can_split = False
            if not self._can_split:
                _LOGGER.warning("memory: the model does not treat samples one by one, so its share is computed at once")
        return bool(self._can_split)

    def _has_same_outputs(self, call: ModelCall) -> bool:
        fraction = self.weights.fraction_of_range
        total = fraction(0, 2) or 1.0 if self.weights.is_mean else 1.0
        parts = [Microbatch(first=each, until=each + 1, fraction=fraction(each, each + 1) / total) for each in (0, 1)]
        for part in parts:
            part.leaves = pytree.tree_leaves(call.of_range(part.first, part.until))
        together = pytree.tree_leaves(call.of_range(0, 2))
        return all(
            microbatches.is_same_leaf(microbatches.merge_leaf(parts, index), leaf)
            for index, leaf in enumerate(together)
        )

    # State that inner passes leave as it was.

    @contextlib.contextmanager
    def dropping_activations(self) -> Iterator[None]:
        """Compute without activations: without a graph, or with one that only shows which parameters are used."""
        if not self.finds_unused:
            with torch.no_grad():
                yield
            return
        dropping = torch.autograd.graph.saved_tensors_hooks(lambda _: None, lambda _: None)  # pyrefly: ignore - no tensor
        with torch.enable_grad(), dropping:
            yield

    @contextlib.contextmanager
    def unweighted(self) -> Iterator[None]:
        """Compute gradients that are weighted later."""
        self.weights.is_within_pass = True
        try:
            yield
        finally:
            self.weights.is_within_pass = False

    @contextlib.contextmanager
    def preserved_state(self) -> Iterator[None]:
        with microbatches.preserved_buffers(self.module), microbatches.restored_random_states(self.device):
            yield


def guard_memory(
    script: Script,
    parallel: DistributedDataParallel,
    weights: SampleWeights,
    environment: WorkerEnvironment,
    set_limit: Callable[[MemoryLimit], object],
) -> None:
    """Guard the memory of a model's training, where it is limited: a card's, or that of a control group.

    Args:
        script: Arguments of `prepare`. With a limit of samples by hand nothing is measured.
        parallel: The model under DDP, whose forward passes go through the guard from here on.
        weights: Weights of the present batch, with its number of samples.
        environment: Names the folder of the record of errors, and the event log.
        set_limit: Gets each new limit, in the script's thread.
    """
    meter = meters.find_meter(parallel.module)
    if meter is None or script.max_samples is not None:
        return
    record = OomRecord.of_worker(environment, os.environ, meter.num_oom_kills())
    atexit.register(lambda: record.record_exit(getattr(sys, "last_value", None)))
    reporter = _LimitReporter(environment, set_limit)
    MemoryGuard(parallel, script.optimizer, weights, meter, record.factor, reporter.report).attach(parallel)


class _LimitReporter:
    """Reports limits: to the balancer each of them, to log and events those that differ from the last one there."""

    def __init__(self, environment: WorkerEnvironment, set_limit: Callable[[MemoryLimit], object]) -> None:
        self._set_limit, self._reported = set_limit, 0.0
        self._write = event_writer(environment.events_path)

    def report(self, limit: MemoryLimit, use: MemoryUse | None, memory_bytes: float) -> None:
        self._set_limit(limit)
        if abs(limit.whole_samples - self._reported) <= _REPORTED_CHANGE * self._reported:
            return
        self._reported = limit.whole_samples
        samples = min(int(limit.whole_samples), _MAX_REPORTED)
        _LOGGER.info(
            "memory: at most %d samples at once in %d bytes (predicted from measured use)", samples, memory_bytes
        )
        self._write(
            "memory_limited",
            rank=int(os.environ.get("RANK") or 0),
            samples_at_once=samples,
            memory_bytes=int(memory_bytes),
            fixed_bytes=int(use.fixed_bytes) if use else None,
            sample_bytes=int(use.sample_bytes) if use else None,
        )
