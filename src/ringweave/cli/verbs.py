"""The table of verbs: what `ringweave` lists, loaded only when one of them is called."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Verb:
    """One verb of the command line."""

    module: str
    """Module of `ringweave.cli` that has it, as a command called `command`."""
    help: str
    """One line for the list of verbs."""
    answers: bool
    """It takes --json."""
    answering: tuple[str, ...] = ()
    """The verbs below it that take --json."""


VERBS: Mapping[str, Verb] = {
    "run": Verb(module="run", help="Run a PyTorch program on several workers.", answers=False),
    "lab": Verb(
        module="lab",
        help="Bring a cluster file up on this machine: namespaces, limited links.",
        answers=False,
        answering=("up", "set", "status", "down"),
    ),
    "discover": Verb(
        module="discover",
        help="Say what is in this machine, which device leads, and write a cluster file.",
        answers=True,
    ),
    "plan": Verb(
        module="planning.plan",
        help="Say what a cluster allows at best, and which schedule is chosen for it.",
        answers=True,
    ),
    "cost": Verb(
        module="planning.cost", help="Predict a training round by the formulas of four architectures.", answers=True
    ),
    "simulate": Verb(
        module="planning.simulate",
        help="Simulate an allreduce on a cluster, with stragglers and failures.",
        answers=True,
    ),
    "partition": Verb(
        module="planning.partition",
        help="Cut a model into pipeline stages for unequal devices and links.",
        answers=True,
    ),
    "bench": Verb(
        module="bench",
        help="Measure ringweave beside Gloo, Open MPI and MPICH.",
        answers=False,
        answering=("allreduce",),
    ),
    "split": Verb(
        module="planning.split", help="Share GPUs out over unequal nodes, at least three on each.", answers=True
    ),
    "server": Verb(module="server", help="Hold the parameters of a job in mode ps-hra.", answers=False),
    "doctor": Verb(module="doctor", help="Say what is here and works, and how to mend what does not.", answers=True),
}
