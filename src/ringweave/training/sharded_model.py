"""Sharded models: what `prepare` does for a model under FSDP2 or HSDP, which sums its gradients itself.

FSDP takes the mean of the ranks' gradients. A rank's portion of the batch gets its weight where the script's loss goes
back into the model: the gradients of the outputs are multiplied by N b_i / sum b (N ranks, b_i samples on this rank),
and the gradients of all parameters follow from them in proportion.

On a CPU, FSDP waits for each collective before it goes on. That is needed by nothing: the parameters of a module can be
gathered while the one before it computes, and the sums of gradients are read after the backward pass. So they run
beside what follows, as they do on CUDA, where they have streams of their own.
"""

import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils import _pytree as pytree

from ringweave.environment import WorkerEnvironment
from ringweave.errors import TrainingError, UsageError
from ringweave.jobs import modes
from ringweave.training.collectives import ControlGroup
from ringweave.training.gradients import SampleWeights
from ringweave.training.options import Script

_FULLY_SHARD = "Shard the whole model by torch.distributed.fsdp.fully_shard over a mesh of all ranks, before prepare"


def decide_mode(requested: str, launcher_mode: str | None) -> tuple[str, str]:
    """Return the mode of a sharded model, and the reason in words.

    Raises:
        UsageError: Another mode than sync is asked for.
    """
    mode, source = modes.decide_mode(requested, launcher_mode, 1)
    if mode == modes.SYNC:
        is_asked = modes.SYNC in (requested, launcher_mode)
        return mode, source if is_asked else "the model is sharded, and its ranks wait for one another in every layer"
    reasons = {
        modes.BALANCED: "the waits for one another in every layer hide how fast each rank is",
        modes.LOCAL: "each site would need the whole model",
        modes.PS: "each worker alone would need the whole model",
        modes.PS_HRA: "the parameter server needs the whole model",
    }
    expected = f"sync for a sharded model, since {reasons[mode]}"
    do = "Leave the mode out, or wrap the model in nothing and let prepare replicate it"
    raise UsageError("mode", got=mode, expected=expected, do=f"{do} ({source})")


def check_script(script: Script, environment: WorkerEnvironment) -> None:
    """Refuse options that do not go with a sharded model, and models that are sharded in another way.

    Raises:
        UsageError: The job is elastic.
        TrainingError: For the first thing that does not fit.
    """
    if environment.coordinators:
        got, expected = "a sharded model", "one that every worker has whole: a lost worker takes its part along"
        do = "Leave out --elastic, and go on from checkpoints after a failure"
        raise UsageError("model of an elastic job", got=got, expected=expected, do=do)
    if script.ddp:
        expected, do = "none for a sharded model, which is not in DistributedDataParallel", "Leave them out"
        raise TrainingError("options ddp", got=", ".join(sorted(script.ddp)), expected=expected, do=do)
    for name, parameter in script.model.named_parameters():
        problem = _parameter_problem(parameter)
        if problem:
            expected = "a part of a tensor that is sharded over all ranks"
            raise TrainingError(f"parameter {name}", got=problem, expected=expected, do=_FULLY_SHARD)
    own = set(script.model.parameters())
    num_foreign = sum(parameter not in own for parameter in script.parameters)
    if num_foreign:
        got = f"{num_foreign} of {len(script.parameters)} that the model does not have"
        do = "Make the optimizer after fully_shard, which replaces the parameters"
        raise TrainingError("parameters of the optimizer", got=got, expected="the sharded model's", do=do)


def _parameter_problem(parameter: Tensor) -> str:
    """Return how a parameter is not sharded as FSDP2 and HSDP do it over all ranks; empty if it is, or is frozen."""
    if not isinstance(parameter, DTensor):
        is_flat = type(parameter).__name__ == "FlatParameter"
        return "one of FullyShardedDataParallel (FSDP1)" if is_flat else "a whole tensor" * parameter.requires_grad
    *outer, inner = parameter.placements
    if not isinstance(inner, Shard) or not all(isinstance(each, Replicate) for each in outer):
        return f"a tensor with placements {parameter.placements}"
    num_ranks = parameter.device_mesh.size()
    return "" if num_ranks == dist.get_world_size() else f"a tensor over {num_ranks} ranks of {dist.get_world_size()}"


@torch.no_grad()
def share_replicas(model: nn.Module, control: ControlGroup) -> None:
    """Give all ranks the same values of what several of them hold: replicas of shards, buffers, frozen parameters.

    As in DistributedDataParallel, values of lower ranks count. A shard that one rank alone holds stays as it is.
    """
    for tensor in [*model.parameters(), *model.buffers()]:
        if not isinstance(tensor, DTensor):
            tensor.copy_(control.broadcast(tensor.detach().cpu().contiguous()))
            continue
        for dimension, placement in enumerate(tensor.placements):
            if isinstance(placement, Replicate):
                dist.broadcast(tensor.to_local(), group=tensor.device_mesh.get_group(dimension), group_src=0)


def weigh_outputs(model: nn.Module, weights: SampleWeights) -> None:
    """Weight the gradients that go into the model by its samples, from the next forward pass on."""

    def weigh(output: Tensor) -> Tensor:
        if not output.requires_grad:
            return output
        handed_out = output.view_as(output)  # the model itself may use the output too, whose gradient is weighted once
        handed_out.register_hook(weights.weigh)
        return handed_out

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        del module, args
        if not torch.is_grad_enabled():
            return output
        if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(output)):
            expected = "a tensor, or a tuple, list or dict with tensors"
            do = "Return one, so that gradients can be weighted by the samples of each rank"
            raise TrainingError("output of the model", got=type(output).__name__, expected=expected, do=do)
        return pytree.tree_map_only(Tensor, weigh, output)

    model.register_forward_hook(hook)


class OpenReductions:
    """Reductions of a model's gradients that run beside a backward pass and end with it.

    FSDP hands them in group by group. An allreduce of what a reduce-scatter leaves begins once that is done, in a
    thread that takes one after the other, so all ranks have them in the same order.
    """

    def __init__(self) -> None:
        self._pass = -1
        self._scatter: dist.Work | None = None
        self._scattered: Tensor | None = None
        self._sums: list[futures.Future[dist.Work | None]] = []
        self._starter = futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="sums-of-gradients")

    def may_open(self) -> bool:
        """Return whether a backward pass is under way, which will wait for all that is open."""
        number = torch._C._current_graph_task_id()
        if number < 0:
            return False
        if number != self._pass:
            self._pass = number
            self._scatter = self._scattered = None  # of a pass that an error ended
            self._sums.clear()
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        return True

    def scatter(self, output: Tensor, start: Callable[[], dist.Work | None]) -> None:
        """Start a reduce-scatter into `output`, after the one before it."""
        self._end_scatter()
        self._scatter, self._scattered = start(), output

    def sum(self, tensor: Tensor, start: Callable[[], dist.Work | None]) -> None:
        """Start an allreduce of a tensor, once the reduce-scatter that writes it is done."""
        is_scattered = self._scattered is not None and tensor.data_ptr() == self._scattered.data_ptr()
        scatter = self._scatter if is_scattered else None

        def start_after() -> dist.Work | None:
            if scatter is not None:
                scatter.wait()
            return start()

        self._sums.append(self._starter.submit(start_after))

    def start_all(self) -> None:
        """Return once no reduction that was handed in is still to be started."""
        self._end_scatter()
        futures.wait(self._sums)

    def _end_scatter(self) -> None:
        scatter, self._scatter, self._scattered = self._scatter, None, None
        if scatter is not None:
            scatter.wait()

    def _end(self) -> None:
        self._end_scatter()
        while self._sums:
            work = self._sums.pop(0).result()
            if work is not None:
                work.wait()


class OverlappedReduceScatter:
    """FSDP's reduce-scatter of one parameter group, left open where nothing reads its output within the pass."""

    def __init__(self, own: Any, reductions: OpenReductions, reads_at_once: Callable[[], bool]) -> None:
        """Wrap what FSDP would call; `reads_at_once` returns whether FSDP or a hook reads the output in the pass."""
        self.allocate = own.allocate
        self._own, self._reductions, self._reads_at_once = own, reductions, reads_at_once

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Start the reduce-scatter; return its work, or None if it ends with the backward pass or is done."""
        start = functools.partial(self._own, output_tensor, input_tensor, group, op)
        if op == dist.ReduceOp.AVG and not self._reads_at_once() and self._reductions.may_open():
            self._reductions.scatter(output_tensor, lambda: start(True))
            return None
        self._reductions.start_all()
        return start(async_op)


class OverlappedAllReduces(dist.ProcessGroup):
    """Group of the replicas of one FSDP parameter group, whose allreduces in a backward pass end with that pass.

    It has what FSDP uses of such a group: its size, and averages of sharded gradients. Each average is waited for at
    once where something reads it before the backward pass ends.
    """

    def __init__(self, group: dist.ProcessGroup, reductions: OpenReductions, reads_at_once: Callable[[], bool]) -> None:
        """Wrap the group; `reads_at_once` returns whether FSDP or a hook reads the sums within the pass."""
        super().__init__(group.rank(), group.size())  # pyrefly: ignore - missing in torch's stubs
        self._group, self._reductions, self._reads_at_once = group, reductions, reads_at_once

    def __eq__(self, other: object) -> bool:
        """Stand for the group in torch's tables, from which the texts of errors are made."""
        return other is self or other is self._group

    def __hash__(self) -> int:
        return hash(self._group)

    def allreduce(self, tensors: list[Tensor], opts: dist.AllreduceOptions) -> dist.Work | None:  # pyrefly: ignore
        """Start an allreduce; return its work, or None if it ends with the backward pass or is done."""
        if opts.reduceOp != dist.ReduceOp.AVG or self._reads_at_once() or not self._reductions.may_open():
            self._reductions.start_all()
            return self._group.allreduce(tensors, opts)
        opts.asyncOp = True
        self._reductions.sum(tensors[0], lambda: self._group.allreduce(tensors, opts))
        return None


class OpenAllGather:
    """FSDP's allgather of one parameter group, which returns at once: FSDP waits for it where it needs the values."""

    def __init__(self, own: Any) -> None:
        """Wrap what FSDP would call."""
        self.allocate, self._own = own.allocate, own

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Start the allgather; return its work."""
        del async_op
        return self._own(output_tensor, input_tensor, group, True)


def overlap_collectives(model: nn.Module) -> int:
    """Let the collectives of FSDP on a CPU run beside computing; return of how many parameter groups.

    Gathers of the next module run beside the module before it, and reductions beside the backward pass. It uses names
    that FSDP does not document; where this torch has others, nothing changes.
    """
    num_groups, reductions = 0, OpenReductions()
    names = ("_all_gather_comm", "_reduce_scatter_comm")
    for group in _param_groups(model):
        if group.device.type != "cpu" or not all(hasattr(getattr(group, name, None), "allocate") for name in names):
            continue
        reads_at_once, mesh_info = _reader_of(group), group.mesh_info
        group._all_gather_comm = OpenAllGather(group._all_gather_comm)
        group._reduce_scatter_comm = OverlappedReduceScatter(group._reduce_scatter_comm, reductions, reads_at_once)
        replicas = getattr(mesh_info, "replicate_process_group", None)
        if isinstance(replicas, dist.ProcessGroup) and replicas.size() > 1:
            group.mesh_info = copy.copy(mesh_info)
            group.mesh_info.replicate_process_group = OverlappedAllReduces(replicas, reductions, reads_at_once)
        num_groups += 1
    if num_groups:
        _gather_ahead(model)
    return num_groups


def _gather_ahead(model: nn.Module) -> None:
    """Let each module's forward pass start the gather of the next one's parameters, in the order of the first pass.

    In the backward pass FSDP does so by itself. A script that has said what to gather ahead keeps its own order.
    """
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    states = [module._get_fsdp_state() for module in sharded]
    if any(getattr(state, "_states_to_forward_prefetch", None) for state in states):
        return
    order: list[FSDPModule] = []

    def note(module: nn.Module, args: Any) -> None:
        del args
        order.extend([module] if module not in order else [])  # pyrefly: ignore

    def plan(module: nn.Module, args: Any, output: Any) -> None:
        del module, args, output
        for each in hooks:
            each.remove()
        for one, following in itertools.pairwise(order):
            one.set_modules_to_forward_prefetch([following])

    hooks = [module.register_forward_pre_hook(note) for module in sharded]
    hooks.append(model.register_forward_hook(plan))


def _param_groups(model: nn.Module) -> Iterator[Any]:
    """Return FSDP's parameter groups of a model; none where they have no such mesh."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            groups = getattr(module._get_fsdp_state(), "_fsdp_param_groups", None) or ()
            yield from (each for each in groups if hasattr(each, "mesh_info") and hasattr(each, "fsdp_params"))


def _reader_of(group: Any) -> Callable[[], bool]:
    def reads_at_once() -> bool:
        """Return whether sums are added to gradients, converted, or handed to hooks before the pass ends."""
        if group._all_reduce_hook is not None or group._reduce_dtype not in (None, group._orig_dtype):
            return True
        if not group.all_reduce_grads or group._partial_reduce_output is not None:
            return True
        sharded = [each.sharded_param for each in group.fsdp_params]
        is_read = any(each.grad is not None or getattr(each, "_post_accumulate_grad_hooks", None) for each in sharded)
        return is_read or any(each.offload_to_cpu for each in group.fsdp_params)

    return reads_at_once
