"""Job request and job file: validation, reading, writing and command-line flags (docs/reference/job-file.md)."""

import enum
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pydantic import Field

from ringweave import units
from ringweave.environment import LOG_MAX_FILES, LOG_MAX_SIZE, check_max_loss_increase
from ringweave.errors import JobError, UsageError
from ringweave.files import problems, yaml_files
from ringweave.files.problems import InputError, InputProblem, KeyPath, dotted_path, problems_text, suggest_closest
from ringweave.files.rotation import LogLimits
from ringweave.files.yaml_files import FileKind
from ringweave.jobs import split, worker_options
from ringweave.jobs.split import MIN_PER_NODE, WorkerSplit
from ringweave.jobs.worker_options import ORDER_RULE, Encrypt, Wire, WorkerOptions

if TYPE_CHECKING:
    from ruamel.yaml.comments import CommentedMap

MAX_NODES = 100_000
MAX_WORKERS = 2**31 - 1
MAX_RETRIES = 1000
MAX_SPARES = 64
"""Upper limit of spares of a run or of a job's node: each takes a few hundred megabytes of memory."""
MAX_TTL_S = 10 * 365 * 86400.0
MODES = ("auto", "sync", "balanced", "ps-hra", "ps", "local")
"""Training modes, as in `prepare(mode=...)` and `run --mode`; `auto` leaves the choice to the planner."""
SERVER_MODES = ("ps-hra", "ps")
"""Modes with a parameter server, elastic or not."""
ELASTIC_SERVER_MODES = (*SERVER_MODES, "local")
"""Modes with a parameter server in an elastic job: sites that come and go exchange through it."""

NAME_RULE = "lower-case letters, digits and hyphens, at most 40, beginning with a letter and not ending in a hyphen"
NODE_NAME_RULE = "a host name: lower-case letters, digits, hyphens and dots, at most 63"
COUNT_RULE = f"a whole number from 1 to {MAX_WORKERS}"
CAPACITY_RULE = f"a whole number from 0 to {MAX_WORKERS}: the GPUs (or CPU workers) that the node may run"
RETRIES_RULE = (
    f"a whole number from 0 to {MAX_RETRIES}: number of replacements after failures that the script did not cause"
)
DELETION_RULE = "one of delete, keep, keep-on-failure"
MODE_RULE = f"one of {', '.join(MODES)}"
LOSS_RULE = "a percentage above 0 and up to 100, such as 0.5%"
TTL_RULE = "a time with a unit, such as 3600s (ns, us, ms, s; at most ten years)"
ELASTIC_RULE = "a map with min: the smallest number of workers with which the job continues when a node is lost"
SPARES_RULE = f"a whole number from 0 to {MAX_SPARES}: idle processes on each node, ready to replace a worker at once"
CLAIM_RULE = "the name of a PersistentVolumeClaim: lower-case letters, digits, hyphens and dots, at most 253"
ENVIRONMENT_RULE = "names (letters, digits, underscores) with text as values"
PROGRAM_KEYS = ("script", "module", "command")
"""Keys of the program; a job has one of them."""
PROGRAM_RULE = "one of script, module and command"

_NAME_PATTERN = re.compile(r"[a-z](?:[a-z0-9-]{0,38}[a-z0-9])?")
_NODE_NAME_PATTERN = re.compile(r"(?=.{1,63}\Z)[a-z0-9](?:[a-z0-9-]*[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]*[a-z0-9])?)*")
_CLAIM_PATTERN = re.compile(r"(?=.{1,253}\Z)[a-z0-9](?:[a-z0-9-]*[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]*[a-z0-9])?)*")
_VARIABLE_PATTERN = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")
RESERVED_PREFIX = "RINGWEAVE_"
"""Prefix of variables that launchers set."""


class DeletionPolicy(enum.StrEnum):
    """Fate of a node's worker group after the end of the job; a TTL or `ringweave delete` removes all groups."""

    DELETE = "delete"
    KEEP = "keep"
    KEEP_ON_FAILURE = "keep-on-failure"


class RequestProblemsError(problems.InputError, JobError):
    """JobError that keeps its problems as data."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRequest:
    """Node on which the job may run."""

    name: str
    """Name. On the local platform only a label; on Slurm and Kubernetes the requested host, if the author gave the
    name."""
    capacity: int
    """Number of GPUs or CPU workers that the node may run."""
    max_retries: int = 3
    """Maximum number of replacements of its worker group after failures other than the script's. Three: a node that
    fails a fourth time needs a repair, not another retry."""
    deletion: DeletionPolicy = DeletionPolicy.DELETE
    """Fate of its worker group after the end of the job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticRequest:
    """Elastic training: the other nodes continue after a loss without losing a train step; the replacement joins."""

    min: int
    """Minimum number of workers with which the others continue. With fewer, all restart from the last checkpoint."""
    spares: int = 0
    """Number of spares on each node: idle processes that are ready to replace a worker of the node at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRequest:
    """Job as requested by its author; prints as the job file that parses back equal. It has no requester."""

    name: str
    """Name of the job, unique on its platform."""
    num_workers: int
    """Total number of GPUs or CPU workers."""
    script: str | None = None
    """The program, a Python script: a path below `directory` if that is given. None: `module` or `command` names it."""
    module: str | None = None
    """The program, as for `python -m`: in `directory`, or installed on the nodes."""
    command: str | None = None
    """The program, run without an interpreter: on the PATH of the nodes, or a path below `directory`."""
    nodes: tuple[NodeRequest, ...]
    """Nodes in order; the split uses as many as it needs."""
    device: str = "cuda"
    """`cuda`: workers are GPUs. `cpu`: workers are processes without a GPU."""
    directory: str | None = None
    """Folder that the program needs around it; None if a script stands alone."""
    arguments: tuple[str, ...] = ()
    """Command-line arguments of the program."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the workers."""
    data: str | None = None
    """Location of the training data; workers see it as RINGWEAVE_DATA. None if the script knows it."""
    image: str | None = None
    """Container image; None for the platform's own."""
    claim: str | None = None
    """PersistentVolumeClaim that all Pods of a Kubernetes job mount (RINGWEAVE_CLAIM); None: no folder outlives the
    Pods."""
    lab: str | None = None
    """Running lab of this machine whose nodes the job uses; None if nodes are only worker groups."""
    mode: str = "auto"
    schedule: str | None = None
    """Schedule of all allreduces from 64 KiB up; None leaves the choice to the planner."""
    tuning: bool | None = None
    """Measured times change schedules and plans; None: only among several nodes."""
    order: str = str(worker_options.BLOCK_ORDER)
    """Order in which devices get ranks, as `parse_rank_order` reads it."""
    replace_backend: bool = False
    """ringweave also serves groups of an explicit "gloo" or "nccl"."""
    leader_per_nic: bool = False
    """Plan with one leader per NIC of a node instead of one per node."""
    encrypt: Encrypt = "auto"
    """Encrypt what travels between nodes; `auto`: between hosts, not in a lab."""
    wire: Wire = "exact"
    """Wire format of gradients on slow links, if scripts leave it open."""
    max_loss_increase: str | None = None
    """Loss at equal samples that `auto` may give up for speed, such as `0.5%`; None: none."""
    elastic: ElasticRequest | None = None
    """Elastic training; None: after the loss of a node all nodes restart from the last checkpoint."""
    standby: bool = False
    """A second parameter server of an elastic job, on another node, takes over when the first one is lost."""
    min_per_node: int = MIN_PER_NODE
    """Minimum number of workers on a used node."""
    ttl_s: float | None = None
    """Seconds from the job's end to its removal with everything it left; None keeps it until it is deleted."""
    suspend: bool = False
    """The job is submitted and checked, and starts only when it is resumed."""

    def __post_init__(self) -> None:
        problems.raise_problems(_request_problems(self), error=RequestProblemsError)

    def __str__(self) -> str:
        return dump_request(self)

    @property
    def split(self) -> WorkerSplit:
        capacities = [node.capacity for node in self.nodes]
        return split.split_workers(self.num_workers, capacities, min_per_node=self.min_per_node)

    @property
    def worker_options(self) -> WorkerOptions:
        values = {name: getattr(self, name) for name in worker_options.OPTION_NAMES}
        return WorkerOptions(**values | {"order": worker_options.parse_rank_order(self.order)})


def _request_problems(request: JobRequest) -> Iterator[InputProblem]:
    yield from _text_problems(("name",), "name of the job", request.name, _NAME_PATTERN, NAME_RULE)
    yield from _count_problems(("num_workers",), "GPUs in all", request.num_workers, (1, MAX_WORKERS), COUNT_RULE)
    yield from _count_problems(
        ("min_per_node",), "minimum per node", request.min_per_node, (1, MAX_WORKERS), COUNT_RULE
    )
    yield from _program_problems(request)
    for key in ("directory", "data", "image", "lab"):
        if getattr(request, key) is not None:
            yield from _path_problems((key,), key, getattr(request, key), "text on one line")
    if request.claim is not None and not _CLAIM_PATTERN.fullmatch(request.claim):
        do = "Name one of the job's namespace: kubectl get persistentvolumeclaims"
        yield _problem(("claim",), "claim", request.claim, CLAIM_RULE, do)
    if request.device not in ("cpu", "cuda"):
        yield _problem(("device",), "device", request.device, "one of cpu, cuda", "Write cpu for workers without a GPU")
    if request.lab is not None and request.device == "cuda":
        do = "Ask for cpu_workers, or leave lab out"
        yield _problem(("lab",), "lab", request.lab, "none for GPUs: a lab limits links and CPU time", do)
    if request.mode not in MODES:
        do = suggest_closest(request.mode, MODES) or "Leave it out for auto"
        yield _problem(("mode",), "mode", request.mode, MODE_RULE, do)
    yield from _option_problems(request)
    if request.ttl_s is not None and not 0 <= request.ttl_s <= MAX_TTL_S:
        yield _problem(
            ("ttl_s",), "ttl", request.ttl_s, TTL_RULE, "Leave the key out to keep the job until it is deleted"
        )
    yield from _environment_problems(request.environment)
    yield from _node_problems(request.nodes)
    if request.elastic is not None:
        yield from _elastic_problems(request, request.elastic)
    if request.standby:
        yield from _standby_problems(request)


def _program_problems(request: JobRequest) -> Iterator[InputProblem]:
    given = [key for key in PROGRAM_KEYS if getattr(request, key) is not None]
    if len(given) != 1:
        got = " and ".join(given) or "none of them"
        do = f"Leave {given[-1]} out" if given else 'Write "script: train.py"'
        yield _problem((given[-1],) if given else (), "program of the job", got, PROGRAM_RULE, do)
    rules = ("a path, such as train.py", "the name of a module, such as text.train", "a program, such as bash")
    for key, rule in zip(PROGRAM_KEYS, rules, strict=True):
        if getattr(request, key) is not None:
            yield from _path_problems((key,), key, getattr(request, key), rule)


def _option_problems(request: JobRequest) -> Iterator[InputProblem]:
    if request.schedule is not None:
        from ringweave import schedules  # brings numpy, which most jobs need not wait for

        if request.schedule not in schedules.SCHEDULE_NAMES:
            do = suggest_closest(request.schedule, schedules.SCHEDULE_NAMES) or "Leave it out for the planner's choice"
            expected = f"one of {', '.join(schedules.SCHEDULE_NAMES)}"
            yield _problem(("schedule",), "schedule", request.schedule, expected, do)
    try:
        worker_options.parse_rank_order(request.order)
    except UsageError:
        do = "Leave it out for block, which fits nearly all schedules"
        yield _problem(("order",), "order", request.order, ORDER_RULE, do)
    try:
        check_max_loss_increase(request.max_loss_increase, where="")
    except UsageError:
        do = "Leave it out to take nothing that costs loss"
        yield _problem(("max_loss_increase",), "largest loss increase", request.max_loss_increase, LOSS_RULE, do)


def _elastic_problems(request: JobRequest, elastic: ElasticRequest) -> Iterator[InputProblem]:
    yield from _count_problems(("elastic", "spares"), "elastic.spares", elastic.spares, (0, MAX_SPARES), SPARES_RULE)
    if elastic.spares and request.command is not None:
        expected = "none with a command: a spare runs a Python script or module"
        do = "Leave spares out, or write script or module"
        yield _problem(("elastic", "spares"), "elastic.spares", elastic.spares, expected, do)
    counts = request.split.counts if request.min_per_node > 0 and request.nodes else None
    if counts is None:  # refused for that reason
        return
    used = [(count, node.name) for count, node in zip(counts, request.nodes, strict=True) if count]
    smallest_count, smallest = min(used)
    most = request.num_workers - (smallest_count if len(used) > 1 else 0)
    if not 1 <= elastic.min <= most:
        do = f"Write min: {most}, or less to survive the loss of larger nodes"
        expected = f"1 to {most}, which are left without the smallest node ({smallest}, {smallest_count} workers)"
        if len(used) == 1:
            do = f"Write min: {most}, or less to continue while some of them are away"
            expected = f"1 to {most}, the workers of its one node"
        yield _problem(("elastic", "min"), "elastic.min", elastic.min, expected, do)


def _standby_problems(request: JobRequest) -> Iterator[InputProblem]:
    counts = request.split.counts if request.min_per_node > 0 and request.nodes else None
    if request.elastic is None or request.mode not in ELASTIC_SERVER_MODES:
        got = f"mode {request.mode}" + ("" if request.elastic else " without elastic")
        do = "Leave standby out, or add elastic and write mode: ps-hra"
        yield _problem(("standby",), "standby", got, "an elastic job with mode ps-hra, ps or local", do)
    elif counts is not None and sum(count > 0 for count in counts) == 1:
        do = "Leave standby out, or share the job out over more nodes"
        yield _problem(("standby",), "standby", "one node", "two nodes or more: one can be lost", do)


def _environment_problems(environment: Mapping[str, str]) -> Iterator[InputProblem]:
    for name, value in environment.items():
        path = ("environment", name)
        if not _VARIABLE_PATTERN.fullmatch(name) or "\0" in value:
            yield _problem(path, "environment variable", name, ENVIRONMENT_RULE, "Rename the variable")
        elif name in (LOG_MAX_SIZE, LOG_MAX_FILES):
            try:
                LogLimits.from_environ({name: value})
            except UsageError as error:
                yield _problem(path, name, value, "a limit of logs", str(error))
        elif name.startswith(RESERVED_PREFIX):
            do = "Rename the variable: launchers set those"
            yield _problem(path, "environment variable", name, f"a name that does not begin with {RESERVED_PREFIX}", do)


def _node_problems(nodes: tuple[NodeRequest, ...]) -> Iterator[InputProblem]:
    if not 1 <= len(nodes) <= MAX_NODES:
        do = 'Add "nodes: [{capacity: 8}]"'
        yield _problem(("nodes",), "nodes", f"{len(nodes)} of them", f"1 to {MAX_NODES} nodes", do)
    seen: set[str] = set()
    for index, node in enumerate(nodes):
        path: KeyPath = ("nodes", index)
        yield from _text_problems((*path, "name"), "name of a node", node.name, _NODE_NAME_PATTERN, NODE_NAME_RULE)
        if node.name in seen:
            do = "Give each node its own name"
            yield _problem((*path, "name"), "name of a node", node.name, "a name used once", do)
        seen.add(node.name)
        what = f"of node {problems.dotted_path((node.name,))}"
        yield from _count_problems(
            (*path, "capacity"), f"capacity {what}", node.capacity, (0, MAX_WORKERS), CAPACITY_RULE
        )
        yield from _count_problems(
            (*path, "max_retries"), f"max_retries {what}", node.max_retries, (0, MAX_RETRIES), RETRIES_RULE
        )


def _text_problems(
    path: KeyPath, what: str, got: str, pattern: re.Pattern[str], expected: str
) -> Iterator[InputProblem]:
    if not pattern.fullmatch(got):
        yield _problem(path, what, got, expected, "Rename it; names become parts of host names")


def _path_problems(path: KeyPath, what: str, got: str, expected: str) -> Iterator[InputProblem]:
    if not got.strip() or not got.isprintable():
        yield _problem(path, what, got, expected, "Write it plainly, on one line")


def _count_problems(
    path: KeyPath, what: str, got: int, limits: tuple[int, int], expected: str
) -> Iterator[InputProblem]:
    if not limits[0] <= got <= limits[1]:
        yield _problem(path, what, got, expected, "Correct the number")


def _problem(path: KeyPath, what: str, got: object, expected: str, do: str) -> InputProblem:
    return InputProblem(path=path, what=what, got=got, expected=expected, do=do)


JOB_FILE = FileKind(
    noun="job file",
    error=JobError,
    expected_keys="a map with the keys name, gpus (or cpu_workers), script and nodes",
    fix_empty='Begin with "name: my-job"',
    fix_too_large="Use count for like nodes",
)
_TEXT_LIST_RULE = "a list of texts; numbers in quotes"


class JobNodeEntry(yaml_files.FileEntry):
    """Item of `nodes` in the job file: a node, or `count` equal nodes."""

    name: str | None = Field(default=None, description=NODE_NAME_RULE, examples=["n0"])
    capacity: int = Field(description=CAPACITY_RULE, examples=["8"])
    max_retries: int = Field(default=3, description=RETRIES_RULE, examples=["3"])
    deletion: str = Field(default="delete", description=DELETION_RULE, examples=["keep-on-failure"])
    count: int | None = Field(default=None, description=f"a whole number from 1 to {MAX_NODES}", examples=["4"])


class ElasticEntry(yaml_files.FileEntry):
    """Value of `elastic` in the job file."""

    min: int = Field(description=COUNT_RULE, examples=["3"])
    spares: int = Field(default=0, description=SPARES_RULE, examples=["1"])


class JobFileEntry(yaml_files.FileEntry):
    """Root of the job file."""

    name: str = Field(description=NAME_RULE, examples=["my-job"])
    gpus: int | None = Field(default=None, description=COUNT_RULE, examples=["15"])
    cpu_workers: int | None = Field(default=None, description=COUNT_RULE, examples=["4"])
    script: str | None = Field(default=None, description="the path of a Python program", examples=["train.py"])
    module: str | None = Field(
        default=None, description="the name of a module, as for python -m", examples=["text.train"]
    )
    command: str | None = Field(default=None, description="a program without its arguments", examples=["bash"])
    directory: str | None = Field(
        default=None, description="the folder that the program needs around it", examples=["."]
    )
    arguments: list[str] = Field(default=[], description=_TEXT_LIST_RULE, examples=['[--epochs, "3"]'])
    environment: dict[str, str] = Field(default={}, description=ENVIRONMENT_RULE, examples=['{SEED: "1"}'])
    data: str | None = Field(default=None, description="where the training data is", examples=["/data/text"])
    image: str | None = Field(default=None, description="a container image", examples=["registry.example/train:1"])
    claim: str | None = Field(default=None, description=CLAIM_RULE, examples=["checkpoints"])
    lab: str | None = Field(
        default=None, description="the name of a lab that is up on this machine", examples=["two-racks"]
    )
    mode: str = Field(default="auto", description=MODE_RULE, examples=["auto"])
    schedule: str | None = Field(default=None, description="the name of a schedule", examples=["ring"])
    tuning: bool | None = Field(default=None, description="true or false", examples=["false"])
    order: str = Field(default="block", description=ORDER_RULE, examples=["round-robin"])
    replace_backend: bool = Field(default=False, description="true or false", examples=["true"])
    leader_per_nic: bool = Field(default=False, description="true or false", examples=["true"])
    encrypt: Encrypt = Field(default="auto", description="auto, on or off", examples=["auto"])
    wire: Wire = Field(default="exact", description="exact, bf16, int8, int4 or auto", examples=["int8"])
    max_loss_increase: str | None = Field(default=None, description=LOSS_RULE, examples=["0.5%"])
    elastic: ElasticEntry | None = Field(default=None, description=ELASTIC_RULE, examples=["{min: 3}"])
    nodes: list[JobNodeEntry] = Field(description="a list of nodes", examples=["[{capacity: 10}, {capacity: 5}]"])
    standby: bool = Field(default=False, description="true or false", examples=["true"])
    min_per_node: int = Field(default=MIN_PER_NODE, description=COUNT_RULE, examples=["3"])
    ttl: str | None = Field(default=None, description=TTL_RULE, examples=["3600s"])
    suspend: bool = Field(default=False, description="true or false", examples=["false"])


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFlag:
    """Key given on the command line; it replaces the file's value."""

    name: str
    """Flag as typed, for errors: `--gpus`."""
    value: Any


def load_request(path: str | os.PathLike[str], flags: Mapping[str, JobFlag] | None = None) -> JobRequest:
    """Read the request in a file, with flags over it.

    `flags`: key of the file -> flag typed for it.

    Raises:
        JobError: File or flags are invalid; the text names places and fixes, on one screen.
    """
    return yaml_files.load_yaml_file(path, JOB_FILE, _request_builder(flags or {}))


def parse_request(text: str, flags: Mapping[str, JobFlag] | None = None, *, source: str = "<text>") -> JobRequest:
    """Parse the request in a text, with flags over it.

    Raises:
        JobError: Text or flags are invalid.
    """
    return yaml_files.load_yaml_text(text, JOB_FILE, _request_builder(flags or {}), source=source)


def request_from_flags(flags: Mapping[str, JobFlag]) -> JobRequest:
    """Return the request that flags alone make.

    Raises:
        JobError: The flags are invalid or incomplete.
    """
    try:
        return _request_builder(flags)({})
    except InputError as error:
        raise JobError(problems_text(error.problems, lambda _: "command line")) from error


def dump_request(request: JobRequest) -> str:
    """Return the job file of a request: `parse_request(dump_request(r)) == r`."""
    content: dict[str, Any] = {
        "name": request.name,
        "gpus" if request.device == "cuda" else "cpu_workers": request.num_workers,
        **{key: getattr(request, key) for key in (*PROGRAM_KEYS, "directory")},
        "arguments": list(request.arguments),
        "environment": dict(request.environment),
        **{key: getattr(request, key) for key in ("data", "image", "claim", "lab", "mode", *_OPTION_KEYS)},
        "elastic": None if request.elastic is None else _elastic_to_yaml(request.elastic),
        "standby": request.standby,
        "nodes": [_node_to_yaml(node) for node in request.nodes],
        "min_per_node": request.min_per_node,
        "ttl": None if request.ttl_s is None else units.format_seconds(request.ttl_s),
        "suspend": request.suspend,
    }
    fields = JobFileEntry.model_fields
    return yaml_files.dump_yaml({key: value for key, value in content.items() if value != fields[key].default})


def _node_to_yaml(node: NodeRequest) -> "CommentedMap":
    entry: dict[str, Any] = {"name": node.name, "capacity": node.capacity}
    if node.max_retries != NodeRequest.__dataclass_fields__["max_retries"].default:
        entry["max_retries"] = node.max_retries
    if node.deletion is not DeletionPolicy.DELETE:
        entry["deletion"] = str(node.deletion)
    return _to_flow_map(entry)


def _elastic_to_yaml(elastic: ElasticRequest) -> "CommentedMap":
    spares = {"spares": elastic.spares} if elastic.spares else {}
    return _to_flow_map({"min": elastic.min, **spares})


def _to_flow_map(content: Mapping[str, Any]) -> "CommentedMap":
    from ruamel.yaml.comments import CommentedMap  # most commands write no YAML

    entry = CommentedMap(content)
    entry.fa.set_flow_style()
    return entry


def _request_builder(flags: Mapping[str, JobFlag]) -> Callable[[Any], JobRequest]:
    def build(value: Any) -> JobRequest:
        try:
            return _build_request(_apply_flags(value, flags))
        except InputError as error:
            typed = tuple(problem for problem in error.problems if problem.path and problem.path[0] in flags)
            if not typed:
                raise
            raise JobError(problems_text(typed, lambda problem: flags[str(problem.path[0])].name)) from error

    return build


def _apply_flags(value: Any, flags: Mapping[str, JobFlag]) -> Any:
    """Return the file's values with the flags over them; a typed total or program replaces one of another kind."""
    if not isinstance(value, dict) or not flags:
        return value
    kinds = ({"gpus", "cpu_workers"}, set(PROGRAM_KEYS))
    hidden = {key for kind in kinds if kind & flags.keys() for key in kind}
    kept = {key: item for key, item in value.items() if key not in hidden}
    return kept | {key: _merge_flag(kept.get(key), flag.value) for key, flag in flags.items()}


def _merge_flag(there: Any, typed: Any) -> Any:
    """Return the typed value; a typed map of variables is merged into the file's."""
    return {**there, **typed} if isinstance(there, dict) and isinstance(typed, dict) else typed


def _build_request(value: Any) -> JobRequest:
    entry = yaml_files.validate_entries(JobFileEntry, value, JOB_FILE.noun)
    found = list(_file_problems(entry))
    if found:
        raise InputError(tuple(found))
    total_key = "gpus" if entry.gpus is not None else "cpu_workers"
    nodes = [_expand_nodes(item) for item in entry.nodes]
    origins = [index for index, group in enumerate(nodes) for _ in group]
    flat = [node for group in nodes for node in group]
    try:
        return JobRequest(
            name=entry.name,
            num_workers=getattr(entry, total_key),
            device="cuda" if entry.gpus is not None else "cpu",
            nodes=tuple(replace(node, name=node.name or f"n{index}") for index, node in enumerate(flat)),
            arguments=tuple(entry.arguments),
            ttl_s=None if entry.ttl is None else units.parse_seconds(entry.ttl),
            elastic=None if entry.elastic is None else ElasticRequest(**dict(entry.elastic)),
            **entry.model_dump(include=_UNCHANGED_FIELDS),
        )
    except InputError as error:
        keys = {"num_workers": total_key, "ttl_s": "ttl"}
        placed = [_to_file_problem(problem, keys, origins) for problem in error.problems]
        # Nodes expanded from one `count` have the same mistake at the same place; it is reported once.
        raise InputError(tuple({problem.path: problem for problem in reversed(placed)}.values())) from error


_OPTION_KEYS = tuple(key for key in JobRequest.__dataclass_fields__ if key in worker_options.OPTION_NAMES)
_UNCHANGED_FIELDS = JobRequest.__dataclass_fields__.keys() & JobFileEntry.model_fields.keys() - {
    *("name", "nodes", "arguments", "elastic"),
}
"""Keys whose values are fields of the request as they are."""


def _file_problems(entry: JobFileEntry) -> Iterator[InputProblem]:
    """Yield the problems that only the file's own entries show."""
    if (entry.gpus is None) == (entry.cpu_workers is None):
        got = "neither" if entry.gpus is None else "both"
        path: KeyPath = () if entry.gpus is None else ("cpu_workers",)
        expected = "either gpus or cpu_workers"
        yield InputProblem(path=path, what="total of the job", got=got, expected=expected, do='Write "gpus: 15"')
    if entry.ttl is not None and not _is_duration(entry.ttl):
        do = "Leave the key out to keep the job until it is deleted"
        yield InputProblem(path=("ttl",), what="ttl", got=entry.ttl, expected=TTL_RULE, do=do)
    num_nodes = 0
    for index, node in enumerate(entry.nodes):
        if node.deletion not in set(DeletionPolicy):
            path, do = ("nodes", index, "deletion"), "Leave it out for delete"
            yield InputProblem(path=path, what="deletion policy", got=node.deletion, expected=DELETION_RULE, do=do)
        num_nodes += 1 if node.count is None else node.count
        if (node.count is not None and node.count < 1) or num_nodes > MAX_NODES:
            path, do = ("nodes", index, "count"), "Leave count out for a single node"
            expected = f"1 to {MAX_NODES} nodes in all"
            yield InputProblem(path=path, what="count", got=node.count, expected=expected, do=do)
            num_nodes = 0


def _is_duration(text: str) -> bool:
    try:
        units.parse_seconds(text)
    except UsageError:
        return False
    return not text.strip()[-1:].isdigit()


def _expand_nodes(entry: JobNodeEntry) -> list[NodeRequest]:
    """Return one node, or `count` nodes; nodes without a name get one by their position in the list."""
    node = NodeRequest(
        name=entry.name or "",
        capacity=entry.capacity,
        max_retries=entry.max_retries,
        deletion=DeletionPolicy(entry.deletion),
    )
    if entry.count is None:
        return [node]
    return [replace(node, name=f"{entry.name}-{index}" if entry.name else "") for index in range(entry.count)]


def _to_file_problem(problem: InputProblem, keys: Mapping[str, str], origins: list[int]) -> InputProblem:
    first = str(problem.path[0]) if problem.path else ""
    path: KeyPath = (keys.get(first, first), *problem.path[1:]) if problem.path else ()
    if len(path) > 1 and path[0] == "nodes" and isinstance(path[1], int):
        path = ("nodes", origins[path[1]], *path[2:])
    return replace(problem, path=path, what=problem.what or dotted_path(path))
