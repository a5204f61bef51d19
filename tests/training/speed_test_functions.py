"""`prepare` in rings on real ranks, of which some are slow, late or silent."""

import json
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ringweave
from ringweave import errors
from ringweave.training import Asynchronous, preparation, speed_test
from tests.training.rings.ring_training import meet_server

TEST = "ringweave-speed-test/1"


class Slow(nn.Linear):
    """Once the test has begun it takes twice as long as those that `num_faster` are, however busy the machine is."""

    def __init__(self, num_faster: int) -> None:
        super().__init__(6, 2)
        self._num_faster = num_faster

    def forward(self, input: Tensor) -> Tensor:
        store = dist.distributed_c10d._get_default_store()
        if self._num_faster and store.check([f"{TEST}/go"]):
            faster = [f"{TEST}/arrived/{place}" for place in range(1, self._num_faster + 1)]
            store.wait(faster)
            time.sleep(2 * max(json.loads(store.get(each))[1] for each in faster))
            self._num_faster = 0
        return super().forward(input)


def prepare(
    port: int, keys: str, rings: int, num_faster: list[int], silent: list[int], speed_test_s: float
) -> tuple[tuple[int, ...], ...] | str | None:
    """The rings that `prepare` makes, or the text of its error; silent ranks wait for that, and never come."""
    meet_server(port, keys)
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    dist.barrier()  # who starts late on a busy machine is not silent
    if rank in silent:
        store.wait(["the others have seen it"])
        return None
    torch.manual_seed(0)
    model, samples = Slow(num_faster[rank]), TensorDataset(torch.randn(64, 6), torch.randn(64, 2))
    triple = model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(samples, batch_size=16)
    preparation.relative_speeds = lambda said: [1.0] * len(said)  # no borders by the noise of a busy machine
    speed_test.TEST_S, speed_test.TRIAL_BUDGET_S = 0.05, 0.1
    settings = Asynchronous(rings=rings, speed_test_s=speed_test_s)
    try:
        loader = ringweave.prepare(*triple, mode="ps-hra", asynchronous=settings)[2]
    except errors.PeerError as error:
        store.set("the others have seen it", "")
        return str(error)
    loader.source.membership.assignment.leave_server()
    return loader.source.membership.assignment.current.rings
