"""What ranks with an accelerator run, one GPU or several: importable, because real processes import it."""

from typing import Any

import torch
import torch.distributed as dist

from ringweave.errors import CommunicationError


def reduce_on_cuda(sizes: list[int]) -> dict[str, dict[str, int]]:
    """Checked allreduces of every kind; how many went by which schedule."""
    rank, size = _take_gpu(), dist.get_world_size()
    for num_elements in sizes:
        _check(torch.arange(num_elements, dtype=torch.float32), dist.ReduceOp.SUM, size * (size + 1) // 2)
    _check(torch.arange(24, dtype=torch.int64).view(6, 4).t(), dist.ReduceOp.SUM, size * (size + 1) // 2)
    _check(2 * torch.arange(10, dtype=torch.float32), dist.ReduceOp.AVG, (size + 1) / 2)
    _check(torch.arange(10, dtype=torch.bfloat16), dist.ReduceOp.MAX, size)
    synchronous = torch.full((5,), float(rank), device="cuda")
    dist.all_reduce(synchronous)
    assert synchronous.tolist() == [sum(range(size))] * 5
    return dist.group.WORLD.collectives_by_schedule()


def reduce_behind_a_busy_stream(num_times: int) -> None:
    """The script runs ahead of its stream, drops its tensors at once, and uses streams of its own."""
    rank, size = _take_gpu(), dist.get_world_size()
    side = torch.cuda.Stream()
    for number in range(num_times):
        with torch.cuda.stream(side if number % 2 else torch.cuda.current_stream()):
            torch.cuda._sleep(2_000_000)
            mine = torch.full((300_000,), float(rank + number), device="cuda")
            work: Any = dist.all_reduce(mine, async_op=True)
            torch.cuda._sleep(2_000_000)
            dropped: Any = dist.all_reduce(torch.ones(200_000, device="cuda"), async_op=True)
            del dropped
            victim = torch.full((200_000,), 7.0, device="cuda")
            work.wait()
            assert bool((mine == sum(range(size)) + size * number).all())
            assert bool((victim == 7.0).all())


def collectives_without_nccl() -> str:
    """What DDP and checkpoints call, by Gloo; what Gloo lacks is refused."""
    rank, size = _take_gpu(), dist.get_world_size()
    sent = torch.full((10,), float(rank), device="cuda")
    dist.broadcast(sent, src=size - 1)
    assert sent.tolist() == [size - 1] * 10
    gathered = [torch.zeros(3, device="cuda") for _ in range(size)]
    dist.all_gather(gathered, torch.full((3,), float(rank), device="cuda"))
    assert [each[0].item() for each in gathered] == list(range(size))
    dist.barrier()
    try:
        dist.send(sent, (rank + 1) % size)
    except CommunicationError as error:
        return str(error)
    raise AssertionError("it was not refused")


def train_by_ddp(num_steps: int) -> list[float]:
    """Losses of a small model on rank 0's device, with parameters broadcast and gradients summed."""
    rank = _take_gpu()
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256)).cuda()
    wrapped = torch.nn.parallel.DistributedDataParallel(model, device_ids=[torch.cuda.current_device()])
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    losses = []
    for step in range(num_steps):
        inputs = torch.randn(16, 256, generator=torch.Generator().manual_seed(step)).cuda()
        loss = (wrapped(inputs) - inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _take_gpu() -> int:
    rank = dist.get_rank()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    return rank


def _check(values: torch.Tensor, op: Any, factor: float) -> None:
    """Rank r brings r + 1 times the values."""
    mine = values.cuda() * (dist.get_rank() + 1)
    work: Any = dist.all_reduce(mine, op, async_op=True)
    work.wait()
    assert torch.equal(mine.cpu(), (values * factor).to(values.dtype)), (op, values.dtype, values.shape)
