"""A request for training: what its author asks for, checked when it is made."""

import enum
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ringweave.errors import JobError
from ringweave.files import problems
from ringweave.files.problems import Path, Problem, closest
from ringweave.jobs import splitting
from ringweave.jobs.splitting import MIN_PER_NODE, Split

MAX_NODES = 100_000
MAX_WORKERS = 2**31 - 1
MAX_RETRIES = 1000
MAX_TTL_S = 10 * 365 * 86400.0
MODES = ("auto", "sync", "balanced", "ps-hra", "ps")
"""Ways of training, as `prepare(mode=...)` and `run --mode` know them too; `auto` leaves the choice to the planner."""
SERVED = ("ps-hra", "ps")
"""Those with a parameter server."""

NAME = "lower-case letters, digits and hyphens, at most 40, beginning with a letter and not ending in a hyphen"
NODE_NAME = "a host name: lower-case letters, digits, hyphens and dots, at most 63"
COUNT = f"a whole number from 1 to {MAX_WORKERS}"
CAPACITY = f"a whole number from 0 to {MAX_WORKERS}: how many GPUs (or CPU workers) the node may run"
RETRIES = f"a whole number from 0 to {MAX_RETRIES}: how often it is replaced after a failure not of the script's doing"
POLICY = "one of delete, keep, keep-on-failure"
MODE = f"one of {', '.join(MODES)}"
TTL = "a time with a unit, such as 3600s (ns, us, ms, s; at most ten years)"
ELASTIC = "a map with min: with how many workers at least the others go on when a node is lost"
CLAIM = "the name of a PersistentVolumeClaim: lower-case letters, digits, hyphens and dots, at most 253"
ENVIRONMENT = "names (letters, digits, underscores) with text as values"

_NAME = re.compile(r"[a-z](?:[a-z0-9-]{0,38}[a-z0-9])?")
_NODE_NAME = re.compile(r"(?=.{1,63}\Z)[a-z0-9](?:[a-z0-9-]*[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]*[a-z0-9])?)*")
_CLAIM = re.compile(r"(?=.{1,253}\Z)[a-z0-9](?:[a-z0-9-]*[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]*[a-z0-9])?)*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")
RESERVED = "RINGWEAVE_"
"""Variables that launchers set begin so."""


class DeletionPolicy(enum.StrEnum):
    """What becomes of a node's worker group when the job has ended; a TTL or `ringweave delete` removes all."""

    DELETE = "delete"
    KEEP = "keep"
    KEEP_ON_FAILURE = "keep-on-failure"


class RequestProblemsError(problems.ProblemsError, JobError):
    """A JobError that still has its problems as data."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRequest:
    """One node on which the job may run."""

    name: str
    """In the local place a name only; on Slurm and Kubernetes the host that is meant, where the author gave it."""
    capacity: int
    """How many GPUs, or CPU workers, it may run."""
    max_retries: int = 3
    """How often its worker group is replaced after a failure that is not the script's. Three: a node that fails
    a fourth time needs mending, not another try."""
    deletion: DeletionPolicy = DeletionPolicy.DELETE
    """What becomes of its worker group in the end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Elastic:
    """A node that is lost costs the others no train step: they go on, and its replacement joins them."""

    min: int
    """Workers with which they go on at least. With fewer all begin again from the last checkpoint, as without this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A job as its author asks for it; prints as the job file that reads back equal. Who asks is never part of it."""

    name: str
    """The job's name, unique in the place where it runs."""
    num_workers: int
    """GPUs in all, or CPU workers in all."""
    script: str
    """The program, a path below `directory` where there is one."""
    nodes: tuple[NodeRequest, ...]
    """In node order; the split takes the nodes it needs."""
    device: str = "cuda"
    """`cuda`: workers are GPUs. `cpu`: they are processes without one."""
    directory: str | None = None
    """The folder that the script needs around it; None where the script is alone."""
    arguments: tuple[str, ...] = ()
    """What the script is called with."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the workers."""
    data: str | None = None
    """Where the training data is; workers see it as RINGWEAVE_DATA. None where the script knows."""
    image: str | None = None
    """The container image; None where the place has what is needed."""
    claim: str | None = None
    """The PersistentVolumeClaim that all Pods of a job on Kubernetes have as a folder, RINGWEAVE_CLAIM; None: no folder
    of theirs outlives them."""
    lab: str | None = None
    """A lab of this machine that is up, whose nodes are the job's; None where nodes are worker groups only."""
    mode: str = "auto"
    """How to train."""
    elastic: Elastic | None = None
    """Whether the others go on when a node is lost; None has all begin again from the last checkpoint."""
    min_per_node: int = MIN_PER_NODE
    """The least that a used node gets."""
    ttl_s: float | None = None
    """Seconds after its end at which the job is removed with all it left; None keeps it until it is deleted."""
    suspend: bool = False
    """Submitted, checked, and not started until it is resumed."""

    def __post_init__(self) -> None:
        problems.refuse_any(_problems(self), error=RequestProblemsError)

    def __str__(self) -> str:
        from ringweave.jobs.requests import job_file

        return job_file.dumps(self)

    @property
    def split(self) -> Split:
        """The total shared out over the nodes."""
        capacities = [node.capacity for node in self.nodes]
        return splitting.split(self.num_workers, capacities, min_per_node=self.min_per_node)


def _problems(request: Request) -> Iterator[Problem]:
    yield from _text(("name",), "name of the job", request.name, _NAME, NAME)
    yield from _count(("num_workers",), "GPUs in all", request.num_workers, (1, MAX_WORKERS), COUNT)
    yield from _count(("min_per_node",), "minimum per node", request.min_per_node, (1, MAX_WORKERS), COUNT)
    yield from _path(("script",), "script", request.script, "a path, such as train.py")
    for key in ("directory", "data", "image", "lab"):
        if getattr(request, key) is not None:
            yield from _path((key,), key, getattr(request, key), "text on one line")
    if request.claim is not None and not _CLAIM.fullmatch(request.claim):
        do = "Name one of the job's namespace: kubectl get persistentvolumeclaims"
        yield _wrong(("claim",), "claim", request.claim, CLAIM, do)
    if request.device not in ("cpu", "cuda"):
        yield _wrong(("device",), "device", request.device, "one of cpu, cuda", "Write cpu for workers without a GPU")
    if request.lab is not None and request.device == "cuda":
        do = "Ask for cpu_workers, or leave lab out"
        yield _wrong(("lab",), "lab", request.lab, "none for GPUs: a lab limits links and CPU time", do)
    if request.mode not in MODES:
        do = closest(request.mode, MODES) or "Leave it out for auto"
        yield _wrong(("mode",), "mode", request.mode, MODE, do)
    if request.ttl_s is not None and not 0 <= request.ttl_s <= MAX_TTL_S:
        yield _wrong(("ttl_s",), "ttl", request.ttl_s, TTL, "Leave the key out to keep the job until it is deleted")
    yield from _environment_problems(request.environment)
    yield from _node_problems(request.nodes)
    if request.elastic is not None:
        yield from _elastic_problems(request, request.elastic)


def _elastic_problems(request: Request, elastic: Elastic) -> Iterator[Problem]:
    if request.mode in SERVED:
        do = "Leave elastic out, or write mode: balanced"
        expected = "none with a parameter server, which dies with its node"
        yield _wrong(("elastic",), "elastic", f"mode {request.mode}", expected, do)
    counts = request.split.counts if request.min_per_node > 0 and request.nodes else None
    if counts is None:  # it is refused for that
        return
    used = [(count, node.name) for count, node in zip(counts, request.nodes, strict=True) if count]
    fewest, smallest = min(used)
    most = request.num_workers - fewest
    if len(used) == 1:
        do = "Leave elastic out, or share the job out over more nodes"
        yield _wrong(("elastic",), "elastic", f"one node, {smallest}", "two nodes or more: one can be lost", do)
    elif not 1 <= elastic.min <= most:
        do = f"Write min: {most}, or less to survive the loss of larger nodes"
        expected = f"1 to {most}, which are left without the smallest node ({smallest}, {fewest} workers)"
        yield _wrong(("elastic", "min"), "elastic.min", elastic.min, expected, do)


def _environment_problems(environment: Mapping[str, str]) -> Iterator[Problem]:
    for name, value in environment.items():
        path = ("environment", name)
        if not _VARIABLE.fullmatch(name) or "\0" in value:
            yield _wrong(path, "environment variable", name, ENVIRONMENT, "Rename the variable")
        elif name.startswith(RESERVED):
            do = "Rename the variable: launchers set those"
            yield _wrong(path, "environment variable", name, f"a name that does not begin with {RESERVED}", do)


def _node_problems(nodes: tuple[NodeRequest, ...]) -> Iterator[Problem]:
    if not 1 <= len(nodes) <= MAX_NODES:
        do = 'Add "nodes: [{capacity: 8}]"'
        yield _wrong(("nodes",), "nodes", f"{len(nodes)} of them", f"1 to {MAX_NODES} nodes", do)
    seen: set[str] = set()
    for index, node in enumerate(nodes):
        path: Path = ("nodes", index)
        yield from _text((*path, "name"), "name of a node", node.name, _NODE_NAME, NODE_NAME)
        if node.name in seen:
            do = "Give each node its own name"
            yield _wrong((*path, "name"), "name of a node", node.name, "a name used once", do)
        seen.add(node.name)
        what = f"of node {problems.dotted((node.name,))}"
        yield from _count((*path, "capacity"), f"capacity {what}", node.capacity, (0, MAX_WORKERS), CAPACITY)
        yield from _count((*path, "max_retries"), f"max_retries {what}", node.max_retries, (0, MAX_RETRIES), RETRIES)


def _text(path: Path, what: str, got: str, pattern: re.Pattern[str], expected: str) -> Iterator[Problem]:
    if not pattern.fullmatch(got):
        yield _wrong(path, what, got, expected, "Rename it; names become parts of host names")


def _path(path: Path, what: str, got: str, expected: str) -> Iterator[Problem]:
    if not got.strip() or not got.isprintable():
        yield _wrong(path, what, got, expected, "Write it plainly, on one line")


def _count(path: Path, what: str, got: int, limits: tuple[int, int], expected: str) -> Iterator[Problem]:
    if not limits[0] <= got <= limits[1]:
        yield _wrong(path, what, got, expected, "Correct the number")


def _wrong(path: Path, what: str, got: object, expected: str, do: str) -> Problem:
    return Problem(path=path, what=what, got=got, expected=expected, do=do)
