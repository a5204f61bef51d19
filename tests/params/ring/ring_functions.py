"""What ranks do in tests of rings: a small model trained through a server whose address and credentials they get."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ringweave import wire
from ringweave.params import flat
from ringweave.params.messages import Group, Setup
from ringweave.params.ring.client import RingClient
from ringweave.params.ring.member import Member, Place, Samples
from ringweave.params.ring.optimizer import PushedOptimizer
from ringweave.params.serving import optimizers

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


# One function, though long: it is a user's script from its first line to its last, in the order of a script.
def train(
    port: int, folder: str, rings: list[list[int]], name: str, options: dict[str, Any], steps: int, local_steps: int = 0
) -> dict[str, Any]:
    """Every ring takes `steps` steps, each on its members' equal parts of a batch."""
    rank = dist.get_rank()
    groups = [dist.new_group(ring, backend="ringweave") for ring in rings]
    index = next(index for index, ring in enumerate(rings) if rank in ring)
    ring = rings[index]
    net = model()
    optimizer = optimizer_of(net, name, options)
    is_representative = rank == ring[0]
    client = None
    if is_representative:
        trust = wire.Tls(wire.Credentials.load(Path(folder) / str(rank)))
        client = RingClient([lambda: wire.Client.connect("127.0.0.1", port, trust, role="server")], index)
    named = list(net.named_parameters())
    if rank == 0:
        assert client is not None
        setup = Setup(
            tensors=flat.specs_of(named),
            optimizer=name,
            groups=[
                Group(parameters=list(range(len(named))), options=optimizers.options_of(group))
                for group in optimizer.param_groups
            ],
            rings=rings,
            overlaps=local_steps > 0,
            compensation=0.0 if local_steps else 0.04,
        )
        first = flat.Flat(setup.tensors)
        for view, (_, parameter) in zip(first.views, named, strict=True):
            view.copy_(parameter.detach())
        client.start(setup, first.buffers())
    dist.barrier()
    member = Member(
        Place(process_group=groups[index], representative=ring[0], client=client),
        [parameter for _, parameter in named],
        overlaps=local_steps > 0,
    )
    member.refresh()
    samples = Samples()
    pushed = PushedOptimizer(optimizer, member, samples, local_steps)
    part = slice(ring.index(rank) * BATCH // len(ring), (ring.index(rank) + 1) * BATCH // len(ring))
    staleness = []
    for number in range(steps):
        pushed.zero_grad()
        loss(net, batch(number)[part]).backward()
        for _, parameter in named:
            dist.all_reduce(parameter.grad, group=groups[index])
            parameter.grad /= len(ring)
        samples.add(BATCH, 1 / len(rings))
        pushed.step()
        if member.last:
            staleness.append(member.last.staleness_versions)
    pushed.rest()
    dist.barrier()
    member.refresh()
    dist.barrier()
    member.leave()
    return {
        "parameters": [each.detach().tolist() for each in net.parameters()],
        "staleness": staleness,
        "loss": sum(loss(net, batch(number)).item() for number in range(20)) / 20,
    }
