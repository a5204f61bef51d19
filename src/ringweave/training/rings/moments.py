"""The state of local optimizers where rings are formed anew: all ranks of a ring go on with the representative's.

With local steps each rank of a ring steps its own optimizer, whose state is that of the ranks which were in its ring,
and another one than that of the ranks that are in it now.
"""

import json
import operator
from typing import Any

import torch

from ringweave.comm import hearing
from ringweave.params.ring.optimizer import PushedOptimizer
from ringweave.training.checkpoints.encoding import BY_NAME, Encoder, decode
from ringweave.training.control import Control

_WHAT = "state of the optimizer in a ring"


@torch.no_grad()
def share(optimizer: PushedOptimizer, within: Control, representative: int, *, is_own: bool) -> None:
    """Take the state of the ring's representative; all ranks of the ring call it. Groups stay each rank's own.

    Args:
        optimizer: This rank's.
        within: Messages among the ranks of the ring.
        representative: Its global rank.
        is_own: This rank is it.

    Raises:
        TrainingError: The optimizer's state is not one of numbers and tensors.
        DisagreementError: What the representative says is something else.

    Cost: one broadcast of the state.
    """
    encoder = Encoder()
    tree = encoder.encode(optimizer.state_dict()["state"], "optimizer.state") if is_own else None
    forms = [[name, str(each.dtype).removeprefix("torch."), list(each.shape)] for name, each in encoder.tensors.items()]
    said = bytearray(json.dumps([tree, forms]).encode())
    length = int(within.broadcast(torch.tensor([len(said)]), representative))
    hearing.check_length(length, _WHAT, least=1)
    text = torch.frombuffer(said, dtype=torch.uint8) if is_own else torch.empty(length, dtype=torch.uint8)
    told = bytes(within.broadcast(text, representative).tolist())
    tree, forms = hearing.read(told, _WHAT, _told, expected="what its representative has")
    tensors = {}
    for name, dtype, shape in forms:
        own = encoder.tensors[name].cpu().contiguous() if is_own else torch.empty(shape, dtype=dtype)
        tensors[name] = within.broadcast(own, representative)
    if not is_own:
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": decode(tree, tensors), "param_groups": groups})


def _told(document: Any) -> tuple[Any, list[tuple[str, torch.dtype, list[int]]]]:
    tree, forms = document
    return tree, [(name, BY_NAME[dtype], [operator.index(size) for size in shape]) for name, dtype, shape in forms]
