"""Backends of torch.distributed: ringweave itself, and Gloo."""

import importlib.util
import sys
from collections.abc import Mapping, Sequence

from ringweave.benchmarks.systems.system import PROGRAMS, Knob, Setup, Shape, Start, System
from ringweave.environment import WorkerEnvironment

_GLOO_MORE_DEVICES = 4


class _TorchBackend(System):
    def problem(self) -> str:
        if importlib.util.find_spec("torch") is None:
            return "PyTorch is not installed here. Install it: pip install 'ringweave[train]'"
        return ""

    def starts(self, setup: Setup, knob: Knob) -> Sequence[Start]:
        argv = (sys.executable, str(PROGRAMS / "torch_worker.py"), *setup.worker_options)
        return [
            Start(node=node, argv=argv, environ=self._environ(setup, rank, knob.times_named))
            for rank, node in enumerate(setup.node_of_rank)
        ]

    def _environ(self, setup: Setup, rank: int, times: int) -> Mapping[str, str]:
        node = setup.node_of_rank[rank]
        told = WorkerEnvironment(
            cluster_path=setup.cluster_path,
            node=node,
            schedule=setup.schedule,
            tuning=False,  # trials would be measured; bench/tuning.py looks at what they find
        )
        return {
            "RINGWEAVE_BENCH_BACKEND": self.name,
            "RANK": str(rank),
            "WORLD_SIZE": str(len(setup.node_of_rank)),
            "LOCAL_RANK": str(setup.local_ranks[rank]),
            "LOCAL_WORLD_SIZE": str(setup.node_of_rank.count(node)),
            "MASTER_ADDR": setup.place.addresses[setup.node_of_rank[0]][0],
            "MASTER_PORT": str(setup.port),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": ",".join(_interfaces(setup, node) * times),
            **(told.to_environ() if self.name == "ringweave" else {}),
        }


class Ringweave(_TorchBackend):
    """This project's backend, with the schedule that its planner takes or that was asked for."""

    name = "ringweave"

    def knobs(self, shape: Shape) -> Sequence[Knob]:
        """None: it has to choose by itself."""
        return [Knob(name="as it chooses")]


class Gloo(_TorchBackend):
    """The library that DDP uses on CPUs. Each interface that is named gets a device of its own, used in turn."""

    name = "gloo"

    def knobs(self, shape: Shape) -> Sequence[Knob]:
        """All interfaces named once, or several times."""
        return [
            Knob(name="all interfaces"),
            Knob(name=f"all interfaces, {_GLOO_MORE_DEVICES} devices each", times_named=_GLOO_MORE_DEVICES),
        ]


def _interfaces(setup: Setup, node: str) -> list[str]:
    """As many as every node has: ranks with different numbers of devices would wait for each other for ever."""
    count = min(len(setup.place.interfaces(each)) for each in set(setup.node_of_rank))
    return setup.place.interfaces(node)[:count]
