"""Random collectives on the device beside the same ones on the CPU path, and every collective of the native path.

`--what random`: windows of allreduces, allgathers, reduce-scatters and broadcasts in random dtypes, operations, sizes,
layouts and streams, the device busy before and after, inputs dropped while the collective runs and their memory used
again. Half of the values are small whole numbers, whose sums do not depend on the order of additions; these must be
equal, and so must all that is only copied. For the others bits are compared too; a difference is counted on its own.
`--what native`: each collective, synchronous and asynchronous, recorded one by one before the next begins.
"""

import dataclasses
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from gpu_device import (
    NUM_STREAMS,
    BenchDevice,
    agree_max,
    first_line,
    join_world,
    new_group,
    rank_parser,
    reduce_with_limit,
    save_json,
)
from torch import Tensor

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int32, torch.int64, torch.uint8)
ARITHMETIC = ("SUM", "MAX", "MIN", "PRODUCT", "AVG")
BITWISE = ("BAND", "BOR", "BXOR")
DENSE_LAYOUTS = ("dense", "offset")
"""All that torch takes besides allreduces; Gloo's broadcast of other layouts gives wrong values (torch 2.13)."""
LAYOUTS = ("dense", "dense", "every second", "transposed", "offset")
KINDS = ("allreduce", "allreduce", "allgather", "reduce-scatter", "broadcast")
WINDOW = 12
"""Collectives in flight together, at most."""
StartedNative = tuple[Any, Callable[[], bool]]
"""Work of a started collective, or None, and the check of its result."""
GARBAGE = 77
MAX_ELEMENTS = 5_000_000


@dataclass(kw_only=True)
class RandomCase:
    """One random collective; every rank draws the same."""

    kind: str
    root: int
    """Of a broadcast."""
    dtype: torch.dtype
    op: str
    num_elements: int
    """Of this rank's input."""
    layout: str
    stream: int
    wait_stream: int
    is_sync: bool
    is_dropped: bool
    is_exact: bool
    busy_before_s: float
    busy_after_s: float


@dataclass(kw_only=True)
class StartedCase:
    """A started collective: the input for the CPU path, and the result or the memory that must stay as it is."""

    case: RandomCase
    kept_input: Tensor
    work: Any
    tensor: Tensor | None
    """Memory of the result."""
    garbage: Tensor | None = None
    result: Tensor | None = None


class TruthRun:
    """All windows of one run, and the counts."""

    def __init__(self, device: BenchDevice, control: Any, seed: int, max_elements: int) -> None:
        self.device, self.control, self.max_elements = device, control, max_elements
        self.rng = random.Random(seed)
        self.generator = torch.Generator(device.device).manual_seed(1000 * seed + dist.get_rank())
        self.pairs: list[tuple[torch.dtype, str]] = []
        self.refused: list[str] = []
        self.counts = dict.fromkeys(("done", "wrong", "bits_differ", "garbage_overwritten", "dropped", "sync"), 0)
        self.examples: list[str] = []
        self.call_s: list[float] = []
        self.sync_errors: list[str] = []

    def find_pairs(self) -> None:
        """Try every dtype with every operation; a pair that the CPU path refuses is left out on both."""
        for dtype in (*FLOATS, *INTEGERS):
            for op in (*ARITHMETIC, *(BITWISE if dtype in INTEGERS else ())):
                problems = [self._try(dtype, op, place) for place in (torch.device("cpu"), self.device.device)]
                if any(problems):
                    self.refused.append(f"{dtype} {op}: CPU {problems[0]}, device {problems[1]}")
                else:
                    self.pairs.append((dtype, op))

    def _try(self, dtype: torch.dtype, op: str, place: torch.device) -> str | None:
        problem = None
        for num_elements in (16, 40_000):
            try:
                dist.all_reduce(torch.ones(num_elements, dtype=dtype, device=place), op=reduce_op(op))
            except Exception as error:
                problem = first_line(error)
        return (
            "refused on another rank"
            if agree_max(float(problem is not None), self.control) and not problem
            else problem
        )

    def draw(self) -> RandomCase:
        """Draw the next case."""
        rng = self.rng
        dtype, op = rng.choice(self.pairs)
        kind, size, num_elements = rng.choice(KINDS), dist.get_world_size(), int(self.max_elements ** rng.random())
        has_blocks = kind in ("allgather", "reduce-scatter")
        return RandomCase(
            kind=kind,
            root=rng.randrange(size),
            dtype=dtype,
            op=op,
            num_elements=size * max(1, num_elements // size) if has_blocks else max(1, num_elements),
            layout=rng.choice(LAYOUTS if kind == "allreduce" else DENSE_LAYOUTS),
            stream=rng.randrange(NUM_STREAMS),
            wait_stream=rng.randrange(NUM_STREAMS),
            is_sync=rng.random() < 0.2,
            is_dropped=rng.random() < 0.2,
            is_exact=rng.random() < 0.5,
            busy_before_s=rng.choice([0, 0, 2e-4, 2e-3]),
            busy_after_s=rng.choice([0, 0, 2e-4, 1e-3]),
        )

    def run_window(self) -> None:
        """Start a window of collectives, finish them in another order, and compare all."""
        cases = [self.draw() for _ in range(self.rng.randint(1, WINDOW))]
        started = [self.start(case, is_alone=index == 0) for index, case in enumerate(cases)]
        waiting = list(started)
        self.rng.shuffle(waiting)
        for each in waiting:
            self.finish(each)
        self.device.synchronize()
        for each in started:
            self.compare(each)
        self.counts["done"] += len(cases)

    def start(self, case: RandomCase, *, is_alone: bool) -> StartedCase:
        """Start one collective on its stream; only a call that is alone in flight is tried for synchronisation."""
        self.counts["sync"] += case.is_sync
        with self.device.use_stream(case.stream):
            self.device.keep_busy(case.busy_before_s)
            tensor = self.make_input(case)
            kept = tensor.clone()
            call, result = self._call(tensor, case, is_alone=is_alone)
            self.device.keep_busy(case.busy_after_s)
            if case.is_dropped and not case.is_sync:
                self.counts["dropped"] += 1
                del tensor, result
                garbage = torch.full((case.num_elements,), GARBAGE, dtype=case.dtype, device=self.device.device)
                return StartedCase(case=case, kept_input=kept, work=call, tensor=None, garbage=garbage)
            return StartedCase(case=case, kept_input=kept, work=call, tensor=result)

    def _call(self, tensor: Tensor, case: RandomCase, *, is_alone: bool) -> tuple[Any, Tensor]:
        """Return the work of the collective, and the memory of its result."""
        started_s = time.perf_counter()
        is_checked = is_alone and not case.is_sync and not self.sync_errors
        try:
            with self.device.forbid_synchronization(is_on=is_checked):
                work, result = start_collective(tensor, case)
        except RuntimeError as error:
            if "synchronizing" not in str(error):
                raise
            self.sync_errors.append(first_line(error))  # all ranks call alike, so all call again
            work, result = start_collective(tensor, case)
        if not case.is_sync:
            self.call_s.append(time.perf_counter() - started_s)
        return work, result

    def make_input(self, case: RandomCase) -> Tensor:
        """Return this rank's input in its layout, with new values."""
        num = case.num_elements
        base = self._values(2 * num if case.layout == "every second" else num + 3, case)
        if case.layout == "every second":
            return base[::2]
        if case.layout == "transposed" and num >= 4:
            return base[: num // 2 * 2].view(2, num // 2).t()
        return base[3:] if case.layout == "offset" else base[:num]

    def _values(self, num: int, case: RandomCase) -> Tensor:
        place = self.device.device
        if case.is_exact or case.dtype in INTEGERS:
            highest = 3 if case.op == "PRODUCT" else 16
            whole = torch.randint(1, highest, (num,), generator=self.generator, device=place)
            return whole.to(case.dtype)
        return torch.randn(num, generator=self.generator, device=place).to(case.dtype)

    def finish(self, each: StartedCase) -> None:
        """Wait on another stream than the one that called, and use the result there."""
        with self.device.use_stream(each.case.wait_stream):
            if each.work is not None:
                each.work.wait()
            else:  # a synchronous call has ordered its own stream only
                self.device.order_after(each.case.stream)
            if each.tensor is not None:
                each.result = each.tensor.clone()
        each.work = None

    def compare(self, each: StartedCase) -> None:
        """Run the case on the CPU path, and compare."""
        case = each.case
        expected = each.kept_input.cpu()
        if each.kept_input.stride() != expected.stride():
            expected = torch.empty_strided(each.kept_input.shape, each.kept_input.stride(), dtype=case.dtype).copy_(
                expected
            )
        expected = start_collective(expected, dataclasses.replace(case, is_sync=True))[1]
        if each.garbage is not None and not bool((each.garbage == GARBAGE).all()):
            self.counts["garbage_overwritten"] += 1
            self._note(case, "memory of a dropped input was written after it had been given away")
        if each.result is None:
            return
        found = each.result.cpu()
        if torch.equal(raw_bytes(found), raw_bytes(expected)):
            return
        self.counts["bits_differ"] += 1
        gap = (found.double() - expected.double()).abs().max().item()
        scale = expected.double().abs().max().item()
        is_copied = case.kind in ("allgather", "broadcast")
        if is_copied or case.is_exact or case.dtype in INTEGERS or not gap <= tolerance(case.dtype) * scale:
            self.counts["wrong"] += 1
            self._note(case, f"largest difference {gap:g}, largest value {scale:g}")

    def _note(self, case: RandomCase, text: str) -> None:
        if len(self.examples) < 10:
            self.examples.append(f"{text}: {case}")

    def summary(self) -> dict[str, Any]:
        """Return counts of this rank, and the time of the asynchronous calls."""
        calls = sorted(self.call_s) or [0.0]
        return {
            "counts": self.counts,
            "examples": self.examples,
            "refused": self.refused,
            "num_pairs": len(self.pairs),
            "call_median_s": statistics.median(calls),
            "call_p99_s": calls[int(0.99 * (len(calls) - 1))],
            "sync_errors": self.sync_errors[:3],
        }


def start_collective(tensor: Tensor, case: RandomCase) -> tuple[Any, Tensor]:
    """Start the case's collective on this rank's input; return its work and the memory of the result."""
    size, is_async, op = dist.get_world_size(), not case.is_sync, reduce_op(case.op)
    if case.kind == "allgather":
        result = tensor.new_empty(size * tensor.numel())
        return dist.all_gather_into_tensor(result, tensor, async_op=is_async), result
    if case.kind == "reduce-scatter":
        result = tensor.new_empty(tensor.numel() // size)
        return dist.reduce_scatter_tensor(result, tensor, op=op, async_op=is_async), result
    if case.kind == "broadcast":
        return dist.broadcast(tensor, case.root, async_op=is_async), tensor
    return dist.all_reduce(tensor, op=op, async_op=is_async), tensor


def raw_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor's elements in order, whatever its layout."""
    return torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1)).view(torch.uint8)


def reduce_op(name: str) -> Any:
    """Return torch's operation of that name."""
    return getattr(dist.ReduceOp, name)


def tolerance(dtype: torch.dtype) -> float:
    """Return the relative error that another order of additions may cause."""
    return {torch.float64: 1e-12, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype]


def run_random(options: Any, device: BenchDevice, control: Any) -> None:
    """Run windows until the count is reached or the time is over; write the counts after every window."""
    run = TruthRun(device, control, options.seed, 20_000 if options.short else MAX_ELEMENTS)
    deadline_s = time.monotonic() + options.budget_s
    run.find_pairs()
    document: dict[str, Any] = {"world_size": dist.get_world_size(), "wanted": options.count, "error": None}
    while run.counts["done"] < options.count and document["error"] is None:
        try:
            run.run_window()
        except Exception as error:
            document["error"] = first_line(error)
        failed = agree_max(float(document["error"] is not None), control)
        document.update(run.summary(), memory=device.memory())
        document["all_ranks"] = sum_counts(run.counts, control)
        save_json(options.result.with_name(f"{options.result.name}.{dist.get_rank()}"), document)
        if dist.get_rank() == 0:
            save_json(options.result, document)
        if failed or agree_max(float(time.monotonic() > deadline_s), control):
            break


def sum_counts(counts: dict[str, int], control: Any) -> dict[str, int]:
    """Return the counts of all ranks together."""
    totals = torch.tensor(list(counts.values()))
    dist.all_reduce(totals, group=control)
    return dict(zip(counts, totals.tolist(), strict=True))


class NativeCases:
    """The collectives of the native path, each as (is_async) -> (work, check of the result)."""

    NAMES = (
        "all_reduce",
        "broadcast",
        "reduce",
        "all_gather",
        "all_gather_into_tensor",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "all_to_all_single",
        "all_to_all",
        "gather",
        "scatter",
        "send_recv",
        "barrier",
        "all_reduce_coalesced",
        "batch_isend_irecv",
    )

    def __init__(self, device: BenchDevice) -> None:
        self.device, self.rank, self.size = device, dist.get_rank(), dist.get_world_size()
        self.total = self.size * (self.size + 1) / 2

    def own(self, num: int = 8) -> Tensor:
        """Return a tensor of this rank's number plus one."""
        return torch.full((num,), self.rank + 1.0, device=self.device.device)

    def all_reduce(self, is_async: bool) -> StartedNative:
        x = self.own()
        return dist.all_reduce(x, async_op=is_async), lambda: bool((x == self.total).all())

    def broadcast(self, is_async: bool) -> StartedNative:
        x = self.own()
        return dist.broadcast(x, 0, async_op=is_async), lambda: bool((x == 1).all())

    def reduce(self, is_async: bool) -> StartedNative:
        x = self.own()
        return dist.reduce(x, 0, async_op=is_async), lambda: self.rank > 0 or bool((x == self.total).all())

    def all_gather(self, is_async: bool) -> StartedNative:
        out = [self.own() for _ in range(self.size)]
        work = dist.all_gather(out, self.own(), async_op=is_async)
        return work, lambda: all(bool((x == i + 1).all()) for i, x in enumerate(out))

    def all_gather_into_tensor(self, is_async: bool) -> StartedNative:
        out = self.own(8 * self.size)
        work = dist.all_gather_into_tensor(out, self.own(), async_op=is_async)
        return work, lambda: bool((out[-8:] == self.size).all())

    def reduce_scatter(self, is_async: bool) -> StartedNative:
        out = self.own()
        work = dist.reduce_scatter(out, [self.own() for _ in range(self.size)], async_op=is_async)
        return work, lambda: bool((out == self.total).all())

    def reduce_scatter_tensor(self, is_async: bool) -> StartedNative:
        out = self.own()
        work = dist.reduce_scatter_tensor(out, self.own(8 * self.size), async_op=is_async)
        return work, lambda: bool((out == self.total).all())

    def all_to_all_single(self, is_async: bool) -> StartedNative:
        out = self.own(8 * self.size)
        work = dist.all_to_all_single(out, self.own(8 * self.size), async_op=is_async)
        return work, lambda: bool((out[-8:] == self.size).all())

    def all_to_all(self, is_async: bool) -> StartedNative:
        out = [self.own() for _ in range(self.size)]
        work = dist.all_to_all(out, [self.own() for _ in range(self.size)], async_op=is_async)
        return work, lambda: bool((out[-1] == self.size).all())

    def gather(self, is_async: bool) -> StartedNative:
        out = [self.own() for _ in range(self.size)] if self.rank == 0 else None
        work = dist.gather(self.own(), out, 0, async_op=is_async)
        return work, lambda: out is None or bool((out[-1] == self.size).all())

    def scatter(self, is_async: bool) -> StartedNative:
        out = self.own()
        parts = [self.own() for _ in range(self.size)] if self.rank == 0 else None
        return dist.scatter(out, parts, 0, async_op=is_async), lambda: bool((out == 1).all())

    def send_recv(self, is_async: bool) -> StartedNative:
        x, work = self.own(), None
        if self.rank == 0:
            work = dist.isend(x, 1) if is_async else dist.send(x, 1)
        elif self.rank == 1:
            work = dist.irecv(x, 0) if is_async else dist.recv(x, 0)
        return work if is_async else None, lambda: self.rank != 1 or bool((x == 1).all())

    def barrier(self, is_async: bool) -> StartedNative:
        return dist.barrier(async_op=is_async), lambda: True

    def all_reduce_coalesced(self, is_async: bool) -> StartedNative:
        xs = [self.own(), self.own(3)]
        work = dist.all_reduce_coalesced(xs, async_op=is_async)
        return work, lambda: all(bool((x == self.total).all()) for x in xs)

    def batch_isend_irecv(self, is_async: bool) -> StartedNative:
        x, y = self.own(), self.own()
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, after), dist.P2POp(dist.irecv, y, before)]):
            work.wait()
        return None, lambda: bool((y == before + 1).all())


def run_native(options: Any, device: BenchDevice, control: Any) -> None:
    """Run each collective twice; a case that a former try did not finish is left out."""
    rank = dist.get_rank()
    document: dict[str, Any] = json.loads(options.result.read_text()) if options.result.exists() else {"cases": {}}
    cases: dict[str, Any] = document["cases"]
    agree_max(0.0, control)  # all ranks have read the file before the first one writes it

    def record(name: str, outcome: str) -> None:
        cases[name] = outcome
        if rank == 0:
            save_json(options.result, document)

    def attempt(name: str, action: Callable[[], bool]) -> None:
        if name in cases:
            return
        record(name, "did not finish")
        try:
            outcome = "right" if action() else "wrong result"
        except Exception as error:
            outcome = first_line(error)
        others: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(others, outcome, group=control)
        record(name, next((each for each in others if each != "right"), "right"))

    if device.is_cuda:
        attempt("plain nccl all_reduce", lambda: plain_nccl(device))
    native = NativeCases(device)
    for name in NativeCases.NAMES:
        function = getattr(native, name)
        for is_async in (True, False):
            attempt(
                f"{name} {'async' if is_async else 'sync'}", lambda f=function, a=is_async: one_native(f, a, device)
            )


def plain_nccl(device: BenchDevice) -> bool:
    """Return whether torch's own NCCL group reduces right with several ranks on this GPU."""
    x = torch.ones(8, device=device.device)
    reduce_with_limit(x, new_group("nccl", 30.0))
    device.synchronize()
    return bool((x == dist.get_world_size()).all())


def one_native(function: Callable[[bool], StartedNative], is_async: bool, device: BenchDevice) -> bool:
    """Start a collective, wait for it, and return whether its result is right."""
    work, is_right = function(is_async)
    if work is not None:
        work.wait()
    device.synchronize()
    return is_right()


def main() -> None:
    """Join the others and run what is asked for."""
    parser = rank_parser(__doc__)
    parser.add_argument("--what", choices=["random", "native"], default="random")
    parser.add_argument("--count", type=int, default=2500)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    device = BenchDevice(options.device)
    control = join_world(30.0)
    device.calibrate_busy()
    (run_random if options.what == "random" else run_native)(options, device, control)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
