"""The walks in ARCHITECTURE.md: every file exists, defines its function, and is reached from a file before it.

A step is a numbered line that begins with a link to a file and the name of a function in that file. Control comes to it
in one of five ways; every way but the first is written behind the function's name:

- a file of an earlier step refers to the function by name;
- `(back from `f`)`: an error or a result returns; this file refers to `f`, which a file of an earlier step defines;
- `(by message `M`)`: an RPC; this file and a file of an earlier step refer to the message class `M`;
- `(by command line)`: a new process; a file of an earlier step names this file's module in a string;
- `(start)`: the first step, and at most one more, where another process sees the same event.
"""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_FILES = {"A gradient bucket": 10, "A job": 18, "A member's death": 20}
_STEP = re.compile(
    r"\d+\. \[(?P<label>[^\]]+)\]\((?P<path>src/ringweave/[\w/]+\.py)\): `(?P<name>\w+)`"
    r"(?: \((?P<how>back from|by message|by command line|start)(?: `(?P<other>\w+)`)?\))?"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class WalkStep:
    """One line of a walk."""

    path: str
    name: str
    how: str
    """Way in which control comes to it; `call` if none is written."""
    other: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """Names in one Python file."""

    defined: frozenset[str]
    """Functions, methods and classes."""
    used: frozenset[str]
    """Names and attributes that the code reads; imports alone do not count."""
    strings: frozenset[str]


def parse_source(text: str) -> SourceFile:
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    return SourceFile(
        defined=frozenset(
            node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        ),
        used=frozenset(node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))
        | frozenset(node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)),
        strings=frozenset(
            node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ),
    )


def parse_walks(text: str) -> dict[str, list[WalkStep]]:
    """Return the steps below each heading of the third level; a numbered line that is no step is an error."""
    walks: dict[str, list[WalkStep]] = {}
    title = None
    for line in text.splitlines():
        if line.startswith("#"):
            title = line.removeprefix("### ").partition(":")[0] if line.startswith("### ") else None
        elif title is not None and line[:1].isdigit():
            step = _STEP.match(line)
            assert step is not None, f"ARCHITECTURE.md: no file link and function at the start of {line!r}"
            assert step["label"] == step["path"].removeprefix("src/ringweave/"), line
            walks.setdefault(title, []).append(
                WalkStep(path=step["path"], name=step["name"], how=step["how"] or "call", other=step["other"] or "")
            )
    return walks


def module_name(path: str) -> str:
    return path.removeprefix("src/").removesuffix(".py").replace("/", ".")


def problem_of_step(step: WalkStep, earlier: list[WalkStep], sources: dict[str, SourceFile]) -> str:
    """Return what is wrong with a step, or an empty text."""
    source, before = sources[step.path], [sources[each.path] for each in earlier]
    if step.name not in source.defined:
        return f"{step.path} does not define {step.name}"
    reached = {
        "call": lambda: any(step.name in each.used for each in before),
        "back from": lambda: step.other in source.used and any(step.other in each.defined for each in before),
        "by message": lambda: step.other in source.used and any(step.other in each.used for each in before),
        "by command line": lambda: any(module_name(step.path) in text for each in before for text in each.strings),
        "start": lambda: not earlier or sum(each.how == "start" for each in earlier) == 1,
    }[step.how]()
    return "" if reached else f"{step.path}: no earlier file leads to {step.name} ({step.how} {step.other})".rstrip()


def problems_of_walk(steps: list[WalkStep], sources: dict[str, SourceFile]) -> list[str]:
    found = [problem_of_step(step, steps[:index], sources) for index, step in enumerate(steps)]
    return [each for each in found if each]


ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
WALKS = parse_walks(ARCHITECTURE)


def load_sources(steps: list[WalkStep]) -> dict[str, SourceFile]:
    return {step.path: parse_source((ROOT / step.path).read_text(encoding="utf-8")) for step in steps}


def test_there_are_three_walks_that_begin_at_a_start() -> None:
    assert set(WALKS) == set(MAX_FILES)
    assert all(steps[0].how == "start" for steps in WALKS.values())


@pytest.mark.parametrize("title", MAX_FILES)
def test_a_walk_passes_few_files_each_once(title: str) -> None:
    paths = [step.path for step in WALKS[title]]
    assert len(set(paths)) == len(paths) <= MAX_FILES[title]


@pytest.mark.parametrize("title", MAX_FILES)
def test_every_file_of_a_walk_is_reached_from_one_before(title: str) -> None:
    steps = WALKS[title]
    assert problems_of_walk(steps, load_sources(steps)) == []


def test_the_bucket_goes_from_the_backend_to_the_socket() -> None:
    steps = WALKS["A gradient bucket"]
    assert steps[0].path.endswith("comm/backend.py")
    assert "sendmsg" in load_sources(steps)[steps[-1].path].used


def test_the_job_goes_from_submit_to_the_processes() -> None:
    steps = WALKS["A job"]
    assert steps[0].path.endswith("cli/submit.py")
    assert "Popen" in load_sources(steps)[steps[-1].path].used


@pytest.mark.parametrize("title", MAX_FILES)
def test_a_step_with_another_function_is_found(title: str) -> None:
    """Every step is really checked: with a name that the file does not have, the walk fails."""
    steps = WALKS[title]
    sources = load_sources(steps)
    for index, step in enumerate(steps):
        wrong = WalkStep(path=step.path, name="no_such_function", how=step.how, other=step.other)
        assert problem_of_step(wrong, steps[:index], sources)


@pytest.mark.parametrize("title", MAX_FILES)
def test_a_step_whose_name_nobody_uses_is_found(title: str) -> None:
    steps = WALKS[title]
    sources = load_sources(steps)
    empty = SourceFile(defined=frozenset(), used=frozenset(), strings=frozenset())
    for index, step in enumerate(steps[1:], start=1):
        without = {**sources, **{each.path: empty for each in steps[:index]}}
        assert (step.how == "start") != bool(problem_of_step(step, steps[:index], without))


def test_a_third_start_is_found() -> None:
    starts = [WalkStep(path="src/ringweave/errors.py", name="explain", how="start", other="")] * 3
    sources = load_sources(starts)
    assert [len(problems_of_walk(starts[:count], sources)) for count in (1, 2, 3)] == [0, 0, 1]


def test_links_of_the_page_lead_to_files() -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", ARCHITECTURE)
    missing = [each for each in targets if "://" not in each and not (ROOT / each).exists()]
    assert missing == []
    assert len(ARCHITECTURE.splitlines()) <= 100


def test_the_layers_of_the_page_are_those_of_the_contract() -> None:
    contract = re.search(r"^layers = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE)
    assert contract is not None
    layers = [set(re.findall(r"\w+", line)) for line in re.findall(r'"([^"]+)"', contract[1])]
    rows = [line for line in ARCHITECTURE.splitlines() if re.match(r"\| \d+ \|", line)]
    shown = [set(re.findall(r"`(\w+?)(?:/|\.py)`", row.split("|")[2])) for row in rows]
    assert shown == [layer for layer in layers if layer != {"__main__"}]
    assert [int(row.split("|")[1]) for row in rows] == list(range(1, 11))
