"""The package on Python 3.11 to 3.14: what later ones have removed is not used; those that are here compile it."""

import ast
import functools
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import effort

ROOT = Path(__file__).parents[1]
FOLDERS = (ROOT / "src" / "ringweave", ROOT / "bench", ROOT / "examples")
REMOVED_MODULES = """
asynchat asyncore distutils imp smtpd aifc audioop cgi cgitb chunk crypt imghdr mailcap msilib nis nntplib ossaudiodev
pipes sndhdr spwd sunau telnetlib uu xdrlib lib2to3
"""
REMOVED_NAMES = """
ast.Num ast.Str ast.Bytes ast.NameConstant ast.Ellipsis asyncio.get_event_loop asyncio.get_child_watcher
asyncio.set_child_watcher collections.abc.ByteString typing.ByteString typing.io typing.re pkgutil.find_loader
pkgutil.get_loader importlib.find_loader importlib.abc.Traversable importlib.abc.ResourceReader ssl.wrap_socket
ssl.match_hostname locale.format locale.resetlocale sqlite3.version sqlite3.version_info urllib.request.URLopener
urllib.request.FancyURLopener itertools.batched configparser.SafeConfigParser datetime.datetime.utcnow datetime.utcnow
datetime.datetime.utcfromtimestamp unittest.makeSuite webbrowser.MacOSX logging.warn tempfile.mktemp
"""
"""Removed or an error by 3.14, deprecated (a warning is an error here), or newer than 3.11."""
CLASSIFIER = "Programming Language :: Python :: 3."


def sources() -> list[Path]:
    return [path for folder in FOLDERS for path in sorted(folder.rglob("*.py"))]


def uses(tree: ast.AST) -> set[str]:
    """Modules that are imported, and names of modules that are used, with dots."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {str(node.module), *(f"{node.module}.{each.name}" for each in node.names)}
        elif isinstance(node, ast.Attribute):
            found.add(dotted(node))
    return found


def dotted(node: ast.expr) -> str:
    """Return `a.b.c`, and `.b.c` where it is a part of anything but a name."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def wrong(tree: ast.AST) -> set[str]:
    modules, names = set(REMOVED_MODULES.split()), set(REMOVED_NAMES.split())
    return {name for name in uses(tree) if name in modules | names}


@dataclass(frozen=True, kw_only=True)
class SourceFacts:
    """Facts of a file that other versions of Python may see otherwise."""

    hidden_annotations: set[str]
    wrong: set[str]
    lines: dict[str, list[int]]
    """By PEP: lines that it forbids."""
    standard_names: set[tuple[str, str]]
    """Modules of the standard library, and names that are imported from them."""


@functools.cache
def source_facts() -> dict[Path, SourceFacts]:
    """Return the facts of every file; all are parsed once."""
    with effort.no_collections():
        return {path: facts_of(ast.parse(path.read_text(encoding="utf-8"))) for path in sources()}


def facts_of(tree: ast.Module) -> SourceFacts:
    lines: dict[str, list[int]] = {"PEP 649": [], "PEP 765": []}
    standard_names: set[tuple[str, str]] = set()
    for node in ast.walk(tree):  # PEP 649: classes have no dictionary of annotations of their own any more
        if isinstance(node, ast.Constant) and node.value == "__annotations__":
            lines["PEP 649"].append(node.lineno)
        elif isinstance(node, ast.Try) and any(leaves(each) for each in node.finalbody):
            lines["PEP 765"].append(node.lineno)
        elif isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in sys.stdlib_module_names:
            standard_names |= {(str(node.module), each.name) for each in node.names}
    return SourceFacts(
        hidden_annotations=hidden_annotations(tree), wrong=wrong(tree), lines=lines, standard_names=standard_names
    )


def test_nothing_is_used_that_a_later_python_has_removed_and_no_annotation_means_a_member_of_its_class() -> None:
    for path, facts in source_facts().items():
        hidden = facts.hidden_annotations
        assert not hidden, f"{path}: quote the annotations with {hidden}, or import the type by its own name"
        assert not facts.wrong, f"{path}: {facts.wrong}"
        assert facts.lines == {"PEP 649": [], "PEP 765": []}, path


def leaves(node: ast.stmt) -> bool:
    """Whether a statement of `finally` leaves it, which 3.14 warns of."""
    return isinstance(node, ast.Return | ast.Break | ast.Continue)


def hidden_annotations(tree: ast.AST) -> set[str]:
    """Names in annotations of a class that the class itself binds: 3.14 evaluates annotations late, and finds those."""
    found: set[str] = set()
    for made in (each for each in ast.walk(tree) if isinstance(each, ast.ClassDef)):
        bound = {name for each in made.body for name in bound_names(each)}
        names = (each for member in made.body for annotation in annotations(member) for each in ast.walk(annotation))
        found |= {each.id for each in names if isinstance(each, ast.Name) and each.id in bound}
    return found


def bound_names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        targets = [node.target]
    return [each.id for each in targets if isinstance(each, ast.Name)]


def annotations(node: ast.stmt) -> list[ast.expr]:
    if isinstance(node, ast.AnnAssign):
        return [node.annotation]
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return []
    taken = node.args
    arguments = [*taken.posonlyargs, *taken.args, *taken.kwonlyargs, taken.vararg, taken.kwarg]
    found = [node.returns, *(each.annotation for each in arguments if each is not None)]
    return [each for each in found if each is not None]


@pytest.mark.parametrize(
    "source", ["class A:\n x: m.T = 1\n def m(self): pass", "class A:\n def list(self) -> list[int]: pass"]
)
def test_an_annotation_that_means_a_member_is_found(source: str) -> None:
    assert hidden_annotations(ast.parse(source))


@pytest.mark.parametrize(
    "source",
    ["import imp", "from imp import reload", "import ast\nast.Num", "from datetime import datetime\ndatetime.utcnow()"],
)
def test_what_was_removed_is_found(source: str) -> None:
    assert wrong(ast.parse(source))


def test_the_classifiers_name_what_is_allowed() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    named = [line.strip(' ",') for line in text.splitlines() if CLASSIFIER in line]
    assert named == [f"{CLASSIFIER}{minor}" for minor in (11, 12, 13, 14)]
    assert 'requires-python = ">=3.11"' in text
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    assert 'python: ["3.11", "3.12", "3.13", "3.14"]' in workflow


def find_python(minor: int) -> str | None:
    """A Python of that version on this machine: this one, one on the path, or one of pyenv."""
    if sys.version_info.minor == minor:
        return sys.executable
    of_pyenv = sorted((Path.home() / ".pyenv" / "versions").glob(f"3.{minor}.*/bin/python"))
    for program in filter(None, [shutil.which(f"python3.{minor}"), *map(str, of_pyenv)]):
        if (
            subprocess.run([program, "-c", ""], capture_output=True, check=False).returncode == 0
        ):  # a shim may lead nowhere
            return program
    return None


@pytest.mark.parametrize("minor", [11, 12, 13, 14])
def test_other_pythons_that_are_here_compile_it(minor: int) -> None:
    program = find_python(minor)
    if program is None:
        pytest.skip(f"there is no Python 3.{minor} on this machine")
    script = "import gc, sys; gc.disable(); [compile(open(each).read(), each, 'exec') for each in sys.argv[1:]]"
    command = [program, "-W", "error", "-c", script, *map(str, sources())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("minor", [12, 13, 14])
def test_the_standard_library_of_other_pythons_has_what_is_imported(minor: int) -> None:
    """Every name that the package takes from the standard library."""
    program = find_python(minor)
    if program is None:
        pytest.skip(f"there is no Python 3.{minor} on this machine")
    taken = set().union(*(facts.standard_names for facts in source_facts().values()))
    script = "import sys, importlib\nfor each in sys.argv[1:]:\n module, name = each.split(':')\n"
    script += " found = importlib.import_module(module)\n"
    script += " hasattr(found, name) or importlib.import_module(f'{module}.{name}')"
    command = [program, "-W", "error", "-c", script, *(":".join(each) for each in sorted(taken))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(taken) > 50
