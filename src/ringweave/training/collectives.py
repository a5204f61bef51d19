"""Small messages among all ranks beside the gradients: prepared options, measured speeds and sample accounts."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringweave.comm import generation_group, peer_data
from ringweave.errors import DisagreementError
from ringweave.planning.balancing import SampleAccount, Speed
from ringweave.planning.balancing.speed import NUM_SPEED_NUMBERS

_HALF = 2**63
_CONTROL_TEXT = "what a rank tells the others"


class ControlGroup:
    """Group of its own on the native backend, so that its messages never queue behind a gradient's."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """Use a group of the native backend that carries no other messages; None creates one of all ranks."""
        if group is None:
            made = dist.new_group(backend="gloo")
            assert isinstance(made, dist.ProcessGroup)
            group = made
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self._group = group

    def gather_json(self, document: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the documents of all ranks, by rank. They are JSON: data of other processes is never unpickled.

        Raises:
            DisagreementError: A document is too long, or malformed.
        """
        own = torch.frombuffer(bytearray(json.dumps(document).encode()), dtype=torch.uint8)
        lengths = [int(length) for length in self._gather(torch.tensor([len(own)]))]
        for rank, length in enumerate(lengths):
            peer_data.check_length(length, _CONTROL_TEXT, min_bytes=1, where=f"rank {rank}")
        texts = self._gather(torch.nn.functional.pad(own, (0, max(lengths) - len(own))))
        return [
            _parse_json(text[:length], rank) for rank, (text, length) in enumerate(zip(texts, lengths, strict=True))
        ]

    def gather_accounts(self, own: SampleAccount) -> list[SampleAccount]:
        accounts = self.start_account_exchange(own)()
        assert accounts is not None, "all ranks tell theirs"
        return accounts

    def start_account_exchange(self, own: SampleAccount | None) -> Callable[[], list[SampleAccount] | None]:
        """Start to exchange the ranks' accounts; None means that this rank has broken off its pass.

        Returns:
            A function that waits for the accounts of all ranks; it returns None if one of them has broken off its pass.
        """
        values = (-1, 0) if own is None else (own.num_samples, own.fingerprint - _HALF)
        work, received = self._start(torch.tensor(values))

        def wait() -> list[SampleAccount] | None:
            work.wait()
            pairs = [found.tolist() for found in received]
            if any(num_samples < 0 for num_samples, _ in pairs):
                return None
            return [SampleAccount(num_samples=samples, fingerprint=mixed + _HALF) for samples, mixed in pairs]

        return wait

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Broadcast one rank's tensor to all ranks, in place."""
        with generation_group.direct_collectives():
            dist.broadcast(tensor, source, group=self._group)
        return tensor

    def start_sum(self, own: float) -> Callable[[], float]:
        """Start to sum a number over all ranks; the function that is returned waits for the sum, the same on all."""
        work, received = self._start(torch.tensor([own], dtype=torch.float64))

        def wait() -> float:
            work.wait()
            return math.fsum(each.item() for each in received)

        return wait

    def start_speed_exchange(self, own: Speed | None) -> Callable[[], list[Speed] | None]:
        """Start to exchange the ranks' speeds; None means that this rank has not measured enough.

        Returns:
            A function that waits for the speeds of all ranks, the same on all; it returns None while one is unknown.
        """
        values = (math.nan,) * NUM_SPEED_NUMBERS if own is None else own.to_numbers()
        work, received = self._start(torch.tensor(values, dtype=torch.float64))

        def wait() -> list[Speed] | None:
            work.wait()
            numbers = [found.tolist() for found in received]
            return None if any(math.isnan(each[0]) for each in numbers) else list(map(Speed.of_numbers, numbers))

        return wait

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        work, received = self._start(tensor)
        work.wait()
        return received

    def _start(self, tensor: Tensor) -> tuple[dist.Work, list[Tensor]]:
        """Start an exchange of all with all: Gloo's all_gather would wait for each rank in turn."""
        repeated = tensor.expand(self.world_size, *tensor.shape).contiguous()
        received = torch.empty_like(repeated)
        work = dist.all_to_all_single(received, repeated, group=self._group, async_op=True)
        assert work is not None
        return work, list(received)


def _parse_json(text: Tensor, rank: int) -> dict[str, Any]:
    expected, where = "a JSON object", f"rank {rank}"
    return peer_data.decode_peer_data(
        text.numpy().tobytes(), _CONTROL_TEXT, peer_data.require_object, expected=expected, where=where
    )


def check_equal(documents: Sequence[Mapping[str, Any]], keys: Sequence[str], names: Sequence[str] = ()) -> None:
    """Refuse to train when ranks have prepared different things, before they wait for each other forever.

    Args:
        documents: Documents of all ranks.
        keys: Keys whose values must be the same.
        names: Name of each rank; empty means ranks from 0 on.

    Raises:
        DisagreementError: For the first key that differs, with the ranks and values.
    """
    names = names or [f"rank {rank}" for rank in range(len(documents))]
    for key in keys:
        for name, document in zip(names, documents, strict=True):
            if document[key] != documents[0][key]:
                raise DisagreementError(
                    f"{key} of {name}",
                    got=document[key],
                    expected=f"{documents[0][key]!r} as on {names[0]}",
                    do="Give prepare the same model, data and options on all ranks",
                )
