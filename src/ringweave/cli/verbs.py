"""The table of verbs: what `ringweave` lists, loaded only when one of them is called."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Verb:
    """One verb of the command line."""

    module: str
    """Module of `ringweave.cli` that has it."""
    command: str = "command"
    """What the command is called there."""
    help: str
    """One line for the list of verbs."""
    answers: bool
    """It takes --json."""
    answering: tuple[str, ...] = ()
    """The verbs below it that take --json."""


VERBS: Mapping[str, Verb] = {
    "run": Verb(module="run", help="Run a PyTorch program on several workers.", answers=False),
    "scale": Verb(module="scale", help="Give an elastic run more or fewer workers.", answers=True),
    "lab": Verb(
        module="lab",
        help="Bring a cluster file up on this machine: namespaces, limited links.",
        answers=False,
        answering=("up", "set", "cut", "mend", "status", "down"),
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
    "chaos": Verb(module="chaos", help="Let faults happen to a job in a lab, and count what they cost.", answers=True),
    "split": Verb(
        module="planning.split", help="Share GPUs out over unequal nodes, at least three on each.", answers=True
    ),
    "submit": Verb(module="jobs.submitting", help="Submit a job: so many GPUs over unequal nodes.", answers=True),
    "jobs": Verb(module="jobs.looking", command="jobs", help="List the jobs of a place.", answers=True),
    "status": Verb(module="jobs.looking", command="status", help="Say how a job and its nodes are.", answers=True),
    "why": Verb(module="jobs.looking", command="why", help="Say why a job does not run, and what helps.", answers=True),
    "logs": Verb(module="jobs.logs", help="Print what the workers of a job printed.", answers=True),
    "events": Verb(module="jobs.looking", command="events", help="List what happened to a job.", answers=True),
    "stop": Verb(module="jobs.acting", command="stop", help="End a job.", answers=True),
    "delete": Verb(module="jobs.acting", command="delete", help="Remove a job with all it left.", answers=True),
    "retry": Verb(module="jobs.acting", command="retry", help="Start a failed or stopped job again.", answers=True),
    "suspend": Verb(module="jobs.acting", command="suspend", help="Keep a job from running.", answers=True),
    "resume": Verb(module="jobs.acting", command="resume", help="Let a suspended job run.", answers=True),
    "server": Verb(module="server", help="Hold the parameters of a job in mode ps-hra.", answers=False),
    "operator": Verb(module="operator", help="Lead the TrainingJobs of a Kubernetes cluster.", answers=False),
    "doctor": Verb(module="doctor", help="Say what is here and works, and how to mend what does not.", answers=True),
}
