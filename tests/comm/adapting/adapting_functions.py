"""What the ranks of the tests of adapting run: importable, because real processes import it."""

import hashlib
import os
import signal
import threading
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ringweave.comm.transport.connect import ChannelListener
from ringweave.comm.transport.sockets import SocketTransport
from ringweave.comm.tuning import selector
from ringweave.comm.tuning.control_tree import ControlTree, run_survey
from ringweave.comm.tuning.selector import ScheduleDecision
from ringweave.planning import Plan
from ringweave.planning.autotune.tuning_messages import SurveyStream, TuningDecision, TuningReport
from ringweave.planning.group_planner import GroupPlacement
from ringweave.testing.ranks import announce


def taken() -> dict[str, int]:
    """{schedule: collectives} of the default group."""
    return {name: row["collectives"] for name, row in dist.group.WORLD.collectives_by_schedule().items()}


def reduce_many(count: int, *sizes: int) -> dict[str, int]:
    """Rounds of checked allreduces of these sizes, all in flight at once, one of the native backend in between."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for number in range(count):
        tensors = [torch.full((num,), float(rank + 1 + number)) for num in sizes]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        small = torch.ones(3)
        dist.all_reduce(small)
        assert small.tolist() == [size] * 3
        for work in reversed(works):
            work.wait()
        for tensor in tensors:
            assert (tensor == size * (size + 1) / 2 + size * number).all()
    return taken()


def digest_of_sums(*sizes: int) -> tuple[str, dict[str, int]]:
    """Of the bits of sums whose last bits depend on the order of adding; and what they were computed by."""
    values = torch.Generator().manual_seed(dist.get_rank())
    digest = hashlib.sha256()
    for num in sizes:
        tensor = torch.randn(num, generator=values) * 10.0 ** (dist.get_rank() - 2)
        dist.all_reduce(tensor)
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest(), taken()


def reduce_in_groups_and_threads(count: int) -> dict[str, int]:
    """Overlapping groups that tune at the same time, each in a thread of its own; one is destroyed in the middle."""
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(list(range(size))), dist.new_group(list(range(size)))]
    failures: list[BaseException] = []

    def work(group: Any) -> None:
        try:
            for number in range(count):
                tensor = torch.full((40_000,), float(rank + number))
                dist.all_reduce(tensor, group=group)
                assert (tensor == size * number + size * (size - 1) / 2).all()
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    third = dist.new_group(list(range(size)))
    for _ in range(5):
        dist.all_reduce(torch.ones(40_000), group=third)
    dist.destroy_process_group(third)
    for thread in threads:
        thread.join()
    assert not failures, failures
    return reduce_many(2, 40_000)


def reduce_odd_ones() -> dict[str, int]:
    """Between the trials: what the native backend cannot do, other operations, other dtypes, all of one class."""
    size = dist.get_world_size()
    for number in range(30):
        averaged, halves = torch.full((50_000,), 2.0), torch.ones(100_000, dtype=torch.bfloat16)
        works = [
            dist.group.WORLD.allreduce([averaged], dist.ReduceOp.AVG),
            dist.all_reduce(halves, async_op=True),
            dist.all_reduce(largest := torch.full((50_000,), float(dist.get_rank())), dist.ReduceOp.MAX, async_op=True),
        ]
        for work in works:
            work.wait()
        assert (averaged == 2).all(), number
        assert (halves == size).all()
        assert (largest == size - 1).all()
    return taken()


def reduce_until_killed(victim: int, at: int) -> str:
    """Rank `victim` kills itself after so many collectives; the error of the others."""
    for number in range(100):
        if dist.get_rank() == victim and number == at:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            dist.all_reduce(torch.ones(50_000))
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
    raise AssertionError("nobody noticed")


def stop_and_abort(at: int) -> list[str]:
    """Rank 1 stays away from collective `at` until it is killed; the others abort theirs. Their errors."""
    for _ in range(at):
        dist.all_reduce(torch.ones(50_000))
    if dist.get_rank() == 1:
        announce("away")
        time.sleep(1000)
    work = dist.all_reduce(torch.ones(50_000), async_op=True)
    behind = dist.all_reduce(torch.ones(60_000), async_op=True)
    time.sleep(0.3)
    dist.group.WORLD.abort()
    errors = []
    for each in (work, behind):
        try:
            each.wait(timedelta(seconds=300))
        except RuntimeError as error:
            errors.append(str(error))
    return errors


def reduce_unequal_sizes() -> str:
    """Rank 1 reduces another size."""
    num = 50_000 if dist.get_rank() != 1 else 80_000
    try:
        dist.all_reduce(torch.ones(num))
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nobody noticed")


def consult_and_survey(phases: list[list[tuple[int, int, int]]]) -> tuple[list[str], list[float]]:
    """What a council says to every rank's numbers, and a survey of the nodes, on a transport of this test's own."""
    group: Any = dist.group.WORLD
    members, door = group.members, group._listeners[1]
    assert isinstance(door, ChannelListener)
    transport = SocketTransport(door, 1, members, timedelta(seconds=300))
    council = ControlTree(members, transport, tag=7, timeout_s=300)
    own = float(dist.get_rank())
    texts = [
        council.reduce_and_decide(
            [own, -own, float("nan"), own if own else float("nan")], lambda numbers: f"{numbers}"
        ),
        council.reduce_and_decide([own] * 5, lambda _: ""),
        council.reduce_and_decide([own], lambda numbers: "x" * 100_000),
    ]
    streams = [[SurveyStream(*stream) for stream in phase] for phase in phases]
    found = run_survey(streams, members, council, transport, tag=7, timeout_s=300)
    texts.append(council.reduce_and_decide(found, lambda rates: str([rate > 0 for rate in rates])))
    transport.close()
    return texts, found


class Scripted:
    """An adviser that has the network surveyed at the second consultation, and then rules another plan, ring first."""

    def __init__(self, where: GroupPlacement, plan: Plan, *known: object) -> None:
        del where, known
        self.plan, self.rates, self.winners, self.num_rules = plan, {}, {}, 0

    def complete_plan(self, whole: Plan) -> None:
        assert whole.nodes == self.plan.nodes

    def decide(self, report: TuningReport, now_s: float) -> TuningDecision:
        self.num_rules += 1
        phases = ((SurveyStream(0, 1, 200_000), SurveyStream(1, 0, 200_000)),)
        found = [TuningDecision(num_bytes=0, schedule="ring", next_in=5), TuningDecision(num_bytes=0, phases=phases)]
        return dict(enumerate(found, 1)).get(
            self.num_rules, TuningDecision(num_bytes=0, schedule="direct", next_in=10**6)
        )

    def decide_after_survey(
        self, num_bytes: int, rates: list[float], now_s: float, seconds: float, kind: str, **_: object
    ) -> TuningDecision:
        assert all(rate > 0 for rate in rates)
        assert len(rates) == 2
        other = replace(self.plan, ring_order=self.plan.ring_order[::-1])
        return TuningDecision(num_bytes=num_bytes, schedule="ring", plan=str(other), next_in=4)

    def take_events(self) -> list[tuple[str, dict]]:
        return []


def switch_plans(count: int) -> tuple[dict[str, int], list[tuple[str, tuple[int, ...], int]]]:
    """Checked allreduces while a scripted adviser rules: what they were done by, and by which plan and version."""
    selector.Autotuner = Scripted
    group: Any = dist.group.WORLD
    director, seen = group._engine._selector, []
    decide = director.wait_for_decision

    def noted(*args: Any, **kwargs: Any) -> ScheduleDecision:
        decision = decide(*args, **kwargs)
        seen.append((decision.choice.schedule, decision.plan.ring_order, decision.version))
        return decision

    director.wait_for_decision = noted
    reduce_many(count, 50_000)
    return taken(), seen
