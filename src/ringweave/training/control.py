"""Small messages among all ranks beside the gradients: what they prepared, how fast they are, what they trained on."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringweave.comm import hearing
from ringweave.errors import DisagreementError, explain
from ringweave.planning.balancing import Account, Speed

_HALF = 2**63
_TOLD = "what a rank tells the others"


class Control:
    """A group of its own on the host library, so that its messages never queue behind a gradient's."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """Among the ranks of a group of the host library, in which nobody else speaks; None makes one of all ranks."""
        if group is None:
            made = dist.new_group(backend="gloo")
            assert isinstance(made, dist.ProcessGroup)
            group = made
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self._group = group

    def gather_json(self, document: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What each rank says, in the order of ranks. JSON, since nothing that comes from elsewhere is unpickled.

        Raises:
            DisagreementError: What one says is too long, or something else.
        """
        own = torch.frombuffer(bytearray(json.dumps(document).encode()), dtype=torch.uint8)
        lengths = [int(length) for length in self._gather(torch.tensor([len(own)]))]
        for rank, length in enumerate(lengths):
            hearing.check_length(length, _TOLD, least=1, where=f"rank {rank}")
        texts = self._gather(torch.nn.functional.pad(own, (0, max(lengths) - len(own))))
        return [_read(text[:length], rank) for rank, (text, length) in enumerate(zip(texts, lengths, strict=True))]

    def gather_accounts(self, own: Account) -> list[Account]:
        """What each rank has trained on."""
        found = self.start_accounts(own).wait()
        assert found is not None, "all ranks tell theirs"
        return found

    def start_accounts(self, own: Account | None) -> "AccountExchange":
        """Begin to tell all ranks what this one has trained on; None if it has broken off its pass."""
        values = (-1, 0) if own is None else (own.num_samples, own.fingerprint - _HALF)
        return AccountExchange(*self._start(torch.tensor(values)))

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """The tensor of one rank, which all others get in the place of theirs."""
        dist.broadcast(tensor, source, group=self._group)
        return tensor

    def start_exchange(self, own: Speed | None) -> "SpeedExchange":
        """Begin to tell all ranks how fast this one is."""
        values = (math.nan,) * 3 if own is None else (own.s_per_sample, own.overhead_samples, own.noise)
        return SpeedExchange(*self._start(torch.tensor(values, dtype=torch.float64)))

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        work, found = self._start(tensor)
        work.wait()
        return found

    def _start(self, tensor: Tensor) -> tuple[dist.Work, list[Tensor]]:
        """Everybody tells everybody: Gloo's all_gather passes it on from rank to rank, and waits for each in turn."""
        said = tensor.expand(self.world_size, *tensor.shape).contiguous()
        found = torch.empty_like(said)
        work = dist.all_to_all_single(found, said, group=self._group, async_op=True)
        assert work is not None
        return work, list(found)


def _read(text: Tensor, rank: int) -> dict[str, Any]:
    expected, where = "a JSON object", f"rank {rank}"
    return hearing.read(text.numpy().tobytes(), _TOLD, hearing.an_object, expected=expected, where=where)


class SpeedExchange:
    """Speeds of all ranks, on their way."""

    def __init__(self, work: dist.Work, found: list[Tensor]) -> None:
        self._work, self._found = work, found

    def wait(self) -> list[Speed] | None:
        """Speeds of all ranks, the same on all of them; None as long as one of them has not measured enough."""
        self._work.wait()
        values = [found.tolist() for found in self._found]
        if any(math.isnan(each_s) for each_s, _, _ in values):
            return None
        return [Speed(s_per_sample=each_s, overhead_samples=q, noise=noise) for each_s, q, noise in values]


class AccountExchange:
    """Accounts of all ranks, on their way."""

    def __init__(self, work: dist.Work, found: list[Tensor]) -> None:
        self._work, self._found = work, found

    def wait(self) -> list[Account] | None:
        """What each rank has trained on; None if one of them has broken off its pass."""
        self._work.wait()
        pairs = [found.tolist() for found in self._found]
        if any(num_samples < 0 for num_samples, _ in pairs):
            return None
        return [Account(num_samples=samples, fingerprint=mixed + _HALF) for samples, mixed in pairs]


def check_alike(said: Sequence[Mapping[str, Any]], keys: Sequence[str], names: Sequence[str] = ()) -> None:
    """Refuse to train when ranks have prepared different things, before they wait for each other for ever.

    Args:
        said: What each has prepared.
        keys: What of it has to be the same.
        names: Who each is; empty means ranks from 0 on.

    Raises:
        DisagreementError: For the first key that differs, with the ranks and values.
    """
    names = names or [f"rank {rank}" for rank in range(len(said))]
    for key in keys:
        for name, document in zip(names, said, strict=True):
            if document[key] != said[0][key]:
                raise DisagreementError(
                    explain(
                        f"{key} of {name}",
                        got=document[key],
                        expected=f"{said[0][key]!r} as on {names[0]}",
                        do="Give prepare the same model, data and options on all ranks",
                    )
                )
