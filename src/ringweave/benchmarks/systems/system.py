"""What the benchmark has to know of a system under test."""

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import ringweave
from ringweave.benchmarks.places.place import Place

PROGRAMS = Path(__file__).parent.parent / "programs"
"""The workers' programs; run by path."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Knob:
    """One way to set a system up."""

    name: str
    """What tables call it."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """Variables of the processes that are started."""
    options: tuple[str, ...] = ()
    """Options of the program that starts the ranks."""
    times_named: int = 1
    """How often each network interface is named to the system."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What decides which knobs are worth a try."""

    num_nodes: int
    most_ranks_per_node: int
    is_crowded: bool
    """There are more ranks than CPUs, so that a rank which polls takes time from one that has work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """Everything that is the same for all systems of a comparison, and where this one finds the rest."""

    place: Place
    node_of_rank: tuple[str, ...]
    """Name of the node of each rank."""
    cluster_path: Path
    """The cluster file that ranks are told of."""
    control_path: Path
    """Socket of the controller."""
    session: str
    """What the workers call themselves to the controller."""
    folder: Path
    """For files of this session; seen by all nodes."""
    port: int
    """Where the ranks of a torch backend meet, on the node of rank 0."""
    schedule: str | None = None
    """The schedule that ringweave has to use; None leaves the choice to it."""

    @property
    def local_ranks(self) -> list[int]:
        """Index of each rank among those of its node."""
        return [self.node_of_rank[:rank].count(node) for rank, node in enumerate(self.node_of_rank)]

    @property
    def worker_options(self) -> list[str]:
        """Options of every worker program."""
        return ["--control", str(self.control_path), "--session", self.session]


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """A process to be started."""

    node: str
    argv: tuple[str, ...]
    environ: Mapping[str, str]
    """Variables on top of the controller's."""


def shape(node_of_rank: Sequence[str], num_cpus: int) -> Shape:
    """What decides on knobs, for ranks on these nodes, all of them played by one machine."""
    counts = [node_of_rank.count(node) for node in set(node_of_rank)]
    return Shape(num_nodes=len(counts), most_ranks_per_node=max(counts), is_crowded=len(node_of_rank) > num_cpus)


class System(abc.ABC):
    """A system under test. Final classes; stateless."""

    name: str

    @abc.abstractmethod
    def problem(self) -> str:
        """Why it cannot be measured here, with what mends it; empty if it can."""

    @abc.abstractmethod
    def knobs(self, shape: Shape) -> Sequence[Knob]:
        """The ways to set it up that are worth a try; the first is its default."""

    @abc.abstractmethod
    def starts(self, setup: Setup, knob: Knob) -> Sequence[Start]:
        """What is started so that all ranks come up."""


def peer_python(folder_name: str) -> Path | None:
    """The interpreter of a peer's environment: below the current directory, else in the checkout of ringweave."""
    for root in (Path.cwd(), Path(ringweave.__file__).parents[2]):
        python = root / folder_name / "bin" / "python"
        if python.exists():
            return python
    return None


def absent_peer(folder_name: str) -> str:
    """The text for a peer whose environment is not there."""
    return f"its environment {folder_name} is not here. Make it: make bench-setup"
