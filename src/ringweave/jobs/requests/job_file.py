"""The job file read and written, flags put over it; every mistake is a JobError that names line and key, or flag.

The format is described in docs/jobs.md.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import Field
from ruamel.yaml.comments import CommentedMap

from ringweave import units
from ringweave.errors import JobError, UsageError
from ringweave.files import reading, schema, yaml_text
from ringweave.files.problems import Path, Problem, ProblemsError, dotted, screenful
from ringweave.files.reading import FileKind
from ringweave.jobs.requests import request as rules
from ringweave.jobs.requests.request import DeletionPolicy, Elastic, NodeRequest, Request
from ringweave.jobs.splitting import MIN_PER_NODE

KIND = FileKind(
    noun="job file",
    error=JobError,
    keys="a map with the keys name, gpus (or cpu_workers), script and nodes",
    begin='Begin with "name: my-job"',
    shrink="Use count for like nodes",
)
_TEXTS = "a list of texts; numbers in quotes"


class NodeEntry(schema.Entry):
    """One item of `nodes`: a node, or `count` nodes that are alike."""

    name: Annotated[str | None, schema.GIVEN] = Field(default=None, description=rules.NODE_NAME, examples=["n0"])
    capacity: int = Field(description=rules.CAPACITY, examples=["8"])
    max_retries: int = Field(default=3, description=rules.RETRIES, examples=["3"])
    deletion: str = Field(default="delete", description=rules.POLICY, examples=["keep-on-failure"])
    count: Annotated[int | None, schema.GIVEN] = Field(
        default=None, description=f"a whole number from 1 to {rules.MAX_NODES}", examples=["4"]
    )


class ElasticEntry(schema.Entry):
    """What `elastic` holds."""

    min: int = Field(description=rules.COUNT, examples=["3"])


class RequestEntry(schema.Entry):
    """The whole file."""

    name: str = Field(description=rules.NAME, examples=["my-job"])
    gpus: Annotated[int | None, schema.GIVEN] = Field(default=None, description=rules.COUNT, examples=["15"])
    cpu_workers: Annotated[int | None, schema.GIVEN] = Field(default=None, description=rules.COUNT, examples=["4"])
    script: str = Field(description="the path of a Python program", examples=["train.py"])
    directory: Annotated[str | None, schema.GIVEN] = Field(
        default=None, description="the folder that the script needs around it", examples=["."]
    )
    arguments: list[str] = Field(default=[], description=_TEXTS, examples=['[--epochs, "3"]'])
    environment: dict[str, str] = Field(default={}, description=rules.ENVIRONMENT, examples=['{SEED: "1"}'])
    data: Annotated[str | None, schema.GIVEN] = Field(
        default=None, description="where the training data is", examples=["/data/text"]
    )
    image: Annotated[str | None, schema.GIVEN] = Field(
        default=None, description="a container image", examples=["registry.example/train:1"]
    )
    claim: Annotated[str | None, schema.GIVEN] = Field(default=None, description=rules.CLAIM, examples=["checkpoints"])
    lab: Annotated[str | None, schema.GIVEN] = Field(
        default=None, description="the name of a lab that is up on this machine", examples=["two-racks"]
    )
    mode: str = Field(default="auto", description=rules.MODE, examples=["auto"])
    elastic: Annotated[ElasticEntry | None, schema.GIVEN] = Field(
        default=None, description=rules.ELASTIC, examples=["{min: 3}"]
    )
    nodes: list[NodeEntry] = Field(description="a list of nodes", examples=["[{capacity: 10}, {capacity: 5}]"])
    min_per_node: int = Field(default=MIN_PER_NODE, description=rules.COUNT, examples=["3"])
    ttl: Annotated[str | None, schema.GIVEN] = Field(default=None, description=rules.TTL, examples=["3600s"])
    suspend: bool = Field(default=False, description="true or false", examples=["false"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """A key given on the command line; it replaces the file's."""

    name: str
    """As it was typed, for errors: `--gpus`."""
    value: Any
    """As the file would have it."""


def load(path: str | os.PathLike[str], flags: Mapping[str, Flag] | None = None) -> Request:
    """The request that a file makes, with flags over it.

    Args:
        path: The job file.
        flags: Key of the file -> what was typed for it.

    Raises:
        JobError: File or flags are wrong; the text says where and what to do, on one screen.
    """
    return reading.load(path, KIND, _builder(flags or {}))


def loads(text: str, flags: Mapping[str, Flag] | None = None, *, source: str = "<text>") -> Request:
    """The request that a text makes, with flags over it.

    Raises:
        JobError: Text or flags are wrong.
    """
    return reading.loads(text, KIND, _builder(flags or {}), source=source)


def from_flags(flags: Mapping[str, Flag]) -> Request:
    """The request that flags alone make.

    Raises:
        JobError: They are wrong, or not enough.
    """
    try:
        return _builder(flags)({})
    except ProblemsError as error:
        raise JobError(screenful(error.problems, lambda _: "command line")) from error


def dumps(request: Request) -> str:
    """The job file of a request: `loads(dumps(r)) == r`."""
    content: dict[str, Any] = {"name": request.name, _total_key(request): request.num_workers, "script": request.script}
    usual = {"mode": "auto", "min_per_node": MIN_PER_NODE, "suspend": False}
    content |= {
        "directory": request.directory,
        "arguments": list(request.arguments) or None,
        "environment": dict(request.environment) or None,
        "data": request.data,
        "image": request.image,
        "claim": request.claim,
        "lab": request.lab,
        "mode": request.mode,
        "elastic": None if request.elastic is None else _flow({"min": request.elastic.min}),
        "nodes": [_node(node) for node in request.nodes],
        "min_per_node": request.min_per_node,
        "ttl": None if request.ttl_s is None else units.format_seconds(request.ttl_s),
        "suspend": request.suspend,
    }
    return yaml_text.dumps(
        {key: value for key, value in content.items() if value is not None and usual.get(key) != value}
    )


def _total_key(request: Request) -> str:
    return "gpus" if request.device == "cuda" else "cpu_workers"


def _node(node: NodeRequest) -> CommentedMap:
    entry: dict[str, Any] = {"name": node.name, "capacity": node.capacity}
    if node.max_retries != NodeRequest.__dataclass_fields__["max_retries"].default:
        entry["max_retries"] = node.max_retries
    if node.deletion is not DeletionPolicy.DELETE:
        entry["deletion"] = str(node.deletion)
    return _flow(entry)


def _flow(content: Mapping[str, Any]) -> CommentedMap:
    """The map, written on one line."""
    entry = CommentedMap(content)
    entry.fa.set_flow_style()
    return entry


def _builder(flags: Mapping[str, Flag]) -> Callable[[Any], Request]:
    def build(value: Any) -> Request:
        try:
            return _build(_overlaid(value, flags))
        except ProblemsError as error:
            typed = tuple(problem for problem in error.problems if problem.path and problem.path[0] in flags)
            if not typed:
                raise
            raise JobError(screenful(typed, lambda problem: flags[str(problem.path[0])].name)) from error

    return build


def _overlaid(value: Any, flags: Mapping[str, Flag]) -> Any:
    """The file's values with the flags over them; a total typed as the one kind replaces one of the other kind."""
    if not isinstance(value, dict) or not flags:
        return value
    totals = {"gpus", "cpu_workers"}
    hidden = totals if totals & flags.keys() else set()
    kept = {key: item for key, item in value.items() if key not in hidden}
    return kept | {key: _over(kept.get(key), flag.value) for key, flag in flags.items()}


def _over(there: Any, typed: Any) -> Any:
    """What was typed; of variables those of the file stay that were not typed."""
    return {**there, **typed} if isinstance(there, dict) and isinstance(typed, dict) else typed


def _build(value: Any) -> Request:
    entry = schema.read(RequestEntry, value, KIND.noun)
    found = list(_early_problems(entry))
    if found:
        raise ProblemsError(tuple(found))
    total_key = "gpus" if entry.gpus is not None else "cpu_workers"
    nodes = [_nodes(item) for item in entry.nodes]
    origins = [index for index, group in enumerate(nodes) for _ in group]
    flat = [node for group in nodes for node in group]
    try:
        return Request(
            name=entry.name,
            num_workers=getattr(entry, total_key),
            device="cuda" if entry.gpus is not None else "cpu",
            nodes=tuple(replace(node, name=node.name or f"n{index}") for index, node in enumerate(flat)),
            arguments=tuple(entry.arguments),
            ttl_s=None if entry.ttl is None else units.parse_seconds(entry.ttl),
            elastic=None if entry.elastic is None else Elastic(min=entry.elastic.min),
            **entry.model_dump(include=_AS_THEY_ARE),
        )
    except ProblemsError as error:
        keys = {"num_workers": total_key, "ttl_s": "ttl"}
        placed = [_in_the_file(problem, keys, origins) for problem in error.problems]
        # Nodes that count made have the same mistake at the same place; it is told once.
        raise ProblemsError(tuple({problem.path: problem for problem in reversed(placed)}.values())) from error


_AS_THEY_ARE = {
    "script",
    "directory",
    "environment",
    "data",
    "image",
    "claim",
    "lab",
    "mode",
    "min_per_node",
    "suspend",
}


def _early_problems(entry: RequestEntry) -> Iterator[Problem]:
    """What can be said only while the words of the file are at hand."""
    if (entry.gpus is None) == (entry.cpu_workers is None):
        got = "neither" if entry.gpus is None else "both"
        path: Path = () if entry.gpus is None else ("cpu_workers",)
        expected = "either gpus or cpu_workers"
        yield Problem(path=path, what="total of the job", got=got, expected=expected, do='Write "gpus: 15"')
    if entry.ttl is not None and not _is_time(entry.ttl):
        do = "Leave the key out to keep the job until it is deleted"
        yield Problem(path=("ttl",), what="ttl", got=entry.ttl, expected=rules.TTL, do=do)
    num_nodes = 0
    for index, node in enumerate(entry.nodes):
        if node.deletion not in set(DeletionPolicy):
            path, do = ("nodes", index, "deletion"), "Leave it out for delete"
            yield Problem(path=path, what="deletion policy", got=node.deletion, expected=rules.POLICY, do=do)
        num_nodes += 1 if node.count is None else node.count
        if (node.count is not None and node.count < 1) or num_nodes > rules.MAX_NODES:
            path, do = ("nodes", index, "count"), "Leave count out for a single node"
            expected = f"1 to {rules.MAX_NODES} nodes in all"
            yield Problem(path=path, what="count", got=node.count, expected=expected, do=do)
            num_nodes = 0


def _is_time(text: str) -> bool:
    try:
        units.parse_seconds(text)
    except UsageError:
        return False
    return not text.strip()[-1:].isdigit()


def _nodes(entry: NodeEntry) -> list[NodeRequest]:
    """One node, or `count` of them; those without a name get one by their place in the list."""
    node = NodeRequest(
        name=entry.name or "",
        capacity=entry.capacity,
        max_retries=entry.max_retries,
        deletion=DeletionPolicy(entry.deletion),
    )
    if entry.count is None:
        return [node]
    return [replace(node, name=f"{entry.name}-{index}" if entry.name else "") for index in range(entry.count)]


def _in_the_file(problem: Problem, keys: Mapping[str, str], origins: list[int]) -> Problem:
    first = str(problem.path[0]) if problem.path else ""
    path: Path = (keys.get(first, first), *problem.path[1:]) if problem.path else ()
    if len(path) > 1 and path[0] == "nodes" and isinstance(path[1], int):
        path = ("nodes", origins[path[1]], *path[2:])
    return replace(problem, path=path, what=problem.what or dotted(path))
