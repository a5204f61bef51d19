"""The code map, docs/explanation/code-map.md: every path exists, and every function is defined in the file before it.

A pair is a path in backticks, a colon, and names in backticks with commas between them. Paths without a folder of the
repository in front are below src/ringweave. Backticks around other texts that end like files name files too.
"""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "explanation" / "code-map.md"
MIN_PAIRS = 50
_FOLDERS = ("bench", "deploy", "docs", "tests", "tools")
_PATH = re.compile(
    r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|md|yaml|toml)|(?:environment|errors|relayed_address)\.py|pyproject\.toml)`"
)
_PAIR = re.compile(r"`([\w/.-]+\.py)`:\s+(`\w+`(?:,\s+`\w+`)*)")


def resolve_path(path: str) -> Path:
    """Return the file that the page means."""
    is_of_repository = path.split("/", maxsplit=1)[0] in _FOLDERS or path == "pyproject.toml"
    return ROOT / path if is_of_repository else ROOT / "src" / "ringweave" / path


def find_paths(text: str) -> list[str]:
    return _PATH.findall(text)


def find_pairs(text: str) -> list[tuple[str, str]]:
    """Return (path, name) of every function that the page names with its file."""
    return [(path, name) for path, names in _PAIR.findall(text) for name in re.findall(r"\w+", names)]


@functools.cache
def defined_names(file: Path) -> frozenset[str]:
    """Return functions, methods and classes of a Python file, and the constants of its module."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    definitions = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    constants = (name for node in tree.body for name in _assigned_names(node))
    return frozenset([*(node.name for node in ast.walk(tree) if isinstance(node, definitions)), *constants])


def _assigned_names(node: ast.stmt) -> Iterator[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return (each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name))


def problems_of_page(text: str) -> list[str]:
    """Return a line for each path without a file and each name that its file does not define."""
    missing = [f"{path}: no such file" for path in find_paths(text) if not resolve_path(path).is_file()]
    pairs = [(path, name) for path, name in find_pairs(text) if resolve_path(path).is_file()]
    return missing + [
        f"{path} does not define {name}" for path, name in pairs if name not in defined_names(resolve_path(path))
    ]


def loose_names(section: str) -> list[str]:
    """Return classes, constants and private functions of a section that no file named in it defines."""
    files = [resolve_path(path) for path in find_paths(section) if path.endswith(".py")]
    known = {name for file in files for name in defined_names(file)}
    return [name for name in re.findall(r"`(_\w+|[A-Z]\w+)`", section) if name not in known]


def test_every_path_and_every_function_of_the_page_exists() -> None:
    assert problems_of_page(PAGE.read_text(encoding="utf-8")) == []


def test_the_page_has_many_pairs_all_of_which_are_found() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert len(set(find_pairs(text))) >= MIN_PAIRS
    assert {path for path, _ in find_pairs(text)} <= set(find_paths(text))
    assert len(re.findall(r"\.py`:", text)) == len(_PAIR.findall(text)), "a path and a colon without a function"


def test_every_row_names_a_function() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| ") and not line.startswith("| topic")]
    assert [row for row in rows if row.count(" | ") != 2 or not find_pairs(row.rsplit(" | ", 1)[1])] == []


def test_lists_name_nothing_that_their_files_lack() -> None:
    sections = PAGE.read_text(encoding="utf-8").split("\n### ")[1:]
    assert len(sections) >= 10
    assert [name for section in sections for name in loose_names(section)] == []
    assert loose_names("`jobs/split.py`: `split_workers` and `_fill_nodes`, not `_fill_node`") == ["_fill_node"]


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("`jobs/split.py`: `split_workers`", []),
        ("`jobs/split.py`: `MIN_PER_NODE`, `WorkerSplit`;\n`errors.py`: `explain`", []),
        ("`tests/test_code_map.py`: `resolve_path`", []),
        ("`jobs/split.py`: `split_worker`", ["jobs/split.py does not define split_worker"]),
        ("`jobs/split.py`: `split_workers`,\n   `total`", ["jobs/split.py does not define total"]),
        ("`jobs/splits.py`: `split_workers`", ["jobs/splits.py: no such file"]),
        ("see `docs/reference/nothing.md`", ["docs/reference/nothing.md: no such file"]),
    ],
)
def test_wrong_pairs_are_reported(text: str, problems: list[str]) -> None:
    assert problems_of_page(text) == problems


def test_a_row_of_the_page_with_another_name_is_reported() -> None:
    """Every pair is really checked: each one, with a name that no file has, is a problem."""
    for path, _ in find_pairs(PAGE.read_text(encoding="utf-8")):
        assert problems_of_page(f"`{path}`: `no_such_function`") == [f"{path} does not define no_such_function"]
