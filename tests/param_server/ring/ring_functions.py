"""What ranks do in tests of rings: a small model trained through a server whose address and credentials they get."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ringweave import rpc
from ringweave.param_server import flat, optimizers
from ringweave.param_server.client import RingClient
from ringweave.param_server.messages import ParameterGroup, ServerSetup
from ringweave.training.rings.ring_worker import ParameterServerOptimizer, RingWorker, StaticExchange

BATCH = 12


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batch(number: int) -> torch.Tensor:
    return torch.randn(BATCH, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(number))


def loss(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (net(x) - x[:, :3].sin()).square().mean()


def optimizer_of(net: nn.Module, name: str, options: dict[str, Any]) -> torch.optim.Optimizer:
    return getattr(torch.optim, name)(net.parameters(), **options)


def alone(name: str, options: dict[str, Any], steps: int) -> list[torch.Tensor]:
    """One process, the whole batch."""
    net = model()
    optimizer = optimizer_of(net, name, options)
    for number in range(steps):
        optimizer.zero_grad()
        loss(net, batch(number)).backward()
        optimizer.step()
    return [each.detach() for each in net.parameters()]


def train(
    port: int, folder: str, rings: list[list[int]], name: str, options: dict[str, Any], steps: int, local_steps: int = 0
) -> dict[str, Any]:
    """Every ring takes `steps` steps, each on its members' equal parts of a batch."""
    net = model()
    optimizer = optimizer_of(net, name, options)
    member, process_group, part = sit_down(net, optimizer, rings, (port, folder), local_steps=local_steps)
    pushed = ParameterServerOptimizer(optimizer, member)
    staleness = []
    for number in range(steps):
        pushed.zero_grad()
        loss(net, batch(number)[part]).backward()
        average_gradients(net, process_group)
        member.ring.samples.add(BATCH, 1 / len(rings))
        pushed.step()
        if member.last_result:
            staleness.append(member.last_result.staleness_versions)
    member.go_idle()
    dist.barrier()
    member.refresh()
    dist.barrier()
    member.leave_server()
    return {
        "parameters": [each.detach().tolist() for each in net.parameters()],
        "staleness": staleness,
        "loss": sum(loss(net, batch(number)).item() for number in range(20)) / 20,
    }


def sit_down(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    rings: list[list[int]],
    server: tuple[int, str],
    *,
    local_steps: int,
) -> tuple[RingWorker, dist.ProcessGroup, slice]:
    """This rank in its ring, with the first parameters; the ring's group; which samples of a batch are the rank's.

    `server` is its port on this machine, and the folder of all ranks' credentials.
    """
    rank = dist.get_rank()
    groups = [dist.new_group(ring, backend="ringweave") for ring in rings]
    index = next(index for index, ring in enumerate(rings) if rank in ring)
    ring = rings[index]
    client = connect(server, rank, index) if rank == ring[0] else None
    if rank == 0:
        assert client is not None
        start(client, setup_of(net, optimizer, rings, overlaps=local_steps > 0), net)
    dist.barrier()
    exchange = StaticExchange(groups[index], ring[0], client)
    member = RingWorker(exchange, list(net.parameters()), local_steps=local_steps)
    member.refresh()
    at = ring.index(rank)
    return member, groups[index], slice(at * BATCH // len(ring), (at + 1) * BATCH // len(ring))


def connect(server: tuple[int, str], rank: int, index: int) -> RingClient:
    """The connection of the representative of a ring."""
    port, folder = server
    trust = rpc.TlsAuthentication(rpc.Credentials.load(Path(folder) / str(rank)))
    return RingClient([lambda: rpc.RpcClient.connect("127.0.0.1", port, trust, role="server")], index)


def setup_of(
    net: nn.Module, optimizer: torch.optim.Optimizer, rings: list[list[int]], *, overlaps: bool
) -> ServerSetup:
    """What the server has to know."""
    places = list(range(len(list(net.parameters()))))
    return ServerSetup(
        tensors=flat.tensor_specs(list(net.named_parameters())),
        optimizer=type(optimizer).__name__,
        groups=[
            ParameterGroup(parameters=places, options=optimizers.group_options(group))
            for group in optimizer.param_groups
        ],
        rings=rings,
        overlaps=overlaps,
        compensation=0.0 if overlaps else 0.04,
    )


def start(client: RingClient, setup: ServerSetup, net: nn.Module) -> None:
    """Give the server the first parameters."""
    first = flat.FlatTensors(setup.tensors)
    for view, parameter in zip(first.views, net.parameters(), strict=True):
        view.copy_(parameter.detach())
    client.start_job(setup, first.buffers())


def average_gradients(net: nn.Module, process_group: dist.ProcessGroup) -> None:
    """Over the ranks of a ring, as DDP does."""
    for parameter in net.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=process_group)
        parameter.grad /= dist.get_world_size(process_group)
