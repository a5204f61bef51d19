"""The package's own code, read as syntax: it unpickles nothing, and parses no JSON without a bound.

`file_io.parse_json` limits length and depth; `file_io.bounded` and `read_bounded` limit the length where pydantic
limits depth and types. What is exempt is named here with its reason.
"""

import ast
import functools
from pathlib import Path

from tests import effort

SOURCE = Path(__file__).parents[1] / "src" / "ringweave"
PICKLES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
FREE_JSON = {
    "files/file_io.py": "the bounded reader itself",
    "lab/lab.py": "answers of ip and tc, which run as we do",
    "launcher/spares.py": "one datagram of at most _MAX_REPORT_BYTES from a child, which loads no more of the package",
    "platforms/hosts/install_main.py": "runs on a host before ringweave is installed there",
    "platforms/kubernetes/api_client.py": "answers of the API server, whose lists come in pages; depth is checked",
    "comm/engine/executor.py": "a tensor of a fixed length",
    "integrations/transformers.py": "a copy of our own document",
    "pipeline/checkpoints.py": "a copy of our own document",
}


@functools.cache
def nodes() -> list[tuple[str, ast.Import | ast.ImportFrom | ast.Call]]:
    """Return all imports and calls in the package, with their file."""
    found = []
    with effort.no_collections():
        for path in sorted(SOURCE.rglob("*.py")):
            name, tree = path.relative_to(SOURCE).as_posix(), ast.parse(path.read_text(encoding="utf-8"))
            kinds = (ast.Import, ast.ImportFrom, ast.Call)
            found += [(name, node) for node in ast.walk(tree) if isinstance(node, kinds)]
    return found


def dotted(node: ast.expr) -> str:
    """Return `a.b.c`, and `.b.c` where it is a part of anything but a name."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def calls() -> list[tuple[str, ast.Call, str]]:
    """Return file, call and name of the called function of all calls in the package."""
    return [(path, node, dotted(node.func)) for path, node in nodes() if isinstance(node, ast.Call)]


def test_nothing_is_unpickled() -> None:
    for path, node in nodes():
        names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not PICKLES & {name.split(".")[0] for name in names}, f"{path}:{node.lineno}"
    for path, call, name in calls():
        where, given = f"{path}:{call.lineno}", {each.arg: each.value for each in call.keywords}
        if name == "torch.load":
            assert ast.unparse(given["weights_only"]) == "True", where
        assert "allow_pickle" not in given, where
        assert name not in ("eval", "exec") or path == "launcher/entry.py", where  # which runs the user's program


def test_json_of_others_has_a_bound() -> None:
    free = {path for path, _, name in calls() if name in ("json.loads", "json.load")}
    assert free <= FREE_JSON.keys(), "use file_io.parse_json or load_json"
    assert free == FREE_JSON.keys(), "no longer exempt: take it out of the list"


def test_texts_that_pydantic_parses_have_a_bound() -> None:
    parses = [each for each in calls() if each[2].endswith((".validate_json", ".model_validate_json"))]
    for path, call, name in parses:
        source = ast.unparse(call.args[0].func) if isinstance(call.args[0], ast.Call) else ""
        assert source in ("file_io.bounded", "file_io.read_bounded"), f"{path}:{call.lineno}: {name}"
    assert len(parses) > 12
